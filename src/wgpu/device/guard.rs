//! Calls into wgpu that return errors. Left alone, wgpu hands errors to a handler that panics by default, and it
//! drops every error of a lost device silently.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};

use futures::FutureExt;

use crate::{Error, Result};

/// What a call asks for, to name it in an error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// What for.
    pub what: &'static str,
    /// Bytes of device memory, 0 if the call is about something else.
    pub bytes: u64,
}

impl Request {
    /// A call that takes no memory worth naming.
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

/// Runs `call` and returns its value, or the first error that wgpu reported during it.
pub(crate) async fn captured<T>(device: &wgpu::Device, request: Request, call: impl FnOnce() -> T) -> Result<T> {
    let (value, errors) = in_scopes(device, call);
    match errors.await {
        None => Ok(value),
        Some(error) => Err(request.error(error)),
    }
}

/// [`captured`] for callers that cannot wait. Errors are known at once on every native backend; in a browser, where
/// they arrive later, they are dropped and show in what the call made.
pub(crate) fn captured_now<T>(device: &wgpu::Device, request: Request, call: impl FnOnce() -> T) -> Result<T> {
    let (value, errors) = in_scopes(device, call);
    match errors.now_or_never().flatten() {
        None => Ok(value),
        Some(error) => Err(request.error(error)),
    }
}

/// Error scopes belong to the thread, so they are closed before anything can be awaited.
fn in_scopes<T>(device: &wgpu::Device, call: impl FnOnce() -> T) -> (T, impl Future<Output = Option<wgpu::Error>>) {
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let value = call();
    let (memory, validation, internal) = (memory.pop(), validation.pop(), internal.pop());
    let errors = async move {
        let (memory, validation, internal) = (memory.await, validation.await, internal.await);
        memory.or(validation).or(internal)
    };
    (value, errors)
}

/// The error of a lost device. wgpu tells the reason only to the one callback that the device's owner may have set.
pub(crate) fn lost() -> Error {
    Error::DeviceLost { message: "it was destroyed, or its driver reset it".into() }
}

/// Fails on a device that takes no more work.
///
/// On a lost device wgpu creates buffers without an error that are unusable; mapping one at creation is the call that
/// shows it.
pub(crate) fn check_alive(device: &wgpu::Device) -> Result<()> {
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

/// Waits until a submission is done and its callbacks have run. Returns at once in a browser, which runs callbacks by
/// itself.
pub(crate) fn wait(device: &wgpu::Device, submission: wgpu::SubmissionIndex) -> Result<()> {
    let poll = wgpu::PollType::Wait { submission_index: Some(submission), timeout: None };
    // wgpu panics where the driver reports a lost device during the wait; it holds no lock at that point.
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

/// Encodes with `encode` and submits.
pub(crate) fn submit(
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
