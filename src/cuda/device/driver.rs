//! Devices of the driver, and what its errors mean.

use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute, CUresult};
use cudarc::driver::{CudaContext, DriverError};

use super::libraries::driver_present;
use crate::{Error, Result};

/// Compute capability that the kernels need: asynchronous copies and the MMA shapes of 8.0.
const LEAST_CAPABILITY: (i32, i32) = (8, 0);

/// What kernels need to know of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceFacts {
    pub(crate) capability: (i32, i32),
    pub(crate) multiprocessors: usize,
    /// Most bytes of shared memory of one block.
    pub(crate) shared_bytes: usize,
}

/// The primary context of a device.
pub(crate) fn open_context(ordinal: usize) -> Result<Arc<CudaContext>> {
    // cudarc panics on the first call of a driver that is not there.
    if !driver_present() {
        let reason = "the CUDA driver (libcuda) was not found; install NVIDIA's driver or use another backend";
        return Err(Error::Adapter { reason: reason.into() });
    }
    CudaContext::new(ordinal)
        .map_err(|error| Error::Adapter { reason: format!("CUDA device {ordinal}: {}", message(error)) })
}

impl DeviceFacts {
    pub(crate) fn of(context: &CudaContext) -> Result<Self> {
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

    /// True if kernels may begin while the one before them still runs: compute capability 9.0.
    pub(crate) fn has_dependent_launches(&self) -> bool {
        self.capability >= (9, 0)
    }

    /// The architecture as NVRTC names it.
    pub(crate) fn architecture(&self) -> String {
        format!("sm_{}{}", self.capability.0, self.capability.1)
    }

    /// Whether four warps can multiply together (`wgmma`).
    pub(crate) fn has_warpgroups(&self) -> bool {
        self.capability == (9, 0)
    }
}

/// An error of the driver about `what`, for which `bytes` bytes were asked.
pub(crate) fn driver_error(what: &'static str, bytes: u64, error: DriverError) -> Error {
    match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::OutOfMemory { what, bytes, message: message(error) },
        // After these every further call in the context fails.
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

    /// Where there is no driver, asking for a device is an error that says so, and no panic.
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
    fn architectures_as_nvrtc_names_them() {
        let facts = DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 0 };
        assert_eq!(facts.architecture(), "sm_90");
    }
}
