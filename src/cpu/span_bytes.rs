//! Saves a span as bytes and restores it: page by page and head by head the codes and ranges of keys and of values,
//! then the span ranges, then the centre of the sequence.

use super::store::CpuStore;
use crate::Result;
use crate::backend::{SpanBytes, SpanPlace};
use crate::format::KeyOrValue;

const BOTH: [KeyOrValue; 2] = [KeyOrValue::Key, KeyOrValue::Value];

impl CpuStore {
    /// Reads the bytes of a place.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when a page or a slot does not exist.
    pub fn read_span(&self, place: SpanPlace<'_>) -> Result<SpanBytes> {
        let mut bytes = Vec::new();
        for &page in place.pages {
            for kv_head in 0..self.shape().kv_heads() {
                for which in BOTH {
                    let (codes, ranges) = self.tile_words(which, page, kv_head)?;
                    bytes.extend_from_slice(bytemuck::cast_slice(codes));
                    bytes.extend_from_slice(bytemuck::cast_slice(ranges));
                }
            }
        }
        if let Some(slot) = place.range_slot {
            for which in BOTH {
                bytes.extend_from_slice(bytemuck::cast_slice(self.span_ranges(which, slot)?));
            }
        }
        if let Some(slot) = place.centre {
            bytes.extend_from_slice(bytemuck::cast_slice(self.centre(slot)?));
        }
        Ok(SpanBytes::new(bytes))
    }

    /// Writes the bytes of another place to this one.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when a page or a slot does not exist,
    /// [`Error::Buffer`](crate::Error::Buffer) when the bytes do not match the place.
    pub fn write_span(&mut self, bytes: &SpanBytes, place: SpanPlace<'_>) -> Result<()> {
        let held = self.read_span(place)?;
        bytes.check(held.bytes().len() as u64)?;
        let mut rest = bytes.bytes();
        let mut take = |words: usize| {
            let (taken, left) = rest.split_at(words * 4);
            rest = left;
            bytemuck::pod_collect_to_vec::<u8, u32>(taken)
        };
        for &page in place.pages {
            for kv_head in 0..self.shape().kv_heads() {
                for which in BOTH {
                    let (codes, ranges) = self.tile_words(which, page, kv_head)?;
                    let (codes, ranges) = (take(codes.len()), take(ranges.len()));
                    self.write_tile(which, page, kv_head, &codes, &ranges)?;
                }
            }
        }
        if let Some(slot) = place.range_slot {
            for which in BOTH {
                let words = 2 * self.span_ranges(which, slot)?.len();
                self.write_span_ranges(which, slot, bytemuck::cast_slice(&take(words)))?;
            }
        }
        if let Some(slot) = place.centre {
            let centre = self.centre_mut(slot)?;
            centre.copy_from_slice(bytemuck::cast_slice(&take(centre.len())));
        }
        Ok(())
    }
}
