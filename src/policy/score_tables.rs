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
    /// maximum; `TEXT` 0 like images, 1 raised, 2 stays; `GROUP` sums of a token of a KV head.
    pub(crate) constants: [(&'static str, usize); 4],
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
            constants: [("WEIGHING", weighing), ("POOL", pool), ("TEXT", text), ("GROUP", self.group)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{HeadAggregation, Pooling, QueryPositions, ScoreRule, Spans};

    /// What a kernel is told: positions only where it weighs by them, boundaries only where text counts.
    #[test]
    fn kernels_get_what_they_need() {
        let spans = Spans::new(9, &[TokenRange::new(2, 5).unwrap()]).unwrap();
        let rows = QueryPositions::last(2, 9).unwrap();
        let tables = |weighing, pool: Option<Pool>, text, group| {
            let pooling = pool.map(|pool| Pooling::new(pool, 7).unwrap());
            let scores = ScoreRule { aggregation: HeadAggregation::Mean, weighing, pooling };
            ScoreRequest { spans: &spans, rows: &rows, scores, group, recent: 3, text }.tables()
        };
        let plain = tables(Weighing::Sum, None, TextRule::Equal, 1);
        assert_eq!((plain.tokens, plain.recent_from, plain.half_width), (9, 6, 0));
        assert!(plain.rows.is_empty() && plain.boundaries.is_empty());
        assert_eq!(plain.constants.map(|(_, value)| value), [0, 0, 0, 1]);
        for (pool, text, constants) in
            [(Pool::Average, TextRule::Raised, [1, 1, 1, 4]), (Pool::Max, TextRule::Stays, [1, 2, 2, 4])]
        {
            let of = tables(Weighing::MeanOfVisible, Some(pool), text, 4);
            assert_eq!((of.half_width, of.rows, of.boundaries), (3, vec![7, 8], vec![2, 5]));
            assert_eq!(of.constants.map(|(_, value)| value), constants);
        }
    }
}
