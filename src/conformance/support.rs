//! The formats that a backend supports, and how.

use super::decode::decode_formats;
use crate::backend::{Arithmetic, AttendArithmetic, Attention, Backend, QueryPrecision};
use crate::format::{AffineFormat, AttentionShape, Bits, Grouping, SegmentFormat, TensorFormat};
use crate::{Error, Result};

/// How a backend supports a format at one shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Support {
    /// The format.
    pub format: SegmentFormat,
    /// Whether single tokens can be appended to packed pages. Otherwise they wait in f16 until a tile is full.
    pub single_tokens: bool,
    /// The arithmetic of attention with each precision of the query, [`QueryPrecision::Int16`] first, or the reason why
    /// the backend does not support the format.
    pub arithmetic: [std::result::Result<AttendArithmetic, String>; 2],
}

/// A backend's support for the timed formats, and for formats whose groups none of them has.
///
/// ```
/// use kvpack::backend::Arithmetic;
/// use kvpack::{AttentionShape, SegmentFormat};
/// let matrix = kvpack::conformance::support(&kvpack::cpu::Cpu::new(), &AttentionShape::new(8, 2, 128)?)?;
/// assert!(matrix.iter().any(|row| row.format == SegmentFormat::F16));
/// assert!(matrix.iter().flat_map(|row| &row.arithmetic).flatten().all(|by| by.keys == Arithmetic::Floats));
/// # Ok::<(), kvpack::Error>(())
/// ```
///
/// # Errors
/// [`Error::DeviceLost`] and other errors that do not concern a format.
pub fn support<B: Backend>(backend: &B, shape: &AttentionShape) -> Result<Vec<Support>> {
    let mut formats = decode_formats();
    formats.push(SegmentFormat {
        key: TensorFormat::F16,
        value: TensorFormat::Affine(AffineFormat::new(Bits::Four, Grouping::TokenChannels(16))),
    });
    formats.push(SegmentFormat::turboquant_renormalized(Bits::Two, 64));
    formats.into_iter().map(|format| row(backend, shape, format)).collect()
}

/// Whether the precision of queries changes what a backend computes. It does where packed keys are multiplied as
/// integers, through wgpu. The CPU multiplies floats, and CUDA always takes 16-bit queries.
///
/// # Errors
/// Errors of the backend.
pub fn rounds_queries<B: Attention>(backend: &B) -> Result<bool> {
    Ok(arithmetic_of_codes(backend)? == Arithmetic::Integers)
}

/// Whether a backend multiplies codes as floats of 32 bits.
pub(super) fn multiplies_floats<B: Attention>(backend: &B) -> Result<bool> {
    Ok(arithmetic_of_codes(backend)? == Arithmetic::Floats)
}

/// Every device multiplies the keys of this format as integers if it multiplies any so.
fn arithmetic_of_codes<B: Attention>(backend: &B) -> Result<Arithmetic> {
    let (shape, format) = (AttentionShape::new(1, 1, 64)?, SegmentFormat::per_channel(Bits::Four));
    Ok(backend.arithmetic(&shape, &format, QueryPrecision::Int8)?.keys)
}

fn row<B: Attention>(backend: &B, shape: &AttentionShape, format: SegmentFormat) -> Result<Support> {
    let served = |query| match backend.arithmetic(shape, &format, query) {
        Ok(arithmetic) => Ok(Ok(arithmetic)),
        Err(error @ (Error::Unsupported { .. } | Error::Format { .. } | Error::Limit { .. })) => {
            Ok(Err(error.to_string()))
        }
        Err(error) => Err(error),
    };
    let arithmetic = [served(QueryPrecision::Int16)?, served(QueryPrecision::Int8)?];
    Ok(Support { format, single_tokens: format.takes_single_tokens(), arithmetic })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Cpu;

    #[test]
    fn the_twin_serves_every_format() {
        for (query_heads, kv_heads, head_dim) in [(1, 1, 64), (8, 1, 128), (14, 2, 256)] {
            let shape = AttentionShape::new(query_heads, kv_heads, head_dim).unwrap();
            for row in support(&Cpu::new(), &shape).unwrap() {
                assert_eq!(
                    row.arithmetic,
                    [Ok(AttendArithmetic::FLOATS), Ok(AttendArithmetic::FLOATS)],
                    "{}",
                    row.format
                );
            }
        }
    }

    /// If a format does not fit a shape, its row says so, and the other rows are complete.
    #[test]
    fn a_format_that_does_not_fit_says_why() {
        let rows = support(&Cpu::new(), &AttentionShape::new(2, 1, 80).unwrap()).unwrap();
        let refused: Vec<&Support> = rows.iter().filter(|row| row.arithmetic[0].is_err()).collect();
        assert!(!refused.is_empty() && refused.len() < rows.len());
        assert!(refused.iter().all(|row| row.arithmetic[0].as_ref().unwrap_err().contains("80")), "{refused:?}");
    }
}
