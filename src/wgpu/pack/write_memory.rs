//! The device memory that steps need, once for all layers.

use std::sync::Arc;

use super::window_packing;
use crate::format::KeyOrValue;
use crate::plan::{WriteLayout, WriteTable};
use crate::wgpu::device::encoded::Encoders;
use crate::wgpu::device::guard::{self, Request};
use crate::wgpu::device::{KernelLimits, buffers};
use crate::{Error, Result};

/// The table of a step on the device, and scratch memory for windows that are rotated before their ranges are known.
/// One serves all layers of a model.
#[derive(Clone, Debug)]
pub struct WriteMemory {
    layout: Arc<WriteLayout>,
    device: wgpu::Device,
    table: wgpu::Buffer,
    /// Where the table of the first slot begins, in bytes.
    first: u64,
    /// Rotated rows of as many windows as a step may pack, `[window][token][kv_head][channel]`.
    rotated: Option<wgpu::Buffer>,
    /// Whose steps read the table.
    encoders: Encoders,
}

impl WriteMemory {
    /// Memory for the steps of a layout. Its table begins as that of a step that writes nothing.
    ///
    /// # Errors
    /// [`Error::Limit`] when a buffer is larger than the device binds; [`Error::OutOfMemory`] or [`Error::DeviceLost`].
    pub fn new(device: &wgpu::Device, layout: &Arc<WriteLayout>) -> Result<Self> {
        let bytes = table_bytes(layout);
        check_bytes(device, "the tables of steps in bytes", bytes)?;
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
        let table = buffers::create_now(device, "tables of steps", bytes, usage)?;
        let rotated = rotated_now(device, rotated_bytes(layout))?;
        let (layout, device, encoders) = (layout.clone(), device.clone(), Encoders::default());
        Ok(Self { layout, device, table, first: 0, rotated, encoders })
    }

    /// The same where tables lie in a buffer from byte `first` on, and other layouts use the same memory for rotated
    /// windows.
    pub(in crate::wgpu) fn within(
        (device, layout): (&wgpu::Device, &Arc<WriteLayout>),
        (table, first): (&wgpu::Buffer, u64),
        rotated: Option<&wgpu::Buffer>,
    ) -> Self {
        let (layout, device, encoders) = (layout.clone(), device.clone(), Encoders::default());
        Self { layout, device, table: table.clone(), first, rotated: rotated.cloned(), encoders }
    }

    /// Writes a table to the device, before the next submission: once per step, whatever the number of layers, and
    /// before the step is encoded. It replaces the table of the step before.
    ///
    /// # Errors
    /// [`Error::Plan`] when the table belongs to another layout, [`Error::NotSubmitted`] when a step that reads the
    /// table before it is encoded and not submitted, [`Error::DeviceLost`].
    pub fn write(&self, queue: &wgpu::Queue, table: &WriteTable) -> Result<()> {
        table.check_layout(&self.layout)?;
        self.encoders.check_submitted(&self.device, "table of a step")?;
        guard::captured_now(&self.device, Request::call("table of a step"), || {
            queue.write_buffer(&self.table, self.first, bytemuck::cast_slice(table.words()));
        })
    }

    /// Notes that these steps read the table.
    pub(super) const fn encoders(&self) -> &Encoders {
        &self.encoders
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
        let size = std::num::NonZeroU64::new(table_bytes(&self.layout));
        wgpu::BufferBinding { buffer: &self.table, offset: self.first, size }
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

/// Bytes of the table of a step. A layout without stores has no sections, and a binding has at least one entry.
pub(in crate::wgpu) fn table_bytes(layout: &WriteLayout) -> u64 {
    (layout.words() as u64 * 4).max(16)
}

/// Memory for rotated windows, if there are any.
///
/// # Errors
/// As [`WriteMemory::new`].
pub(in crate::wgpu) fn rotated_now(device: &wgpu::Device, bytes: u64) -> Result<Option<wgpu::Buffer>> {
    check_bytes(device, "rotated windows in bytes", bytes)?;
    let create = || buffers::create_now(device, "rotated windows", bytes, wgpu::BufferUsages::STORAGE);
    (bytes > 0).then(create).transpose()
}

fn check_bytes(device: &wgpu::Device, what: &'static str, needed: u64) -> Result<()> {
    let allowed = KernelLimits::new(&device.limits()).binding_bytes;
    if needed <= allowed {
        return Ok(());
    }
    Err(Error::Limit { what: what.into(), needed, allowed, hint: "create a layout with fewer windows and tokens" })
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
