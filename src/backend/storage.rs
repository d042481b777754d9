//! Stores: the pages of one format on a device.

use std::future::Future;

use super::Device;
use crate::Result;
use crate::format::{AttentionShape, SegmentFormat};

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

    /// Grows the centres of sequences' keys to at least `slots` slots, new ones zero, and keeps those there are. From then on the
    /// tokens of a step are stored less a centre each.
    ///
    /// # Errors
    /// [`Format`](crate::Error::Format) when the keys have a range for every channel, which centres do not help;
    /// [`OutOfMemory`](crate::Error::OutOfMemory) or [`Limit`](crate::Error::Limit). The store is as it was.
    fn reserve_centres(&self, store: &mut Self::Store, slots: usize) -> impl Future<Output = Result<()>>;

    /// Bytes that the store holds on the device: tiles, tile ranges, span ranges and centres.
    fn store_bytes(&self, store: &Self::Store) -> u64;
}
