//! What a cache keeps on the device: pages and ranges in stores, token numbers, bytes on their way to the host.

mod indices;
pub(super) mod span_bytes;
pub(super) mod store;

pub use indices::Indices;
pub use span_bytes::SpanReads;
pub use store::{Shard, Store, StoreBuffer, max_shard_pages};
