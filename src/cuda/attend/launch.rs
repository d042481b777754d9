//! A decode step that is bound to memory, and its launches.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::result::memset_d8_async;
use cudarc::driver::sys;
use cudarc::driver::sys::CUlaunchAttributeID_enum::{
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
};
use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig};

use crate::Result;
use crate::cuda::device::driver::driver_error;
use crate::cuda::device::memory::Memory;

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
    pub(super) unused: u32,
}

/// A kernel with all that it is told.
#[derive(Debug)]
pub(super) struct Launch {
    pub(super) function: CudaFunction,
    pub(super) config: LaunchConfig,
    pub(super) call: AttendCall,
    /// May begin while the kernel before it still runs, and waits for it itself.
    pub(super) overlaps: bool,
    /// What is set to zeros first.
    pub(super) clears: Option<Arc<Memory>>,
}

impl Launch {
    /// Queues the kernel on a stream.
    fn run(&self, stream: &CudaStream) -> Result<()> {
        let failed = |error| driver_error("attend", 0, error);
        stream.context().bind_to_thread().map_err(failed)?;
        if let Some(memory) = &self.clears {
            // SAFETY: the memory lives as long as the step, and the stream orders this like any other work.
            unsafe { memset_d8_async(memory.address(), 0, memory.bytes(), stream.cu_stream()) }.map_err(failed)?;
        }
        let mut attributes = Vec::with_capacity(2);
        if self.call.cluster > 1 {
            let cluster = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: self.call.cluster, y: 1, z: 1 };
            let value = sys::CUlaunchAttributeValue { clusterDim: cluster };
            attributes.push((CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value));
        }
        if self.overlaps {
            let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
            attributes.push((CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value));
        }
        let mut attributes: Vec<sys::CUlaunchAttribute> =
            attributes.into_iter().map(|(id, value)| sys::CUlaunchAttribute { id, pad: [0; 4], value }).collect();
        let config = sys::CUlaunchConfig {
            gridDimX: self.config.grid_dim.0,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.config.block_dim.0,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.config.shared_mem_bytes,
            hStream: stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let mut arguments = [(&raw const self.call).cast_mut().cast::<c_void>()];
        // SAFETY: the one argument is the kernel's, and the driver copies it and the attributes before it returns. Pages,
        // slots, queries, output and scratch were checked or sized when the step was bound, which keeps them.
        let launched = unsafe {
            sys::cuLaunchKernelEx(&config, self.function.cu_function(), arguments.as_mut_ptr(), std::ptr::null_mut())
        };
        launched.result().map_err(failed)
    }
}

/// A step that is ready to run, with its scratch, on the stream of the backend that it was bound by. It keeps alive all
/// memory that it reads and writes, and that is given back in the order of the same stream: a step may be let go of while
/// it runs. A graph that captured the step needs it as long as it is replayed.
///
/// It reads whatever the pages hold when it runs, so that a graph that captured it may be replayed after tokens were
/// overwritten in place; after tokens were added, plan and bind anew. Two runs must not overlap.
#[derive(Debug)]
pub struct BoundStep {
    pub(super) stream: Arc<CudaStream>,
    pub(super) launches: Vec<Launch>,
    pub(super) memory: Vec<Arc<Memory>>,
}

impl BoundStep {
    /// Launches the kernels of the step, after clearing the extremes of calibrated scores: nothing is allocated or
    /// copied, and nothing waits.
    ///
    /// # Errors
    /// What the driver says of a launch.
    pub fn launch(&self) -> Result<()> {
        self.launches.iter().try_for_each(|launch| launch.run(&self.stream))
    }

    /// Bytes that the step keeps alive, scratch and stores alike.
    pub fn bytes(&self) -> usize {
        self.memory.iter().map(|memory| memory.bytes()).sum()
    }
}
