//! What a cache keeps on the device: pages and ranges in stores, token numbers, bytes on their way to the host.

mod indices;
mod shard;
pub(super) mod span_bytes;
mod store;

pub use indices::Indices;
pub use shard::{Shard, StoreBuffer, max_shard_pages};
pub use span_bytes::SpanReads;
pub use store::Store;
