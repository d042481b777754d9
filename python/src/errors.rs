//! Exceptions: the texts of the library's errors.

use pyo3::PyErr;
use pyo3::create_exception;
use pyo3::exceptions::PyException;

create_exception!(kvpack, Error, PyException, "An error of kvpack. The text says what was given and what is allowed.");
create_exception!(kvpack, NoRoom, Error, "The budget or the device has too little room. The cache is as it was.");
create_exception!(
    kvpack,
    TensorError,
    Error,
    "A tensor has another device, type, shape or layout than the call needs."
);

/// The exception for an error of the library.
pub fn raised(error: kvpack::Error) -> PyErr {
    let text = error.to_string();
    match error {
        kvpack::Error::NoRoom { .. } | kvpack::Error::OutOfMemory { .. } => NoRoom::new_err(text),
        kvpack::Error::Elements { .. } | kvpack::Error::NotFinite { .. } | kvpack::Error::Buffer { .. } => {
            TensorError::new_err(text)
        }
        _ => Error::new_err(text),
    }
}

/// An exception about a tensor of the caller.
pub fn wrong_tensor(what: &str, reason: impl std::fmt::Display) -> PyErr {
    TensorError::new_err(format!("{what}: {reason}"))
}
