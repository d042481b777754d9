//! Memory on the device.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::result::{memcpy_dtod_async, memcpy_dtoh_async, memcpy_htod_async, memset_d8_async};
use cudarc::driver::sys::{CUpointer_attribute, cuPointerGetAttributes};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DriverError};

use super::driver::{driver_error, is_capturing, make_current, wait_for_stream};
use crate::{Error, Result};

/// Bytes on the device, alive as long as their owner.
#[derive(Debug)]
pub struct Memory {
    owner: Owner,
    address: u64,
    bytes: usize,
}

/// Keeps memory alive.
enum Owner {
    /// An allocation of this library, freed in the order of the stream that it was made on.
    Library(CudaSlice<u8>),
    /// An owner handed over by an engine.
    Engine(#[expect(dead_code, reason = "held only to keep the memory alive")] Arc<dyn Any + Send + Sync>),
}

impl Drop for Memory {
    fn drop(&mut self) {
        // A slice of a stream that cudarc does not count is freed in whatever context the thread has. Without one the
        // memory would be lost, and the next call would report it. A device that fails here has already failed
        // elsewhere.
        if let Owner::Library(slice) = &self.owner {
            make_current(slice.context()).unwrap_or(());
        }
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Library(_) => "Library",
            Self::Engine(_) => "Engine",
        })
    }
}

/// Whether both are the same stream. The default streams of all devices have the same handle, so contexts count too.
pub fn same_stream(a: &CudaStream, b: &CudaStream) -> bool {
    a.cu_stream() == b.cu_stream() && a.context() == b.context()
}

/// Bytes of `elements` elements of `size` bytes.
///
/// # Errors
/// [`Error::Limit`] when they exceed any memory.
pub fn bytes_of(what: &'static str, elements: usize, size: usize) -> Result<usize> {
    let allowed = isize::MAX as usize;
    elements.checked_mul(size).filter(|&bytes| bytes <= allowed).ok_or_else(|| Error::Limit {
        what: format!("{what} in bytes"),
        needed: (elements as u64).saturating_mul(size as u64),
        allowed: allowed as u64,
        hint: "ask for fewer elements",
    })
}

/// Whether the driver knows the memory of these bytes of the host: it is pinned, or shared with a device. A copy from
/// such memory reads it when the stream comes to the copy. Other bytes are taken before the call that queues the copy
/// returns.
fn is_known_to_driver(bytes: &[u8]) -> bool {
    let mut memory_type = 0u32;
    let mut asked = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    let mut answer = (&raw mut memory_type).cast::<c_void>();
    // SAFETY: One attribute is asked for, of 4 bytes, and one place is given for it. The driver does not read the
    // bytes.
    let found = unsafe { cuPointerGetAttributes(1, &mut asked, &mut answer, bytes.as_ptr() as u64) };
    // Of memory that it does not know the driver says 0, or that there is an error.
    found.result().is_ok() && memory_type != 0
}

/// Queues a copy of bytes of the host. The caller may overwrite or free them at once: pinned ones are waited for.
///
/// # Errors
/// [`Error::Plan`] for pinned bytes while a graph captures the stream; errors of the driver.
fn copy_from_host<T>(
    stream: &Arc<CudaStream>,
    what: &'static str,
    bytes: &[u8],
    queue: impl FnOnce() -> std::result::Result<T, DriverError>,
) -> Result<T> {
    let failed = |error| driver_error(what, bytes.len() as u64, error);
    stream.context().bind_to_thread().map_err(failed)?;
    if !is_known_to_driver(bytes) {
        return queue().map_err(failed);
    }
    if is_capturing(stream)? {
        let reason = "it is copied from pinned memory of the host, which must be waited for, and a graph captures the \
                      stream; copy it before the capture begins";
        return Err(Error::Plan { what, reason: reason.into() });
    }
    let queued = queue();
    let done = wait_for_stream(stream);
    queued.and_then(|queued| done.map(|()| queued)).map_err(failed)
}

impl Memory {
    /// Zeroed bytes, at least one.
    pub fn zeroed(stream: &Arc<CudaStream>, what: &'static str, bytes: usize) -> Result<Arc<Self>> {
        let slice = stream.alloc_zeros::<u8>(bytes.max(1)).map_err(|error| driver_error(what, bytes as u64, error))?;
        Ok(Self::new(stream, slice))
    }

    /// At least one byte of uninitialised memory, for data that is written before it is read.
    pub fn unwritten(stream: &Arc<CudaStream>, what: &'static str, bytes: usize) -> Result<Arc<Self>> {
        // SAFETY: Every bit pattern is a valid byte, and this type hands bytes out only through copies by the driver.
        let slice = unsafe { stream.alloc::<u8>(bytes.max(1)) };
        Ok(Self::new(stream, slice.map_err(|error| driver_error(what, bytes as u64, error))?))
    }

    /// A copy of bytes of the host. The caller may overwrite or free them at once. [`Error::Plan`] for bytes in pinned
    /// memory while a graph captures the stream.
    pub fn upload(stream: &Arc<CudaStream>, what: &'static str, bytes: &[u8]) -> Result<Arc<Self>> {
        let at_least_one = if bytes.is_empty() { &[0] } else { bytes };
        let slice = copy_from_host(stream, what, at_least_one, || stream.clone_htod(at_least_one))?;
        Ok(Self::new(stream, slice))
    }

    fn new(stream: &Arc<CudaStream>, slice: CudaSlice<u8>) -> Arc<Self> {
        let (address, bytes) = (slice.device_ptr(stream).0, slice.len());
        Arc::new(Self { owner: Owner::Library(slice), address, bytes })
    }

    /// An engine's memory, which `owner` keeps alive. The bytes exist: [`Tensor::from_address`](super::tensor::Tensor)
    /// asks its caller for that.
    pub(super) fn of_engine(owner: Arc<dyn Any + Send + Sync>, address: u64, bytes: usize) -> Arc<Self> {
        Arc::new(Self { owner: Owner::Engine(owner), address, bytes })
    }

    /// Checks that work on `stream` may use the memory. An allocation of this library is freed in the order of the
    /// stream that it was made on, possibly before work on another stream is done with it.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub fn check_stream(&self, what: &'static str, stream: &CudaStream) -> Result<()> {
        match &self.owner {
            Owner::Library(slice) if !same_stream(slice.stream(), stream) => {
                let reason = "it was made on another stream than that of the call, and is given back in the order of its \
                              own; use the backend of that stream, or make it with this one";
                Err(Error::Plan { what, reason: reason.into() })
            }
            Owner::Library(_) | Owner::Engine(_) => Ok(()),
        }
    }

    /// Queues a copy of the host's bytes to `offset` bytes from the start of the memory. The caller may overwrite or
    /// free the bytes at once: the driver has taken them when it returns, and those in pinned memory are waited for.
    /// [`Error::Plan`] on another stream, and for pinned bytes while a graph captures the stream.
    pub fn write(&self, stream: &Arc<CudaStream>, what: &'static str, offset: usize, bytes: &[u8]) -> Result<()> {
        if offset.checked_add(bytes.len()).is_none_or(|end| end > self.bytes) {
            let reason = format!("{} bytes from byte {offset} on, of {}", bytes.len(), self.bytes);
            return Err(Error::Buffer { what, reason });
        }
        self.check_stream(what, stream)?;
        let to = self.address + offset as u64;
        // SAFETY: The bytes were checked to fit the memory, which lives as long as work on its stream may use it.
        copy_from_host(stream, what, bytes, || unsafe { memcpy_htod_async(to, bytes, stream.cu_stream()) })
    }

    /// Queues setting all bytes to `byte`. [`Error::Plan`] on another stream.
    pub fn fill(&self, stream: &Arc<CudaStream>, what: &'static str, byte: u8) -> Result<()> {
        self.check_stream(what, stream)?;
        let failed = |error| driver_error(what, self.bytes as u64, error);
        stream.context().bind_to_thread().map_err(failed)?;
        // SAFETY: The memory has `self.bytes` bytes, and lives as long as work on its stream may use it.
        unsafe { memset_d8_async(self.address, byte, self.bytes, stream.cu_stream()) }.map_err(failed)
    }

    /// Copies all bytes to the host, after all work queued on the stream. [`Error::Plan`] on another stream.
    pub fn download(&self, stream: &Arc<CudaStream>, what: &'static str) -> Result<Vec<u8>> {
        self.download_part(stream, what, 0, self.bytes)
    }

    /// Copies `bytes` bytes to the host, starting at `offset`. [`Error::Plan`] on another stream, which would read
    /// before the memory's own has written.
    pub fn download_part(
        &self,
        stream: &Arc<CudaStream>,
        what: &'static str,
        offset: usize,
        bytes: usize,
    ) -> Result<Vec<u8>> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let reason = format!("bytes {offset}.. of {}, {bytes} of them", self.bytes);
            return Err(Error::Buffer { what, reason });
        }
        self.check_stream(what, stream)?;
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let failed = |error| driver_error(what, bytes as u64, error);
        let mut copied = vec![0u8; bytes];
        stream.context().bind_to_thread().map_err(failed)?;
        // SAFETY: The bytes were checked to lie within the memory, which outlives the copy, because this function waits
        // for it.
        let queued = unsafe { memcpy_dtoh_async(&mut copied, self.address + offset as u64, stream.cu_stream()) };
        // The host's bytes are freed only when no copy into them is running.
        let done = wait_for_stream(stream);
        queued.and(done).map_err(failed)?;
        Ok(copied)
    }

    /// A larger copy of the memory. The new bytes are zero. [`Error::Plan`] on another stream.
    pub fn grown(&self, stream: &Arc<CudaStream>, what: &'static str, bytes: usize) -> Result<Arc<Self>> {
        self.check_stream(what, stream)?;
        let grown = Self::zeroed(stream, what, bytes.max(self.bytes))?;
        // SAFETY: Both allocations have at least this many bytes, are distinct, and are freed in the order of the
        // stream.
        let copied = unsafe { memcpy_dtod_async(grown.address, self.address, self.bytes, stream.cu_stream()) };
        copied.map_err(|error| driver_error(what, bytes as u64, error))?;
        Ok(grown)
    }

    /// Its address on the device.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_overflow_are_refused() {
        assert_eq!(bytes_of("words", 3, 4), Ok(12));
        for elements in [usize::MAX, usize::MAX / 4 + 2, usize::MAX / 4] {
            let error = bytes_of("words", elements, 4).unwrap_err();
            assert!(matches!(error, Error::Limit { .. }), "{error}");
        }
    }
}
