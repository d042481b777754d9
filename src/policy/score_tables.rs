//! A [`ScoreRequest`] in the form that kernels take.

use super::eviction::TextRule;
use super::method::Weighing;
use super::pooling::Pool;
use super::token_scores::ScoreRequest;
use crate::counts::saturated;
use crate::plan::TokenRange;

/// The numbers of a request that the kernels of all devices take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ScoreTables {
    pub(crate) tokens: usize,
    /// The first of the recent tokens.
    pub(crate) recent_from: usize,
    /// Tokens that are pooled on either side.
    pub(crate) half_width: usize,
    /// Positions of the rows; empty if the kernel does not use them.
    pub(crate) rows: Vec<u32>,
    /// Starts and ends of the images, in order: a token is text if an even number of them are at or before it. Empty if
    /// text is scored like images.
    pub(crate) boundaries: Vec<u32>,
    /// The constants of the kernel: `WEIGHING` 0 sum, 1 mean of the rows that see a token; `POOL` 0 none, 1 average, 2
    /// maximum; `TEXT` 0 like images, 1 raised, 2 stays.
    pub(crate) constants: [(&'static str, usize); 3],
}

impl ScoreRequest<'_> {
    pub(crate) fn tables(&self) -> ScoreTables {
        let weighing = usize::from(self.scores.weighing == Weighing::MeanOfVisible);
        let (pool, half_width) = match self.scores.pooling {
            None => (0, 0),
            Some(pooling) => (if pooling.pool() == Pool::Average { 1 } else { 2 }, pooling.width() / 2),
        };
        let text = match self.text {
            TextRule::Equal => 0,
            TextRule::Raised => 1,
            TextRule::Stays => 2,
        };
        // No prompt has positions beyond 32 bits.
        let edges = |image: &TokenRange| [saturated(image.start()), saturated(image.end())];
        let boundaries = self.spans.images().iter().flat_map(edges).collect();
        ScoreTables {
            tokens: self.tokens(),
            recent_from: self.tokens() - self.recent,
            half_width,
            rows: if weighing == 1 { self.rows.positions().to_vec() } else { Vec::new() },
            boundaries: if text > 0 { boundaries } else { Vec::new() },
            constants: [("WEIGHING", weighing), ("POOL", pool), ("TEXT", text)],
        }
    }
}
