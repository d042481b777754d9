//! Saves a span as bytes and restores it: its pages as stored, then the span ranges, then the centre of the sequence.

use std::sync::Arc;

use cudarc::driver::result::memcpy_dtoh_async;
use cudarc::driver::{CudaEvent, CudaStream, DriverError, PinnedHostSlice};

use super::store::Store;
use crate::Result;
use crate::backend::{SpanBytes, SpanPlace};
use crate::cuda::device::driver::{driver_error, wait_for_event, wait_for_stream};
use crate::cuda::device::memory::Memory;
use crate::format::{KeyOrValue, SegmentFormat};

/// A contiguous range of bytes of a store.
struct Place<'a> {
    memory: &'a Arc<Memory>,
    offset: usize,
    bytes: usize,
}

/// Contents of places on their way to pinned memory of the host.
#[derive(Debug)]
pub struct SpanReads {
    host: PinnedHostSlice<u8>,
    /// Recorded after the copies.
    copied: CudaEvent,
    /// Bytes of every place.
    lengths: Vec<usize>,
    /// What is copied from. It lives as long as a copy may read it.
    memory: Vec<Arc<Memory>>,
}

impl SpanReads {
    /// Queues the copies.
    pub(in crate::cuda) fn begin(stream: &Arc<CudaStream>, places: &[(&Store, SpanPlace<'_>)]) -> Result<Self> {
        let of_spans = places.iter().map(|(store, place)| store.places(*place)).collect::<Result<Vec<_>>>()?;
        Self::begin_places(stream, &of_spans)
    }

    /// Queues copies of whole memories, each of some bytes.
    pub(in crate::cuda) fn begin_memories(
        stream: &Arc<CudaStream>,
        memories: &[(&Arc<Memory>, usize)],
    ) -> Result<Self> {
        let place = |&(memory, bytes): &(_, usize)| vec![Place { memory, offset: 0, bytes }];
        Self::begin_places(stream, &memories.iter().map(place).collect::<Vec<_>>())
    }

    fn begin_places(stream: &Arc<CudaStream>, of_spans: &[Vec<Place<'_>>]) -> Result<Self> {
        let lengths: Vec<usize> = of_spans.iter().map(|of| of.iter().map(|place| place.bytes).sum()).collect();
        let bytes: usize = lengths.iter().sum();
        let failed = |error| driver_error("pages that are read", bytes as u64, error);
        // SAFETY: Every byte is copied into before it is read.
        let host = unsafe { stream.context().alloc_pinned::<u8>(bytes.max(1)) }.map_err(failed)?;
        let copied = stream.context().new_event(None).map_err(failed)?;
        let memory = of_spans.iter().flatten().map(|place| place.memory.clone()).collect();
        let mut reads = Self { host, copied, lengths, memory };
        stream.context().bind_to_thread().map_err(failed)?;
        let queued = reads.queue(stream, of_spans.iter().flatten());
        let recorded = reads.copied.record(stream);
        if let Err(error) = queued.and(recorded) {
            // The host's bytes are freed only when no copy into them is running.
            wait_for_stream(stream).unwrap_or(());
            return Err(failed(error));
        }
        Ok(reads)
    }

    fn queue<'a>(
        &mut self,
        stream: &Arc<CudaStream>,
        places: impl Iterator<Item = &'a Place<'a>>,
    ) -> std::result::Result<(), DriverError> {
        let mut rest = self.host.as_mut_slice()?;
        for place in places {
            let (to, others) = rest.split_at_mut(place.bytes);
            rest = others;
            // SAFETY: `Store::places`, and who names whole memories, saw to it that the bytes lie within the memory,
            // which these reads hold. The host's
            // bytes are read or freed only after the event that follows the copies.
            unsafe { memcpy_dtoh_async(to, place.memory.address() + place.offset as u64, stream.cu_stream()) }?;
        }
        Ok(())
    }

    pub(in crate::cuda) fn have_arrived(&self) -> Result<bool> {
        self.copied.try_is_complete().map_err(|error| driver_error("pages that are read", 0, error))
    }

    /// Waits for the copies.
    pub(in crate::cuda) fn finish(self) -> Result<Vec<SpanBytes>> {
        let failed = |error| driver_error("pages that are read", 0, error);
        self.copied.synchronize().map_err(failed)?;
        let mut rest = self.host.as_slice().map_err(failed)?;
        let of_span = |&length: &usize| {
            let (of_span, others) = rest.split_at(length);
            rest = others;
            SpanBytes::new(of_span.to_vec())
        };
        Ok(self.lengths.iter().map(of_span).collect())
    }
}

impl Drop for SpanReads {
    fn drop(&mut self) {
        // What copies write must stay until they are done. A device that fails here has already failed elsewhere.
        wait_for_event(&self.copied).unwrap_or(());
        self.memory.clear();
    }
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
