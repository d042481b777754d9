//! Which formats a backend serves, and how.

use super::decode::decode_formats;
use crate::backend::{AttendArithmetic, Attention, Backend, QueryPrecision};
use crate::format::{AffineFormat, AttentionShape, Bits, Grouping, SegmentFormat, TensorFormat};
use crate::{Error, Result};

/// What a backend does with a format at one shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Support {
    /// The format.
    pub format: SegmentFormat,
    /// True if single tokens can be appended to packed pages; otherwise they wait in f16 until a tile is full.
    pub single_tokens: bool,
    /// How it is attended to with each precision of the query, [`QueryPrecision::Int16`] first; why not, where the
    /// backend does not serve it.
    pub arithmetic: [std::result::Result<AttendArithmetic, String>; 2],
}

/// What a backend does with the formats that are timed, and with those whose groups none of them has.
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
/// [`Error::DeviceLost`] and what else is no matter of a format.
pub fn support<B: Backend>(backend: &B, shape: &AttentionShape) -> Result<Vec<Support>> {
    let mut formats = decode_formats();
    formats.push(SegmentFormat {
        key: TensorFormat::F16,
        value: TensorFormat::Affine(AffineFormat::new(Bits::Four, Grouping::TokenChannels(16))),
    });
    formats.push(SegmentFormat::turboquant_renormalized(Bits::Two, 64));
    formats.into_iter().map(|format| row(backend, shape, format)).collect()
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

    /// What does not fit a shape is said in its row, and the other rows are there.
    #[test]
    fn a_format_that_does_not_fit_says_why() {
        let rows = support(&Cpu::new(), &AttentionShape::new(2, 1, 80).unwrap()).unwrap();
        let refused: Vec<&Support> = rows.iter().filter(|row| row.arithmetic[0].is_err()).collect();
        assert!(!refused.is_empty() && refused.len() < rows.len());
        assert!(refused.iter().all(|row| row.arithmetic[0].as_ref().unwrap_err().contains("80")), "{refused:?}");
    }
}
