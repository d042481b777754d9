//! Copies a page of a store: its tiles and its tile ranges, bit for bit.

use crate::Result;
use crate::plan::Page;
use crate::wgpu::device::buffers;
use crate::wgpu::device::guard;
use crate::wgpu::device::store::{Store, StorePart};

impl Store {
    /// Submits the copy of a page to another.
    ///
    /// A buffer cannot be copied to itself, so each part of the page passes through one of its own.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when there is no such page, [`Error::OutOfMemory`](crate::Error::OutOfMemory)
    /// when there is no room for a page to pass through.
    pub(crate) fn copy_page(&self, device: &wgpu::Device, queue: &wgpu::Queue, from: Page, to: Page) -> Result<()> {
        self.check_pages("copy of a page", [&from, &to])?;
        let usage = wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let mut copies = Vec::new();
        for part in [StorePart::Keys, StorePart::KeyRanges, StorePart::Values, StorePart::ValueRanges] {
            let bytes = self.page_part_bytes(part);
            if bytes > 0 {
                let between = buffers::create_now(device, "page on its way", bytes, usage)?;
                let buffers = (self.shard_buffer(from.shard, part)?, self.shard_buffer(to.shard, part)?);
                copies.push((bytes, buffers, between));
            }
        }
        guard::submit(device, queue, "kvpack copy of a page", |encoder| {
            for (bytes, (source, target), between) in &copies {
                encoder.copy_buffer_to_buffer(source, u64::from(from.index) * bytes, between, 0, *bytes);
                encoder.copy_buffer_to_buffer(between, 0, target, u64::from(to.index) * bytes, *bytes);
            }
        })
        .map(drop)
    }
}
