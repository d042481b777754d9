//! Uploads that do not block the host.

use std::sync::Arc;

use cudarc::driver::result::memcpy_htod_async;
use cudarc::driver::{CudaEvent, CudaStream, PinnedHostSlice};

use super::driver::{driver_error, wait_for_event};
use super::memory::Memory;
use crate::{Error, Result};

/// Maximum number of uploads in flight. The host runs a step or two ahead of the device; beyond this limit it waits.
const UNDER_WAY: usize = 4;

/// Pinned host memory for repeated uploads of tables. The driver copies from it while the host goes on. For unpinned
/// memory the host would have to wait.
#[derive(Debug)]
pub struct Pinned {
    stream: Arc<CudaStream>,
    bytes: usize,
    parts: Vec<Part>,
    next: usize,
}

#[derive(Debug)]
struct Part {
    host: PinnedHostSlice<u8>,
    /// Recorded after the copy that reads the part.
    copied: CudaEvent,
}

impl Pinned {
    /// Creates memory for uploads of up to `bytes` bytes on a stream.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(stream: &Arc<CudaStream>, bytes: usize) -> Result<Self> {
        let failed = |error| driver_error("pinned memory of the host", bytes as u64, error);
        let part = |_| {
            // SAFETY: Only bytes that were written before are copied out of it.
            let host = unsafe { stream.context().alloc_pinned::<u8>(bytes.max(1)) }.map_err(failed)?;
            let copied = stream.context().new_event(None).map_err(failed)?;
            Ok(Part { host, copied })
        };
        let parts = (0..UNDER_WAY).map(part).collect::<Result<_>>()?;
        Ok(Self { stream: stream.clone(), bytes, parts, next: 0 })
    }

    /// Queues a copy of bytes to the start of `memory`. It waits only if every part still has a copy pending.
    pub fn upload(&mut self, what: &'static str, bytes: &[u8], memory: &Memory) -> Result<()> {
        let room = self.bytes.min(memory.bytes());
        if bytes.len() > room {
            return Err(Error::Buffer { what, reason: format!("{} bytes into {room}", bytes.len()) });
        }
        if bytes.is_empty() {
            return Ok(());
        }
        memory.check_stream(what, &self.stream)?;
        let failed = |error| driver_error(what, bytes.len() as u64, error);
        let part = &mut self.parts[self.next];
        self.next = (self.next + 1) % UNDER_WAY;
        part.copied.synchronize().map_err(failed)?;
        let host = &mut part.host.as_mut_slice().map_err(failed)?[..bytes.len()];
        host.copy_from_slice(bytes);
        self.stream.context().bind_to_thread().map_err(failed)?;
        // SAFETY: The bytes were checked to fit the memory, which lives as long as work on its stream may use it. The
        // host's bytes are overwritten or freed only after the event that follows the copy.
        unsafe { memcpy_htod_async(memory.address(), host, self.stream.cu_stream()) }.map_err(failed)?;
        part.copied.record(&self.stream).map_err(failed)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Memory that a copy still reads must stay. A device that fails here has already failed elsewhere.
        self.parts.iter().for_each(|part| wait_for_event(&part.copied).unwrap_or(()));
    }
}
