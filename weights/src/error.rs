//! The one error type of the crate.

use std::io;
use std::path::PathBuf;

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong. A call that returns an error has changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number of bits without a format.
    #[error("weights of {given} bits: codes have 2, 3, 4 or 8 bits")]
    Bits {
        /// The number given.
        given: u64,
    },

    /// A size that no layer has.
    #[error("{what} is {given}; allowed are 1 to {most}")]
    Size {
        /// Which size.
        what: &'static str,
        /// The size given.
        given: u64,
        /// The largest that is allowed.
        most: u64,
    },

    /// A list of the wrong length.
    #[error("{what} has {given} elements; {of} needs {needed}")]
    Elements {
        /// Which list.
        what: &'static str,
        /// Its length.
        given: usize,
        /// The length it needs.
        needed: usize,
        /// What needs it.
        of: String,
    },

    /// A value outside its range.
    #[error("{what} {index} is {given}; allowed are {allowed}")]
    Value {
        /// Which list.
        what: &'static str,
        /// Where in it.
        index: usize,
        /// The value there.
        given: String,
        /// The values that are allowed.
        allowed: String,
    },

    /// An infinity or NaN.
    #[error("{what} {index} is {given}; all must be finite, so repair or leave out what made it")]
    NonFinite {
        /// Which list.
        what: &'static str,
        /// Where in it.
        index: usize,
        /// The value there.
        given: f64,
    },

    /// Something that a format cannot store.
    #[error("{format} cannot store {what}: {hint}")]
    Format {
        /// The format.
        format: &'static str,
        /// What it cannot store.
        what: String,
        /// What to do.
        hint: &'static str,
    },

    /// A tensor of a checkpoint that is missing or does not fit.
    #[error("tensor '{name}': {reason}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong with it and what is needed.
        reason: String,
    },

    /// A layer of a checkpoint whose tensors contradict each other or the configuration.
    #[error("layer '{name}': {reason}")]
    Layer {
        /// Its name.
        name: String,
        /// What is wrong with it.
        reason: Box<Error>,
    },

    /// A configuration that cannot be read or is not supported.
    #[error("{what}: {reason}")]
    Config {
        /// The file or the key.
        what: String,
        /// What is wrong with it and what is allowed.
        reason: String,
    },

    /// A file that cannot be read or written.
    #[error("{}: {reason}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system reports.
        reason: io::Error,
    },

    /// A file that is no safetensors file, or only a part of one.
    #[error("{file} is not a whole safetensors file: {reason}; fetch it again")]
    Safetensors {
        /// The file.
        file: String,
        /// What is wrong with it.
        reason: String,
    },

    /// A Hessian without a Cholesky factor.
    #[error(
        "the Hessian has no Cholesky factor, not even with a damping of {damping}; calibrate on more tokens, or look \
         for activations that are far larger than the others"
    )]
    NotPositiveDefinite {
        /// The largest damping tried, as a fraction of the mean diagonal.
        damping: f64,
    },

    /// An error of the device or of a tensor on it.
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    #[error(transparent)]
    Device(kvpack_device::Error),
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl From<kvpack_device::Error> for Error {
    fn from(error: kvpack_device::Error) -> Self {
        Self::Device(error)
    }
}

/// Refuses a list of the wrong length.
pub(crate) fn check_elements(what: &'static str, given: usize, needed: usize, of: impl Fn() -> String) -> Result<()> {
    if given == needed { Ok(()) } else { Err(Error::Elements { what, given, needed, of: of() }) }
}

/// Refuses infinities and NaN.
pub(crate) fn check_finite(what: &'static str, values: &[f32]) -> Result<()> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(index) => Err(Error::NonFinite { what, index, given: values[index].into() }),
    }
}

/// Refuses numbers of rows that no product has.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) fn check_rows(rows: usize) -> Result<()> {
    if (1..=crate::MOST_ROWS).contains(&rows) {
        return Ok(());
    }
    Err(Error::Size { what: "the number of rows", given: rows as u64, most: crate::MOST_ROWS as u64 })
}
