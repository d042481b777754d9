//! Calls into wgpu that return errors. By default wgpu passes errors to a handler that panics, and silently drops every
//! error of a lost device.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::deferred;
use crate::{Error, Result};

/// What a call requests, to name it in an error.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The purpose of the call.
    pub what: &'static str,
    /// Bytes of device memory, 0 if the call does not allocate.
    pub bytes: u64,
}

impl Request {
    /// A call without a notable allocation.
    pub const fn call(what: &'static str) -> Self {
        Self { what, bytes: 0 }
    }

    fn error(self, error: wgpu::Error) -> Error {
        match error {
            wgpu::Error::OutOfMemory { source } => {
                Error::OutOfMemory { what: self.what, bytes: self.bytes, message: source.to_string() }
            }
            wgpu::Error::Validation { description, .. } | wgpu::Error::Internal { description, .. } => {
                Error::Gpu { message: format!("{}: {description}", self.what) }
            }
        }
    }
}

/// Runs `call` and returns its value. Returns the first error instead if wgpu reported one during the call, or if an
/// earlier call that could not wait left one.
pub async fn captured<T>(device: &wgpu::Device, request: Request, call: impl FnOnce() -> T) -> Result<T> {
    let scopes = Scopes::open(device);
    let value = call();
    let errors = scopes.close(request);
    settled(device).await?;
    errors.await.map(|()| value)
}

/// [`captured`] for callers that cannot wait. Native backends report errors at once. A browser reports them later: then
/// the next call that waits returns them.
pub fn captured_now<T>(device: &wgpu::Device, request: Request, call: impl FnOnce() -> T) -> Result<T> {
    let scopes = Scopes::open(device);
    let value = call();
    deferred::defer(device, scopes.close(request)).map(|()| value)
}

/// Waits for the outcomes of earlier calls that could not wait, and returns the first error.
pub async fn settled(device: &wgpu::Device) -> Result<()> {
    deferred::settle(device).await
}

/// One error scope for each kind of error. They belong to the thread, so they are closed before anything is awaited.
struct Scopes {
    internal: wgpu::ErrorScopeGuard,
    validation: wgpu::ErrorScopeGuard,
    memory: wgpu::ErrorScopeGuard,
}

impl Scopes {
    fn open(device: &wgpu::Device) -> Self {
        let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
        let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        Self { internal, validation, memory }
    }

    /// Closes the scopes now and reports the first error.
    fn close(self, request: Request) -> impl Future<Output = Result<()>> + use<> {
        let (memory, validation, internal) = (self.memory.pop(), self.validation.pop(), self.internal.pop());
        async move {
            let (memory, validation, internal) = (memory.await, validation.await, internal.await);
            memory.or(validation).or(internal).map_or(Ok(()), |error| Err(request.error(error)))
        }
    }
}

/// The error of a lost device. wgpu reports the reason only to the single callback that the device's owner may have
/// set.
pub fn lost() -> Error {
    Error::DeviceLost { message: "it was destroyed, or its driver reset it".into() }
}

/// Fails if the device no longer accepts work.
///
/// On a lost device wgpu creates unusable buffers without an error; only mapping a buffer at creation reveals it. In a
/// browser only a failing download does.
pub fn check_alive(device: &wgpu::Device) -> Result<()> {
    captured_now(device, Request::call("probe of the device"), || {
        let probe = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("kvpack probe"),
            size: 4,
            usage: wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::MAP_WRITE,
            mapped_at_creation: true,
        });
        probe.get_mapped_range_mut(..).is_ok()
    })
    .and_then(|alive| if alive { Ok(()) } else { Err(lost()) })
}

/// Blocks until a submission is done and its callbacks have run. In a browser, where nothing may block, it returns at
/// once: see [`buffers::finished`](super::buffers::finished).
pub fn wait(device: &wgpu::Device, submission: wgpu::SubmissionIndex) -> Result<()> {
    poll(device, wgpu::PollType::Wait { submission_index: Some(submission), timeout: None })
}

/// The same for everything that is submitted.
pub fn wait_for_all(device: &wgpu::Device) -> Result<()> {
    poll(device, wgpu::PollType::Wait { submission_index: None, timeout: None })
}

/// Runs the callbacks of what is done, and waits for nothing. A browser runs them by itself.
pub fn look(device: &wgpu::Device) -> Result<()> {
    poll(device, wgpu::PollType::Poll)
}

fn poll(device: &wgpu::Device, poll: wgpu::PollType) -> Result<()> {
    // wgpu panics if the driver reports a lost device during the wait. It holds no lock at that point.
    match catch_unwind(AssertUnwindSafe(|| device.poll(poll))) {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => check_alive(device).and(Err(Error::Gpu { message: error.to_string() })),
        Err(panic) => Err(Error::DeviceLost { message: panic_message(panic.as_ref()) }),
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("the driver lost it").to_owned()
}

/// Whether the device belongs to a browser, which runs calls in another process and never blocks.
pub fn in_browser(device: &wgpu::Device) -> bool {
    device.adapter_info().backend == wgpu::Backend::BrowserWebGpu
}

/// Encodes with `encode` and submits.
pub fn submit(
    device: &wgpu::Device,
    queue: &wgpu::Queue,
    what: &'static str,
    encode: impl FnOnce(&mut wgpu::CommandEncoder),
) -> Result<wgpu::SubmissionIndex> {
    captured_now(device, Request::call(what), || {
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some(what) });
        encode(&mut encoder);
        queue.submit([encoder.finish()])
    })
}

/// [`submit`] for encoding that may fail. Then nothing is submitted.
pub fn encode_and_submit(
    device: &wgpu::Device,
    queue: &wgpu::Queue,
    what: &'static str,
    encode: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<()>,
) -> Result<()> {
    captured_now(device, Request::call(what), || {
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some(what) });
        encode(&mut encoder)?;
        queue.submit([encoder.finish()]);
        Ok(())
    })?
}
