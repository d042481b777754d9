//! The formats that have CUDA kernels, and where their tiles lie in a page.

use super::program::Program;
use crate::format::{AttentionShape, Bits, Grouping, KeyOrValue, RangeRule, SegmentFormat, TILE_TOKENS, TensorFormat};
use crate::{Error, Result};

/// Head dimensions that have CUDA kernels.
pub const HEAD_DIMS: [usize; 4] = [64, 96, 128, 256];

/// One segment format at one head dimension, as the kernels are compiled for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct PageFormat {
    pub(super) head_dim: usize,
    pub(super) key: TensorPages,
    pub(super) value: TensorPages,
}

/// Keys or values of a page format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TensorPages {
    pub(super) bits: usize,
    /// A range beside each tile for every token; otherwise one per channel and span, or none for f16.
    pub(super) token_ranges: bool,
}

impl PageFormat {
    /// # Errors
    /// [`Error::Unsupported`] names what has no kernel.
    pub(super) fn new(shape: &AttentionShape, format: &SegmentFormat) -> Result<Self> {
        let head_dim = shape.head_dim();
        if !HEAD_DIMS.contains(&head_dim) {
            return Err(Error::Unsupported {
                what: format!("head_dim {head_dim} on the CUDA backend"),
                hint: format!("the head dims served are {HEAD_DIMS:?}; the wgpu backend serves more"),
            });
        }
        Ok(Self { head_dim, key: TensorPages::new(&format.key)?, value: TensorPages::new(&format.value)? })
    }

    /// The f16 pages that every head dimension has.
    pub(super) const fn f16(head_dim: usize) -> Self {
        let f16 = TensorPages { bits: 16, token_ranges: false };
        Self { head_dim, key: f16, value: f16 }
    }

    pub(super) const fn tensor(&self, which: KeyOrValue) -> &TensorPages {
        match which {
            KeyOrValue::Key => &self.key,
            KeyOrValue::Value => &self.value,
        }
    }

    /// Bytes of a tile of keys or of values.
    pub(super) const fn tile_bytes(&self, which: KeyOrValue) -> usize {
        TILE_TOKENS * self.head_dim * self.tensor(which).bits / 8
    }

    /// Where a head's tile of keys or of values begins in its part of a page.
    pub(super) const fn tile_offset(&self, which: KeyOrValue) -> usize {
        match which {
            KeyOrValue::Key => 0,
            KeyOrValue::Value => self.tile_bytes(KeyOrValue::Key),
        }
    }

    /// Bytes of one head of a page: tiles and the ranges beside them.
    pub(super) const fn head_bytes(&self) -> usize {
        self.tile_bytes(KeyOrValue::Key)
            + self.tile_bytes(KeyOrValue::Value)
            + self.key.range_bytes()
            + self.value.range_bytes()
    }

    /// The macros of `cuda/common/tile.cuh`.
    pub(super) fn defines(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("HEAD_DIM", self.head_dim),
            ("KEY_BITS", self.key.bits),
            ("VALUE_BITS", self.value.bits),
            ("KEY_TOKEN_RANGES", self.key.token_ranges.into()),
            ("VALUE_TOKEN_RANGES", self.value.token_ranges.into()),
        ]
    }

    /// The kernels that move rows into pages and back.
    pub(super) fn rows_program(&self) -> Program {
        const FILES: &[&str] =
            &["ranges_span.cu", "ranges_tile.cu", "append.cu", "find_non_finite.cu", "dequantize.cu", "quantize.cu"];
        Program { files: FILES, defines: self.defines() }
    }
}

impl TensorPages {
    fn new(format: &TensorFormat) -> Result<Self> {
        let unsupported = || {
            let hint = "the CUDA kernels serve f16, and affine codes of 1, 2, 4 or 8 bits, not rotated, with a range per channel or per token; the wgpu \
                        backend serves every format";
            Err(Error::Unsupported { what: format!("format {format} on the CUDA backend"), hint: hint.into() })
        };
        match format {
            TensorFormat::F16 => Ok(Self { bits: 16, token_ranges: false }),
            TensorFormat::Codebook(_) => unsupported(),
            TensorFormat::Affine(affine)
                if affine.rotation.is_some() || affine.bits == Bits::Three || affine.ranges == RangeRule::Symmetric =>
            {
                unsupported()
            }
            TensorFormat::Affine(affine) => match affine.grouping {
                Grouping::Channel => Ok(Self { bits: affine.bits.count() as usize, token_ranges: false }),
                Grouping::Token => Ok(Self { bits: affine.bits.count() as usize, token_ranges: true }),
                Grouping::ChannelTokens(_) | Grouping::TokenChannels(_) => unsupported(),
            },
        }
    }

    const fn range_bytes(&self) -> usize {
        if self.token_ranges { TILE_TOKENS * size_of::<u32>() } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::AffineFormat;

    #[test]
    fn a_page_is_as_large_as_the_format_says() {
        let token = TensorFormat::Affine(AffineFormat::new(Bits::Four, Grouping::Token));
        let formats = [
            SegmentFormat::F16,
            SegmentFormat::per_channel(Bits::One),
            SegmentFormat { key: token, value: token },
            SegmentFormat { key: TensorFormat::F16, value: token },
        ];
        for head_dim in HEAD_DIMS {
            let shape = AttentionShape::new(6, 3, head_dim).unwrap();
            for format in &formats {
                let pages = PageFormat::new(&shape, format).unwrap();
                assert_eq!(pages.head_bytes() * 3, format.page_bytes(&shape), "{format} at {head_dim}");
                assert_eq!(pages.head_bytes() % 16, 0, "copies of 16 bytes");
            }
        }
    }

    #[test]
    fn what_has_no_kernel_is_refused_by_name() {
        let kivi = TensorFormat::Affine(AffineFormat::new(Bits::Two, Grouping::ChannelTokens(32)));
        let shape = AttentionShape::new(4, 2, 128).unwrap();
        let error = PageFormat::new(&shape, &SegmentFormat { key: kivi, value: kivi }).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("per channel and 32 tokens"), "{error}");
        let saw = PageFormat::new(&shape, &SegmentFormat::saw_int4()).unwrap_err();
        assert!(matches!(&saw, Error::Unsupported { .. }), "{saw}");
        let three = PageFormat::new(&shape, &SegmentFormat::per_channel(Bits::Three)).unwrap_err();
        assert!(matches!(&three, Error::Unsupported { .. }), "{three}");
        let symmetric = TensorFormat::Affine(AffineFormat::new(Bits::Eight, Grouping::Token).symmetric());
        let symmetric = PageFormat::new(&shape, &SegmentFormat { key: symmetric, value: symmetric }).unwrap_err();
        assert!(matches!(&symmetric, Error::Unsupported { .. }), "{symmetric}");
        let shape = AttentionShape::new(4, 2, 80).unwrap();
        let error = PageFormat::new(&shape, &SegmentFormat::F16).unwrap_err();
        assert!(error.to_string().contains("head_dim 80"), "{error}");
    }
}
