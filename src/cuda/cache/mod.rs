//! What a cache keeps on the device: pages and ranges in stores, the formats of pages, token numbers, bytes on their way
//! to the host.

pub(super) mod indices;
pub(super) mod page_format;
pub(super) mod span_bytes;
pub(super) mod store;
