//! The device layer, which knows nothing of caches, and what the backend keeps on the device, by the names that the rest
//! of the backend uses.

pub use kvpack_device::wgpu::{
    Capabilities, Checks, ElementBinding, KernelLimits, Kernels, Launch, Launches, Path, Requirements, ShaderSources,
    SubgroupSizes, Tensor, Timestamps, Variant, adapters, choose_adapter, offers_matrices, open_device, shader,
};
pub(super) use kvpack_device::wgpu::{buffers, capabilities, encoded, guard, launch};

pub(super) use super::cache::span_bytes;
pub use super::cache::{Indices, Shard, SpanReads, Store, StoreBuffer, max_shard_pages};

impl crate::backend::TypedTensor for Tensor {
    fn elements(&self) -> usize {
        self.elements()
    }

    fn element_type(&self) -> crate::plan::ElementType {
        self.element_type()
    }
}
