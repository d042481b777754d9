//! Memory that cuBLAS works in.

use std::ptr;
use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::cublas::CudaBlas;
use candle_core::cuda_backend::cudarc::cublas::sys::{cublasSetWorkspace_v2, cublasStatus_t::CUBLAS_STATUS_SUCCESS};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};

/// As much as cuBLAS takes on this card where it is given none.
const BYTES: usize = 32 << 20;

/// A workspace that all products of candle's cuBLAS share. Without one, each product that a graph captures allocates
/// and frees its own: two nodes of the graph, which every replay runs.
pub struct Workspace {
    blas: Arc<CudaBlas>,
    _memory: CudaSlice<u8>,
}

impl Workspace {
    /// For the products of a device, which run in the order of its one stream.
    pub fn of(device: &CudaDevice) -> Result<Self> {
        // SAFETY: cuBLAS writes what it reads of it.
        let memory = unsafe { device.cuda_stream().alloc::<u8>(BYTES)? };
        let blas = device.cublas_handle();
        let address = memory.device_ptr(&device.cuda_stream()).0;
        // SAFETY: the memory has these bytes, and lives until the handle is given back its own workspace.
        let status = unsafe { cublasSetWorkspace_v2(*blas.handle(), address as *mut _, BYTES) };
        ensure!(status == CUBLAS_STATUS_SUCCESS, "cuBLAS refused its workspace: {status:?}");
        Ok(Self { blas, _memory: memory })
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // SAFETY: no memory is the workspace of its own. What runs still is ahead of the release in the one stream.
        unsafe { cublasSetWorkspace_v2(*self.blas.handle(), ptr::null_mut(), 0) };
    }
}
