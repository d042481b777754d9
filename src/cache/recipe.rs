//! Recipes: how a cache stores what it is given.

use crate::backend::QueryPrecision;
use crate::format::{Bits, Calibration, SegmentFormat};
use crate::plan::TokenRange;

/// What happens to tokens that decoding appends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RecentWindow {
    /// They stay in f16 (CalibQuant).
    KeepF16,
    /// They are packed in the recipe's format tile by tile: each full tile of 128 as soon as at least `newer` newer
    /// tokens are held, so that between `newer` and `newer + 127` of the newest tokens are in f16 (the residual window
    /// of KIVI).
    PackTiles {
        /// Newer tokens that stay in f16, at least.
        newer: usize,
    },
    /// Each token is packed as it arrives, into the open tile. Needs a format whose codes and ranges depend on the token
    /// alone: see [`SegmentFormat::takes_single_tokens`].
    PackTokens,
}

/// How a [`KvCache`](super::KvCache) stores and attends: the packed format beside f16, and what goes where.
///
/// ```
/// use kvpack::cache::{Recipe, RecentWindow};
/// use kvpack::{Bits, Calibration};
/// let recipe = Recipe::calibquant(Bits::One).with_calibration(Calibration::new(0.0, 3.0)?);
/// assert_eq!(recipe.recent, RecentWindow::KeepF16);
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// Format of the packed spans.
    pub packed: SegmentFormat,
    /// Calibration of the scores of every packed span, each with its own extremes.
    pub calibration: Option<Calibration>,
    /// What happens to appended tokens.
    pub recent: RecentWindow,
    /// Of the appended tokens, those among so many first tokens of a sequence stay in f16, in whole tiles where tiles are
    /// packed: attention sinks (StreamingLLM, arXiv 2309.17453) cost little to keep and much to lose.
    pub sink: usize,
    /// Precision of query and weights where packed keys and values are multiplied as integers.
    pub query: QueryPrecision,
}

impl Recipe {
    /// Everything in f16: the baseline. Spans that ask to be packed are stored in f16 too.
    pub const fn f16() -> Self {
        Self::of(SegmentFormat::F16, RecentWindow::KeepF16)
    }

    /// CalibQuant (arXiv 2502.14882): packed spans (the visual tokens) with one range per channel and span, shrunk at
    /// 1 bit as in the published code; text and decoded tokens in f16.
    ///
    /// Scores are not calibrated until [`Recipe::with_calibration`] says how: the published code uses (0, 3), and
    /// [`Calibration::search`] finds what suits the data at hand.
    pub const fn calibquant(bits: Bits) -> Self {
        Self::of(SegmentFormat::calibquant(bits), RecentWindow::KeepF16)
    }

    /// Packed spans and decoded tokens in `packed`: each token as it arrives where the format
    /// [takes single tokens](SegmentFormat::takes_single_tokens), otherwise as soon as tokens fill a tile.
    pub const fn pack_all(packed: SegmentFormat) -> Self {
        let at_once = packed.takes_single_tokens();
        Self::of(packed, if at_once { RecentWindow::PackTokens } else { RecentWindow::PackTiles { newer: 0 } })
    }

    /// The same recipe, packing appended tokens tile by tile behind a window of at least `newer` newest tokens in f16.
    #[must_use]
    pub const fn with_window(self, newer: usize) -> Self {
        Self { recent: RecentWindow::PackTiles { newer }, ..self }
    }

    /// The same recipe, keeping appended tokens among the first `sink` tokens in f16.
    #[must_use]
    pub const fn with_sink(self, sink: usize) -> Self {
        Self { sink, ..self }
    }

    /// The same recipe with calibrated scores of packed spans.
    #[must_use]
    pub const fn with_calibration(self, calibration: Calibration) -> Self {
        Self { calibration: Some(calibration), ..self }
    }

    const fn of(packed: SegmentFormat, recent: RecentWindow) -> Self {
        Self { packed, calibration: None, recent, sink: 0, query: QueryPrecision::Int16 }
    }

    /// True if packing changes anything.
    pub(super) fn packs(&self) -> bool {
        self.packed != SegmentFormat::F16
    }
}

/// Where a span of a prompt is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpanStorage {
    /// In f16.
    F16,
    /// In the packed format of the recipe.
    Packed,
}

/// A run of prompt tokens that is stored as one span, with ranges of its own where the format has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptSpan {
    /// The tokens.
    pub tokens: TokenRange,
    /// Where they go.
    pub storage: SpanStorage,
}

impl PromptSpan {
    /// Tokens that stay in f16.
    pub const fn f16(tokens: TokenRange) -> Self {
        Self { tokens, storage: SpanStorage::F16 }
    }

    /// Tokens that are packed.
    pub const fn packed(tokens: TokenRange) -> Self {
        Self { tokens, storage: SpanStorage::Packed }
    }
}
