//! Buffers: created, filled and read back, with typed errors.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::channel::oneshot;

use super::capabilities::MOST_BINDING_BYTES;
use super::guard::{self, Request};
use crate::{Error, Result};

/// Usages of arrays that kernels read or write and that the host copies.
pub const ARRAY_USAGES: wgpu::BufferUsages =
    wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_SRC).union(wgpu::BufferUsages::COPY_DST);

/// Creates a zeroed buffer of `size` bytes.
pub async fn create(
    device: &wgpu::Device,
    what: &'static str,
    size: u64,
    usage: wgpu::BufferUsages,
) -> Result<wgpu::Buffer> {
    check_size(device, what, size, usage)?;
    let call = || device.create_buffer(&descriptor(what, size, usage));
    let buffer = guard::captured(device, Request { what, bytes: size }, call).await?;
    guard::check_alive(device)?;
    Ok(buffer)
}

/// [`create`] for callers that cannot wait.
pub fn create_now(
    device: &wgpu::Device,
    what: &'static str,
    size: u64,
    usage: wgpu::BufferUsages,
) -> Result<wgpu::Buffer> {
    check_size(device, what, size, usage)?;
    let call = || device.create_buffer(&descriptor(what, size, usage));
    let buffer = guard::captured_now(device, Request { what, bytes: size }, call)?;
    guard::check_alive(device)?;
    Ok(buffer)
}

/// Creates a buffer that holds `bytes`. The length must be a multiple of 4, and at least 4.
pub fn create_filled(
    device: &wgpu::Device,
    what: &'static str,
    bytes: &[u8],
    usage: wgpu::BufferUsages,
) -> Result<wgpu::Buffer> {
    let size = bytes.len() as u64;
    check_size(device, what, size, usage)?;
    let filled = guard::captured_now(device, Request { what, bytes: size }, || {
        let buffer =
            device.create_buffer(&wgpu::BufferDescriptor { mapped_at_creation: true, ..descriptor(what, size, usage) });
        buffer.get_mapped_range_mut(..).ok()?.copy_from_slice(bytes);
        buffer.unmap();
        Some(buffer)
    })?;
    filled.ok_or_else(guard::lost)
}

/// A range of bytes of a buffer. Its start and its length are multiples of 4.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The buffer.
    pub buffer: &'a wgpu::Buffer,
    /// Bytes before the range.
    pub offset: u64,
    /// Bytes of the range.
    pub bytes: u64,
}

/// Copies `size` bytes, starting at `offset`, to the host once all submitted work is done. Both must be multiples of 4.
pub async fn read(
    device: &wgpu::Device,
    queue: &wgpu::Queue,
    buffer: &wgpu::Buffer,
    offset: u64,
    size: u64,
) -> Result<Vec<u8>> {
    read_all(device, queue, &[Place { buffer, offset, bytes: size }]).await
}

/// [`read`] for several places. Their bytes are concatenated.
pub async fn read_all(device: &wgpu::Device, queue: &wgpu::Queue, places: &[Place<'_>]) -> Result<Vec<u8>> {
    let size: u64 = places.iter().map(|place| place.bytes).sum();
    if size == 0 {
        return Ok(Vec::new());
    }
    let staging = create(device, DOWNLOAD, size, DOWNLOADED).await?;
    Download::submit(device, queue, staging, places)?.finish(device).await
}

const DOWNLOAD: &str = "staging buffer of a download";
const DOWNLOADED: wgpu::BufferUsages = wgpu::BufferUsages::MAP_READ.union(wgpu::BufferUsages::COPY_DST);

/// Bytes on their way to the host.
#[derive(Debug)]
pub struct Download {
    staging: wgpu::Buffer,
    submission: wgpu::SubmissionIndex,
    mapped: oneshot::Receiver<std::result::Result<(), wgpu::BufferAsyncError>>,
    /// Whether the receiver has its message.
    has_arrived: Arc<AtomicBool>,
}

impl Download {
    /// Submits copies of places, of at least a byte together, and waits for nothing.
    pub fn begin(device: &wgpu::Device, queue: &wgpu::Queue, places: &[Place<'_>]) -> Result<Self> {
        let size = places.iter().map(|place| place.bytes).sum();
        Self::submit(device, queue, create_now(device, DOWNLOAD, size, DOWNLOADED)?, places)
    }

    fn submit(device: &wgpu::Device, queue: &wgpu::Queue, staging: wgpu::Buffer, places: &[Place<'_>]) -> Result<Self> {
        let submission = guard::submit(device, queue, "kvpack download", |encoder| {
            let mut at = 0;
            for place in places {
                encoder.copy_buffer_to_buffer(place.buffer, place.offset, &staging, at, place.bytes);
                at += place.bytes;
            }
        })?;
        let (sender, mapped) = oneshot::channel();
        let has_arrived: Arc<AtomicBool> = Arc::default();
        let note = has_arrived.clone();
        guard::captured_now(device, Request::call("mapping of a download"), || {
            staging.map_async(wgpu::MapMode::Read, .., move |mapped| {
                // The receiver is gone only if the download was dropped. Then nobody needs the result.
                let _ = sender.send(mapped);
                note.store(true, Ordering::Release);
            });
        })?;
        Ok(Self { staging, submission, mapped, has_arrived })
    }

    /// Whether the bytes are on the host, or never will be. Asks the device, and waits for nothing.
    pub fn has_arrived(&self, device: &wgpu::Device) -> Result<bool> {
        if !self.has_arrived.load(Ordering::Acquire) {
            guard::look(device)?;
        }
        Ok(self.has_arrived.load(Ordering::Acquire))
    }

    /// The bytes. Waits until they are on the host.
    pub async fn finish(self, device: &wgpu::Device) -> Result<Vec<u8>> {
        let Self { staging, submission, mapped, has_arrived } = self;
        if !has_arrived.load(Ordering::Acquire) {
            guard::wait(device, submission)?;
        }
        // Either the callback has run, or another thread that polled at the same time is about to run it. A dropped
        // callback cancels the channel.
        let mapped = mapped.await;
        guard::settled(device).await?;
        if !matches!(mapped, Ok(Ok(()))) {
            return Err(guard::lost());
        }
        let view = staging.get_mapped_range(..).map_err(|error| Error::Gpu { message: error.to_string() })?;
        let bytes = view.to_vec();
        drop(view);
        staging.unmap();
        Ok(bytes)
    }
}

/// Waits until all work submitted so far is done, `submission` included.
///
/// # Errors
/// [`Error::DeviceLost`], and the errors of earlier calls that could not wait.
pub async fn finished(device: &wgpu::Device, queue: &wgpu::Queue, submission: wgpu::SubmissionIndex) -> Result<()> {
    if !guard::in_browser(device) {
        return guard::wait(device, submission);
    }
    // The queue's own promise also resolves on a lost device. A download fails there.
    let word = create(device, "word behind a submission", 4, wgpu::BufferUsages::COPY_SRC).await?;
    read(device, queue, &word, 0, 4).await.map(drop)
}

fn descriptor(what: &'static str, size: u64, usage: wgpu::BufferUsages) -> wgpu::BufferDescriptor<'static> {
    wgpu::BufferDescriptor { label: Some(what), size, usage, mapped_at_creation: false }
}

fn check_size(device: &wgpu::Device, what: &'static str, size: u64, usage: wgpu::BufferUsages) -> Result<()> {
    let bound = if usage.contains(wgpu::BufferUsages::STORAGE) { MOST_BINDING_BYTES } else { u64::MAX };
    let allowed = device.limits().max_buffer_size.min(bound);
    if size > allowed {
        return Err(Error::Limit {
            what: format!("{what} in bytes"),
            needed: size,
            allowed,
            hint: "spread it over several buffers, or create the device with the limits of kvpack's Requirements",
        });
    }
    Ok(())
}
