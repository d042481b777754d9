//! Calls whose commands an engine takes for its own pass.

use std::cell::RefCell;
use std::sync::Arc;

use super::Wgpu;
use crate::wgpu::device::encoded::{EncodedSteps, Encoders, RecordedStep};
use crate::wgpu::device::{Kernels, Launches, Store};
use crate::{Error, Result};

/// What calls would have submitted, in their order: see [`Wgpu::record`].
#[derive(Debug)]
#[must_use = "the dispatches run once they are encoded and submitted"]
pub struct Recorded {
    launches: Launches,
    /// Counts them as not submitted, for the stores that they read and write.
    step: RecordedStep,
    steps: Arc<EncodedSteps>,
}

impl Recorded {
    /// Encodes all dispatches into a pass. Does not submit, wait or allocate.
    pub fn encode(self, pass: &mut wgpu::ComputePass<'_>) {
        self.launches.encode(pass);
        self.steps.hold(self.step.encoded(), pass);
    }

    /// Number of dispatches.
    pub fn len(&self) -> usize {
        self.launches.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.launches.is_empty()
    }
}

/// The calls of a thread that are recorded.
struct Recording {
    /// Those of the backend that records, which its clones share.
    kernels: Arc<Kernels>,
    launches: Vec<Launches>,
    /// Of the stores that they read and write.
    encoders: Vec<Encoders>,
}

thread_local! {
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// Ends a recording, also where the calls panic.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        RECORDING.with_borrow_mut(|recording| *recording = None);
    }
}

impl Wgpu {
    /// Takes the commands that `calls` would submit through this backend or a clone of it, on this thread, so that an
    /// engine encodes them into its own pass: 0 submissions, 0 waits. They are calls that queue kernels and wait for
    /// nothing: [`ObservedParts::observe`](crate::cache::ObservedParts::observe),
    /// [`ModelCache::compress_parts`](crate::cache::ModelCache::compress_parts),
    /// [`ModelCache::pack_parts`](crate::cache::ModelCache::pack_parts), and those of
    /// [`TokenSelection`](crate::backend::TokenSelection) that neither upload nor download.
    ///
    /// Encode what was recorded behind the commands whose results it reads, before the next step of the cache is
    /// [written](crate::wgpu::ModelStep::write), and submit passes in the order in which they were encoded. What it was
    /// recorded for has happened for the library as soon as it is recorded: whoever drops it loses the contents of
    /// pages. Until it is submitted, calls that submit commands over the same pages return [`Error::NotSubmitted`].
    ///
    /// Record every call that changes a cache by itself. An error of a later call in the same closure would drop what an
    /// earlier one recorded.
    ///
    /// ```no_run
    /// # use kvpack::cache::{ModelCache, ObservedParts};
    /// # use kvpack::wgpu::Wgpu;
    /// # fn example(
    /// #     backend: &Wgpu, cache: &mut ModelCache<Wgpu>, prompt: &mut ObservedParts<Wgpu>, pass: &mut wgpu::ComputePass<'_>,
    /// # ) -> kvpack::Result<()> {
    /// // The last part of a prompt is encoded into the pass, and its step is committed.
    /// let packing = backend.record(|| cache.compress_parts(prompt))?;
    /// packing.encode(pass);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of the calls, and [`Error::Plan`] for a call that waits, or submits more than dispatches, and within another
    /// recording. Then nothing is to be encoded.
    pub fn record(&self, calls: impl FnOnce() -> Result<()>) -> Result<Recorded> {
        let recording = Recording { kernels: self.kernels.clone(), launches: Vec::new(), encoders: Vec::new() };
        let nested = RECORDING.with_borrow_mut(|current| match current {
            Some(_) => true,
            None => {
                *current = Some(recording);
                false
            }
        });
        if nested {
            let reason = "a recording is within another one; end that first".into();
            return Err(Error::Plan { what: "recording", reason });
        }
        let end = End;
        calls()?;
        let recorded = RECORDING.with_borrow_mut(Option::take);
        drop(end);
        let steps = EncodedSteps::new(self.kernels.submissions());
        let (launches, encoders) = recorded.map(|of| (of.launches, of.encoders)).unwrap_or_default();
        encoders.iter().for_each(|encoders| encoders.add(&steps));
        Ok(Recorded { launches: launches.into_iter().flatten().collect(), step: steps.record(), steps })
    }

    /// Whether the calls of this thread through this backend are recorded.
    fn is_recording(&self) -> bool {
        RECORDING.with_borrow(|current| current.as_ref().is_some_and(|of| Arc::ptr_eq(&of.kernels, &self.kernels)))
    }

    /// Records dispatches if calls are recorded, and says whether it did.
    pub(super) fn recorded(&self, launches: &Launches) -> bool {
        self.is_recording()
            && RECORDING.with_borrow_mut(|current| match current {
                Some(recording) => {
                    recording.launches.push(launches.clone());
                    true
                }
                None => false,
            })
    }

    /// Notes which stores recorded dispatches read and write, if calls are recorded, and says whether it did.
    pub(super) fn records_over(&self, stores: &[&Store]) -> bool {
        self.is_recording()
            && RECORDING.with_borrow_mut(|current| match current {
                Some(recording) => {
                    recording.encoders.extend(stores.iter().map(|store| store.encoders().clone()));
                    true
                }
                None => false,
            })
    }

    /// Checks that nothing is recorded, for a call that waits or submits more than dispatches.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub(super) fn check_not_recording(&self, what: &'static str) -> Result<()> {
        if !self.is_recording() {
            return Ok(());
        }
        let reason =
            "it cannot be recorded; call it before Wgpu::record, or after what was recorded is submitted".into();
        Err(Error::Plan { what, reason })
    }
}
