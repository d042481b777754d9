//! Saves a span as bytes and restores it: its pages as stored, then the span ranges, then the centre of the sequence.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::memory::Memory;
use super::store::Store;
use crate::Result;
use crate::backend::{SpanBytes, SpanPlace};
use crate::format::{KeyOrValue, SegmentFormat};

/// A contiguous range of bytes of a store.
struct Place<'a> {
    memory: &'a Arc<Memory>,
    offset: usize,
    bytes: usize,
}

impl Store {
    /// Reads the bytes of a place, after all work queued on the stream.
    pub(crate) fn read_span(&self, stream: &Arc<CudaStream>, place: SpanPlace<'_>) -> Result<SpanBytes> {
        let mut bytes = Vec::new();
        for Place { memory, offset, bytes: count } in self.places(place)? {
            bytes.extend(memory.download_part(stream, "a span", offset, count)?);
        }
        Ok(SpanBytes::new(bytes))
    }

    /// Queues a write of the bytes of another place to this one.
    pub(crate) fn write_span(
        &mut self,
        stream: &Arc<CudaStream>,
        bytes: &SpanBytes,
        place: SpanPlace<'_>,
    ) -> Result<()> {
        let places = self.places(place)?;
        bytes.check(places.iter().map(|place| place.bytes as u64).sum())?;
        let mut rest = bytes.bytes();
        for place in places {
            let (of_place, left) = rest.split_at(place.bytes);
            place.memory.write(stream, "a span", place.offset, of_place)?;
            rest = left;
        }
        Ok(())
    }

    /// The byte ranges of the pages, adjacent pages joined, of the ranges of the slot, and of the centre.
    fn places(&self, SpanPlace { pages, range_slot, centre }: SpanPlace<'_>) -> Result<Vec<Place<'_>>> {
        self.check_centre("span", centre)?;
        let mut places: Vec<Place<'_>> = Vec::new();
        let runs = pages.chunk_by(|a, b| a.shard == b.shard && a.index.checked_add(1) == Some(b.index));
        for run in runs {
            run.iter().try_for_each(|&page| self.page_address("span", page).map(drop))?;
            let (memory, first) = (self.shard_memory(run[0].shard)?, run[0].index as usize);
            places.push(Place { memory, offset: first * self.page_bytes(), bytes: run.len() * self.page_bytes() });
        }
        if let Some(slot) = range_slot {
            self.check_slot("span", slot)?;
            let ranges = [KeyOrValue::Key, KeyOrValue::Value].into_iter().filter_map(|which| self.ranges(which));
            let bytes = self.slot_bytes();
            places.extend(ranges.map(|memory| Place { memory, offset: slot * bytes, bytes }));
        }
        if let Some((slot, memory)) = centre.zip(self.centres()) {
            let bytes = SegmentFormat::centre_bytes(self.shape());
            places.push(Place { memory, offset: slot * bytes, bytes });
        }
        Ok(places)
    }
}
