//! The formats of a segment: the named methods, and what keys and values allow together.

use std::fmt;

use super::tensor_format::{AffineFormat, CodebookFormat, Grouping, TensorFormat};
use super::{AttentionShape, Bits, KeyOrValue, Rotation, TILE_TOKENS};
use crate::{Error, Result};

/// The formats of a segment's keys and values. They are independent of each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SegmentFormat {
    /// Format of the keys.
    pub key: TensorFormat,
    /// Format of the values.
    pub value: TensorFormat,
}

impl SegmentFormat {
    /// Keys and values in f16.
    pub const F16: Self = Self { key: TensorFormat::F16, value: TensorFormat::F16 };

    /// Keys and values as affine codes of one width with one range per channel over the span, as in CalibQuant (arXiv
    /// 2502.14882, §3.1), without range shrinking.
    pub const fn per_channel(bits: Bits) -> Self {
        let format = TensorFormat::Affine(AffineFormat::new(bits, Grouping::Channel));
        Self { key: format, value: format }
    }

    /// CalibQuant as published: [`SegmentFormat::per_channel`]. At 1 bit the ranges of keys are multiplied by 0.5 and
    /// those of values by 0.3.
    pub const fn calibquant(bits: Bits) -> Self {
        let (key, value) = match bits {
            Bits::One => (0.5, 0.3),
            _ => (1.0, 1.0),
        };
        Self {
            key: TensorFormat::Affine(AffineFormat { shrink: key, ..AffineFormat::new(bits, Grouping::Channel) }),
            value: TensorFormat::Affine(AffineFormat { shrink: value, ..AffineFormat::new(bits, Grouping::Channel) }),
        }
    }

    /// The format of keys or of values.
    pub const fn tensor(&self, which: KeyOrValue) -> &TensorFormat {
        match which {
            KeyOrValue::Key => &self.key,
            KeyOrValue::Value => &self.value,
        }
    }

    /// The same format with tile ranges in place of span ranges. Tiles that are packed one by one as a sequence grows
    /// then form a single span.
    ///
    /// ```
    /// use kvpack::{Bits, SegmentFormat};
    /// let tiles = SegmentFormat::calibquant(Bits::Two).with_tile_ranges();
    /// assert_eq!(tiles.to_string(), "2-bit per channel and 128 tokens");
    /// assert_eq!(SegmentFormat::saw_int4().with_tile_ranges(), SegmentFormat::saw_int4());
    /// ```
    #[must_use]
    pub const fn with_tile_ranges(self) -> Self {
        Self { key: self.key.with_tile_ranges(), value: self.value.with_tile_ranges() }
    }

    /// Whether tokens can be stored one by one: keys and values are f16 or have ranges of their own for every token.
    pub const fn takes_single_tokens(&self) -> bool {
        self.key.takes_single_tokens() && self.value.takes_single_tokens()
    }

    /// The reason why [`SegmentFormat::takes_single_tokens`] is false, and what to do.
    pub(crate) fn why_no_single_tokens(&self) -> String {
        format!(
            "single tokens cannot go into a store of {self}, whose ranges span several; use formats with ranges per token, \
             or collect a tile of {TILE_TOKENS} in f16 and quantize it"
        )
    }

    /// The reason why keys of the format cannot be centred ([`TensorFormat::takes_centre`]), and what to do.
    pub(crate) fn why_no_centre(&self) -> String {
        format!(
            "keys of {} have ranges of their own for every channel, whose minima hold what all tokens have in common; a centre \
             would change nothing, so leave it out",
            self.key
        )
    }

    /// SAW-INT4 (arXiv 2604.19157): 4-bit codes with one range per token and head, keys rotated by Hadamard transforms
    /// of order 16. Tokens are packed as they arrive, without a residual window.
    ///
    /// kvpack rounds codes half to even and ranges to f16. [`saw_int4`](crate::format::interchange::saw_int4)
    /// reproduces the published kernel.
    pub const fn saw_int4() -> Self {
        let four_bit = AffineFormat::new(Bits::Four, Grouping::Token);
        Self {
            key: TensorFormat::Affine(four_bit.rotated(Rotation::hadamard(16))),
            value: TensorFormat::Affine(four_bit),
        }
    }

    /// KIVI (arXiv 2402.02750): keys with one range per channel and 32 tokens, values with one range per token and 32
    /// channels.
    pub const fn kivi(bits: Bits) -> Self {
        Self {
            key: TensorFormat::Affine(AffineFormat::new(bits, Grouping::ChannelTokens(32))),
            value: TensorFormat::Affine(AffineFormat::new(bits, Grouping::TokenChannels(32))),
        }
    }

    /// TurboQuant (arXiv 2504.19874) for keys and values: codes of a Lloyd-Max codebook for randomly rotated rows, and
    /// one norm per token.
    pub const fn turboquant(bits: Bits, head_dim: usize) -> Self {
        let format = TensorFormat::Codebook(CodebookFormat::turboquant(bits, head_dim));
        Self { key: format, value: format }
    }

    /// The same format with [norms](NormRule::Renormalized) that make the decoded row as long as the row.
    pub const fn turboquant_renormalized(bits: Bits, head_dim: usize) -> Self {
        let format = TensorFormat::Codebook(CodebookFormat::turboquant(bits, head_dim).renormalized());
        Self { key: format, value: format }
    }

    /// TurboQuant with keys for unbiased inner products (algorithm 2): keys have levels at one bit less and a sign
    /// sketch of their residual. Values form weighted sums, not inner products, and have [levels
    /// alone](SegmentFormat::turboquant).
    pub const fn turboquant_prod(bits: Bits, head_dim: usize) -> Self {
        let key = TensorFormat::Codebook(CodebookFormat::turboquant_prod(bits, head_dim));
        Self { key, value: TensorFormat::Codebook(CodebookFormat::turboquant(bits, head_dim)) }
    }

    /// QJL (arXiv 2406.03482): a key is one sign for each channel of a random projection, and a norm. Values have 4-bit
    /// codes with one range per token. The paper uses more signs than channels; this format uses as many.
    pub const fn qjl(head_dim: usize) -> Self {
        Self {
            key: TensorFormat::Codebook(CodebookFormat::turboquant_prod(Bits::One, head_dim)),
            value: TensorFormat::Affine(AffineFormat::new(Bits::Four, Grouping::Token)),
        }
    }

    /// Checks that heads of `shape` can be stored in this format.
    ///
    /// # Errors
    /// [`Error::Format`] names the parameter that does not fit and what is allowed.
    pub fn check(&self, shape: &AttentionShape) -> Result<()> {
        self.key.check(shape)?;
        self.value.check(shape)?;
        if self.value.sketched().is_some() {
            let reason = "sketches are for keys, whose inner products with queries they estimate".into();
            return Err(Error::Format { format: self.value.to_string(), reason });
        }
        Ok(())
    }
}

impl fmt::Display for SegmentFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.key == self.value { write!(f, "{}", self.key) } else { write!(f, "K {}, V {}", self.key, self.value) }
    }
}
