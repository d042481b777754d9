//! What a check found.

use std::fmt;

use crate::path::Path;

/// A failure of a check.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Failure {
    /// The backend refused a call that it must serve.
    Refused {
        /// Its error, printed.
        reason: String,
    },
    /// Elements differ from what the stored codes say.
    Differs {
        /// Outputs or weights.
        what: &'static str,
        /// How many.
        elements: usize,
        /// Index of the first, in `[rows, N]` or `[N, K]`.
        index: usize,
        /// The backend's element.
        got: f64,
        /// What it must be, or be near to.
        want: f64,
    },
    /// An infinite activation, or NaN, gave finite outputs.
    Finite {
        /// How many.
        elements: usize,
        /// Index of the first in `[rows, N]`.
        index: usize,
    },
    /// A second run of the same product gave other bits.
    Unrepeated {
        /// How many outputs.
        elements: usize,
    },
    /// Elements behind the outputs, or behind the weights, have changed.
    WrittenBehind {
        /// How many.
        elements: usize,
    },
    /// The tensor that came back has another size than the one that went in.
    Length {
        /// Its elements.
        given: usize,
        /// Those that went in.
        expected: usize,
    },
    /// The error of all outputs together is over its limit.
    Inaccurate(Accuracy),
}

/// The normalised mean square error of all outputs, `Σ (got − want)² / Σ want²`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Accuracy {
    /// Measured.
    pub nmse: f64,
    /// Allowed.
    pub limit: f64,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { reason } => write!(f, "refused: {reason}"),
            Self::Differs { what, elements, index, got, want } => {
                write!(f, "{elements} {what} differ, first element {index}: {got} instead of {want}")
            }
            Self::Finite { elements, index } => {
                write!(f, "an activation is not finite, and {elements} outputs are, first element {index}")
            }
            Self::Unrepeated { elements } => write!(f, "{elements} outputs differ from run to run"),
            Self::WrittenBehind { elements } => {
                write!(f, "{elements} elements behind the last have changed; nothing should write them")
            }
            Self::Length { given, expected } => write!(f, "a tensor of {expected} elements came back with {given}"),
            Self::Inaccurate(Accuracy { nmse, limit }) => write!(f, "NMSE {nmse:.1e} is over the limit {limit:.0e}"),
        }
    }
}

/// The outcome of one check on one backend.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The kernel that multiplied; `None` on a CPU, and if nothing was multiplied.
    pub path: Option<Path>,
    /// The accuracy of a product; `None` if nothing was multiplied, or activations were not finite.
    pub accuracy: Option<Accuracy>,
    /// Everything found wrong; empty if the check passed.
    pub failures: Vec<Failure>,
}

impl Report {
    /// True if nothing was found wrong.
    pub fn passed(&self) -> bool {
        self.failures.is_empty()
    }

    /// The reasons of a failure in one line; empty if the check passed.
    pub fn reason(&self) -> String {
        self.failures.iter().map(Failure::to_string).collect::<Vec<_>>().join("; ")
    }
}
