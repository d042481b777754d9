//! The tables of steps on the device: one buffer, with a slot for every step that is under way, and in a slot a region
//! for every part of the step.

use super::table_slots::TableSlots;
use crate::wgpu::attend::Sizing;
use crate::wgpu::device::encoded::Submissions;
use crate::wgpu::device::{KernelLimits, buffers};
use crate::{Error, Result};

/// The tables of the steps of an engine.
#[derive(Debug)]
pub(super) struct StepTables {
    slots: TableSlots,
    buffer: Option<wgpu::Buffer>,
    /// Bytes of a slot of the buffer, a multiple of `alignment`.
    slot_bytes: u64,
    /// What the offset of a binding is a multiple of.
    alignment: u64,
    /// The contents of the slot that is written.
    staged: Vec<u8>,
}

/// Where the regions of a step begin in its slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Regions {
    bytes: u64,
}

impl Regions {
    /// The first byte of the region of a part.
    pub(super) const fn first(self, part: usize) -> u64 {
        self.bytes * part as u64
    }
}

impl StepTables {
    pub(super) fn new(submissions: &Submissions) -> Self {
        let slots = TableSlots::new(submissions);
        Self { slots, buffer: None, slot_bytes: 0, alignment: 1, staged: Vec::new() }
    }

    pub(super) const fn slots(&self) -> &TableSlots {
        &self.slots
    }

    pub(super) const fn buffer(&self) -> Option<&wgpu::Buffer> {
        self.buffer.as_ref()
    }

    /// A slot that no command reads. Where steps that are under way read all of them, there are more slots than the
    /// buffer has room for.
    ///
    /// # Errors
    /// [`Error::Limit`] when there are as many as there may be.
    pub(super) fn free_slot(&mut self) -> Result<usize> {
        if let Some(slot) = self.slots.free() {
            return Ok(slot);
        }
        let first_new = self.slots.len();
        self.slots.grow()?;
        Ok(first_new)
    }

    /// Takes back slots that the buffer got no room for, so that the next step asks for less.
    pub(super) fn keep_slots(&mut self, slots: usize) {
        self.slots.truncate(slots);
    }

    /// Whether the buffer has room for steps of this number of parts, each with a region of this size.
    pub(super) fn have_room(&self, parts: usize, region_bytes: u64) -> bool {
        let slots = self.slots.len() as u64;
        let has_slots = self.buffer.as_ref().is_some_and(|buffer| buffer.size() >= slots * self.slot_bytes);
        has_slots && self.regions(parts).bytes >= region_bytes
    }

    /// Another buffer that has the room.
    ///
    /// # Errors
    /// [`Error::Limit`] when it is larger than the device binds; [`Error::OutOfMemory`] or [`Error::DeviceLost`].
    pub(super) fn make_room(
        &mut self,
        device: &wgpu::Device,
        limits: &KernelLimits,
        parts: usize,
        region_bytes: u64,
    ) -> Result<()> {
        let alignment = limits.binding_alignment;
        let regions = region_bytes.next_multiple_of(alignment).saturating_mul(parts as u64);
        let slot_bytes = Sizing::Classes { parts: 1 }.bytes(regions).next_multiple_of(alignment).max(self.slot_bytes);
        let needed = slot_bytes.saturating_mul(self.slots.len() as u64);
        if needed > limits.binding_bytes {
            let hint = "attend to fewer sequences per step, or submit steps and poll the device before you encode more";
            let what = "tables of steps in bytes".into();
            return Err(Error::Limit { what, needed, allowed: limits.binding_bytes, hint });
        }
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
        self.buffer = None; // so that both need not fit
        self.buffer = Some(buffers::create_now(device, "tables of steps", needed, usage)?);
        (self.slot_bytes, self.alignment) = (slot_bytes, alignment);
        Ok(())
    }

    /// The regions of a step of this number of parts: all of a slot, evenly.
    pub(super) fn regions(&self, parts: usize) -> Regions {
        let even = self.slot_bytes / parts.max(1) as u64;
        Regions { bytes: even / self.alignment * self.alignment }
    }

    /// Where a slot begins, in bytes: the buffer is smaller than 4 GiB.
    pub(super) const fn slot_offset(&self, slot: usize) -> u32 {
        (self.slot_bytes * slot as u64) as u32
    }

    /// Writes the tables of a step to its slot at once, each at its place there.
    pub(super) fn upload<'a>(
        &mut self,
        queue: &wgpu::Queue,
        slot: usize,
        tables: impl Iterator<Item = (u64, &'a [u8])>,
    ) {
        let mut end = 0;
        for (first, bytes) in tables {
            let first = first as usize;
            end = end.max(first + bytes.len());
            if self.staged.len() < end {
                self.staged.resize(end, 0);
            }
            self.staged[first..first + bytes.len()].copy_from_slice(bytes);
        }
        if let Some(buffer) = &self.buffer {
            queue.write_buffer(buffer, u64::from(self.slot_offset(slot)), &self.staged[..end]);
        }
    }
}
