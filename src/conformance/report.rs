//! The result of a conformance run.

use std::fmt;

use super::support::{multiplies_floats, rounds_queries};
use crate::Result;
use crate::backend::{Attention, QueryBytes, QueryPrecision};
use crate::format::SegmentFormat;

/// Errors of an attention output against the f64 reference over the same stored data.
///
/// All are normalised mean square errors, `Σ (got − want)² / Σ want²`.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct OutputError {
    /// Over all sequences and heads.
    pub nmse: f64,
    /// The worst single head of any sequence.
    pub worst_head: f64,
    /// Over all heads, with the mean of the head's values subtracted from the reference in the denominator: the error
    /// relative to the information that the weights add to a plain average. `None` if the outputs are plain averages.
    pub informative: Option<f64>,
}

/// The largest errors that pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// For [`OutputError::nmse`].
    pub nmse: f64,
    /// For [`OutputError::worst_head`]. A head that averages many tokens has a small output as its denominator.
    pub worst_head: f64,
    /// For [`OutputError::informative`].
    pub informative: f64,
}

impl Limits {
    /// The limits of a step over segments of these formats: those of the least precise. A backend that never rounds
    /// queries has the limits of 16 bits, whatever precision is asked for, and ten times those where it multiplies
    /// halves and bytes of formats whose queries others round to 8 bits: weights and codes are rounded there. For other
    /// packed formats the informative part has twice the limit: weights times codes that count from 0 are rounded.
    ///
    /// # Errors
    /// As [`rounds_queries`].
    pub fn of_step<'a, B: Attention>(
        backend: &B,
        query: QueryPrecision,
        formats: impl IntoIterator<Item = &'a SegmentFormat>,
    ) -> Result<Self> {
        let formats: Vec<_> = formats.into_iter().collect();
        let bytes = formats.iter().map(|format| query.bytes(format)).min().unwrap_or(QueryBytes::Two);
        let is_packed = formats.iter().any(|format| **format != SegmentFormat::F16);
        let of_two = Self::new(QueryBytes::Two);
        Ok(match (rounds_queries(backend)?, bytes) {
            (true, bytes) => Self::new(bytes),
            (false, QueryBytes::One) if !multiplies_floats(backend)? => of_two.times(10.0),
            (false, QueryBytes::Two) if is_packed && !multiplies_floats(backend)? => {
                Self { informative: 2.0 * of_two.informative, ..of_two }
            }
            (false, _) => of_two,
        })
    }

    const fn times(self, factor: f64) -> Self {
        let Self { nmse, worst_head, informative } = self;
        Self { nmse: factor * nmse, worst_head: factor * worst_head, informative: factor * informative }
    }

    /// The same for a step with sinks. Without them an error that all large scores of a head share changes nothing. A
    /// sink does not move with the scores: theirs, of ten bits after the binary point, becomes one of the output.
    pub const fn with_sinks(self) -> Self {
        Self { worst_head: 4.0 * self.worst_head, ..self }
    }

    /// The same for values of the smallest step. Their 8-bit codes fill a tenth of the range and lie at its end. Rounded
    /// weights multiply the distance of a code from the middle, which is several times what the codes differ by.
    pub const fn with_smallest_steps(self) -> Self {
        Self { informative: 4.0 * self.informative, ..self }
    }

    /// 10⁻⁶ where the query keeps 16 bits or more, 10⁻⁴ where it is quantised to int8; twice that for the informative
    /// part, and ten times for the worst single head. With int8, where one heavy channel sets the step of a head's
    /// whole query, ten times and a hundred times.
    pub const fn new(query: QueryBytes) -> Self {
        match query {
            QueryBytes::Two => Self { nmse: 1e-6, worst_head: 1e-5, informative: 2e-6 },
            QueryBytes::One => Self { nmse: 1e-4, worst_head: 1e-2, informative: 1e-3 },
        }
    }
}

/// A failure of a case.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Failure {
    /// Stored data differ from those of the CPU reference.
    Stored {
        /// Keys or values.
        tensor: &'static str,
        /// Elements that differ, over all spans.
        elements: usize,
        /// The first of them.
        first: Mismatch,
    },
    /// The search for non-finite elements missed a planted one, or reported one that does not exist.
    NonFinite {
        /// The expected and the actual result.
        message: String,
    },
    /// A second run of the same step returned other outputs.
    Unrepeated {
        /// Elements whose bits differ.
        elements: usize,
        /// Index of the first in `[sequences, query_heads, head_dim]`.
        index: usize,
    },
    /// A kernel wrote something other than the CPU reference.
    Differs {
        /// The data that were written.
        what: String,
        /// Number of elements that differ; 1 if the lengths differ.
        elements: usize,
        /// Index of the first.
        index: usize,
        /// The backend's element.
        got: f64,
        /// The CPU reference's element.
        want: f64,
    },
    /// A call that must be refused was accepted, or refused with the wrong error.
    Refusal {
        /// The call, the expected outcome and the actual one.
        message: String,
    },
    /// Something was written outside the pages, or the ranges, of the check.
    Guard {
        /// Index of the store.
        store: usize,
        /// Keys or values.
        tensor: &'static str,
        /// Elements of guard pages that have changed.
        elements: usize,
    },
    /// Elements of a 16-bit output are not the nearest to those of the same step in f32.
    Misrounded {
        /// Number of such elements.
        elements: usize,
        /// Index of the first in `[sequences, query_heads, head_dim]`.
        index: usize,
        /// The first.
        got: f32,
        /// The nearest.
        want: f32,
    },
    /// An output is NaN or infinite.
    OutputNotFinite {
        /// Its index in `[sequences, query_heads, head_dim]`.
        index: usize,
    },
    /// An error exceeds its limit.
    Inaccurate {
        /// Which error.
        what: String,
        /// Measured.
        error: f64,
        /// Allowed.
        limit: f64,
    },
}

impl Failure {
    /// A failure if a backend returns another number of elements than the CPU reference.
    pub(super) fn of_length(what: &str, got: usize, want: usize) -> Option<Self> {
        let what = format!("length of {what}");
        (got != want).then_some(Self::Differs { what, elements: 1, index: 0, got: got as f64, want: want as f64 })
    }
}

/// An element whose stored value differs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mismatch {
    /// The sequence.
    pub sequence: usize,
    /// The span, counted over all sequences of the case, without empty spans.
    pub span: usize,
    /// Index in `[kv_heads, tokens, head_dim]` of the span.
    pub index: usize,
    /// The backend's value.
    pub got: f32,
    /// The CPU reference's value.
    pub want: f32,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stored { tensor, elements, first } => write!(
                f,
                "{elements} stored {tensor} differ from the CPU reference's, first in sequence {}, span {}, element {}: {} \
                 instead of {}",
                first.sequence, first.span, first.index, first.got, first.want
            ),
            Self::NonFinite { message } => write!(f, "search for non-finite elements: {message}"),
            Self::Unrepeated { elements, index } => {
                write!(f, "{elements} output elements differ from run to run, first element {index}")
            }
            Self::Differs { what, elements, index, got, want } => {
                write!(
                    f,
                    "{what}: {elements} elements differ from the CPU reference's, first element {index}: {got} instead of {want}"
                )
            }
            Self::Refusal { message } => f.write_str(message),
            Self::Guard { store, tensor, elements } => {
                write!(
                    f,
                    "{elements} {tensor} outside the pages of store {store} have changed; nothing should write them"
                )
            }
            Self::Misrounded { elements, index, got, want } => write!(
                f,
                "{elements} output elements are not rounded to the nearest, first element {index}: {got} instead of {want}"
            ),
            Self::OutputNotFinite { index } => write!(f, "output element {index} is not finite"),
            Self::Inaccurate { what, error, limit } => write!(f, "{what} {error:.1e} is over the limit {limit:.0e}"),
        }
    }
}

/// The errors of an attention output, and their limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Accuracy {
    /// Errors of the output.
    pub error: OutputError,
    /// The largest that pass.
    pub limits: Limits,
}

/// The outcome of one check on one backend.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Name of the check.
    pub check: String,
    /// The accuracy of attention; `None` if the check does not measure it.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bits;
    use crate::cpu::Cpu;

    #[test]
    fn a_backend_that_rounds_no_queries_has_the_limits_of_16_bits() {
        let format = SegmentFormat::per_channel(Bits::One);
        assert_eq!(QueryPrecision::ByFormat.bytes(&format), QueryBytes::One);
        for query in [QueryPrecision::ByFormat, QueryPrecision::Int8] {
            assert_eq!(Limits::of_step(&Cpu::new(), query, [&format]), Ok(Limits::new(QueryBytes::Two)));
        }
    }
}
