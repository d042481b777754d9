//! Numbered slots of a store, on the host alone.

/// Slots, each of which several spans or sequences may hold.
#[derive(Clone, Debug, Default)]
pub(super) struct Slots {
    /// How many hold each slot.
    holders: Vec<u32>,
    /// Free slots, highest first.
    free: Vec<usize>,
}

impl Slots {
    /// Sees to it that there are at least so many slots.
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

    /// Takes the lowest that is free, if one is.
    pub(super) fn take(&mut self) -> Option<usize> {
        let slot = self.free.pop()?;
        self.holders[slot] = 1;
        Some(slot)
    }

    /// Lets one more hold a slot.
    pub(super) fn share(&mut self, slot: usize) {
        self.holders[slot] += 1;
    }

    /// Lets one fewer hold a slot, which is free when nobody does.
    pub(super) fn release(&mut self, slot: usize) {
        self.holders[slot] -= 1;
        if self.holders[slot] == 0 {
            let at = self.free.partition_point(|&free| free > slot);
            self.free.insert(at, slot);
        }
    }
}
