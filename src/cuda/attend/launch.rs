//! A decode step bound to memory, and its launches.

use std::sync::Arc;

use cudarc::driver::result::memset_d8_async;
use cudarc::driver::{CudaStream, DeviceRepr};

use super::scratch::AttendScratch;
use super::unseen::UnseenRow;
use crate::Result;
use crate::cuda::device::driver::{driver_error, make_current};
use crate::cuda::device::launch::KernelLaunch;
use crate::cuda::device::memory::Memory;
use crate::cuda::device::tensor::Tensor;
use crate::cuda::pack::store_step::WriteCall;

/// `AttendCall` of `cuda/common/attend_call.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AttendCall {
    pub(super) pages: u64,
    pub(super) items: u64,
    pub(super) queries: u64,
    pub(super) output: u64,
    pub(super) lse: u64,
    pub(super) key_ranges: u64,
    pub(super) value_ranges: u64,
    pub(super) states: u64,
    pub(super) state_lse: u64,
    pub(super) arrivals: u64,
    pub(super) extremes: u64,
    pub(super) sinks: u64,
    pub(super) halves: u64,
    pub(super) query_stride: u64,
    pub(super) output_stride: u64,
    pub(super) kv_heads: u32,
    pub(super) group: u32,
    pub(super) chunks: u32,
    pub(super) score_scale: f32,
    pub(super) query_type: u32,
    pub(super) output_type: u32,
    pub(super) cluster: u32,
    pub(super) tau1: f32,
    pub(super) tau2: f32,
    pub(super) beside: u32,
    pub(super) early: u32,
    pub(super) soft_cap: f32,
    pub(super) item_room: u32,
    pub(super) row_parts: u32,
    pub(super) first_head: u32,
    pub(super) section_heads: u32,
}

// SAFETY: A struct of C layout without padding, the same on both sides. Addresses are plain integers.
unsafe impl DeviceRepr for AttendCall {}

/// `StoringCall` of `cuda/attend.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct StoringCall {
    attend: AttendCall,
    writes: WriteCall,
}

// SAFETY: A struct of two C layouts of whole words of 8 bytes, the same on both sides.
unsafe impl DeviceRepr for StoringCall {}

/// When a launch of `attend` begins: `early` of its call.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) enum Begins {
    /// After the kernels before it.
    After,
    /// Overlapping with the kernels that store what its layer appends.
    BesideStoring,
}

/// A kernel with its arguments.
#[derive(Debug)]
pub(super) struct Launch {
    pub(super) kernel: KernelLaunch,
    pub(super) call: AttendCall,
    /// Memory that is zeroed first.
    pub(super) clears: Option<Arc<Memory>>,
}

impl Launch {
    /// The same launch, overlapping with the previous one, on which it does not depend. One extra block waits for that
    /// one (`cuda/attend.cu`).
    pub(super) fn beside_the_one_before(mut self) -> Self {
        let blocks = &mut self.kernel.config.grid_dim.0;
        self.call.beside = *blocks;
        *blocks += 1;
        self
    }

    /// Queues the kernel on a stream.
    fn run(&self, stream: &Arc<CudaStream>, begins: Begins) -> Result<()> {
        self.run_as(stream, begins, self.call)
    }

    /// [`Self::run`] with other tensors in the call.
    fn run_as(&self, stream: &Arc<CudaStream>, begins: Begins, call: AttendCall) -> Result<()> {
        if let Some(memory) = &self.clears {
            let failed = |error| driver_error("attend", 0, error);
            stream.context().bind_to_thread().map_err(failed)?;
            // SAFETY: The memory lives as long as the step, and the stream orders this like any other work.
            unsafe { memset_d8_async(memory.address(), 0, memory.bytes(), stream.cu_stream()) }.map_err(failed)?;
        }
        // SAFETY: The argument matches the kernel. Pages, slots, queries, output and scratch were checked or sized when
        // the step was bound, and the step keeps them alive.
        unsafe { self.kernel.run(stream, &AttendCall { early: begins as u32, ..call }) }
    }
}

/// A step that is ready to run, with its scratch, on the stream of the backend that bound it. It keeps alive all memory
/// that it reads and writes. That memory is freed in the order of the same stream, so a step may be dropped while it
/// runs. A graph that captured the step needs it as long as the graph is replayed.
///
/// It reads the current contents of the pages whenever it runs. A graph that captured it may therefore be replayed
/// after tokens were overwritten in place. After tokens were added, plan and bind again. Two runs must not overlap.
#[derive(Debug)]
pub struct BoundAttendStep {
    pub(super) stream: Arc<CudaStream>,
    pub(super) unseen: Vec<UnseenRow>,
    pub(super) launches: Vec<Launch>,
    /// The only launch, if its blocks may store the tokens of the step, with the kernel that does so.
    pub(super) storing: Option<Launch>,
    pub(super) memory: Vec<Arc<Memory>>,
    /// The counters of the scratch, zeros between steps.
    arrivals: Arc<Memory>,
}

impl BoundAttendStep {
    /// A step that launches nothing yet.
    pub(super) fn new(stream: &Arc<CudaStream>, scratch: &AttendScratch) -> Self {
        Self {
            stream: stream.clone(),
            unseen: Vec::new(),
            launches: Vec::new(),
            storing: None,
            memory: scratch.memory(),
            arrivals: scratch.arrivals.clone(),
        }
    }

    /// Launches the kernels of the step, after clearing the extremes of calibrated scores. Does not allocate, copy or
    /// wait.
    ///
    /// # Errors
    /// Errors of the driver from a launch.
    pub fn launch(&self) -> Result<()> {
        self.unseen.iter().try_for_each(|row| row.write(&self.stream))?;
        self.launch_all(&self.stream, |launch| launch.run(&self.stream, Begins::After))
    }

    /// Queues all launches. If one fails, blocks of those before it have arrived, and the last one of their queries,
    /// which sets the counters back, never comes: later steps of the scratch would merge too early. So they are zeroed.
    fn launch_all(&self, stream: &Arc<CudaStream>, queue: impl FnMut(&Launch) -> Result<()>) -> Result<()> {
        let queued = self.launches.iter().try_for_each(queue);
        // A stream that does not take this takes no later step either. An error that another call left is no obstacle.
        if queued.is_err() && make_current(stream.context()).is_ok() {
            // SAFETY: The memory lives as long as the step, and the stream orders this behind what was launched.
            let zeroed =
                unsafe { memset_d8_async(self.arrivals.address(), 0, self.arrivals.bytes(), stream.cu_stream()) };
            zeroed.unwrap_or(());
        }
        queued
    }

    /// Whether it writes rows of queries that see no token, which no kernel of attention takes.
    pub(in crate::cuda) fn writes_unseen_rows(&self) -> bool {
        !self.unseen.is_empty()
    }

    /// [`Self::launch`] directly behind the storing kernels of its layer, overlapping with them. Only for steps of one
    /// launch, whose tables name the pages to wait for.
    pub(in crate::cuda) fn launch_beside_storing(&self) -> Result<()> {
        self.launch_all(&self.stream, |launch| launch.run(&self.stream, Begins::BesideStoring))
    }

    /// [`Self::launch`] on `stream`, from and to tensors of the same rows as those that were bound.
    pub(in crate::cuda) fn launch_on(
        &self,
        stream: &Arc<CudaStream>,
        queries: &Tensor,
        output: &Tensor,
        begins: Begins,
    ) -> Result<()> {
        let on_tensors = |launch: &Launch| {
            let (queries, query_type) = (queries.address(), queries.type_code());
            let (output, output_type) = (output.address(), output.type_code());
            launch.run_as(stream, begins, AttendCall { queries, output, query_type, output_type, ..launch.call })
        };
        self.launch_all(stream, on_tensors)
    }

    /// Whether [`Self::launch_storing`] may stand for storing and attending.
    pub(in crate::cuda) const fn stores(&self) -> bool {
        self.storing.is_some()
    }

    /// [`Self::launch`] that also stores the tokens of the step, one for each query in their order, in the pages that
    /// the tables mark; from and to other tensors than those that were bound, if they are given.
    pub(in crate::cuda) fn launch_storing(
        &self,
        stream: &Arc<CudaStream>,
        writes: WriteCall,
        tensors: Option<[&Tensor; 2]>,
    ) -> Result<()> {
        let Some(Launch { kernel, call, .. }) = &self.storing else { return Ok(()) };
        let mut attend = AttendCall { early: Begins::BesideStoring as u32, ..*call };
        if let Some([queries, output]) = tensors {
            (attend.queries, attend.query_type) = (queries.address(), queries.type_code());
            (attend.output, attend.output_type) = (output.address(), output.type_code());
        }
        // A single launch runs whole or not at all: either way its counters are zeros.
        // SAFETY: The argument matches the kernel. Both calls were checked as those of two launches would be.
        unsafe { kernel.run(stream, &StoringCall { attend, writes }) }
    }

    /// Bytes that the step keeps alive, including scratch and stores.
    pub fn bytes(&self) -> usize {
        self.memory.iter().map(|memory| memory.bytes()).sum()
    }
}
