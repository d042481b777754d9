//! Dense tensors on the device.

use std::any::Any;
use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::memory::{Memory, bytes_of};
use crate::{ElementType, Elements, Error, Result};

/// A dense array of f32, f16 or bf16 elements on the device: kvpack's own, or an engine's memory. Cheap to clone.
///
/// A tensor that kvpack allocated belongs to the stream it was created on. Backends on other streams refuse it, because
/// it is freed in the order of that stream.
#[derive(Clone, Debug)]
pub struct Tensor {
    memory: Arc<Memory>,
    /// Bytes of the memory before the first element.
    offset: usize,
    elements: usize,
    element_type: ElementType,
}

impl Tensor {
    /// A tensor of zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Limit`] for more elements than memory can hold.
    pub fn zeroed(stream: &Arc<CudaStream>, elements: usize, element_type: ElementType) -> Result<Self> {
        let memory = Memory::zeroed(stream, "a tensor", bytes_of("a tensor", elements, element_type.bytes())?)?;
        Ok(Self { memory, offset: 0, elements, element_type })
    }

    /// The `elements` elements at `address`, in an engine's memory. The tensor, its clones and the steps that they are
    /// bound to hold `owner`, which keeps the memory alive.
    ///
    /// ```no_run
    /// use std::sync::Arc;
    /// use kvpack_device::cuda::Tensor;
    /// use kvpack_device::cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
    /// use kvpack_device::ElementType;
    /// # fn example(stream: &Arc<CudaStream>, projected: CudaSlice<half::bf16>) -> kvpack_device::Result<()> {
    /// // What an engine's projection wrote on the stream of the backend.
    /// let (address, elements) = (projected.device_ptr(stream).0, projected.len());
    /// // SAFETY: the slice holds these elements, is given back in the order of its stream, and that is the backend's.
    /// let keys = unsafe { Tensor::from_address(Arc::new(projected), address, elements, ElementType::Bf16) }?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    /// The memory at `address` holds `elements` elements on the device of every backend that receives the tensor, and
    /// they stay there as long as `owner` lives. After the last holder drops `owner`, the memory is not reused before
    /// all work then queued on the streams of these backends is done. (Memory freed in the order of one of these
    /// streams satisfies this for that stream.) The caller orders accesses of other streams before or after the work of
    /// the backends. While a backend writes the tensor as an output, nothing else uses it.
    ///
    /// # Errors
    /// [`Error::Buffer`] when the address is not a multiple of the element size, or the elements pass the end of the
    /// address space.
    pub unsafe fn from_address(
        owner: Arc<dyn Any + Send + Sync>,
        address: u64,
        elements: usize,
        element_type: ElementType,
    ) -> Result<Self> {
        let size = element_type.bytes();
        let bytes = elements.checked_mul(size).filter(|&bytes| address.checked_add(bytes as u64).is_some());
        let Some(bytes) = bytes.filter(|_| address.is_multiple_of(size as u64)) else {
            let reason = format!(
                "{elements} elements of {size} bytes at address {address:#x}; it must be a multiple of the size, and all \
                 elements must lie in the address space"
            );
            return Err(Error::Buffer { what: "a tensor", reason });
        };
        Ok(Self { memory: Memory::of_engine(owner, address, bytes), offset: 0, elements, element_type })
    }

    /// A tensor of the same memory that has `elements` of the elements, starting at `first`.
    ///
    /// # Errors
    /// [`Error::Buffer`] when they do not lie within the tensor.
    pub fn slice(&self, first: usize, elements: usize) -> Result<Self> {
        if elements == 0 || first.checked_add(elements).is_none_or(|end| end > self.elements) {
            let reason = format!("elements {first} .. {first} + {elements} of {}", self.elements);
            return Err(Error::Buffer { what: "part of a tensor", reason });
        }
        let offset = self.offset + first * self.element_type.bytes();
        Ok(Self { memory: self.memory.clone(), offset, elements, element_type: self.element_type })
    }

    /// Copies elements to a new tensor. The caller may overwrite or free them at once: elements in pinned memory are
    /// waited for.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Plan`] for elements in pinned memory while a graph captures the stream.
    pub fn upload(stream: &Arc<CudaStream>, elements: Elements<'_>) -> Result<Self> {
        let memory = Memory::upload(stream, "a tensor", elements.bytes())?;
        Ok(Self { memory, offset: 0, elements: elements.len(), element_type: elements.element_type() })
    }

    /// Queues overwriting the first elements with these, which must have the tensor's type. The caller may overwrite or
    /// free them at once: elements in pinned memory are waited for.
    ///
    /// # Errors
    /// [`Error::Buffer`] when they have another type, or exceed the tensor; [`Error::Plan`] when kvpack created the
    /// tensor on another stream, and for elements in pinned memory while a graph captures the stream; errors of the
    /// driver.
    pub fn write(&self, stream: &Arc<CudaStream>, elements: Elements<'_>) -> Result<()> {
        let (given, held) = ((elements.element_type(), elements.len()), (self.element_type, self.elements));
        if given.0 != held.0 || given.1 > held.1 {
            let reason = format!("{} elements of {:?} into {} of {:?}", given.1, given.0, held.1, held.0);
            return Err(Error::Buffer { what: "a tensor", reason });
        }
        self.memory.write(stream, "a tensor", self.offset, elements.bytes())
    }

    /// Copies the elements to the host as f32, after all work queued on the stream.
    ///
    /// # Errors
    /// [`Error::Plan`] when kvpack created the tensor on another stream; [`Error::DeviceLost`].
    pub fn download(&self, stream: &Arc<CudaStream>) -> Result<Vec<f32>> {
        self.download_part(stream, 0, self.elements)
    }

    /// Copies `elements` elements to the host as f32, starting at `first`, after all work queued on the stream.
    ///
    /// # Errors
    /// [`Error::Buffer`] when they do not lie within the memory of the tensor; [`Error::Plan`] when kvpack created it
    /// on another stream; [`Error::DeviceLost`].
    pub fn download_part(&self, stream: &Arc<CudaStream>, first: usize, elements: usize) -> Result<Vec<f32>> {
        let size = self.element_type.bytes();
        let bytes = self.memory.download_part(stream, "a tensor", self.offset + first * size, elements * size)?;
        let mut read = Vec::with_capacity(elements);
        self.element_type.read_f32(&bytes, &mut read);
        Ok(read)
    }

    /// Number of elements.
    pub const fn elements(&self) -> usize {
        self.elements
    }

    /// Their type.
    pub const fn element_type(&self) -> ElementType {
        self.element_type
    }

    /// Address of an element on the device.
    pub fn address_of(&self, element: usize) -> u64 {
        self.address() + (element * self.element_type.bytes()) as u64
    }

    /// The element type's number in the kernels.
    pub const fn type_code(&self) -> u32 {
        type_code(self.element_type)
    }

    /// Address of the first element on the device.
    pub fn address(&self) -> u64 {
        self.memory.address() + self.offset as u64
    }

    /// The memory that it lies in.
    pub const fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

/// Element types by their numbers in `cuda/common/elements.cuh`.
pub const fn type_code(element_type: ElementType) -> u32 {
    match element_type {
        ElementType::F32 => 0,
        ElementType::F16 => 1,
        ElementType::Bf16 => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_an_engine_must_hold_whole_elements() {
        // SAFETY: Nothing accesses the memory of these tensors.
        let tensor = |address, elements, of| unsafe { Tensor::from_address(Arc::new(()), address, elements, of) };
        let refused =
            |address, elements, of| assert!(matches!(tensor(address, elements, of), Err(Error::Buffer { .. })));
        refused(0x1002, 4, ElementType::F32);
        refused(0x1001, 4, ElementType::Bf16);
        refused(u64::MAX - 3, 2, ElementType::F32);
        refused(0x1000, usize::MAX, ElementType::F16);
        let whole = tensor(0x1002, 8, ElementType::Bf16).unwrap();
        let part = whole.slice(3, 5).unwrap();
        assert_eq!((part.address(), part.elements()), (0x1008, 5));
        assert_eq!(part.slice(1, 4).unwrap().address(), 0x100a);
        assert!(whole.slice(3, 6).is_err() && whole.slice(0, 0).is_err() && whole.slice(usize::MAX, 2).is_err());
    }
}
