//! What a step takes on one rank and on several, computed from a few measurements.

use std::fmt;

use super::Placement;
use crate::format::{AttentionShape, SegmentFormat, TILE_TOKENS};
use crate::{Error, Result};

/// A line through two measurements: seconds that do not depend on the bytes, and seconds for every byte.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Line {
    fixed: f64,
    per_byte: f64,
}

impl Line {
    /// Through (bytes, seconds) at two sizes.
    fn through(what: &'static str, small: (u64, f64), large: (u64, f64)) -> Result<Self> {
        let ((less, short), (more, long)) = (small, large);
        let are_times = short.is_finite() && long.is_finite() && short > 0.0 && long > short;
        let bytes = more.saturating_sub(less) as f64;
        if bytes == 0.0 || !are_times {
            let reason = format!(
                "{short} s for {less} bytes and {long} s for {more}; measure two sizes of which the larger takes longer"
            );
            return Err(Error::Plan { what, reason });
        }
        let per_byte = (long - short) / bytes;
        Ok(Self { fixed: (short - per_byte * less as f64).max(0.0), per_byte })
    }

    fn at(&self, bytes: f64) -> f64 {
        self.fixed + self.per_byte * bytes
    }
}

/// What attention of one layer takes on one device, from two measured steps of one format: the bytes of stored keys and
/// values, and seconds.
///
/// ```
/// use kvpack::ranks::ReadTime;
/// // 32 over 8 heads × 128 in f16, one sequence, CUDA on an H200: 9.3 µs at 4k tokens, 123.7 µs at 128k.
/// let f16 = ReadTime::of((4096 * 4096, 9.3e-6), (131_072 * 4096, 123.7e-6))?;
/// assert!((f16.seconds(1 << 32) - 950e-6).abs() < 10e-6); // a million tokens
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadTime(Line);

impl ReadTime {
    /// From (bytes, seconds) of a short and a long step.
    ///
    /// # Errors
    /// [`Error::Plan`] unless the longer step has more bytes and takes longer.
    pub fn of(short: (u64, f64), long: (u64, f64)) -> Result<Self> {
        Ok(Self(Line::through("time of attention", short, long)?))
    }

    /// Seconds for a number of bytes.
    pub fn seconds(&self, bytes: u64) -> f64 {
        self.0.at(bytes as f64)
    }
}

/// What an exchange of states takes: an all-gather between two ranks, measured at two sizes, and what every further
/// rank adds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExchangeTime {
    two: Line,
    further: f64,
}

impl ExchangeTime {
    /// From (bytes of a rank, seconds) of a small and a large all-gather between two ranks.
    ///
    /// # Errors
    /// [`Error::Plan`] unless the larger has more bytes and takes longer.
    pub fn of(small: (u64, f64), large: (u64, f64)) -> Result<Self> {
        Ok(Self { two: Line::through("time of an exchange", small, large)?, further: 0.0 })
    }

    /// The same where every rank beyond the second adds this many seconds, besides the bytes that it sends.
    ///
    /// # Errors
    /// [`Error::Plan`] unless they are finite and not below 0.
    pub fn with_further_ranks(self, seconds: f64) -> Result<Self> {
        if !seconds.is_finite() || seconds < 0.0 {
            let reason = format!("{seconds} s for a further rank; use a finite number, 0 or more");
            return Err(Error::Plan { what: "time of an exchange", reason });
        }
        Ok(Self { further: seconds, ..self })
    }

    /// Seconds to gather these bytes of each rank on all of them; 0 for one rank.
    pub fn seconds(&self, bytes: u64, ranks: usize) -> f64 {
        if ranks < 2 {
            return 0.0;
        }
        let others = (ranks - 1) as f64;
        self.two.at(bytes as f64 * others) + self.further * (others - 1.0)
    }
}

/// The time of one layer's decode step, on one rank and on several.
///
/// A rank takes as long as attention to the tokens that it stores; the longest counts. Then all gather the states of
/// all, 4 bytes for every channel of every query head and its log-sum-exp. The merge is part of the exchange.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Shape of the layer.
    pub shape: AttentionShape,
    /// The format of its tokens.
    pub format: SegmentFormat,
    /// What attention takes, measured for this shape and format.
    pub read: ReadTime,
    /// What an exchange takes.
    pub exchange: ExchangeTime,
}

/// The result of [`StepTime::plan`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SplitTime {
    /// Ranks.
    pub ranks: usize,
    /// Seconds of a layer on one rank.
    pub one: f64,
    /// Seconds of a layer on these ranks: attention and exchange.
    pub split: f64,
    /// Seconds of the exchange alone.
    pub exchange: f64,
}

impl StepTime {
    /// The time of a step of one sequence of this length on these ranks.
    ///
    /// # Errors
    /// As [`Placement::new`].
    pub fn plan(&self, tokens: usize, ranks: usize) -> Result<SplitTime> {
        let longest = Placement::new(ranks)?.share(0)?.tokens(tokens);
        let heads = self.shape.query_heads() as u64;
        let exchange = self.exchange.seconds(heads * (self.shape.head_dim() as u64 + 1) * 4, ranks);
        let of = |tokens: usize| self.read.seconds(self.bytes(tokens));
        Ok(SplitTime { ranks, one: of(tokens), split: of(longest) + exchange, exchange })
    }

    /// The number of ranks, up to `most`, on which a step takes least; the smallest of several.
    ///
    /// # Errors
    /// As [`Placement::new`].
    pub fn best(&self, tokens: usize, most: usize) -> Result<SplitTime> {
        let mut best = self.plan(tokens, most)?;
        for ranks in (1..most).rev() {
            let other = self.plan(tokens, ranks)?;
            if other.split <= best.split {
                best = other;
            }
        }
        Ok(best)
    }

    /// Bytes of the keys and values of a number of tokens of one layer.
    pub fn bytes(&self, tokens: usize) -> u64 {
        let page = self.format.page_bytes(&self.shape) as u64;
        (tokens as u64).saturating_mul(page) / TILE_TOKENS as u64
    }
}

impl SplitTime {
    /// Whether the step takes less than on one rank.
    pub fn pays(&self) -> bool {
        self.split < self.one
    }

    /// The time on one rank, divided by that of all ranks together.
    pub fn efficiency(&self) -> f64 {
        self.one / (self.split * self.ranks as f64)
    }
}

impl fmt::Display for SplitTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pays = if self.pays() { "pays" } else { "does not pay" };
        write!(
            f,
            "{} ranks: {:.1} µs a layer, {:.1} of them the exchange, against {:.1} on one: splitting {pays} \
             ({:.0} % efficient)",
            self.ranks,
            self.split * 1e6,
            self.exchange * 1e6,
            self.one * 1e6,
            self.efficiency() * 100.0
        )
    }
}
