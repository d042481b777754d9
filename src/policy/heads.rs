//! How the scores of a group's query heads become the scores of their KV head.

/// How the column sums of the query heads that share a KV head are aggregated.
///
/// Published methods differ here. Sum and mean are not equivalent once scores are pooled, compared with a threshold or
/// with those of another layer; SnapKV, H2O and VL-Cache take the mean. Every call therefore names its aggregation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeadAggregation {
    /// Every query head keeps its own: `[query_heads, tokens]`.
    Each,
    /// Their sum: `[kv_heads, tokens]`, as for the other aggregations.
    Sum,
    /// Their mean.
    Mean,
    /// The largest.
    Max,
}

impl HeadAggregation {
    /// All aggregations.
    pub const ALL: [Self; 4] = [Self::Each, Self::Sum, Self::Mean, Self::Max];

    /// Rows of the result.
    pub const fn rows(self, query_heads: usize, kv_heads: usize) -> usize {
        match self {
            Self::Each => query_heads,
            _ => kv_heads,
        }
    }

    /// Aggregates the scores of a group's heads. `None` where each head keeps its own scores, and for no heads.
    pub fn of(self, scores: impl ExactSizeIterator<Item = f64>) -> Option<f64> {
        if scores.len() == 0 {
            return None;
        }
        let heads = scores.len() as f64;
        match self {
            Self::Each => None,
            Self::Sum => Some(scores.sum()),
            Self::Mean => Some(scores.sum::<f64>() / heads),
            // A score that is not a number stays one, as in a sum.
            Self::Max => scores.reduce(|largest, x| if x > largest || x.is_nan() { x } else { largest }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_scores_of_each_head_have_a_row_for_it() {
        for aggregation in HeadAggregation::ALL {
            let rows = if aggregation == HeadAggregation::Each { 12 } else { 4 };
            assert_eq!(aggregation.rows(12, 4), rows, "{aggregation:?}");
        }
    }

    #[test]
    fn a_score_that_is_no_number_is_not_lost() {
        for aggregation in [HeadAggregation::Sum, HeadAggregation::Mean, HeadAggregation::Max] {
            for scores in [[f64::NAN, 1.0, 2.0], [1.0, f64::NAN, 2.0], [1.0, 2.0, f64::NAN]] {
                let aggregated = aggregation.of(scores.into_iter());
                assert!(aggregated.is_some_and(f64::is_nan), "{aggregation:?} of {scores:?}: {aggregated:?}");
            }
        }
        assert_eq!(HeadAggregation::Max.of([-3.0, -1.0, -2.0].into_iter()), Some(-1.0));
    }
}
