//! Memory on the device.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};

use super::driver::driver_error;
use crate::Result;

/// Bytes on the device. They are given back, in the order of the stream they were allocated on, when the last owner
/// goes.
#[derive(Debug)]
pub(crate) struct Memory {
    slice: CudaSlice<u8>,
    address: u64,
}

impl Memory {
    /// Zeroed bytes, at least one.
    pub(crate) fn zeroed(stream: &Arc<CudaStream>, what: &'static str, bytes: usize) -> Result<Arc<Self>> {
        let slice = stream.alloc_zeros::<u8>(bytes.max(1)).map_err(|error| driver_error(what, bytes as u64, error))?;
        Ok(Self::new(stream, slice))
    }

    /// A copy of bytes of the host.
    pub(crate) fn upload(stream: &Arc<CudaStream>, what: &'static str, bytes: &[u8]) -> Result<Arc<Self>> {
        let at_least_one = if bytes.is_empty() { &[0] } else { bytes };
        let slice = stream.clone_htod(at_least_one).map_err(|error| driver_error(what, bytes.len() as u64, error))?;
        Ok(Self::new(stream, slice))
    }

    fn new(stream: &Arc<CudaStream>, slice: CudaSlice<u8>) -> Arc<Self> {
        let address = slice.device_ptr(stream).0;
        Arc::new(Self { slice, address })
    }

    /// Copies all bytes to the host, after the work that the stream holds.
    pub(crate) fn download(&self, stream: &Arc<CudaStream>, what: &'static str) -> Result<Vec<u8>> {
        self.download_part(stream, what, 0, self.slice.len())
    }

    /// Copies `bytes` bytes from `offset` on to the host.
    pub(crate) fn download_part(
        &self,
        stream: &Arc<CudaStream>,
        what: &'static str,
        offset: usize,
        bytes: usize,
    ) -> Result<Vec<u8>> {
        let Some(part) = self.slice.try_slice(offset..offset + bytes) else {
            let reason = format!("bytes {offset}..{} of {}", offset + bytes, self.slice.len());
            return Err(crate::Error::Buffer { what, reason });
        };
        let copied = stream.clone_dtoh(&part).and_then(|copied| stream.synchronize().map(|()| copied));
        copied.map_err(|error| driver_error(what, bytes as u64, error))
    }

    /// A larger copy, zeroed beyond what there is.
    pub(super) fn grown(&self, stream: &Arc<CudaStream>, what: &'static str, bytes: usize) -> Result<Arc<Self>> {
        let failed = |error| driver_error(what, bytes as u64, error);
        let mut slice = stream.alloc_zeros::<u8>(bytes.max(self.slice.len())).map_err(failed)?;
        stream.memcpy_dtod(&self.slice, &mut slice).map_err(failed)?;
        Ok(Self::new(stream, slice))
    }

    /// Its address on the device.
    pub(crate) const fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.slice.len()
    }
}
