//! Steps of decoding as CUDA graphs: all layers of a model and its logits, captured once and replayed.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use candle_core::cuda_backend::cudarc::driver::sys::CUgraphInstantiate_flags;
use candle_core::cuda_backend::cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaGraph, CudaStream, PinnedHostSlice};
use candle_core::{DType, Device, Storage, Tensor};
use candle_host::{Arriving, Layers, Rig, Steps};
use candle_nn::ops::softmax_last_dim;
use kvpack::AttentionShape;
use kvpack::cache::ModelCache;
use kvpack::cuda::{Cuda, LaunchMemory, Tensor as KvTensor};
use kvpack_cli::{Attention, Inputs, Model, Product};
use kvpack_weights::QuantizedLinear;

use crate::attention::{Bound, lend, open};
use crate::fused::HostKernels;
use crate::scratch::Scratch;
use crate::weights::CudaProduct;

/// Graphs that are kept. One serves a class of steps until sequences have grown by an eighth.
const GRAPHS: usize = 8;

/// Steps whose times are kept until they are asked for.
const TIMED: usize = 4;

/// Times that attention alone is launched to be timed.
const REPEATS: usize = 5;

/// candle's CUDA device with kvpack on its stream.
pub struct CudaRig {
    device: Device,
    backend: Cuda,
    scratch: Scratch,
    /// Memory of the host for tokens that arrive. To allocate or free some would wait for the device.
    arrivals: Rc<RefCell<Vec<PinnedHostSlice<u32>>>>,
}

impl CudaRig {
    /// The first device.
    pub fn open() -> Result<Self> {
        let (device, backend) = open()?;
        Ok(Self { device, backend, scratch: Scratch::default(), arrivals: Rc::default() })
    }

    /// The kernels of this program.
    pub fn kernels(&self) -> HostKernels {
        HostKernels { backend: self.backend.clone(), scratch: self.scratch.clone() }
    }
}

impl Rig for CudaRig {
    type Backend = Cuda;
    type Steps = CudaSteps;

    fn backend(&self) -> &Cuda {
        &self.backend
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn dtype(&self) -> DType {
        DType::F16
    }

    fn on_device(&self, model: Model, dtype: DType) -> Result<Model> {
        model.moved(&self.device, dtype)?.joined()?.with_fused(Box::new(self.kernels()))
    }

    fn product(&self, linear: &QuantizedLinear) -> Result<Box<dyn Product>> {
        Ok(Box::new(CudaProduct::new(&self.backend, &self.scratch, linear)?))
    }

    fn steps(&self, model: &Model, layers: usize, rows: usize) -> Result<CudaSteps> {
        let of = (model.config.attention, layers);
        let rows = (rows, model.dtype());
        Ok(CudaSteps {
            bound: Bound::new(&self.backend, &self.device, of, rows)?,
            backend: self.backend.clone(),
            of,
            rows,
            device: self.device.clone(),
            scratch: self.scratch.clone(),
            stream: self.backend.stream().clone(),
            seen: Vec::new(),
            graphs: Vec::new(),
            replayed: VecDeque::new(),
        })
    }

    fn bring(&self, tokens: &Tensor) -> Result<Arriving> {
        let (stream, count) = (self.backend.stream(), tokens.elem_count());
        let place = self.arrivals.borrow().iter().position(|memory| memory.len() == count);
        let mut memory = match place {
            Some(place) => self.arrivals.borrow_mut().swap_remove(place),
            // SAFETY: what is read of it was copied there before.
            None => unsafe { stream.context().alloc_pinned_with_flags::<u32>(count, 0)? },
        };
        let tokens = tokens.contiguous()?;
        let (storage, layout) = tokens.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { bail!("the tokens are not on a CUDA device") };
        let first = layout.start_offset();
        let from = storage.as_cuda_slice::<u32>()?.slice(first..first + count);
        stream.memcpy_dtoh(&from, &mut memory)?;
        let arrivals = self.arrivals.clone();
        Ok(Box::new(move || {
            let arrived = memory.as_slice()?.to_vec();
            arrivals.borrow_mut().push(memory);
            Ok(arrived)
        }))
    }

    fn softmax(&self, scores: &Tensor) -> Result<Tensor> {
        Ok(softmax_last_dim(scores)?)
    }

    fn free_bytes(&self) -> Option<u64> {
        self.device.synchronize().ok()?;
        let (free, _) = self.backend.stream().context().mem_get_info().ok()?;
        Some(free as u64)
    }
}

/// Steps of kvpack on the stream of candle.
pub struct CudaSteps {
    bound: Bound,
    backend: Cuda,
    /// Shape and number of layers.
    of: (AttentionShape, usize),
    /// The most rows, and their type.
    rows: (usize, DType),
    device: Device,
    scratch: Scratch,
    stream: Arc<CudaStream>,
    /// Classes of steps that ran kernel by kernel once, so that candle has loaded what they launch.
    seen: Vec<Class>,
    /// The newest last.
    graphs: Vec<Captured>,
    /// Around each of the last steps that was replayed, the oldest first.
    replayed: VecDeque<Option<[CudaEvent; 2]>>,
}

/// Steps of one class and as many rows have the same graph.
type Class = (u64, usize);

/// A graph, and what it reads and writes.
struct Captured {
    class: Class,
    graph: CudaGraph,
    inputs: Inputs,
    output: Tensor,
    _memory: LaunchMemory,
    _scratch: Scratch,
}

impl CudaSteps {
    /// Captures what `work` launches. It must leave none of the memory that it allocates.
    fn captured(stream: &Arc<CudaStream>, work: impl FnOnce() -> Result<()>) -> Result<CudaGraph> {
        stream.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED)?;
        let worked = work();
        let graph = stream.end_capture(CUgraphInstantiate_flags(0));
        worked?; // what went wrong first
        graph?.context("the driver captured no graph")
    }
}

impl Steps<Cuda> for CudaSteps {
    fn open<'a>(&'a mut self, cache: &'a mut ModelCache<Cuda>) -> Result<Box<dyn Attention + 'a>> {
        Ok(Box::new(self.bound.write(cache)?))
    }

    fn run_again(&mut self, cache: &mut ModelCache<Cuda>, inputs: &Inputs, layers: &Layers<'_>) -> Result<Tensor> {
        let Self { bound, device, scratch, stream, seen, graphs, replayed, .. } = self;
        if replayed.len() >= TIMED {
            replayed.pop_front();
        }
        replayed.push_back(None);
        let mut step = bound.write(cache)?;
        let class = (step.step.class(), inputs.rows());
        let place = graphs.iter().position(|captured| captured.class == class);
        if place.is_none() && (!step.step.is_for_graphs() || !seen.contains(&class)) {
            // candle copies the shapes of some tensors to the device; a capture needs them there.
            let _kept = device.as_cuda_device()?.enable_cuda_graph_htod_cache();
            seen.retain(|of| *of != class);
            seen.push(class);
            if seen.len() > 4 * GRAPHS {
                seen.remove(0);
            }
            return layers(inputs, &mut step);
        }
        let captured = match place {
            Some(place) => graphs.remove(place),
            None => {
                let inputs = inputs.copied()?;
                let again = scratch.step();
                let output = layers_output(&inputs, layers, &mut step, device)?;
                drop(again);
                let again = scratch.step();
                let graph = Self::captured(stream, || {
                    let _kept = device.as_cuda_device()?.enable_cuda_graph_htod_cache();
                    Ok(output.slice_set(&layers(&inputs, &mut step)?, 0, 0)?)
                })?;
                drop(again);
                if graphs.len() >= GRAPHS {
                    stream.synchronize()?; // the oldest may be running
                    graphs.remove(0);
                }
                Captured { class, graph, inputs, output, _memory: step.step.memory(), _scratch: scratch.clone() }
            }
        };
        captured.inputs.set(inputs)?;
        let before = stream.record_event(Some(CU_EVENT_DEFAULT))?;
        captured.graph.launch()?;
        let after = stream.record_event(Some(CU_EVENT_DEFAULT))?;
        step.step.replayed();
        if let Some(last) = replayed.back_mut() {
            *last = Some([before, after]);
        }
        let output = captured.output.clone();
        graphs.push(captured);
        Ok(output)
    }

    fn tensor(&self, tensor: &Tensor) -> Result<KvTensor> {
        lend(tensor)
    }

    fn wait(&self) -> Result<()> {
        Ok(self.device.synchronize()?)
    }

    fn forget(&mut self) -> Result<()> {
        self.wait()?; // graphs may be running
        self.graphs.clear();
        self.seen.clear();
        self.replayed.clear();
        self.bound = Bound::new(&self.backend, &self.device, self.of, self.rows)?;
        Ok(())
    }

    fn replayed_ms(&mut self) -> Option<f64> {
        let [before, after] = self.replayed.pop_front()??;
        before.elapsed_ms(&after).ok().map(f64::from)
    }

    fn attention_ms(&mut self, cache: &mut ModelCache<Cuda>) -> Result<Option<f64>> {
        let layers = cache.layers();
        let step = self.bound.write(cache)?;
        if !step.step.is_for_graphs() {
            bail!("the step packs a part of a prompt");
        }
        let launch = || (0..layers).try_for_each(|layer| step.step.launch(layer));
        launch()?; // what is compiled now does not count
        let graph = Self::captured(&self.stream, || Ok(launch()?))?;
        graph.launch()?;
        let before = self.stream.record_event(Some(CU_EVENT_DEFAULT))?;
        for _ in 0..REPEATS {
            graph.launch()?;
        }
        let after = self.stream.record_event(Some(CU_EVENT_DEFAULT))?;
        let ms = f64::from(before.elapsed_ms(&after)?);
        self.stream.synchronize()?;
        Ok(Some(ms / REPEATS as f64))
    }
}

/// A tensor for what the layers return: they run once more, kernel by kernel, so that its shape is known.
fn layers_output(inputs: &Inputs, layers: &Layers<'_>, step: &mut dyn Attention, device: &Device) -> Result<Tensor> {
    let _kept = device.as_cuda_device()?.enable_cuda_graph_htod_cache();
    Ok(layers(inputs, step)?.copy()?)
}
