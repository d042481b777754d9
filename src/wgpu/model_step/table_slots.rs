//! Slots of tables: a step that is written keeps its tables until the device has read them.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::wgpu::device::encoded::{EncodedStep, EncodedSteps, Submissions};
use crate::{Error, Result};

/// Slots before an engine has been seen to need more: one that the device reads, and one that is written meanwhile.
const FIRST_SLOTS: usize = 2;

/// Most steps that may be encoded while the device has finished none of them.
const MOST_SLOTS: usize = 256;

/// Which slots are read by commands that the device has not finished.
///
/// `Queue::write_buffer` takes effect before the next submission, so that a second write to one place would overtake
/// the commands that read the first. A slot is written again only once the commands that read it are finished, or were
/// dropped without a submission.
#[derive(Debug)]
pub(super) struct TableSlots {
    slots: Vec<Arc<Slot>>,
    steps: Arc<EncodedSteps>,
}

/// Commands that read a slot hold it.
#[derive(Debug, Default)]
struct Slot {
    /// The pass that held the slot last.
    newest_pass: AtomicU64,
    /// The step whose tables it has, as long as commands that read them are not submitted.
    step: Mutex<Weak<EncodedStep>>,
}

impl Slot {
    fn step(&self) -> Option<Arc<EncodedStep>> {
        self.step.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }
}

impl TableSlots {
    pub(super) fn new(submissions: &Submissions) -> Self {
        let slots = (0..FIRST_SLOTS).map(|_| Arc::default()).collect();
        Self { slots, steps: EncodedSteps::new(submissions) }
    }

    /// The steps that are not submitted.
    pub(super) const fn steps(&self) -> &Arc<EncodedSteps> {
        &self.steps
    }

    /// Whether commands that read a slot are not submitted.
    pub(super) fn is_encoded(&self, slot: usize) -> bool {
        self.slots[slot].step().is_some()
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// The first slot that no command reads.
    pub(super) fn free(&self) -> Option<usize> {
        self.slots.iter().position(|slot| Arc::strong_count(slot) == 1)
    }

    /// Twice the slots, for buffers that have room for them.
    ///
    /// # Errors
    /// [`Error::Limit`] when there are as many as there may be.
    pub(super) fn grow(&mut self) -> Result<()> {
        let needed = 2 * self.slots.len();
        if needed > MOST_SLOTS {
            return Err(Error::Limit {
                what: "steps that are encoded and not finished".into(),
                needed: self.slots.len() as u64 + 1,
                allowed: MOST_SLOTS as u64,
                hint: "submit them, and poll the device until it has finished some",
            });
        }
        self.slots.resize_with(needed, Arc::default);
        Ok(())
    }

    /// As many slots as there were before they grew.
    pub(super) fn truncate(&mut self, slots: usize) {
        self.slots.truncate(slots);
    }

    /// Keeps a slot from being written until the commands of a pass are finished or dropped.
    pub(super) fn hold(&self, slot: usize, pass: &wgpu::ComputePass<'_>) {
        let slot = &self.slots[slot];
        let mut hasher = DefaultHasher::new();
        pass.hash(&mut hasher);
        let pass_id = hasher.finish();
        if slot.newest_pass.swap(pass_id, Ordering::Relaxed) != pass_id {
            let held = slot.clone();
            pass.on_submitted_work_done(move || drop(held));
            let mut step = slot.step.lock().unwrap_or_else(PoisonError::into_inner);
            let encoded = step.upgrade().unwrap_or_else(|| self.steps.begin());
            *step = Arc::downgrade(&encoded);
            self.steps.hold(encoded, pass);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_in_use_are_left_alone() {
        let mut slots = TableSlots::new(&Submissions::default());
        let mut held = Vec::new();
        while slots.len() < MOST_SLOTS || slots.free().is_some() {
            match slots.free() {
                Some(slot) => {
                    assert_eq!(slot, held.len(), "the first free one is taken");
                    held.push(slots.slots[slot].clone());
                }
                None => slots.grow().unwrap(),
            }
        }
        assert!(matches!(slots.grow(), Err(Error::Limit { needed: 257, allowed: 256, .. })));
        held.remove(7);
        assert_eq!(slots.free(), Some(7));
    }
}
