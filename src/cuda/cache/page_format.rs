//! The formats that have CUDA kernels, and the place of their tiles in a page.

use crate::cuda::device::program::Program;
use crate::cuda::sources::SOURCES;
use crate::format::codebook::level_unit;
use crate::format::sketch::{Sketch, sketch_level};
use crate::format::{
    AttentionShape, Grouping, KeyOrValue, NormRule, RangeRule, Rotation, SegmentFormat, TILE_TOKENS, TensorFormat,
};
use crate::{Error, Result};

/// Fragments consist of this many channels of keys. Rows are padded with zeros to a multiple of it (head_dim 80).
const FRAGMENT_CHANNELS: usize = 32;

/// One segment format at one head dimension: the unit for which kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PageFormat {
    /// Channels as stored, padding included.
    pub(crate) head_dim: usize,
    /// Channels of the tensors.
    pub(crate) channels: usize,
    pub(crate) key: TensorPages,
    pub(crate) value: TensorPages,
}

/// Keys or values of a page format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TensorPages {
    pub(crate) bits: usize,
    /// The elements that share a range; `None` for f16.
    pub(crate) grouping: Option<Grouping>,
    /// Whether ranges are symmetric about 0.
    pub(super) symmetric: bool,
    /// Bits of the unit of a codebook's levels; 0 for codes with ranges, and for a sketch alone.
    pub(super) level_unit: u32,
    /// Bits of the level of a sketch and the seed of its rotations; zeros without a sketch.
    pub(super) sketch: [u32; 2],
    /// Whether norms are divided by those of the levels.
    pub(super) renormalized: bool,
    /// How rows are rotated before they are stored.
    pub(crate) rotation: Option<Rotation>,
}

impl PageFormat {
    /// # Errors
    /// [`Error::Unsupported`] names the part without a kernel.
    pub(crate) fn new(shape: &AttentionShape, format: &SegmentFormat) -> Result<Self> {
        let channels = shape.head_dim();
        let tensor = |format| TensorPages::new(format, channels);
        Ok(Self { key: tensor(&format.key)?, value: tensor(&format.value)?, ..Self::f16(channels) })
    }

    /// The f16 pages of a head dimension. Every head dimension has them.
    pub(crate) const fn f16(channels: usize) -> Self {
        let head_dim = channels.next_multiple_of(FRAGMENT_CHANNELS);
        Self { head_dim, channels, key: TensorPages::F16, value: TensorPages::F16 }
    }

    /// True if keys or values are codes.
    pub(crate) const fn packed(&self) -> bool {
        self.key.bits != 16 || self.value.bits != 16
    }

    pub(crate) const fn tensor(&self, which: KeyOrValue) -> &TensorPages {
        match which {
            KeyOrValue::Key => &self.key,
            KeyOrValue::Value => &self.value,
        }
    }

    /// Bytes of a tile of keys or of values.
    pub(crate) const fn tile_bytes(&self, which: KeyOrValue) -> usize {
        TILE_TOKENS * self.head_dim * self.tensor(which).bits / 8
    }

    /// Offset of a head's tile of keys or of values in its part of a page.
    pub(super) const fn tile_offset(&self, which: KeyOrValue) -> usize {
        match which {
            KeyOrValue::Key => 0,
            KeyOrValue::Value => self.tile_bytes(KeyOrValue::Key),
        }
    }

    /// Bytes of one head of a page: the tiles and their ranges.
    pub(crate) const fn head_bytes(&self) -> usize {
        self.tile_bytes(KeyOrValue::Key)
            + self.tile_bytes(KeyOrValue::Value)
            + self.key.range_bytes(self.head_dim)
            + self.value.range_bytes(self.head_dim)
    }

    /// Number of tile ranges of keys or of values.
    pub(crate) const fn ranges_per_tile(&self, which: KeyOrValue) -> usize {
        self.tensor(which).range_bytes(self.head_dim) / size_of::<u32>()
    }

    /// Units of a tile that one thread of `quantize` or `dequantize` moves: words, or three of them at 3 bits.
    pub(crate) const fn units_per_tile(&self, which: KeyOrValue) -> usize {
        let words = self.tile_bytes(which) / size_of::<u32>();
        if self.tensor(which).bits == 3 { words / 3 } else { words }
    }

    /// Whether ranges of keys or of values change within the rows of a tile.
    pub(crate) const fn is_grouped(&self) -> bool {
        self.key.is_grouped(self.head_dim) || self.value.is_grouped(self.head_dim)
    }

    /// The macros of `cuda/common/tile.cuh` and `rotation.cuh`.
    pub(crate) fn defines(&self) -> Vec<(&'static str, usize)> {
        let order = |tensor: &TensorPages| tensor.rotation.map_or(0, |rotation| rotation.order());
        let seed = |tensor: &TensorPages| tensor.rotation.and_then(|rotation| rotation.seed());
        let dealt = |tensor: &TensorPages| {
            tensor.rotation.is_some_and(|rotation| rotation.dealt_blocks(self.channels) > 1).into()
        };
        vec![
            ("HEAD_DIM", self.head_dim),
            ("TENSOR_CHANNELS", self.channels),
            ("KEY_BITS", self.key.bits),
            ("VALUE_BITS", self.value.bits),
            ("KEY_GROUP_TOKENS", self.key.group(self.head_dim)[0]),
            ("KEY_GROUP_CHANNELS", self.key.group(self.head_dim)[1]),
            ("VALUE_GROUP_TOKENS", self.value.group(self.head_dim)[0]),
            ("VALUE_GROUP_CHANNELS", self.value.group(self.head_dim)[1]),
            ("KEY_LEVEL_UNIT", self.key.level_unit as usize),
            ("VALUE_LEVEL_UNIT", self.value.level_unit as usize),
            ("KEY_SKETCH_LEVEL", self.key.sketch[0] as usize),
            ("KEY_SKETCH_SEED", self.key.sketch[1] as usize),
            ("KEY_RENORMALIZED", self.key.renormalized.into()),
            ("VALUE_RENORMALIZED", self.value.renormalized.into()),
            ("KEY_SYMMETRIC", self.key.symmetric.into()),
            ("VALUE_SYMMETRIC", self.value.symmetric.into()),
            ("KEY_ROTATION_ORDER", order(&self.key)),
            ("KEY_ROTATION_SIGNED", seed(&self.key).is_some().into()),
            ("KEY_ROTATION_DEALT", dealt(&self.key)),
            ("KEY_ROTATION_SEED", seed(&self.key).unwrap_or(0) as usize),
            ("VALUE_ROTATION_ORDER", order(&self.value)),
            ("VALUE_ROTATION_SIGNED", seed(&self.value).is_some().into()),
            ("VALUE_ROTATION_DEALT", dealt(&self.value)),
            ("VALUE_ROTATION_SEED", seed(&self.value).unwrap_or(0) as usize),
        ]
    }

    /// The kernels that move rows into pages and back out.
    pub(crate) fn rows_program(&self) -> Program {
        const FILES: &[&str] = &[
            "centre_keys.cu",
            "uncentre_keys.cu",
            "hadamard.cu",
            "ranges_span.cu",
            "ranges_tile.cu",
            "code_rows.cu",
            "find_non_finite.cu",
            "dequantize.cu",
            "quantize.cu",
        ];
        Program { sources: &SOURCES, files: FILES, defines: self.defines() }
    }

    /// The kernels that compute centres. They are the same for all formats.
    pub(crate) fn mean_program(&self) -> Program {
        Program { sources: &SOURCES, files: &["key_mean.cu"], defines: Self::f16(self.channels).defines() }
    }

    /// The kernels that store the writes of a step.
    pub(crate) fn step_program(&self) -> Program {
        Program { sources: &SOURCES, files: &["append.cu", "copy_page.cu", "pack_windows.cu"], defines: self.defines() }
    }

    /// [`Self::step_program`] for centred keys.
    pub(crate) fn centred_step_program(&self) -> Program {
        let mut program = self.step_program();
        program.defines.push(("KEY_CENTRED", 1));
        program
    }
}

impl TensorPages {
    const F16: Self = Self {
        bits: 16,
        grouping: None,
        symmetric: false,
        level_unit: 0,
        sketch: [0, 0],
        renormalized: false,
        rotation: None,
    };

    fn new(format: &TensorFormat, channels: usize) -> Result<Self> {
        match format {
            TensorFormat::F16 => Ok(Self::F16),
            TensorFormat::Codebook(codebook) => {
                let unit = |bits| {
                    level_unit(bits, channels).map(f32::to_bits).ok_or_else(|| Error::Unsupported {
                        what: format!("format {format} on the CUDA backend"),
                        hint: "use a codebook of 1 to 4 bits".into(),
                    })
                };
                let sketch = |sketch: Sketch| [sketch_level(channels).to_bits(), sketch.seed];
                Ok(Self {
                    bits: codebook.bits.count() as usize,
                    grouping: Some(Grouping::Token),
                    symmetric: false,
                    level_unit: codebook.level_bits().map_or(Ok(0), unit)?,
                    sketch: codebook.sketch.map_or([0, 0], sketch),
                    renormalized: codebook.norms == NormRule::Renormalized,
                    rotation: Some(codebook.rotation),
                })
            }
            TensorFormat::Affine(affine) => Ok(Self {
                bits: affine.bits.count() as usize,
                grouping: Some(affine.grouping),
                symmetric: affine.ranges == RangeRule::Symmetric,
                level_unit: 0,
                sketch: [0, 0],
                renormalized: false,
                rotation: affine.rotation,
            }),
        }
    }

    /// Whether whole rows are coded before they are packed: their fields and norms depend on more than ranges and
    /// elements.
    pub(crate) const fn codes_rows(&self) -> bool {
        self.sketched() || self.renormalized
    }

    /// True if fields hold the sign of a sketch.
    pub(crate) const fn sketched(&self) -> bool {
        self.sketch[0] != 0
    }

    /// Tokens and channels of the elements that share a tile range; zeros if there are none.
    /// Whether each channel has one range over a span.
    pub(crate) const fn has_span_ranges(&self) -> bool {
        matches!(self.grouping, Some(Grouping::Channel))
    }

    /// Whether each token has one range for all its channels.
    pub(crate) const fn has_token_ranges(&self) -> bool {
        matches!(self.grouping, Some(Grouping::Token))
    }

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
            [tokens, channels] => TILE_TOKENS / tokens * head_dim.div_ceil(channels) * size_of::<u32>(),
        }
    }

    /// Whether ranges change within the rows of a tile: those of groups of tokens do, and those of groups of channels
    /// smaller than a row.
    pub(crate) const fn is_grouped(&self, head_dim: usize) -> bool {
        match self.grouping {
            Some(Grouping::ChannelTokens(_)) => true,
            Some(Grouping::TokenChannels(channels)) => channels < head_dim,
            _ => false,
        }
    }

    /// Groups of channels in a row, or 1 without groups: `KEY_ROW_GROUPS` in `cuda/common/tile.cuh`.
    pub(crate) const fn row_groups(&self, head_dim: usize) -> usize {
        match self.grouping {
            Some(Grouping::TokenChannels(channels)) => head_dim.div_ceil(channels),
            _ => 1,
        }
    }

    /// Bytes of the tile ranges of `tokens` tokens: `RANGE_ROW_BYTES` in `cuda/common/attend_call.cuh`.
    pub(crate) const fn step_range_bytes(&self, head_dim: usize, tokens: usize) -> usize {
        let groups = match self.group(head_dim) {
            [0, _] | [_, 0] => 0,
            [group, 1] if group > tokens => head_dim,
            [group, 1] => tokens / group * head_dim,
            [_, channels] => tokens * head_dim.div_ceil(channels),
        };
        groups * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AffineFormat, Bits, HEAD_DIMS};

    #[test]
    fn a_page_is_as_large_as_the_format_says() {
        let grouped = |grouping| TensorFormat::Affine(AffineFormat::new(Bits::Four, grouping));
        let token = grouped(Grouping::Token);
        let formats = [
            SegmentFormat::F16,
            SegmentFormat::per_channel(Bits::One),
            SegmentFormat::per_channel(Bits::Three),
            SegmentFormat::turboquant(Bits::Four, 64),
            SegmentFormat::turboquant_prod(Bits::Two, 64),
            SegmentFormat { key: token, value: token },
            SegmentFormat { key: TensorFormat::F16, value: token },
            SegmentFormat { key: grouped(Grouping::ChannelTokens(32)), value: grouped(Grouping::TokenChannels(16)) },
        ];
        for head_dim in HEAD_DIMS.into_iter().filter(|head_dim| head_dim.is_multiple_of(FRAGMENT_CHANNELS)) {
            let shape = AttentionShape::new(6, 3, head_dim).unwrap();
            for format in &formats {
                let pages = PageFormat::new(&shape, format).unwrap();
                assert_eq!(pages.head_bytes() * 3, format.page_bytes(&shape), "{format} at {head_dim}");
                assert_eq!(pages.head_bytes() % 16, 0, "copies of 16 bytes");
            }
        }
    }

    /// Rows of 80 channels are stored in tiles of 96.
    #[test]
    fn rows_are_stored_in_whole_fragments() {
        let shape = AttentionShape::new(4, 2, 80).unwrap();
        let token_channels = TensorFormat::Affine(AffineFormat::new(Bits::Four, Grouping::TokenChannels(20)));
        let format = SegmentFormat { key: TensorFormat::F16, value: token_channels };
        let pages = PageFormat::new(&shape, &format).unwrap();
        assert_eq!((pages.head_dim, pages.channels), (96, 80));
        assert_eq!(pages.tile_bytes(KeyOrValue::Key), 128 * 96 * 2);
        assert_eq!(pages.ranges_per_tile(KeyOrValue::Value), 128 * 5);
    }
}
