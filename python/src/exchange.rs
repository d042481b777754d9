//! `DLPackExchangeAPI`: functions in C through which a library shows its tensors without a call of Python.

use std::ffi::{CStr, c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;

use crate::dlpack::DlTensor;
use crate::view::View;

const NAME: &CStr = c"dlpack_exchange_api";
const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
#[cfg(feature = "cuda")]
const CUDA: c_int = 2;

#[repr(C)]
struct Table {
    major: u32,
    minor: u32,
    /// The table of an older version, or null.
    older: *const Table,
    allocate: *const c_void,
    managed_tensor: *const c_void,
    to_object: *const c_void,
    /// Fills in a tensor, which stays the object's. -1 with an exception.
    tensor: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
    /// The stream that the library works on now. -1 with an exception.
    current_stream: Option<unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int>,
}

/// The functions of a type of tensors.
pub struct Exchange {
    table: &'static Table,
}

// SAFETY: nothing writes a table, and its functions may be called by every thread that holds the interpreter.
unsafe impl Send for Exchange {}
// SAFETY: as above.
unsafe impl Sync for Exchange {}

impl Exchange {
    /// Those of a type, if it has them in a version that is known here.
    pub fn of(tensor_type: &Bound<'_, PyAny>) -> Option<Self> {
        let capsule = tensor_type.getattr(ATTRIBUTE).ok()?;
        // SAFETY: CPython checks that it is a capsule of this name.
        let table = unsafe {
            if ffi::PyCapsule_IsValid(capsule.as_ptr(), NAME.as_ptr()) == 0 {
                return None;
            }
            ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr())
        };
        let mut table = table.cast::<Table>().cast_const();
        while !table.is_null() {
            // SAFETY: tables live as long as the process, and begin with their version in all versions.
            let found: &'static Table = unsafe { &*table };
            if found.major == 1 {
                return Some(Self { table: found });
            }
            table = found.older;
        }
        None
    }

    /// A tensor of exactly this type. `None` where the library does not show it; another way then says why.
    pub fn view(&self, what: &str, tensor: &Bound<'_, PyAny>) -> Option<View> {
        let (show, mut shown) = (self.table.tensor?, DlTensor::EMPTY);
        // SAFETY: the object has the type that the table belongs to, and the interpreter is held.
        if unsafe { show(tensor.as_ptr().cast(), &raw mut shown) } != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: the tensor shows what it holds until the interpreter is let go of, and the view keeps it.
        unsafe { shown.view(what, tensor) }.ok()
    }

    /// The handle of the current stream of a CUDA device.
    #[cfg(feature = "cuda")]
    pub fn current_stream(&self, py: Python<'_>, ordinal: i32) -> Option<u64> {
        let (ask, mut stream) = (self.table.current_stream?, std::ptr::null_mut());
        // SAFETY: the interpreter is held; the function writes the handle.
        if unsafe { ask(CUDA, ordinal, &raw mut stream) } != 0 {
            drop(PyErr::take(py));
            return None;
        }
        Some(stream as u64)
    }
}
