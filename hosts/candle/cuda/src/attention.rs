//! kvpack's step as the attention of a candle model on CUDA: what an engine needs of kvpack, and all of it.

use std::sync::Arc;

use anyhow::{Result, bail};
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr};
use candle_core::{DType, Device, Storage, Tensor};
use half::{bf16, f16};
use kvpack::AttentionShape;
use kvpack::backend::StoredLayers;
use kvpack::cache::ModelCache;
use kvpack::cuda::{Cuda, KernelCache, LayerTensors, ModelStep, StepLaunches, Tensor as KvTensor, WrittenStep};
use kvpack::plan::{ElementType, RowLayout};
use kvpack_cli::{Attention, Chunk};

/// candle's device, and kvpack on its stream.
pub fn open() -> Result<(Device, Cuda)> {
    let device = Device::new_cuda_with_stream(0)?; // a stream of its own, which graphs need
    // SAFETY: candle and kvpack use this one stream, whose order is all that tensors need. Graphs must not wait for
    // events that were recorded before they were captured.
    unsafe { device.as_cuda_device()?.disable_event_tracking() };
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

/// The steps of kvpack for layers of one shape, which run one after the other.
pub struct Bound {
    steps: ModelStep,
    stream: Arc<CudaStream>,
    shared: Shared,
}

/// What steps are bound to where the tensors of a layer cannot be taken in place: `[rows, heads, head_dim]`, and the
/// output `[rows, query_heads · head_dim]`.
struct Shared {
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
}

impl Bound {
    /// For steps of up to `rows` tokens of a model of these layers.
    pub fn new(
        backend: &Cuda,
        device: &Device,
        (shape, layers): (AttentionShape, usize),
        (rows, dtype): (usize, DType),
    ) -> Result<Self> {
        let heads = |count: usize| Tensor::randn(0f32, 1.0, (rows, count, shape.head_dim()), device)?.to_dtype(dtype);
        let (queries, keys, values) = (heads(shape.query_heads())?, heads(shape.kv_heads())?, heads(shape.kv_heads())?);
        let output = Tensor::zeros((rows, shape.query_heads() * shape.head_dim()), dtype, device)?;
        let lent = LayerTensors {
            keys: lend(&keys)?,
            values: lend(&values)?,
            queries: lend(&queries)?,
            output: lend(&output)?,
        };
        let steps = ModelStep::new(backend, RowLayout::token_major(rows, &shape), vec![lent; layers])?.keeping(8);
        Ok(Self { steps, stream: backend.stream().clone(), shared: Shared { queries, keys, values, output } })
    }

    /// The open step of a cache, its tables on the stream.
    pub fn write<'a>(&'a mut self, cache: &'a ModelCache<Cuda>) -> Result<CudaStep<'a>> {
        let open = cache.open_steps()?;
        let stored = open.first().map(|part| part.stored);
        let step = self.steps.write(&open)?;
        // Parts of prompts that are packed as spans are read where steps are bound.
        let launches = step.launches().ok().zip(stored);
        Ok(CudaStep { step, launches, stream: &self.stream, shared: &self.shared })
    }
}

/// The open step of a cache.
pub struct CudaStep<'a> {
    pub step: WrittenStep<'a>,
    /// The launches for tensors of any address, and where layers are marked as stored.
    launches: Option<(StepLaunches, &'a StoredLayers)>,
    stream: &'a Arc<CudaStream>,
    shared: &'a Shared,
}

impl Attention for CudaStep<'_> {
    /// Stores the keys and values of a layer's rows, whichever sequences they belong to, and attends with its queries.
    fn attend(&mut self, chunk: &Chunk) -> Result<Tensor> {
        let rows = chunk.queries.dim(0)?;
        let Shared { queries, keys, values, output } = self.shared;
        if let Some((launches, stored)) = &self.launches {
            // candle's tensors lie elsewhere in every step; kvpack reads and writes them there.
            let output = output.narrow(0, 0, rows)?;
            let lent = LayerTensors {
                keys: lend(&chunk.keys)?,
                values: lend(&chunk.values)?,
                queries: lend(&chunk.queries)?,
                output: lend(&output)?,
            };
            launches.store_and_attend(self.stream, chunk.layer, &lent)?;
            stored.mark(chunk.layer);
            return Ok(output);
        }
        for (bound, given) in [(queries, &chunk.queries), (keys, &chunk.keys), (values, &chunk.values)] {
            bound.slice_set(&given.contiguous()?, 0, 0)?;
        }
        self.step.launch(chunk.layer)?;
        Ok(output.narrow(0, 0, rows)?)
    }
}
