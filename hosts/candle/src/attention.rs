//! kvpack's step as the attention of a candle model, on the CPU. The same for CUDA, where tensors are not copied, is
//! `cuda/src/attention.rs`.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use kvpack::backend::Backend;
use kvpack::cache::ModelCache;
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, RowLayout};
use kvpack_cli::{Attention, Chunk};
use pollster::block_on;

/// What opens kvpack's step for the layers of a batch.
pub trait Steps<B: Backend> {
    /// Runs layers whose attention is the open step of the cache.
    ///
    /// # Errors
    /// What the layers, the cache or the device report.
    fn run(
        &mut self,
        cache: &mut ModelCache<B>,
        layers: impl FnOnce(&mut dyn Attention) -> Result<Tensor>,
    ) -> Result<Tensor>;
}

/// Steps of the CPU backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuSteps;

/// The open step of a cache on the CPU.
struct CpuStep<'a>(&'a mut ModelCache<Cpu>);

impl Steps<Cpu> for CpuSteps {
    fn run(
        &mut self,
        cache: &mut ModelCache<Cpu>,
        layers: impl FnOnce(&mut dyn Attention) -> Result<Tensor>,
    ) -> Result<Tensor> {
        layers(&mut CpuStep(cache))
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
