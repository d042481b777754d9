//! Steps that an engine has encoded and not submitted. Until it submits them, pages lack the tokens that
//! a cache counts.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::guard::{self, Request};
use crate::{Error, Result};

/// Learns when the commands of a pass are submitted.
///
/// wgpu tells when submitted commands are finished, not when commands are submitted. It does map buffers at the
/// submission, and refuses at once to map one that is mapped already. This keeps such a buffer.
#[derive(Clone, Debug, Default)]
pub struct Submissions {
    /// A buffer that stays mapped; `None` where wgpu does not refuse it at once.
    mapped: Option<wgpu::Buffer>,
}

impl Submissions {
    pub(super) fn new(device: &wgpu::Device) -> Self {
        // A browser maps buffers, and refuses to, later.
        if cfg!(target_family = "wasm") {
            return Self::default();
        }
        let create = || {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("notice of submissions"),
                size: 4,
                usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: true,
            })
        };
        let mapped = guard::captured_now(device, Request::call("notice of submissions"), create).ok();
        Self { mapped: mapped.filter(refuses_at_once) }
    }
}

/// Whether wgpu refuses to map a mapped buffer within the call, as `wgpu::Buffer::map_async` of 30.0.1 does. Another
/// version might panic at the submission instead, as the documentation of `map_buffer_on_submit` says; this finds out
/// here.
fn refuses_at_once(mapped: &wgpu::Buffer) -> bool {
    let refused = Arc::new(AtomicBool::new(false));
    let note = refused.clone();
    let call = move || mapped.map_async(wgpu::MapMode::Read, .., move |of| note.store(of.is_err(), Ordering::Relaxed));
    catch_unwind(AssertUnwindSafe(call)).is_ok() && refused.load(Ordering::Relaxed)
}

/// The steps of a `ModelStep`, or of a layer that is bound by itself, that are encoded and not submitted.
#[derive(Debug)]
pub struct EncodedSteps {
    submissions: Submissions,
    count: Arc<AtomicUsize>,
}

impl EncodedSteps {
    /// None so far, of passes that `submissions` watches.
    pub fn new(submissions: &Submissions) -> Arc<Self> {
        Arc::new(Self { submissions: submissions.clone(), count: Arc::default() })
    }

    /// A step that counts as not submitted as long as it lives.
    pub fn begin(&self) -> Arc<EncodedStep> {
        self.count.fetch_add(1, Ordering::AcqRel);
        Arc::new(EncodedStep(self.count.clone()))
    }

    /// Keeps a step until the commands of a pass are submitted or dropped. Where wgpu does not tell of that, until they
    /// are finished or dropped.
    pub fn hold(&self, step: Arc<EncodedStep>, pass: &wgpu::ComputePass<'_>) {
        match &self.submissions.mapped {
            Some(mapped) => pass.map_buffer_on_submit(mapped, wgpu::MapMode::Read, .., move |_| drop(step)),
            None => pass.on_submitted_work_done(move || drop(step)),
        }
    }

    /// Number of steps that are not submitted.
    pub fn count(&self, device: &wgpu::Device) -> usize {
        not_submitted(&self.count, &self.submissions, device)
    }
}

/// Number of steps that are not submitted. None in a browser, which tells of finished commands alone, and where nothing
/// may wait for them.
fn not_submitted(count: &AtomicUsize, submissions: &Submissions, device: &wgpu::Device) -> usize {
    if cfg!(target_family = "wasm") {
        return 0;
    }
    if count.load(Ordering::Acquire) > 0 && submissions.mapped.is_none() {
        // Submitted steps count until they are finished. What fails here fails again in the caller's next call.
        let _ = guard::wait_for_all(device);
    }
    count.load(Ordering::Acquire)
}

/// A step with commands that are not submitted, and the number of them. The passes that hold the commands hold it.
#[derive(Debug)]
pub struct EncodedStep(Arc<AtomicUsize>);

impl Drop for EncodedStep {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Whose steps use a store or flags. Clones share it, as they share buffers.
#[derive(Clone, Debug, Default)]
pub struct Encoders(Arc<Mutex<Vec<Encoder>>>);

/// The number of steps that somebody encoded, as long as there may be any: their commands may outlive what encoded
/// them.
#[derive(Clone, Debug)]
struct Encoder {
    count: Weak<AtomicUsize>,
    submissions: Submissions,
}

impl Encoders {
    /// Notes that these steps use the store.
    pub fn add(&self, steps: &EncodedSteps) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|other| other.count.strong_count() > 0);
        if !known.iter().any(|other| std::ptr::eq(other.count.as_ptr(), Arc::as_ptr(&steps.count))) {
            known.push(Encoder { count: Arc::downgrade(&steps.count), submissions: steps.submissions.clone() });
        }
    }

    /// Checks that all steps are submitted, before the library submits commands of its own.
    ///
    /// # Errors
    /// [`Error::NotSubmitted`].
    pub fn check_submitted(&self, device: &wgpu::Device, what: &'static str) -> Result<()> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let of = |known: &Encoder| Some(not_submitted(&*known.count.upgrade()?, &known.submissions, device));
        let steps = known.iter().filter_map(of).sum();
        if steps == 0 { Ok(()) } else { Err(Error::NotSubmitted { what, steps }) }
    }
}
