//! Launches kernels with options that cudarc's builder lacks: clusters and programmatic serialisation.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use cudarc::driver::sys::CUlaunchAttributeID_enum::{
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_IGNORE,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
};
use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, LaunchConfig, sys};

use super::driver::driver_error;
use crate::Result;

/// The value of an attribute that is not given.
const IGNORED: sys::CUlaunchAttributeValue = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 0 };

/// Held while the limit of a function is read and raised.
static SHARED_LIMITS: Mutex<()> = Mutex::new(());

/// Allows a function `bytes` bytes of dynamic shared memory. The limit belongs to the function and only grows: another
/// launch of it, bound earlier or by another thread, may need more.
pub fn set_shared_bytes(function: &CudaFunction, name: &'static str, bytes: usize) -> Result<()> {
    let failed = |error| driver_error(name, bytes as u64, error);
    let _raised = SHARED_LIMITS.lock().unwrap_or_else(PoisonError::into_inner);
    let limit = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    match function.get_attribute(limit).map_err(failed)? {
        allowed if allowed >= bytes as i32 => Ok(()),
        _ => function.set_attribute(limit, bytes as i32).map_err(failed),
    }
}

/// How a kernel is launched.
#[derive(Debug)]
pub struct KernelLaunch {
    /// Name of the kernel, for errors.
    pub name: &'static str,
    /// The compiled kernel.
    pub function: CudaFunction,
    /// Grid, blocks and dynamic shared memory.
    pub config: LaunchConfig,
    /// Blocks of a cluster, 1 without clusters.
    pub cluster: u32,
    /// Whether the kernel may begin while the previous one still runs. It then waits for that one itself. Devices
    /// before compute capability 9.0 have no such launches.
    pub overlaps: bool,
}

impl KernelLaunch {
    /// Queues the kernel on a stream.
    ///
    /// # Errors
    /// Errors of the driver.
    ///
    /// # Safety
    /// `call` is the kernel's only argument. The memory that it names has the sizes that the kernel assumes, and lives
    /// until the kernel is done.
    pub unsafe fn run<T: DeviceRepr>(&self, stream: &Arc<CudaStream>, call: &T) -> Result<()> {
        let failed = |error| driver_error(self.name, 0, error);
        stream.context().bind_to_thread().map_err(failed)?;
        // On the stack: an engine launches hundreds of kernels for each token.
        let none = sys::CUlaunchAttribute { id: CU_LAUNCH_ATTRIBUTE_IGNORE, pad: [0; 4], value: IGNORED };
        let (mut attributes, mut count) = ([none; 2], 0);
        let mut add = |id, value| {
            attributes[count] = sys::CUlaunchAttribute { id, pad: [0; 4], value };
            count += 1;
        };
        if self.cluster > 1 {
            let cluster = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: self.cluster, y: 1, z: 1 };
            let value = sys::CUlaunchAttributeValue { clusterDim: cluster };
            add(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value);
        }
        if self.overlaps {
            let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
            add(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value);
        }
        let (grid, block) = (self.config.grid_dim, self.config.block_dim);
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: block.0,
            blockDimY: block.1,
            blockDimZ: block.2,
            sharedMemBytes: self.config.shared_mem_bytes,
            hStream: stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        let mut arguments = [std::ptr::from_ref(call).cast_mut().cast::<c_void>()];
        // SAFETY: The driver copies the argument and the attributes before it returns. The caller guarantees the rest.
        let launched = unsafe {
            sys::cuLaunchKernelEx(&config, self.function.cu_function(), arguments.as_mut_ptr(), std::ptr::null_mut())
        };
        launched.result().map_err(failed)
    }
}
