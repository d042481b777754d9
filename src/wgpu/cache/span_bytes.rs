//! Saves a span as bytes and restores it: page by page the parts of the page, then the span ranges, then the centre of
//! the sequence.

use super::shard::StoreBuffer;
use super::store::Store;
use crate::Result;
use crate::backend::{SpanBytes, SpanPlace};
use crate::format::{KeyOrValue, SegmentFormat};
use crate::wgpu::device::buffers::{self, Download};
use crate::wgpu::device::guard::{self, Request};

const PARTS: [StoreBuffer; 4] =
    [StoreBuffer::Keys, StoreBuffer::KeyRanges, StoreBuffer::Values, StoreBuffer::ValueRanges];

/// Most bytes that are read in one submission: the staging buffer is as large.
const MOST_AT_ONCE: u64 = 256 << 20;

/// Reads the bytes of places once all submitted work is done: in one submission, unless they are very many.
///
/// # Errors
/// [`Error::Plan`](crate::Error::Plan) when a page or a slot does not exist,
/// [`Error::NotSubmitted`](crate::Error::NotSubmitted), [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::DeviceLost`](crate::Error::DeviceLost).
pub(in crate::wgpu) async fn read_all(
    device: &wgpu::Device,
    queue: &wgpu::Queue,
    places: &[(&Store, SpanPlace<'_>)],
) -> Result<Vec<SpanBytes>> {
    let (lengths, submissions) = places_of(device, places)?;
    let mut bytes = Vec::with_capacity(lengths.iter().sum());
    for together in submissions {
        bytes.extend(buffers::read_all(device, queue, &together).await?);
    }
    Ok(by_span(&lengths, &bytes))
}

/// Contents of places on their way to the host, in staging buffers of as many bytes.
#[derive(Debug)]
pub struct SpanReads {
    lengths: Vec<usize>,
    downloads: Vec<Download>,
}

impl SpanReads {
    /// Submits the copies, in one submission unless they are very many, and waits for nothing.
    pub(in crate::wgpu) fn begin(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        places: &[(&Store, SpanPlace<'_>)],
    ) -> Result<Self> {
        let (lengths, submissions) = places_of(device, places)?;
        let begin = |together: &Vec<_>| Download::begin(device, queue, together);
        Ok(Self { lengths, downloads: submissions.iter().map(begin).collect::<Result<_>>()? })
    }

    /// The same for whole buffers, each of some bytes, in one submission.
    pub(in crate::wgpu) fn begin_buffers(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        buffers: &[(&wgpu::Buffer, u64)],
    ) -> Result<Self> {
        let places: Vec<_> =
            buffers.iter().map(|&(buffer, bytes)| buffers::Place { buffer, offset: 0, bytes }).collect();
        let lengths = places.iter().map(|place| place.bytes as usize).collect();
        let download = if places.is_empty() { None } else { Some(Download::begin(device, queue, &places)?) };
        Ok(Self { lengths, downloads: download.into_iter().collect() })
    }

    pub(in crate::wgpu) fn have_arrived(&self, device: &wgpu::Device) -> Result<bool> {
        for download in &self.downloads {
            if !download.has_arrived(device)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(in crate::wgpu) async fn finish(self, device: &wgpu::Device) -> Result<Vec<SpanBytes>> {
        let mut bytes = Vec::with_capacity(self.lengths.iter().sum());
        for download in self.downloads {
            bytes.extend(download.finish(device).await?);
        }
        Ok(by_span(&self.lengths, &bytes))
    }
}

/// The bytes of every span, and where they lie in the stores, by submission. No submission is empty.
///
/// # Errors
/// As [`read_all`].
fn places_of<'a>(
    device: &wgpu::Device,
    places: &[(&'a Store, SpanPlace<'_>)],
) -> Result<(Vec<usize>, Vec<Vec<buffers::Place<'a>>>)> {
    places.iter().try_for_each(|(store, _)| store.encoders().check_submitted(device, "reading of pages"))?;
    let of_spans = places.iter().map(|(store, place)| store.places(*place)).collect::<Result<Vec<_>>>()?;
    let lengths = of_spans.iter().map(|of| of.iter().map(|place| place.bytes as usize).sum()).collect();
    let mut rest = of_spans.concat();
    let allowed = MOST_AT_ONCE.min(device.limits().max_buffer_size);
    let mut submissions = Vec::new();
    while !rest.is_empty() {
        let together = how_many(rest.iter().map(|place| place.bytes), allowed);
        submissions.push(rest.drain(..together).collect());
    }
    Ok((lengths, submissions))
}

fn by_span(lengths: &[usize], mut bytes: &[u8]) -> Vec<SpanBytes> {
    let of_span = |&length: &usize| {
        let (of_span, others) = bytes.split_at(length);
        bytes = others;
        SpanBytes::new(of_span.to_vec())
    };
    lengths.iter().map(of_span).collect()
}

/// How many of the first lengths together are no more than `allowed`. At least one: a part of a page is never larger
/// than a buffer may be.
fn how_many(lengths: impl Iterator<Item = u64>, allowed: u64) -> usize {
    let sums = lengths.scan(0u64, |sum, length| {
        *sum = sum.saturating_add(length);
        Some(*sum)
    });
    sums.take_while(|&sum| sum <= allowed).count().max(1)
}

impl Store {
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
        self.encoders().check_submitted(device, "writing of pages")?;
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

#[cfg(test)]
mod tests {
    use super::how_many;

    #[test]
    fn reads_are_cut_at_what_is_allowed() {
        let lengths = [5, 5, 0, 6, 20, 1];
        for (from, allowed, expected) in
            [(0, 10, 3), (0, 9, 1), (0, 16, 4), (3, 10, 1), (4, 10, 1), (5, 10, 1), (0, 99, 6)]
        {
            assert_eq!(how_many(lengths[from..].iter().copied(), allowed), expected, "from {from}, {allowed}");
        }
    }
}
