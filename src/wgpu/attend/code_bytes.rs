//! The values of the bytes of the integer path.

use crate::format::codebook::level_unit;
use crate::format::{AffineFormat, Bits, TensorFormat};

/// How the signed bytes of the integer path represent the factor of a range's scale: `(byte / step + middle) · unit`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CodeBytes {
    /// Distance between the bytes of neighbouring codes: fields of affine codes are shifted to the top of their bytes.
    pub step: f32,
    /// The value of byte 0, in codes, or in steps of levels for a codebook.
    pub middle: f32,
    /// 1 for affine codes, the unit of levels for a codebook.
    pub unit: f32,
}

impl CodeBytes {
    pub(super) fn new(format: &TensorFormat, head_dim: usize) -> Self {
        match format {
            TensorFormat::F16 => Self { step: 1.0, middle: 0.0, unit: 1.0 },
            TensorFormat::Affine(AffineFormat { bits, .. }) => Self {
                step: (1u32 << (8 - bits.count())) as f32,
                middle: (1u32 << (bits.count() - 1)) as f32,
                unit: 1.0,
            },
            // A format without a unit is refused when a store is created.
            TensorFormat::Codebook(codebook) => Self {
                step: if codebook.bits == Bits::One { 128.0 } else { 1.0 },
                middle: 0.5,
                unit: level_unit(codebook.bits, head_dim).unwrap_or(1.0),
            },
        }
    }
}
