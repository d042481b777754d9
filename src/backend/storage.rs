//! Stores: the pages of one format on a device.

use std::future::Future;

use super::Device;
use crate::format::{AttentionShape, SegmentFormat};
use crate::plan::Page;
use crate::{Error, Result};

/// The parts of a store that belong to a span or a sequence. Each may be left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanPlace<'a> {
    /// Pages.
    pub pages: &'a [Page],
    /// Slot of span ranges.
    pub range_slot: Option<usize>,
    /// Slot of the centre of a sequence's keys.
    pub centre: Option<usize>,
}

/// The contents of a [`SpanPlace`] on the host, as its backend stores them. Only a store of the same backend, shape and
/// format can take them back.
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

    /// Checks that the number of bytes matches the pages and ranges.
    pub(crate) fn check(&self, held: u64) -> Result<()> {
        if self.0.len() as u64 == held {
            return Ok(());
        }
        let reason =
            format!("{} bytes for pages and ranges of {held}; the place must have the same size", self.0.len());
        Err(Error::Buffer { what: "a span", reason })
    }
}

/// A device that keeps pages of packed keys and values.
///
/// A method that returns an error has changed nothing that a later call can observe.
pub trait Storage: Device {
    /// Pages and quantisation ranges of one segment format, in shards.
    type Store;

    /// A shard that is to take the place of a store's newest one.
    type Shard;

    /// Contents of places on their way to the host. Where it is dropped, nothing arrives, and nothing has changed.
    type SpanReads;

    /// An empty store: no shards, no range slots.
    ///
    /// # Errors
    /// [`Format`](crate::Error::Format) when the format does not fit the shape, [`Limit`](crate::Error::Limit) when the
    /// device cannot hold one page, [`Unsupported`](crate::Error::Unsupported) when it has no kernel for the format.
    fn create_store(&self, shape: AttentionShape, format: SegmentFormat) -> Result<Self::Store>;

    /// Largest number of pages in one shard of such a store on this device.
    fn max_shard_pages(&self, shape: &AttentionShape, format: &SegmentFormat) -> u32;

    /// Adds a shard of `pages` zeroed pages.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory); the store is unchanged.
    fn add_shard(&self, store: &mut Self::Store, pages: u32) -> impl Future<Output = Result<()>>;

    /// Checks that an engine has submitted all that it encoded over stores, before the library reads what that
    /// stored or chose. A backend whose stream keeps the order has nothing to check.
    ///
    /// # Errors
    /// [`NotSubmitted`](crate::Error::NotSubmitted), which names the call by `what`.
    fn check_submitted(&self, what: &'static str, stores: &[&Self::Store]) -> Result<()>;

    /// Number of shards that a step reads at once. A store that has this many grows by a larger shard in place of
    /// its newest one.
    fn shards_at_once(&self) -> usize;

    /// A shard of `pages` pages for the place of the newest shard. It begins with that shard's pages, and the others
    /// are zeroed. The store is not changed.
    ///
    /// # Errors
    /// [`Plan`](crate::Error::Plan) when the store has no shard or its newest shard has as many pages,
    /// [`Limit`](crate::Error::Limit) when a shard cannot have as many, [`NotSubmitted`](crate::Error::NotSubmitted),
    /// [`Unsupported`](crate::Error::Unsupported) in a browser, [`OutOfMemory`](crate::Error::OutOfMemory).
    fn larger_shard(&self, store: &Self::Store, pages: u32) -> impl Future<Output = Result<Self::Shard>>;

    /// Puts such a shard in the place of the newest one. What was written to the store in between is lost.
    ///
    /// # Errors
    /// [`Plan`](crate::Error::Plan) when the shard was made for a store of another shape or format, or has fewer pages
    /// than the newest one.
    fn replace_shard(&self, store: &mut Self::Store, shard: Self::Shard) -> Result<()>;

    /// Drops the newest shard; its pages hold nothing any more. Does nothing to a store without shards.
    fn drop_shard(&self, store: &mut Self::Store);

    /// Bytes that the device could still give to stores, as far as that can be known before it is asked for them.
    fn available_bytes(&self) -> Option<u64>;

    /// Grows the span ranges to at least `slots` slots. Existing slots keep their contents.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory); the store is unchanged.
    fn reserve_ranges(&self, store: &mut Self::Store, slots: usize) -> impl Future<Output = Result<()>>;

    /// Grows the centres of the sequences' keys to at least `slots` slots. Existing slots keep their contents, and new
    /// ones are zeroed. From then on steps store centred keys.
    ///
    /// # Errors
    /// [`Format`](crate::Error::Format) when the keys have a range for every channel, where centres do not help;
    /// [`OutOfMemory`](crate::Error::OutOfMemory) or [`Limit`](crate::Error::Limit). The store is unchanged.
    fn reserve_centres(&self, store: &mut Self::Store, slots: usize) -> impl Future<Output = Result<()>>;

    /// Reads the contents of places, in their order, together where the device can. Waits for the work that may write
    /// them.
    ///
    /// # Errors
    /// When a page or a slot does not exist; [`OutOfMemory`](crate::Error::OutOfMemory),
    /// [`DeviceLost`](crate::Error::DeviceLost).
    fn read_spans(&self, places: &[(&Self::Store, SpanPlace<'_>)]) -> impl Future<Output = Result<Vec<SpanBytes>>>;

    /// Begins to read the contents of places: queues copies behind all submitted work, and waits for nothing. Later
    /// work does not change what is read.
    ///
    /// # Errors
    /// As [`Storage::read_spans`].
    fn begin_reads(&self, places: &[(&Self::Store, SpanPlace<'_>)]) -> Result<Self::SpanReads>;

    /// Whether the contents are on the host. Waits for nothing.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::Error::DeviceLost).
    fn have_arrived(&self, reads: &Self::SpanReads) -> Result<bool>;

    /// The contents, in the order of their places. Waits until they are on the host.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::Error::DeviceLost).
    fn finish_reads(&self, reads: Self::SpanReads) -> impl Future<Output = Result<Vec<SpanBytes>>>;

    /// Writes the contents of another place to this one, bit for bit, in the order of the queued work.
    ///
    /// # Errors
    /// When a page or a slot does not exist, or the bytes do not match the place.
    fn write_span(&self, store: &mut Self::Store, bytes: &SpanBytes, place: SpanPlace<'_>) -> Result<()>;

    /// The name of the layout of [`SpanBytes`], the same on all devices of one kind of backend. Bytes of one layout are
    /// those of no other.
    fn span_layout(&self) -> &'static str;

    /// Bytes that the store holds on the device: tiles, tile ranges, span ranges and centres.
    fn store_bytes(&self, store: &Self::Store) -> u64;
}
