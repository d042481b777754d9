//! Dense tensors on the device.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::memory::Memory;
use crate::Result;
use crate::plan::{ElementType, Elements};

/// A dense array of f32, f16 or bf16 elements on the device. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Tensor {
    memory: Arc<Memory>,
    elements: usize,
    element_type: ElementType,
}

impl Tensor {
    /// A tensor of zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn zeroed(stream: &Arc<CudaStream>, elements: usize, element_type: ElementType) -> Result<Self> {
        let memory = Memory::zeroed(stream, "a tensor", elements * element_type.bytes())?;
        Ok(Self { memory, elements, element_type })
    }

    /// Copies elements to a new tensor.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn upload(stream: &Arc<CudaStream>, elements: Elements<'_>) -> Result<Self> {
        let memory = Memory::upload(stream, "a tensor", elements.bytes())?;
        Ok(Self { memory, elements: elements.len(), element_type: elements.element_type() })
    }

    /// Copies the elements to the host as f32, after the work that the stream holds.
    ///
    /// # Errors
    /// [`Error::DeviceLost`](crate::Error::DeviceLost).
    pub fn download(&self, stream: &Arc<CudaStream>) -> Result<Vec<f32>> {
        self.download_part(stream, 0, self.elements)
    }

    pub(crate) fn download_part(&self, stream: &Arc<CudaStream>, first: usize, elements: usize) -> Result<Vec<f32>> {
        let size = self.element_type.bytes();
        let bytes = self.memory.download_part(stream, "a tensor", first * size, elements * size)?;
        Ok(self.element_type.to_f32(&bytes).collect())
    }

    /// Number of elements.
    pub const fn elements(&self) -> usize {
        self.elements
    }

    /// Their type.
    pub const fn element_type(&self) -> ElementType {
        self.element_type
    }

    /// The type as kernels know it.
    pub(crate) const fn type_code(&self) -> u32 {
        type_code(self.element_type)
    }

    pub(crate) const fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

/// Types by the numbers of `cuda/common/elements.cuh`.
pub(crate) const fn type_code(element_type: ElementType) -> u32 {
    match element_type {
        ElementType::F32 => 0,
        ElementType::F16 => 1,
        ElementType::Bf16 => 2,
    }
}
