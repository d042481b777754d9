//! Saves a span as bytes and restores it: page by page the parts of the page, then the span ranges, then the centre of
//! the sequence.

use super::buffers;
use super::guard::{self, Request};
use super::store::{Store, StoreBuffer};
use crate::Result;
use crate::backend::{SpanBytes, SpanPlace};
use crate::format::{KeyOrValue, SegmentFormat};

const PARTS: [StoreBuffer; 4] =
    [StoreBuffer::Keys, StoreBuffer::KeyRanges, StoreBuffer::Values, StoreBuffer::ValueRanges];

impl Store {
    /// Reads the bytes of a place once all submitted work is done.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when a page or a slot does not exist,
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::DeviceLost`](crate::Error::DeviceLost).
    pub async fn read_span(
        &self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        place: SpanPlace<'_>,
    ) -> Result<SpanBytes> {
        let places = self.places(place)?;
        Ok(SpanBytes::new(buffers::read_all(device, queue, &places).await?))
    }

    /// Queues a write of the bytes of another place to this one, before the next submission.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when a page or a slot does not exist,
    /// [`Error::Buffer`](crate::Error::Buffer) when the bytes do not match the place.
    pub fn write_span(
        &mut self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        bytes: &SpanBytes,
        place: SpanPlace<'_>,
    ) -> Result<()> {
        let places = self.places(place)?;
        bytes.check(places.iter().map(|place| place.bytes).sum())?;
        guard::captured_now(device, Request::call("pages that are written back"), || {
            let mut rest = bytes.bytes();
            for place in places {
                let (of_place, left) = rest.split_at(place.bytes as usize);
                queue.write_buffer(place.buffer, place.offset, of_place);
                rest = left;
            }
        })
    }

    /// The buffer places of all parts of the pages, of the ranges of the slot, and of the centre.
    fn places(&self, SpanPlace { pages, range_slot, centre }: SpanPlace<'_>) -> Result<Vec<buffers::Place<'_>>> {
        self.check_pages("span", pages)?;
        self.check_centre("span", centre)?;
        let mut places = Vec::with_capacity(4 * pages.len() + 2);
        for page in pages {
            for part in PARTS {
                let bytes = self.page_part_bytes(part);
                if bytes > 0 {
                    let (buffer, offset) = (self.shard_buffer(page.shard, part)?, u64::from(page.index) * bytes);
                    places.push(buffers::Place { buffer, offset, bytes });
                }
            }
        }
        if let Some(slot) = range_slot {
            self.check_slot("span", slot)?;
            for which in [KeyOrValue::Key, KeyOrValue::Value] {
                if self.format().tensor(which).has_span_ranges() {
                    let (buffer, bytes) = (self.span_ranges_buffer(which)?, self.slot_bytes());
                    places.push(buffers::Place { buffer, offset: slot as u64 * bytes, bytes });
                }
            }
        }
        if let Some(slot) = centre {
            let (buffer, bytes) = (self.centres_buffer()?, SegmentFormat::centre_bytes(self.shape()) as u64);
            places.push(buffers::Place { buffer, offset: slot as u64 * bytes, bytes });
        }
        Ok(places)
    }
}
