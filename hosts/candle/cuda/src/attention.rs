//! kvpack's step as the attention of a candle model on CUDA: what an engine needs of kvpack, and all of it.

use std::sync::Arc;

use anyhow::{Result, bail};
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::{DType, Device, Storage, Tensor};
use candle_host::Steps;
use half::{bf16, f16};
use kvpack::AttentionShape;
use kvpack::cache::ModelCache;
use kvpack::cuda::{Cuda, KernelCache, LayerTensors, ModelStep, Tensor as KvTensor, WrittenStep};
use kvpack::plan::{ElementType, RowLayout};
use kvpack_cli::{Attention, Chunk};

/// candle's device, and kvpack on its stream.
pub fn open() -> Result<(Device, Cuda)> {
    let device = Device::new_cuda_with_stream(0)?; // a stream of its own, which graphs need
    let backend = Cuda::new(device.as_cuda_device()?.cuda_stream(), KernelCache::of_user())?;
    Ok((device, backend))
}

/// kvpack's view of a contiguous tensor of candle. Nothing is copied.
pub fn lend(tensor: &Tensor) -> Result<KvTensor> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { bail!("the tensor is not on a CUDA device") };
    if !layout.is_contiguous() {
        bail!("the tensor is not contiguous");
    }
    let stream = storage.device.cuda_stream();
    let (base, element_type) = match tensor.dtype() {
        DType::F32 => (storage.as_cuda_slice::<f32>()?.device_ptr(&stream).0, ElementType::F32),
        DType::F16 => (storage.as_cuda_slice::<f16>()?.device_ptr(&stream).0, ElementType::F16),
        DType::BF16 => (storage.as_cuda_slice::<bf16>()?.device_ptr(&stream).0, ElementType::Bf16),
        other => bail!("kvpack takes f32, f16 and bf16, not {other:?}"),
    };
    let address = base + (layout.start_offset() * element_type.bytes()) as u64;
    // SAFETY: the clone of the tensor keeps its storage alive, which holds all elements of the tensor from this address
    // on. candle frees it in the order of its one stream, which is the backend's.
    Ok(unsafe { KvTensor::from_address(Arc::new(tensor.clone()), address, tensor.elem_count(), element_type) }?)
}

/// The steps of kvpack, bound to tensors of candle. Layers run one after the other and share these tensors.
pub struct CudaSteps {
    steps: ModelStep,
    shared: Shared,
}

/// `[rows, heads, head_dim]`, and the output `[rows, query_heads · head_dim]`.
struct Shared {
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
}

impl CudaSteps {
    /// For steps of up to `rows` tokens of a model of these layers.
    pub fn new(
        backend: &Cuda,
        device: &Device,
        of: (AttentionShape, usize),
        rows: usize,
        dtype: DType,
    ) -> Result<Self> {
        let (shape, layers) = of;
        let heads = |count: usize| Tensor::zeros((rows, count, shape.head_dim()), dtype, device);
        let (queries, keys, values) = (heads(shape.query_heads())?, heads(shape.kv_heads())?, heads(shape.kv_heads())?);
        let output = Tensor::zeros((rows, shape.query_heads() * shape.head_dim()), dtype, device)?;
        let lent = LayerTensors {
            keys: lend(&keys)?,
            values: lend(&values)?,
            queries: lend(&queries)?,
            output: lend(&output)?,
        };
        let steps = ModelStep::new(backend, RowLayout::token_major(rows, &shape), vec![lent; layers])?;
        Ok(Self { steps, shared: Shared { queries, keys, values, output } })
    }
}

impl Steps<Cuda> for CudaSteps {
    fn run(
        &mut self,
        cache: &mut ModelCache<Cuda>,
        layers: impl FnOnce(&mut dyn Attention) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let open = cache.open_steps()?;
        let step = self.steps.write(&open)?;
        layers(&mut CudaStep { step, shared: &self.shared })
    }
}

/// The open step of a cache, its tables on the stream.
struct CudaStep<'a> {
    step: WrittenStep<'a>,
    shared: &'a Shared,
}

impl Attention for CudaStep<'_> {
    /// Stores the keys and values of a layer's rows, whichever sequences they belong to, and attends with its queries.
    fn attend(&mut self, chunk: &Chunk) -> Result<Tensor> {
        let Shared { queries, keys, values, output } = self.shared;
        // candle's tensors have other addresses in every step; these are bound once.
        for (bound, given) in [(queries, &chunk.queries), (keys, &chunk.keys), (values, &chunk.values)] {
            bound.slice_set(&given.contiguous()?, 0, 0)?;
        }
        self.step.launch(chunk.layer)?;
        Ok(output.narrow(0, 0, chunk.queries.dim(0)?)?)
    }
}
