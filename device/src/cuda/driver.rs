//! Devices of the driver, and the meaning of its errors.

use std::sync::Arc;

use cudarc::driver::result::{ctx, event, stream};
use cudarc::driver::sys::{
    CUDA_VERSION, CUdevice_attribute, CUresult, CUstream, CUstreamCaptureStatus, cuDriverGetVersion,
};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};

use super::libraries::driver_present;
use crate::{Error, Result};

/// Compute capability that the kernels need: 8.0 brought asynchronous copies and the MMA shapes.
const LEAST_CAPABILITY: (i32, i32) = (8, 0);

/// Driver version that launches need, in the driver's own numbering. `cuLaunchKernelEx` came with CUDA 11.8. Only the
/// measurement of durations calls newer functions.
const LEAST_DRIVER: i32 = 11_080;

/// Driver version that durations need: bindings of CUDA 13 measure them with a function that came with 12.8.
pub const LEAST_TIMING_DRIVER: i32 = if CUDA_VERSION >= 13_000 { 12_080 } else { LEAST_DRIVER };

/// The handle that stands for the default stream of the thread that uses it.
const PER_THREAD_STREAM: usize = 2;

/// The facts about a device that kernels depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Compute capability.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Maximum bytes of shared memory of one block.
    pub shared_bytes: usize,
}

/// The primary context of a device.
pub fn open_context(ordinal: usize) -> Result<Arc<CudaContext>> {
    // cudarc panics at the first call if the driver is missing.
    if !driver_present() {
        let reason = "the CUDA driver (libcuda) was not found; install NVIDIA's driver or use another backend";
        return Err(Error::Adapter { reason: reason.into() });
    }
    CudaContext::new(ordinal)
        .map_err(|error| Error::Adapter { reason: format!("CUDA device {ordinal}: {}", message(error)) })
}

/// Refuses the default stream of a thread (`CU_STREAM_PER_THREAD`), by the handle of the stream for `what`. The same
/// handle is another stream on every thread, so that nothing orders what threads queue on it.
///
/// # Errors
/// [`Error::Plan`].
pub fn check_is_one_stream(what: &'static str, handle: CUstream) -> Result<()> {
    if handle as usize != PER_THREAD_STREAM {
        return Ok(());
    }
    let reason = "the stream has handle 0x2, the default stream of a thread, which is another one on every thread; \
                  pass a stream of your own (CudaContext::new_stream, or candle's Device::new_cuda_with_stream), or \
                  the default stream of the context";
    Err(Error::Plan { what, reason: reason.into() })
}

/// Makes the context that of this thread. [`CudaContext::bind_to_thread`] returns an error that another call left in
/// the context, without binding. What drops must be given back all the same, and that error is for the next call.
pub fn make_current(context: &CudaContext) -> std::result::Result<(), DriverError> {
    if ctx::get_current()? == Some(context.cu_ctx()) {
        return Ok(());
    }
    // SAFETY: The context lives as long as `context`, whose holder may use it on any thread.
    unsafe { ctx::set_current(context.cu_ctx()) }
}

/// Waits for an event, also where another call left an error in the context, after which [`CudaEvent::synchronize`]
/// would not wait.
pub fn wait_for_event(awaited: &CudaEvent) -> std::result::Result<(), DriverError> {
    make_current(awaited.context())?;
    // SAFETY: The event lives as long as `awaited`, and its context is current.
    unsafe { event::synchronize(awaited.cu_event()) }
}

/// Waits for a stream, also where another call left an error in the context.
pub fn wait_for_stream(awaited: &CudaStream) -> std::result::Result<(), DriverError> {
    make_current(awaited.context())?;
    // SAFETY: The stream lives as long as `awaited`, and its context is current.
    unsafe { stream::synchronize(awaited.cu_stream()) }
}

/// Whether a graph captures the stream.
///
/// # Errors
/// Errors of the driver, but none that another call left in the context.
pub fn is_capturing(asked: &CudaStream) -> Result<bool> {
    let failed = |error| driver_error("state of a stream", 0, error);
    make_current(asked.context()).map_err(failed)?;
    // SAFETY: The stream lives as long as `asked`, and its context is current.
    let status = unsafe { stream::is_capturing(asked.cu_stream()) }.map_err(failed)?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

impl DeviceFacts {
    /// The facts about the device of a context.
    ///
    /// # Errors
    /// [`Error::Adapter`] when the device or the driver is too old; errors of the driver.
    pub fn of(context: &CudaContext) -> Result<Self> {
        check_driver("the CUDA kernels", LEAST_DRIVER)?;
        let attribute =
            |attribute| context.attribute(attribute).map_err(|error| driver_error("device facts", 0, error));
        let capability = context.compute_capability().map_err(|error| driver_error("device facts", 0, error))?;
        if capability < LEAST_CAPABILITY {
            let ((major, minor), (least_major, least_minor)) = (capability, LEAST_CAPABILITY);
            let reason = format!(
                "the device has compute capability {major}.{minor}, the CUDA kernels need {least_major}.{least_minor}; use \
                 the wgpu backend"
            );
            return Err(Error::Adapter { reason });
        }
        let multiprocessors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared_bytes = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        Ok(Self { capability, multiprocessors: multiprocessors as usize, shared_bytes: shared_bytes as usize })
    }

    /// Whether the compute capability is 9.0 or newer. Such devices have a copy engine and clusters, and a kernel may
    /// begin while the previous one still runs.
    pub fn is_9_0_or_newer(&self) -> bool {
        self.capability >= (9, 0)
    }

    /// The architecture in NVRTC's spelling.
    pub fn architecture(&self) -> String {
        format!("sm_{}{}", self.capability.0, self.capability.1)
    }

    /// Whether four warps can multiply together (`wgmma`).
    pub fn has_warpgroups(&self) -> bool {
        self.capability == (9, 0)
    }
}

/// Checks that the loaded driver is new enough for everything that `what` calls: cudarc panics at a function that is
/// missing.
///
/// # Errors
/// [`Error::Adapter`].
pub fn check_driver(what: &str, least: i32) -> Result<()> {
    let mut found = 0;
    // SAFETY: The driver writes one integer, and needs no context for that.
    unsafe { cuDriverGetVersion(&mut found) }.result().map_err(|error| driver_error("driver version", 0, error))?;
    check_version(what, found, least)
}

fn check_version(what: &str, found: i32, least: i32) -> Result<()> {
    if found >= least {
        return Ok(());
    }
    let text = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
    let reason = format!(
        "the driver supports CUDA up to {}, but {what} need {}; install a newer driver, or use another backend",
        text(found),
        text(least)
    );
    Err(Error::Adapter { reason })
}

/// An error of the driver about `what`, which requested `bytes` bytes.
pub fn driver_error(what: &'static str, bytes: u64, error: DriverError) -> Error {
    match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::OutOfMemory { what, bytes, message: message(error) },
        // After these errors every further call in the context fails.
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_LAUNCH_FAILED
        | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
        | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | CUresult::CUDA_ERROR_DEINITIALIZED => Error::DeviceLost { message: format!("{what}: {}", message(error)) },
        _ => Error::Gpu { message: format!("{what}: {}", message(error)) },
    }
}

fn message(error: DriverError) -> String {
    let text = |text: std::result::Result<&std::ffi::CStr, DriverError>| {
        text.map_or_else(|_| String::from("unknown"), |text| text.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(error.error_string()), text(error.error_name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without a driver, opening a device returns an error that says so, and does not panic.
    #[test]
    fn no_driver_is_a_typed_error() {
        if driver_present() {
            return; // `kvpack check --backend cuda` covers machines that have one.
        }
        let error = open_context(0).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::Adapter { .. }), "{error}");
        assert!(error.to_string().contains("libcuda"), "{error}");
    }

    #[test]
    fn old_drivers_are_a_typed_error() {
        assert_eq!(check_version("kernels", 11_080, LEAST_DRIVER), Ok(()));
        assert_eq!(check_version("kernels", 13_010, LEAST_DRIVER), Ok(()));
        let error = check_version("kernels", 11_070, LEAST_DRIVER).unwrap_err();
        assert!(matches!(error, Error::Adapter { .. }), "{error}");
        assert!(error.to_string().contains("up to 11.7, but kernels need 11.8"), "{error}");
    }

    #[test]
    fn the_default_stream_of_a_thread_is_a_typed_error() {
        let check = |handle: usize| check_is_one_stream("a backend", handle as CUstream);
        assert!([0, 1, 3, 0x7f00_0000_1000].into_iter().all(|handle| check(handle).is_ok()));
        let error = check(2).unwrap_err();
        assert!(matches!(error, Error::Plan { .. }) && error.to_string().contains("0x2"), "{error}");
    }

    #[test]
    fn architectures_as_nvrtc_names_them() {
        let facts = DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 0 };
        assert_eq!(facts.architecture(), "sm_90");
    }
}
