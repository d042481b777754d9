//! Stores: the pages of one format on a device.

use std::future::Future;

use super::Device;
use crate::format::{AttentionShape, SegmentFormat};
use crate::plan::Page;
use crate::{Error, Result};

/// What of a store a span or a sequence has: each part may be left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanPlace<'a> {
    /// Pages.
    pub pages: &'a [Page],
    /// Slot of span ranges.
    pub range_slot: Option<usize>,
    /// Slot of the centre of a sequence's keys.
    pub centre: Option<usize>,
}

/// What a [`SpanPlace`] holds, on the host, as its backend stores it: only a store of the same backend, shape and
/// format can hold it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanBytes(Vec<u8>);

impl SpanBytes {
    pub(crate) const fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Checks that they are as many as pages and ranges hold.
    pub(crate) fn check(&self, held: u64) -> Result<()> {
        if self.0.len() as u64 == held {
            return Ok(());
        }
        let reason = format!("{} bytes for pages and ranges of {held}; write them where they were read", self.0.len());
        Err(Error::Buffer { what: "a span", reason })
    }
}

/// A device that keeps pages of packed keys and values.
///
/// A method that returns an error has changed nothing that a later call could see.
pub trait Storage: Device {
    /// Pages and ranges of one segment format, in shards.
    type Store;

    /// An empty store: no shards, no range slots.
    ///
    /// # Errors
    /// When the format does not fit the shape or the device.
    fn create_store(&self, shape: AttentionShape, format: SegmentFormat) -> Result<Self::Store>;

    /// Most pages that one shard of such a store can hold on this device.
    fn max_shard_pages(&self, shape: &AttentionShape, format: &SegmentFormat) -> u32;

    /// Adds a shard of `pages` zeroed pages.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory); the store is as it was.
    fn add_shard(&self, store: &mut Self::Store, pages: u32) -> impl Future<Output = Result<()>>;

    /// Grows the span ranges to at least `slots` slots and keeps those there are.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory); the store is as it was.
    fn reserve_ranges(&self, store: &mut Self::Store, slots: usize) -> impl Future<Output = Result<()>>;

    /// Grows the centres of sequences' keys to at least `slots` slots, new ones zero, and keeps those there are. From
    /// then on the tokens of a step are stored less a centre each.
    ///
    /// # Errors
    /// [`Format`](crate::Error::Format) when the keys have a range for every channel, which centres do not help;
    /// [`OutOfMemory`](crate::Error::OutOfMemory) or [`Limit`](crate::Error::Limit). The store is as it was.
    fn reserve_centres(&self, store: &mut Self::Store, slots: usize) -> impl Future<Output = Result<()>>;

    /// What a place holds. It waits for the work that may write it.
    ///
    /// # Errors
    /// When a page or a slot does not exist; [`OutOfMemory`](crate::Error::OutOfMemory),
    /// [`DeviceLost`](crate::Error::DeviceLost).
    fn read_span(&self, store: &Self::Store, place: SpanPlace<'_>) -> impl Future<Output = Result<SpanBytes>>;

    /// Lets a place hold what another did, bit for bit, in the order of the work that is queued.
    ///
    /// # Errors
    /// When a page or a slot does not exist, or the bytes are not those of such a place.
    fn write_span(&self, store: &mut Self::Store, bytes: &SpanBytes, place: SpanPlace<'_>) -> Result<()>;

    /// Bytes that the store holds on the device: tiles, tile ranges, span ranges and centres.
    fn store_bytes(&self, store: &Self::Store) -> u64;
}
