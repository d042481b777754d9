//! DLPack: tensors of any library. <https://dmlc.github.io/dlpack/latest/c_api.html>

use std::ffi::{CStr, c_void};

use kvpack::plan::ElementType;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::wrong_tensor;
use crate::view::{Dimensions, Place, View, contiguous, wrong_type};

/// `DLTensor`.
#[repr(C)]
pub struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// The first fields of `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: DlTensor,
}

const PLAIN: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const READ_ONLY: u64 = 1;
const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;

/// A tensor through its `__dlpack__`. The capsule is its owner: it is not consumed, so that it frees the tensor.
pub fn view(what: &str, tensor: &Bound<'_, PyAny>, stream: Option<u64>) -> PyResult<View> {
    let py = tensor.py();
    let keywords = PyDict::new(py);
    if let Some(stream) = stream {
        // 1 is the default stream, whose handle is 0.
        keywords.set_item("stream", stream.max(1))?;
    }
    keywords.set_item("max_version", (1, 0))?;
    let capsule = match tensor.call_method("__dlpack__", (), Some(&keywords)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            keywords.del_item("max_version")?;
            tensor.call_method("__dlpack__", (), Some(&keywords))
        }
        result => result,
    }
    .map_err(|error| wrong_tensor(what, format!("its __dlpack__ failed: {error}")))?;
    // SAFETY: the capsule lives until the end of the call, and is kept by the view.
    let (found, read_only) = unsafe { tensor_of(what, &capsule)? };
    // SAFETY: as above.
    Ok(View { read_only, ..unsafe { found.view(what, &capsule) }? })
}

impl DlTensor {
    /// A tensor without elements, for others to fill.
    pub const EMPTY: Self = Self {
        data: std::ptr::null_mut(),
        device_type: 0,
        device_id: 0,
        dimensions: 0,
        code: 0,
        bits: 0,
        lanes: 0,
        shape: std::ptr::null(),
        strides: std::ptr::null(),
        byte_offset: 0,
    };

    /// The tensor as its owner holds it.
    ///
    /// # Safety
    /// The pointers are those of a living tensor.
    pub unsafe fn view(&self, what: &str, owner: &Bound<'_, PyAny>) -> PyResult<View> {
        let element = match (self.code, self.bits, self.lanes) {
            (FLOAT, 32, 1) => ElementType::F32,
            (FLOAT, 16, 1) => ElementType::F16,
            (BFLOAT, 16, 1) => ElementType::Bf16,
            (code, bits, lanes) => {
                return Err(wrong_type(what, &format!("of {bits} bits (DLPack's type {code}, {lanes} lanes)")));
            }
        };
        let place = match self.device_type {
            CPU | CUDA_HOST => Place::Cpu,
            CUDA => Place::Cuda(self.device_id),
            other => {
                return Err(wrong_tensor(what, format!("it lies on DLPack's device {other}; use the CPU or CUDA")));
            }
        };
        let dimensions = usize::try_from(self.dimensions).unwrap_or(0);
        let list = |numbers: *const i64| match dimensions > 0 && !numbers.is_null() {
            // SAFETY: DLPack's shape and strides have one number for every dimension.
            true => unsafe { std::slice::from_raw_parts(numbers, dimensions) },
            false => &[],
        };
        let shape: Dimensions<usize> = list(self.shape).iter().map(|&n| usize::try_from(n).unwrap_or(0)).collect();
        let strides = match self.strides.is_null() {
            true => contiguous(&shape),
            false => list(self.strides).iter().map(|&n| n as isize).collect(),
        };
        let address = (self.data as usize).wrapping_add(self.byte_offset as usize);
        let owner = owner.clone().unbind();
        Ok(View { address, shape, strides, element, place, read_only: false, of_torch: false, owner })
    }
}

/// The tensor in a capsule.
///
/// # Safety
/// The tensor is valid as long as the capsule lives.
unsafe fn tensor_of<'a>(what: &str, capsule: &'a Bound<'_, PyAny>) -> PyResult<(&'a DlTensor, bool)> {
    // SAFETY: CPython checks that it is a capsule of this name.
    let of_name = |name: &CStr| unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 0 {
            return std::ptr::null_mut();
        }
        ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr())
    };
    let plain = of_name(PLAIN).cast::<DlTensor>();
    if !plain.is_null() {
        // SAFETY: `DLManagedTensor` begins with its tensor.
        return Ok((unsafe { &*plain }, false));
    }
    let versioned = of_name(VERSIONED).cast::<Versioned>();
    if versioned.is_null() {
        return Err(wrong_tensor(what, "its __dlpack__ returned no capsule of DLPack, or one that was used"));
    }
    // SAFETY: the capsule of this name holds a versioned tensor, whose first fields are the same in all versions 1.
    let versioned = unsafe { &*versioned };
    if versioned.major != 1 {
        let (major, minor) = (versioned.major, versioned.minor);
        return Err(wrong_tensor(what, format!("it is of DLPack {major}.{minor}; kvpack reads 1")));
    }
    Ok((&versioned.tensor, versioned.flags & READ_ONLY != 0))
}
