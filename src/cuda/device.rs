//! The device layer, which knows nothing of caches, and what the backend keeps on the device, by the names that the rest
//! of the backend uses.

pub(super) use kvpack_device::cuda::{driver, kernels, launch, libraries, memory, pinned, program, sources, tensor};

pub(super) use super::cache::{indices, page_format, span_bytes, store};

impl crate::backend::TypedTensor for tensor::Tensor {
    fn elements(&self) -> usize {
        self.elements()
    }

    fn element_type(&self) -> crate::plan::ElementType {
        self.element_type()
    }
}
