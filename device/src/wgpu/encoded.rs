//! Steps that an engine has recorded or encoded, and not submitted. Until it submits them, pages lack the tokens that a
//! cache counts.

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
    counts: Arc<Counts>,
}

/// Numbers of steps.
#[derive(Debug, Default)]
struct Counts {
    not_submitted: AtomicUsize,
    /// Those of them whose commands are in no pass yet.
    not_encoded: AtomicUsize,
}

impl EncodedSteps {
    /// None so far, of passes that `submissions` watches.
    pub fn new(submissions: &Submissions) -> Arc<Self> {
        Arc::new(Self { submissions: submissions.clone(), counts: Arc::default() })
    }

    /// A step that counts as not submitted as long as it lives.
    pub fn begin(&self) -> Arc<EncodedStep> {
        self.counts.not_submitted.fetch_add(1, Ordering::AcqRel);
        Arc::new(EncodedStep(self.counts.clone()))
    }

    /// The same for commands that are in no pass yet.
    pub fn record(&self) -> RecordedStep {
        self.counts.not_encoded.fetch_add(1, Ordering::AcqRel);
        RecordedStep(self.begin())
    }

    /// Keeps a step until the commands of a pass are submitted or dropped. Where wgpu does not tell of that, until they
    /// are finished or dropped.
    pub fn hold(&self, step: Arc<EncodedStep>, pass: &wgpu::ComputePass<'_>) {
        match &self.submissions.mapped {
            Some(mapped) => pass.map_buffer_on_submit(mapped, wgpu::MapMode::Read, .., move |_| drop(step)),
            None => pass.on_submitted_work_done(move || drop(step)),
        }
    }
}

/// Number of steps that are not submitted. None in a browser, which tells of finished commands alone, and where nothing
/// may wait for them.
fn not_submitted(counts: &Counts, submissions: &Submissions, device: &wgpu::Device) -> usize {
    if cfg!(target_family = "wasm") {
        return 0;
    }
    let count = &counts.not_submitted;
    if count.load(Ordering::Acquire) > 0 && submissions.mapped.is_none() {
        // Submitted steps count until they are finished. What fails here fails again in the caller's next call.
        let _ = guard::wait_for_all(device);
    }
    count.load(Ordering::Acquire)
}

/// A step with commands that are not submitted, and the number of them. The passes that hold the commands hold it.
#[derive(Debug)]
pub struct EncodedStep(Arc<Counts>);

impl Drop for EncodedStep {
    fn drop(&mut self) {
        self.0.not_submitted.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A step whose commands are in no pass yet.
#[derive(Debug)]
pub struct RecordedStep(Arc<EncodedStep>);

impl RecordedStep {
    /// The step, whose commands a pass has now.
    pub fn encoded(self) -> Arc<EncodedStep> {
        self.0.clone()
    }
}

impl Drop for RecordedStep {
    fn drop(&mut self) {
        (self.0).0.not_encoded.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Whose steps use a store or flags. Clones share it, as they share buffers.
#[derive(Clone, Debug, Default)]
pub struct Encoders(Arc<Mutex<Vec<Encoder>>>);

/// The number of steps that somebody encoded, as long as there may be any: their commands may outlive what encoded
/// them.
#[derive(Clone, Debug)]
struct Encoder {
    counts: Weak<Counts>,
    submissions: Submissions,
}

impl Encoders {
    /// Notes that these steps use the store.
    pub fn add(&self, steps: &EncodedSteps) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|other| other.counts.strong_count() > 0);
        if !known.iter().any(|other| std::ptr::eq(other.counts.as_ptr(), Arc::as_ptr(&steps.counts))) {
            known.push(Encoder { counts: Arc::downgrade(&steps.counts), submissions: steps.submissions.clone() });
        }
    }

    /// Checks that all steps are submitted, before the library submits commands of its own.
    ///
    /// # Errors
    /// [`Error::NotSubmitted`].
    pub fn check_submitted(&self, device: &wgpu::Device, what: &'static str) -> Result<()> {
        self.check_others_submitted(device, what, 0)
    }

    /// The same but for this many steps, which the commands belong to.
    ///
    /// # Errors
    /// [`Error::NotSubmitted`].
    pub fn check_others_submitted(&self, device: &wgpu::Device, what: &'static str, own: usize) -> Result<()> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let of = |known: &Encoder| Some(not_submitted(&*known.counts.upgrade()?, &known.submissions, device));
        match known.iter().filter_map(of).sum::<usize>().saturating_sub(own) {
            0 => Ok(()),
            steps => Err(Error::NotSubmitted { what, steps }),
        }
    }

    /// Checks that all that was recorded is encoded, before other commands over the store are.
    ///
    /// # Errors
    /// [`Error::NotSubmitted`].
    pub fn check_encoded(&self, what: &'static str) -> Result<()> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |known: &Encoder| Some(known.counts.upgrade()?.not_encoded.load(Ordering::Acquire));
        match known.iter().filter_map(of).sum() {
            0 => Ok(()),
            steps => Err(Error::NotSubmitted { what, steps }),
        }
    }
}
