//! How keys or values are stored: f16, affine codes with their ranges, or codes of a codebook with norms.

use std::fmt;

use super::sketch::Sketch;
use super::{AttentionShape, Bits, Codebook, RangeRule, Rotation, TILE_TOKENS};
use crate::{Error, Result};

/// The largest f16.
const LARGEST_HALF: f32 = 65504.0;

/// The elements of one KV head that share a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Grouping {
    /// One range per channel over all tokens of a span (CalibQuant).
    Channel,
    /// One range per channel and this many consecutive tokens: 32, 64 or 128 (KIVI keys).
    ChannelTokens(usize),
    /// One range per token over the whole head (SAW-INT4, TurboQuant).
    Token,
    /// One range per token and this many consecutive channels: a multiple of 4 that divides `head_dim` (KIVI values).
    TokenChannels(usize),
}

/// Affine codes of a fixed width.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AffineFormat {
    /// Width of a code.
    pub bits: Bits,
    /// The elements that share a range.
    pub grouping: Grouping,
    /// How ranges are computed from the extremes of their groups.
    pub ranges: RangeRule,
    /// Factor of the minimum and maximum before the scale is computed, 0 < shrink ≤ 1. CalibQuant's published code uses
    /// 0.5 for keys and 0.3 for values at 1 bit.
    pub shrink: f32,
    /// Rotation of every row before ranges and codes are computed. Attention undoes it: queries are rotated like the
    /// keys, and outputs of rotated values are rotated back.
    pub rotation: Option<Rotation>,
}

impl AffineFormat {
    /// Codes of `bits` with unshrunk ranges, not rotated.
    pub const fn new(bits: Bits, grouping: Grouping) -> Self {
        Self { bits, grouping, ranges: RangeRule::MinMax, shrink: 1.0, rotation: None }
    }

    /// The same format with ranges about 0.
    #[must_use]
    pub const fn symmetric(self) -> Self {
        Self { ranges: RangeRule::Symmetric, ..self }
    }

    /// The same format for rotated rows.
    #[must_use]
    pub const fn rotated(self, rotation: Rotation) -> Self {
        Self { rotation: Some(rotation), ..self }
    }
}

/// Codes of a [`Codebook`]: the levels of rotated rows, relative to their norms (TurboQuant, arXiv 2504.19874).
///
/// Every token has one norm, [rounded to f16](super::codebook::stored_norm) and stored in the place of a range per
/// token, as a scale with minimum 0; `value = norm · level`. [`NormRule`] defines the norm.
///
/// With a *sketch*, the top bit of every field is the sign of a channel of the residual, rotated once more, and the
/// other bits are the code. The norm of the residual is stored in the place of the range's minimum. See
/// [`sketch`](super::sketch).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CodebookFormat {
    /// Width of a field: 1 to 4 bits, the sign of a sketch included.
    pub bits: Bits,
    /// Rotation of every row before its codes are computed. It gives all channels the density of the codebook.
    pub rotation: Rotation,
    /// The rotations of the residual whose signs are stored. Keys only.
    pub sketch: Option<Sketch>,
    /// The norm that is stored for the levels.
    pub norms: NormRule,
}

/// The norm that is stored with a row of levels. The codes are the same for both rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormRule {
    /// The norm of the row, as published. Levels with the least squared error are shorter than the row by their squared
    /// error. Inner products are too small by that amount, at 1 bit by 36 %.
    Row,
    /// The norm of the row divided by the norm of its levels, so that the decoded row is as long as the row. The
    /// squared error grows and the error of the length vanishes. Not available with a sketch, which estimates the
    /// residual of the levels.
    Renormalized,
}

impl CodebookFormat {
    /// TurboQuant's codec for the least squared error: a randomised rotation of the largest order that divides the
    /// head. If that order is less than the whole head (head_dim 80 and 96), channels have the same distribution only
    /// within each block.
    pub const fn turboquant(bits: Bits, head_dim: usize) -> Self {
        let rotation = Rotation::randomized(Rotation::largest_order(head_dim), TURBOQUANT_SEED);
        Self { bits, rotation, sketch: None, norms: NormRule::Row }
    }

    /// TurboQuant's codec for unbiased inner products (algorithm 2): [`turboquant`](Self::turboquant) with one bit
    /// less, and a sign sketch of the residual. At 1 bit it is the sketch alone, which is QJL (arXiv 2406.03482) with
    /// as many signs as channels.
    ///
    /// The published projections are dense Gaussian matrices. Here the projection is `√head_dim` times [randomised
    /// rotations](Sketch).
    pub const fn turboquant_prod(bits: Bits, head_dim: usize) -> Self {
        Self { sketch: Some(Sketch { seed: SKETCH_SEED }), ..Self::turboquant(bits, head_dim) }
    }

    /// The same format with [norms](NormRule::Renormalized) that make the decoded row as long as the row.
    #[must_use]
    pub const fn renormalized(self) -> Self {
        Self { norms: NormRule::Renormalized, ..self }
    }

    /// The width of the codes of levels: that of a field minus the sign of a sketch. `None` for a sketch alone.
    pub const fn level_bits(&self) -> Option<Bits> {
        match self.sketch {
            None => Some(self.bits),
            Some(_) => Bits::from_count(self.bits.count() - 1),
        }
    }

    pub(super) fn check_head_dim(&self, head_dim: usize) -> Result<()> {
        let levels = self.level_bits().is_none_or(|bits| Codebook::of_format(bits, head_dim).is_some());
        if !levels || self.bits == Bits::Eight {
            let format = TensorFormat::Codebook(*self).to_string();
            return Err(Error::Format { format, reason: "use a codebook of 1 to 4 bits".into() });
        }
        if self.sketch.is_some() && self.norms == NormRule::Renormalized {
            let format = TensorFormat::Codebook(*self).to_string();
            let reason = "a sketch already estimates the residual; use NormRule::Row".into();
            return Err(Error::Format { format, reason });
        }
        self.rotation.check_head_dim(head_dim)
    }
}

/// Seed of the signs of [`CodebookFormat::turboquant`].
const TURBOQUANT_SEED: u32 = 0x7475_7262;

/// Seed of the signs of the sketch of [`CodebookFormat::turboquant_prod`].
const SKETCH_SEED: u32 = 0x736b_6574;

/// The format of one tensor, keys or values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TensorFormat {
    /// IEEE half precision.
    F16,
    /// Affine codes.
    Affine(AffineFormat),
    /// Codes of a codebook.
    Codebook(CodebookFormat),
}

impl TensorFormat {
    /// Bits of one stored element, without ranges.
    pub const fn element_bits(&self) -> usize {
        match self {
            Self::F16 => 16,
            Self::Affine(AffineFormat { bits, .. }) | Self::Codebook(CodebookFormat { bits, .. }) => {
                bits.count() as usize
            }
        }
    }

    /// The width of its codes, if it has codes.
    pub const fn code_bits(&self) -> Option<Bits> {
        match self {
            Self::F16 => None,
            Self::Affine(AffineFormat { bits, .. }) | Self::Codebook(CodebookFormat { bits, .. }) => Some(*bits),
        }
    }

    /// The elements that share a range, if there are ranges. The norms of a codebook's rows are ranges per token.
    pub const fn grouping(&self) -> Option<Grouping> {
        match self {
            Self::F16 => None,
            Self::Affine(affine) => Some(affine.grouping),
            Self::Codebook(_) => Some(Grouping::Token),
        }
    }

    /// The affine format, if this is one.
    pub const fn affine(&self) -> Option<&AffineFormat> {
        match self {
            Self::F16 | Self::Codebook(_) => None,
            Self::Affine(affine) => Some(affine),
        }
    }

    /// The codebook format, if it has a sketch.
    pub const fn sketched(&self) -> Option<&CodebookFormat> {
        match self {
            Self::Codebook(codebook) if codebook.sketch.is_some() => Some(codebook),
            _ => None,
        }
    }

    /// The rotation of rows before they are stored, if there is one.
    pub const fn rotation(&self) -> Option<Rotation> {
        match self {
            Self::F16 => None,
            Self::Affine(affine) => affine.rotation,
            Self::Codebook(codebook) => Some(codebook.rotation),
        }
    }

    /// Whether one f32 range per channel covers the whole span, so that it folds into the query or the output.
    pub fn has_span_ranges(&self) -> bool {
        self.grouping() == Some(Grouping::Channel)
    }

    /// The same format with tile ranges in place of span ranges.
    #[must_use]
    pub const fn with_tile_ranges(self) -> Self {
        match self {
            Self::Affine(AffineFormat { grouping: Grouping::Channel, bits, ranges, shrink, rotation }) => {
                Self::Affine(AffineFormat {
                    grouping: Grouping::ChannelTokens(TILE_TOKENS),
                    bits,
                    ranges,
                    shrink,
                    rotation,
                })
            }
            _ => self,
        }
    }

    /// Number of tile ranges, each a pair of f16 in one word; 0 if there are none. Saturates at the largest number.
    ///
    /// Order inside a tile: `[token group][channel]` for [`Grouping::ChannelTokens`], `[token]` for
    /// [`Grouping::Token`], `[channel group][token]` for [`Grouping::TokenChannels`].
    pub const fn ranges_per_tile(&self, head_dim: usize) -> usize {
        match self.grouping() {
            None | Some(Grouping::Channel) => 0,
            Some(Grouping::ChannelTokens(tokens)) => groups(TILE_TOKENS, tokens).saturating_mul(head_dim),
            Some(Grouping::Token) => TILE_TOKENS,
            Some(Grouping::TokenChannels(channels)) => groups(head_dim, channels).saturating_mul(TILE_TOKENS),
        }
    }

    /// The largest magnitude that is stored in full and decodes within the range of f16: 65504 in f16.
    ///
    /// Scales, minima and norms of tiles are f16. The spread of a group is up to twice its largest element, so codes
    /// store half of that: 32752. Rotated elements and norms are up to `√head_dim` times the largest element of a row,
    /// so their limit is `32752 / √head_dim`: 4094 at head_dim 64, 2047 at 256. Renormalised norms are divided by the
    /// length of the levels. A row whose rotation lies in a single channel therefore decodes too short from 0.43 times
    /// that limit on (4 bits, head_dim 256). [`KvCache`](crate::KvCache) refuses larger elements. Kernels do not check
    /// them: what they store of larger elements may be infinite or NaN, and may differ between backends.
    pub fn largest_element(&self, head_dim: usize) -> f32 {
        match (self, self.rotation()) {
            (Self::F16, _) => LARGEST_HALF,
            (_, None) => LARGEST_HALF / 2.0,
            (_, Some(_)) => (f64::from(LARGEST_HALF) / 2.0 / (head_dim as f64).sqrt()) as f32,
        }
    }

    /// Whether a token's codes and ranges depend on that token alone, so that tokens can be stored one by one.
    pub const fn takes_single_tokens(&self) -> bool {
        matches!(self.grouping(), None | Some(Grouping::Token | Grouping::TokenChannels(_)))
    }

    /// Whether centring helps the keys. Scales, ranges and norms of single tokens grow with what all tokens have in
    /// common. Ranges per channel already have it in their minima.
    pub const fn takes_centre(&self) -> bool {
        self.takes_single_tokens()
    }

    /// The place of an element's range among the ranges of its tile (see [`TensorFormat::ranges_per_tile`]). Saturates
    /// at the largest number.
    pub const fn range_index(&self, head_dim: usize, token: usize, channel: usize) -> usize {
        match self.grouping() {
            None => 0,
            Some(Grouping::Channel) => channel,
            Some(Grouping::ChannelTokens(tokens)) => {
                groups(token, tokens).saturating_mul(head_dim).saturating_add(channel)
            }
            Some(Grouping::Token) => token,
            Some(Grouping::TokenChannels(channels)) => {
                groups(channel, channels).saturating_mul(TILE_TOKENS).saturating_add(token)
            }
        }
    }

    pub(super) fn check(&self, shape: &AttentionShape) -> Result<()> {
        let reject = |reason: String| Err(Error::Format { format: self.to_string(), reason });
        let affine = match self {
            Self::F16 => return Ok(()),
            Self::Affine(affine) => affine,
            Self::Codebook(codebook) => return codebook.check_head_dim(shape.head_dim()),
        };
        if !(affine.shrink > 0.0 && affine.shrink <= 1.0) {
            return reject(format!("range shrink {} is outside 0 < shrink ≤ 1", affine.shrink));
        }
        if affine.ranges == RangeRule::Symmetric && affine.bits == Bits::One {
            return reject("ranges about 0 have only the code 0 at 1 bit; use 2 bits or more".into());
        }
        if let Some(rotation) = affine.rotation {
            rotation.check(shape)?;
        }
        match affine.grouping {
            Grouping::ChannelTokens(tokens) if ![32, 64, 128].contains(&tokens) => {
                reject(format!("groups of {tokens} tokens; use 32, 64 or 128"))
            }
            Grouping::TokenChannels(channels)
                if channels == 0 || channels % 4 != 0 || !shape.head_dim().is_multiple_of(channels) =>
            {
                reject(format!(
                    "groups of {channels} channels; use a multiple of 4 that divides head_dim {}",
                    shape.head_dim()
                ))
            }
            _ => Ok(()),
        }
    }
}

/// Whole groups of `size` among `count`; 0 for size 0, which every check refuses.
const fn groups(count: usize, size: usize) -> usize {
    match count.checked_div(size) {
        Some(groups) => groups,
        None => 0,
    }
}

impl fmt::Display for TensorFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let affine = match self {
            Self::F16 => return f.write_str("f16"),
            Self::Affine(affine) => affine,
            Self::Codebook(codebook) => {
                match (codebook.sketch, codebook.level_bits()) {
                    (Some(_), None) => f.write_str("1-bit sketch")?,
                    (Some(_), Some(bits)) => write!(f, "{bits}-bit codebook and 1-bit sketch")?,
                    (None, _) => write!(f, "{}-bit codebook", codebook.bits)?,
                }
                write!(f, ", {}", codebook.rotation)?;
                return if codebook.norms == NormRule::Renormalized { f.write_str(", renormalised") } else { Ok(()) };
            }
        };
        write!(f, "{}-bit ", affine.bits)?;
        match affine.grouping {
            Grouping::Channel => f.write_str("per channel")?,
            Grouping::ChannelTokens(tokens) => write!(f, "per channel and {tokens} tokens")?,
            Grouping::Token => f.write_str("per token")?,
            Grouping::TokenChannels(channels) => write!(f, "per token and {channels} channels")?,
        }
        if affine.ranges == RangeRule::Symmetric {
            f.write_str(", symmetric")?;
        }
        if affine.shrink != 1.0 {
            write!(f, ", ranges × {}", affine.shrink)?;
        }
        if let Some(rotation) = affine.rotation {
            write!(f, ", {rotation}")?;
        }
        Ok(())
    }
}
