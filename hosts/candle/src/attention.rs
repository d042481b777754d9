//! kvpack's step as the attention of a candle model, on the CPU. The same for CUDA, where tensors are not copied, is
//! `cuda/src/attention.rs`.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use kvpack::backend::Backend;
use kvpack::cache::ModelCache;
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, RowLayout};
use kvpack_cli::{Attention, Chunk, Inputs, Model, Product, softmax};
use kvpack_weights::QuantizedLinear;
use pollster::block_on;

use crate::rig::{Arriving, Rig};
use crate::weights::CpuProduct;

/// What a step computes: the layers of a model, or what stands for them, with the attention that it is given.
pub type Layers<'a> = dyn Fn(&Inputs, &mut dyn Attention) -> Result<Tensor> + 'a;

/// What opens kvpack's step for the layers of a batch.
pub trait Steps<B: Backend> {
    /// The open step of a cache as attention.
    ///
    /// # Errors
    /// What the cache or the device report.
    fn open<'a>(&'a mut self, cache: &'a mut ModelCache<B>) -> Result<Box<dyn Attention + 'a>>;

    /// Runs layers that later steps run in the same way, with other inputs. A device may record and replay them.
    ///
    /// # Errors
    /// What the layers, the cache or the device report.
    fn run_again(&mut self, cache: &mut ModelCache<B>, inputs: &Inputs, layers: &Layers<'_>) -> Result<Tensor> {
        layers(inputs, &mut *self.open(cache)?)
    }

    /// A tensor for calls of the cache.
    ///
    /// # Errors
    /// When its type is none that kvpack takes.
    fn tensor(&self, tensor: &Tensor) -> Result<B::Tensor>;

    /// Waits until the device is done.
    ///
    /// # Errors
    /// What the device reports.
    fn wait(&self) -> Result<()>;

    /// Lets go of what is kept for steps of caches so far, and with it of their memory.
    ///
    /// # Errors
    /// What the device reports.
    fn forget(&mut self) -> Result<()> {
        Ok(())
    }

    /// Milliseconds that the device spent on the oldest step not asked for yet, if it was replayed. Waits for it.
    fn replayed_ms(&mut self) -> Option<f64> {
        None
    }

    /// Milliseconds of the device for storing and attending in all layers of the open step, alone; none where a device
    /// has no clock of its own. What the step stores is not what the model computes: abandon it.
    ///
    /// # Errors
    /// What the cache or the device report.
    fn attention_ms(&mut self, _: &mut ModelCache<B>) -> Result<Option<f64>> {
        Ok(None)
    }
}

/// The CPU.
#[derive(Debug, Default)]
pub struct CpuRig(Cpu, DeviceOfCandle);

/// candle's CPU device.
#[derive(Debug)]
struct DeviceOfCandle(Device);

impl Default for DeviceOfCandle {
    fn default() -> Self {
        Self(Device::Cpu)
    }
}

impl Rig for CpuRig {
    type Backend = Cpu;
    type Steps = CpuSteps;

    fn backend(&self) -> &Cpu {
        &self.0
    }

    fn device(&self) -> &Device {
        &self.1.0
    }

    fn dtype(&self) -> DType {
        DType::F32
    }

    fn on_device(&self, model: Model, _: DType) -> Result<Model> {
        model.joined()
    }

    fn product(&self, linear: &QuantizedLinear) -> Result<Box<dyn Product>> {
        Ok(Box::new(CpuProduct(linear.clone())))
    }

    fn steps(&self, _: &Model, _: usize, _: usize) -> Result<CpuSteps> {
        Ok(CpuSteps)
    }

    fn bring(&self, tokens: &Tensor) -> Result<Arriving> {
        let tokens = tokens.to_vec1()?;
        Ok(Box::new(|| Ok(tokens)))
    }

    fn softmax(&self, scores: &Tensor) -> Result<Tensor> {
        Ok(softmax(scores)?)
    }

    fn free_bytes(&self) -> Option<u64> {
        None
    }
}

/// Steps of the CPU backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuSteps;

/// The open step of a cache on the CPU.
struct CpuStep<'a>(&'a mut ModelCache<Cpu>);

impl Steps<Cpu> for CpuSteps {
    fn open<'a>(&'a mut self, cache: &'a mut ModelCache<Cpu>) -> Result<Box<dyn Attention + 'a>> {
        Ok(Box::new(CpuStep(cache)))
    }

    fn tensor(&self, tensor: &Tensor) -> Result<CpuTensor> {
        copied(tensor)
    }

    fn wait(&self) -> Result<()> {
        Ok(())
    }
}

impl Attention for CpuStep<'_> {
    /// Stores the keys and values of a layer's rows, whichever sequences they belong to, and attends with its queries.
    fn attend(&mut self, chunk: &Chunk) -> Result<Tensor> {
        let Self(cache) = self;
        let rows = chunk.queries.dim(0)?;
        let layout = RowLayout::token_major(rows, cache.shape(chunk.layer)?);
        let [queries, keys, values] = [&chunk.queries, &chunk.keys, &chunk.values].map(copied);
        block_on(cache.store(chunk.layer, layout, &keys?, &values?))?;
        let output = block_on(cache.attend(chunk.layer, &queries?, ElementType::F32))?.to_f32();
        let width = output.len() / rows;
        Ok(Tensor::from_vec(output, (rows, width), &Device::Cpu)?.to_dtype(chunk.queries.dtype())?)
    }
}

fn copied(tensor: &Tensor) -> Result<CpuTensor> {
    Ok(CpuTensor::F32(tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?))
}
