//! Memory of the caller as a tensor of the CPU backend, without a copy.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::plan::{ElementType, Elements};
use crate::{Error, Result};

/// Elements in memory of the caller: see [`CpuTensor::from_address`](super::CpuTensor::from_address).
pub struct ForeignTensor {
    address: NonNull<u8>,
    elements: usize,
    element_type: ElementType,
    /// Keeps the memory.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the owner, which may be sent and shared, keeps the memory; who made the tensor promised that nothing else
// writes it meanwhile.
unsafe impl Send for ForeignTensor {}
// SAFETY: as above. Shared references only read.
unsafe impl Sync for ForeignTensor {}

impl fmt::Debug for ForeignTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements of {:?} at {:?}", self.elements, self.element_type, self.address)
    }
}

impl ForeignTensor {
    /// # Safety
    /// As [`CpuTensor::from_address`](super::CpuTensor::from_address).
    pub(super) unsafe fn new(
        owner: Arc<dyn Any + Send + Sync>,
        address: usize,
        elements: usize,
        element_type: ElementType,
    ) -> Result<Self> {
        let size = element_type.bytes();
        let most = isize::MAX as usize - address.min(isize::MAX as usize);
        let fits = elements.checked_mul(size).is_some_and(|bytes| bytes <= most);
        let pointer = NonNull::new(std::ptr::with_exposed_provenance_mut(address));
        let Some(address) = pointer.filter(|_| fits && address.is_multiple_of(size)) else {
            let reason = format!(
                "{elements} elements of {size} bytes at address {address:#x}; it must be a multiple of the size and not 0, \
                 and all elements must lie in the address space"
            );
            return Err(Error::Buffer { what: "a tensor", reason });
        };
        Ok(Self { address, elements, element_type, _owner: owner })
    }

    pub(super) const fn elements(&self) -> Elements<'_> {
        let (address, n) = (self.address, self.elements);
        // SAFETY: the caller of `new` promised that this number of elements lies there, and that nothing writes them
        // while the shared reference lives. `new` checked the alignment.
        unsafe {
            match self.element_type {
                ElementType::F32 => Elements::F32(std::slice::from_raw_parts(address.cast().as_ptr(), n)),
                ElementType::F16 => Elements::F16(std::slice::from_raw_parts(address.cast().as_ptr(), n)),
                ElementType::Bf16 => Elements::Bf16(std::slice::from_raw_parts(address.cast().as_ptr(), n)),
            }
        }
    }

    pub(super) const fn elements_mut(&mut self) -> ElementsMut<'_> {
        let (address, n) = (self.address, self.elements);
        // SAFETY: as above; nothing else uses the elements while the exclusive reference lives.
        unsafe {
            match self.element_type {
                ElementType::F32 => ElementsMut::F32(std::slice::from_raw_parts_mut(address.cast().as_ptr(), n)),
                ElementType::F16 => ElementsMut::F16(std::slice::from_raw_parts_mut(address.cast().as_ptr(), n)),
                ElementType::Bf16 => ElementsMut::Bf16(std::slice::from_raw_parts_mut(address.cast().as_ptr(), n)),
            }
        }
    }
}

/// Elements of a dense tensor in host memory, to write.
#[derive(Debug)]
pub enum ElementsMut<'a> {
    /// 32-bit floats.
    F32(&'a mut [f32]),
    /// 16-bit floats.
    F16(&'a mut [f16]),
    /// Brain floats.
    Bf16(&'a mut [bf16]),
}

impl ElementsMut<'_> {
    /// Writes numbers from element `first` on, rounded to the nearest value, ties to even. The caller has checked that
    /// there are as many elements.
    pub(crate) fn write_f32(&mut self, first: usize, numbers: &[f32]) {
        let place = first..first + numbers.len();
        match self {
            Self::F32(to) => to[place].copy_from_slice(numbers),
            Self::F16(to) => to[place].convert_from_f32_slice(numbers),
            Self::Bf16(to) => to[place].convert_from_f32_slice(numbers),
        }
    }
}
