//! The foundation of every kernel: the driver, memory and the formats of pages in it, and kernels from source to
//! function.

pub(super) mod driver;
pub(super) mod indices;
pub(super) mod kernels;
pub(super) mod launch;
pub(super) mod libraries;
pub(super) mod memory;
pub(super) mod page_format;
pub(super) mod pinned;
pub(super) mod program;
mod sources;
pub(super) mod span_bytes;
pub(super) mod store;
pub(super) mod tensor;
