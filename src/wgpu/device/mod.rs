//! The foundation of every kernel: adapters and their capabilities, memory, and kernels from source to launch.

pub(super) mod adapters;
mod assembly;
mod beside;
pub(super) mod buffers;
pub(super) mod capabilities;
mod counted;
mod deferred;
pub(super) mod encoded;
pub(super) mod guard;
mod indices;
pub(super) mod kernels;
pub(super) mod launch;
pub mod shader;
mod sources;
pub(super) mod span_bytes;
pub(super) mod store;
mod tensor;
mod unroll;

pub use adapters::{adapters, choose_adapter, open_device};
pub use capabilities::{Capabilities, KernelLimits, Path, Requirements, SubgroupSizes, Timestamps, offers_matrices};
pub use indices::Indices;
pub use kernels::{Checks, Kernels};
pub use launch::{Launch, Launches};
pub use shader::Variant;
pub use span_bytes::SpanReads;
pub use store::{Store, StoreBuffer, max_shard_pages};
pub use tensor::{ElementBinding, Tensor};
