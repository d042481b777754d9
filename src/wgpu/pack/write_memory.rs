//! The device memory that steps need, once for all layers.

use std::sync::Arc;

use super::window_packing;
use crate::format::KeyOrValue;
use crate::plan::{WriteLayout, WriteTable};
use crate::wgpu::device::{KernelLimits, buffers};
use crate::{Error, Result};

/// The table of a step on the device, and scratch memory for windows that are rotated before their ranges are known.
/// One serves all layers of a model.
#[derive(Clone, Debug)]
pub struct WriteMemory {
    layout: Arc<WriteLayout>,
    /// Tables of several steps, each at the beginning of a slot.
    table: wgpu::Buffer,
    /// Bytes of a slot.
    slot_bytes: u64,
    /// Rotated rows of as many windows as a step may pack, `[window][token][kv_head][channel]`.
    rotated: Option<wgpu::Buffer>,
}

impl WriteMemory {
    /// Memory for the steps of a layout. Its table begins as that of a step that writes nothing.
    ///
    /// # Errors
    /// [`Error::Limit`] when a buffer is larger than the device binds; [`Error::OutOfMemory`] or [`Error::DeviceLost`].
    pub fn new(device: &wgpu::Device, layout: &Arc<WriteLayout>) -> Result<Self> {
        Self::with_slots(device, layout, 1)
    }

    /// The same with room for the tables of `slots` steps, one after the other.
    pub(in crate::wgpu) fn with_slots(device: &wgpu::Device, layout: &Arc<WriteLayout>, slots: usize) -> Result<Self> {
        let limits = KernelLimits::new(&device.limits());
        let allowed = limits.binding_bytes;
        let rotated = rotated_bytes(layout);
        // A layout without stores has no sections, and a buffer has at least one entry.
        let slot_bytes = (layout.words() as u64 * 4).max(16).next_multiple_of(limits.binding_alignment);
        let table = slot_bytes.saturating_mul(slots as u64);
        for (what, needed) in [("the tables of steps in bytes", table), ("rotated windows in bytes", rotated)] {
            if needed > allowed {
                let hint = "create a layout with fewer windows and tokens";
                return Err(Error::Limit { what: what.into(), needed, allowed, hint });
            }
        }
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
        let table = buffers::create_now(device, "tables of steps", table, usage)?;
        let create = || buffers::create_now(device, "rotated windows", rotated, wgpu::BufferUsages::STORAGE);
        let rotated = if rotated > 0 { Some(create()?) } else { None };
        Ok(Self { layout: layout.clone(), table, slot_bytes, rotated })
    }

    /// Writes a table to the device, before the next submission: once per step, whatever the number of layers. It
    /// replaces the table of the step before, whose commands must have been submitted by then.
    ///
    /// # Errors
    /// [`Error::Plan`] when the table belongs to another layout.
    pub fn write(&self, queue: &wgpu::Queue, table: &WriteTable) -> Result<()> {
        self.write_slot(queue, table, 0)
    }

    /// The same for one of several slots.
    pub(in crate::wgpu) fn write_slot(&self, queue: &wgpu::Queue, table: &WriteTable, slot: usize) -> Result<()> {
        table.check_layout(&self.layout)?;
        queue.write_buffer(&self.table, u64::from(self.slot_offset(slot)), bytemuck::cast_slice(table.words()));
        Ok(())
    }

    /// Where the table of a slot begins, in bytes: a binding is smaller than 4 GiB.
    pub(in crate::wgpu) const fn slot_offset(&self, slot: usize) -> u32 {
        (self.slot_bytes * slot as u64) as u32
    }

    /// The layout.
    pub const fn layout(&self) -> &Arc<WriteLayout> {
        &self.layout
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        self.table.size() + self.rotated.as_ref().map_or(0, wgpu::Buffer::size)
    }

    /// The table of the first slot.
    pub(super) fn table(&self) -> wgpu::BufferBinding<'_> {
        wgpu::BufferBinding { buffer: &self.table, offset: 0, size: std::num::NonZeroU64::new(self.slot_bytes) }
    }

    pub(super) fn rotated(&self) -> Result<wgpu::BufferBinding<'_>> {
        let missing = || Error::Plan { what: "step", reason: "its layout rotates no windows".into() };
        self.rotated.as_ref().map(wgpu::Buffer::as_entire_buffer_binding).ok_or_else(missing)
    }

    pub(super) fn check_layout(&self, layout: &WriteLayout) -> Result<()> {
        if *self.layout == *layout {
            return Ok(());
        }
        Err(Error::Plan { what: "step", reason: "its memory was made for another layout".into() })
    }
}

/// Bytes of the rotated rows of as many windows as a step may pack.
pub(crate) fn rotated_bytes(layout: &WriteLayout) -> u64 {
    let of_pair = |pair: &crate::plan::WindowCapacity| {
        let format = &layout.stores()[pair.to].format;
        let of = |which| window_packing::scratch_bytes(layout.shape(), format.tensor(which));
        pair.windows as u64 * of(KeyOrValue::Key).max(of(KeyOrValue::Value))
    };
    layout.windows().iter().map(of_pair).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AffineFormat, AttentionShape, Bits, Grouping, Rotation, SegmentFormat, TensorFormat};
    use crate::plan::{StoreCapacity, WindowCapacity};

    /// Whichever of keys and values is rotated first, and as many windows as a step may pack.
    #[test]
    fn rotated_rows_have_room() {
        let shape = AttentionShape::new(2, 2, 64).unwrap();
        let plain = TensorFormat::Affine(AffineFormat::new(Bits::Four, Grouping::Channel));
        let rotated =
            TensorFormat::Affine(AffineFormat::new(Bits::Four, Grouping::Channel).rotated(Rotation::hadamard(16)));
        let bytes = |key, value| {
            let store = |format| StoreCapacity {
                format,
                shard_pages: vec![2],
                range_slots: 2,
                tokens: 0,
                copies: 0,
                centres: 0,
                centre_slots: 0,
            };
            let stores = vec![store(SegmentFormat::F16), store(SegmentFormat { key, value })];
            let windows = vec![WindowCapacity { from: 0, to: 1, windows: 3, newer: 0 }];
            rotated_bytes(&WriteLayout::new(shape, 0, stores, windows).unwrap())
        };
        assert_eq!(bytes(plain, plain), 0);
        assert_eq!([bytes(rotated, plain), bytes(plain, rotated)], [3 * 128 * 2 * 64 * 4; 2]);
    }
}
