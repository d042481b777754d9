//! Numbered slots of a store, on the host alone.

/// Slots that several spans or sequences may hold.
#[derive(Clone, Debug, Default)]
pub(super) struct Slots {
    /// Number of holders of each slot.
    holders: Vec<u32>,
    /// Free slots, highest first.
    free: Vec<usize>,
}

impl Slots {
    /// Grows to at least `slots` slots.
    pub(super) fn grow(&mut self, slots: usize) {
        let held = self.holders.len();
        self.free.splice(0..0, (held..slots.max(held)).rev());
        self.holders.resize(slots.max(held), 0);
    }

    pub(super) fn len(&self) -> usize {
        self.holders.len()
    }

    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn in_use(&self) -> usize {
        self.holders.len() - self.free.len()
    }

    /// Takes the lowest free slot, if there is one.
    pub(super) fn take(&mut self) -> Option<usize> {
        let slot = self.free.pop()?;
        self.holders[slot] = 1;
        Some(slot)
    }

    /// Takes the highest free slot, if there is one.
    pub(super) fn take_last(&mut self) -> Option<usize> {
        let slot = (!self.free.is_empty()).then(|| self.free.remove(0))?;
        self.holders[slot] = 1;
        Some(slot)
    }

    /// Adds a holder to a slot.
    pub(super) fn share(&mut self, slot: usize) {
        self.holders[slot] += 1;
    }

    /// Removes a holder from a slot. It is free when nobody holds it.
    pub(super) fn release(&mut self, slot: usize) {
        self.holders[slot] -= 1;
        if self.holders[slot] == 0 {
            let at = self.free.partition_point(|&free| free > slot);
            self.free.insert(at, slot);
        }
    }
}
