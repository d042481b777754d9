//! The formats that have CUDA kernels, and where their tiles lie in a page.

use super::program::Program;
use crate::format::codebook::level_unit;
use crate::format::{
    AttentionShape, Bits, Grouping, KeyOrValue, NormRule, RangeRule, Rotation, SegmentFormat, TILE_TOKENS, TensorFormat,
};
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
    /// Which elements share a range; none for f16.
    pub(super) grouping: Option<Grouping>,
    /// Ranges are made about 0.
    pub(super) symmetric: bool,
    /// Bits of the unit of a codebook's levels; 0 where codes have ranges.
    pub(super) level_unit: u32,
    /// How rows are rotated before they are stored.
    pub(super) rotation: Option<Rotation>,
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
        let tensor = |format| TensorPages::new(format, head_dim);
        Ok(Self { head_dim, key: tensor(&format.key)?, value: tensor(&format.value)? })
    }

    /// The f16 pages that every head dimension has.
    pub(super) const fn f16(head_dim: usize) -> Self {
        let f16 = TensorPages { bits: 16, grouping: None, symmetric: false, level_unit: 0, rotation: None };
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
            + self.key.range_bytes(self.head_dim)
            + self.value.range_bytes(self.head_dim)
    }

    /// Ranges beside a tile of keys or of values.
    pub(super) const fn ranges_per_tile(&self, which: KeyOrValue) -> usize {
        self.tensor(which).range_bytes(self.head_dim) / size_of::<u32>()
    }

    /// True if ranges of keys or of values change inside rows of a tile.
    pub(super) const fn is_grouped(&self) -> bool {
        self.key.is_grouped(self.head_dim) || self.value.is_grouped(self.head_dim)
    }

    /// True if a byte of a tile may hold codes of two tokens, whose slots are then a multiple of 16 apart: where the
    /// bit planes of a load are more blocks of channels than a row has, or no divisor of them.
    pub(super) const fn tokens_share_bytes(&self) -> bool {
        let key_blocks = self.head_dim / if self.key.bits == 16 { 16 } else { 32 };
        !key_blocks.is_multiple_of(self.key.planes()) || !(self.head_dim / 16).is_multiple_of(self.value.planes())
    }

    /// The macros of `cuda/common/tile.cuh` and `rotation.cuh`.
    pub(super) fn defines(&self) -> Vec<(&'static str, usize)> {
        let order = |tensor: &TensorPages| tensor.rotation.map_or(0, |rotation| rotation.order());
        let seed = |tensor: &TensorPages| tensor.rotation.and_then(|rotation| rotation.seed());
        vec![
            ("HEAD_DIM", self.head_dim),
            ("KEY_BITS", self.key.bits),
            ("VALUE_BITS", self.value.bits),
            ("KEY_GROUP_TOKENS", self.key.group(self.head_dim)[0]),
            ("KEY_GROUP_CHANNELS", self.key.group(self.head_dim)[1]),
            ("VALUE_GROUP_TOKENS", self.value.group(self.head_dim)[0]),
            ("VALUE_GROUP_CHANNELS", self.value.group(self.head_dim)[1]),
            ("KEY_LEVEL_UNIT", self.key.level_unit as usize),
            ("VALUE_LEVEL_UNIT", self.value.level_unit as usize),
            ("KEY_SYMMETRIC", self.key.symmetric.into()),
            ("VALUE_SYMMETRIC", self.value.symmetric.into()),
            ("KEY_ROTATION_ORDER", order(&self.key)),
            ("KEY_ROTATION_SIGNED", seed(&self.key).is_some().into()),
            ("KEY_ROTATION_SEED", seed(&self.key).unwrap_or(0) as usize),
            ("VALUE_ROTATION_ORDER", order(&self.value)),
            ("VALUE_ROTATION_SIGNED", seed(&self.value).is_some().into()),
            ("VALUE_ROTATION_SEED", seed(&self.value).unwrap_or(0) as usize),
        ]
    }

    /// The kernels that move rows into pages and back.
    pub(super) fn rows_program(&self) -> Program {
        const FILES: &[&str] = &[
            "hadamard.cu",
            "ranges_span.cu",
            "ranges_tile.cu",
            "append.cu",
            "find_non_finite.cu",
            "dequantize.cu",
            "quantize.cu",
        ];
        Program { files: FILES, defines: self.defines() }
    }
}

impl TensorPages {
    fn new(format: &TensorFormat, head_dim: usize) -> Result<Self> {
        let unsupported = || {
            let hint =
                "the CUDA kernels serve f16, and codes of 1, 2, 4 or 8 bits; the wgpu backend serves every format";
            Err(Error::Unsupported { what: format!("format {format} on the CUDA backend"), hint: hint.into() })
        };
        match format {
            TensorFormat::F16 => Ok(Self { bits: 16, grouping: None, symmetric: false, level_unit: 0, rotation: None }),
            format if format.code_bits() == Some(Bits::Three) || format.sketched().is_some() => unsupported(),
            TensorFormat::Codebook(codebook) if codebook.norms == NormRule::Renormalized => unsupported(),
            format if format.rotation().is_some_and(|rotation| rotation.dealt_blocks(head_dim) > 1) => unsupported(),
            TensorFormat::Codebook(codebook) => {
                let Some(unit) = level_unit(codebook.bits, head_dim) else { return unsupported() };
                Ok(Self {
                    bits: codebook.bits.count() as usize,
                    grouping: Some(Grouping::Token),
                    symmetric: false,
                    level_unit: unit.to_bits(),
                    rotation: Some(codebook.rotation),
                })
            }
            TensorFormat::Affine(affine) => Ok(Self {
                bits: affine.bits.count() as usize,
                grouping: Some(affine.grouping),
                symmetric: affine.ranges == RangeRule::Symmetric,
                level_unit: 0,
                rotation: affine.rotation,
            }),
        }
    }

    /// Bit planes of a byte lane.
    const fn planes(&self) -> usize {
        if self.bits == 16 { 1 } else { 8 / self.bits }
    }

    /// Tokens and channels of the elements that share a range beside a tile; zeros if there are none.
    const fn group(&self, head_dim: usize) -> [usize; 2] {
        match self.grouping {
            None | Some(Grouping::Channel) => [0, 0],
            Some(Grouping::ChannelTokens(tokens)) => [tokens, 1],
            Some(Grouping::Token) => [1, head_dim],
            Some(Grouping::TokenChannels(channels)) => [1, channels],
        }
    }

    const fn range_bytes(&self, head_dim: usize) -> usize {
        match self.group(head_dim) {
            [0, _] | [_, 0] => 0,
            [tokens, channels] => TILE_TOKENS / tokens * (head_dim / channels) * size_of::<u32>(),
        }
    }

    /// True if ranges change inside rows of a tile: those of groups of tokens, and of groups of channels smaller than a row.
    pub(super) const fn is_grouped(&self, head_dim: usize) -> bool {
        match self.grouping {
            Some(Grouping::ChannelTokens(_)) => true,
            Some(Grouping::TokenChannels(channels)) => channels < head_dim,
            _ => false,
        }
    }

    /// Groups of channels in a row, 1 where there are none: `KEY_ROW_GROUPS` in `cuda/common/tile.cuh`.
    pub(super) const fn row_groups(&self, head_dim: usize) -> usize {
        match self.grouping {
            Some(Grouping::TokenChannels(channels)) => head_dim / channels,
            _ => 1,
        }
    }

    /// Bytes of the ranges beside a tile that so many tokens need: `RANGE_ROW_BYTES` in `cuda/common/attend_call.cuh`.
    pub(super) const fn step_range_bytes(&self, head_dim: usize, tokens: usize) -> usize {
        let groups = match self.group(head_dim) {
            [0, _] | [_, 0] => 0,
            [group, 1] if group > tokens => head_dim,
            [group, 1] => tokens / group * head_dim,
            [_, channels] => tokens * (head_dim / channels),
        };
        groups * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::AffineFormat;

    #[test]
    fn a_page_is_as_large_as_the_format_says() {
        let grouped = |grouping| TensorFormat::Affine(AffineFormat::new(Bits::Four, grouping));
        let token = grouped(Grouping::Token);
        let formats = [
            SegmentFormat::F16,
            SegmentFormat::per_channel(Bits::One),
            SegmentFormat::turboquant(Bits::Four, 64),
            SegmentFormat { key: token, value: token },
            SegmentFormat { key: TensorFormat::F16, value: token },
            SegmentFormat { key: grouped(Grouping::ChannelTokens(32)), value: grouped(Grouping::TokenChannels(16)) },
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
    fn tokens_share_bytes_where_a_load_holds_more_than_a_row() {
        let shares = |head_dim, bits| {
            let shape = AttentionShape::new(4, 2, head_dim).unwrap();
            PageFormat::new(&shape, &SegmentFormat::per_channel(bits)).unwrap().tokens_share_bytes()
        };
        assert!(!shares(128, Bits::Four) && !shares(128, Bits::Two) && !shares(256, Bits::One));
        assert!(shares(128, Bits::One) && shares(64, Bits::Two) && shares(96, Bits::Four));
    }

    #[test]
    fn what_has_no_kernel_is_refused_by_name() {
        let shape = AttentionShape::new(4, 2, 128).unwrap();
        let three = PageFormat::new(&shape, &SegmentFormat::per_channel(Bits::Three)).unwrap_err();
        assert!(matches!(&three, Error::Unsupported { .. }), "{three}");
        let sketched = PageFormat::new(&shape, &SegmentFormat::turboquant_prod(Bits::Two, 128)).unwrap_err();
        assert!(matches!(&sketched, Error::Unsupported { .. }), "{sketched}");
        let dealt = AffineFormat::new(Bits::Four, Grouping::Token).rotated(Rotation::dealt(16, 1));
        let dealt = SegmentFormat { key: TensorFormat::Affine(dealt), value: TensorFormat::F16 };
        let dealt = PageFormat::new(&shape, &dealt).unwrap_err();
        assert!(matches!(&dealt, Error::Unsupported { .. }), "{dealt}");
        let shape = AttentionShape::new(4, 2, 80).unwrap();
        let error = PageFormat::new(&shape, &SegmentFormat::F16).unwrap_err();
        assert!(error.to_string().contains("head_dim 80"), "{error}");
    }
}
