//! Blocks of queries: what of a plan a piece of work takes together.
//!
//! Queries of one run that see the same tokens read them together: a piece of work is a run of tokens for a *block* of
//! neighbouring queries. Causal queries differ only at the end, so that a block sees everything but its last tile
//! together, and the rest query by query; no kernel needs a mask.

use std::ops::Range;

use super::attend::{AttendPlan, PlannedRun, PlannedSpan, Visible};
use crate::format::TILE_TOKENS;

/// Neighbouring queries of a run.
///
/// The last tokens that they see lie in the same span, so that each has at most one piece of work alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// Index of the run.
    pub run: usize,
    /// First query, counted within the run.
    pub first: usize,
    /// Queries.
    pub queries: usize,
}

/// A run of tokens of a span for some of a block's queries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Index of the block.
    pub block: usize,
    /// First query, counted within the block.
    pub first: usize,
    /// Queries: all of the block, or one of it.
    pub queries: usize,
    /// Tokens of the span; the first is a multiple of 128.
    pub tokens: Range<usize>,
}

/// How runs are cut into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockQueries {
    /// Most queries of a block.
    pub most: usize,
    /// Runs of fewer queries than this are taken query by query, and longer ones, if this is more than 1,
    /// in even blocks.
    pub least: usize,
}

/// The blocks of all runs.
pub(crate) fn blocks(plan: &AttendPlan, BlockQueries { most, least }: BlockQueries) -> Vec<Block> {
    let mut starts = vec![Vec::new(); plan.runs().len()];
    if most > 1 {
        for span in plan.segments().iter().flat_map(|segment| segment.spans()) {
            starts[span.run].push(span.start);
        }
    }
    let mut blocks = Vec::with_capacity(plan.runs().len());
    for (index, (run, starts)) in plan.runs().iter().zip(&starts).enumerate() {
        let most = if run.run.queries < least { 1 } else { most };
        let mut first = 0;
        while first < run.run.queries {
            let left = run.run.queries - first;
            let most = if least > 1 { left.div_ceil(left.div_ceil(most.max(1))) } else { most.max(1) };
            let longest = most.min(left);
            let crosses = |queries: &usize| {
                let (before, after) = (run.visible(first), run.visible(first + queries - 1));
                starts.iter().any(|&start| before <= start && start < after)
            };
            let queries = (1..=longest).rev().find(|queries| !crosses(queries)).unwrap_or(1);
            blocks.push(Block { run: index, first, queries });
            first += queries;
        }
    }
    blocks
}

impl Block {
    /// Adds what the block's queries see of a span of its run: first what they see together.
    pub(crate) fn add_parts(&self, index: usize, run: &PlannedRun, span: &PlannedSpan, parts: &mut Vec<Part>) {
        let seen = |query: usize| match run.run.visible {
            Visible::All => span.tokens,
            Visible::Causal => run.visible(self.first + query).saturating_sub(span.start).min(span.tokens),
        };
        let part = |first, queries, tokens: Range<usize>| Part { block: index, first, queries, tokens };
        let (least, most) = (seen(0), seen(self.queries - 1));
        if least == most {
            parts.extend((most > 0).then(|| part(0, self.queries, 0..most)));
            return;
        }
        // Everyone has some of the last tile alone, so that all have the same number of pieces.
        let together = least.saturating_sub(1) / TILE_TOKENS * TILE_TOKENS;
        parts.extend((together > 0).then(|| part(0, self.queries, 0..together)));
        parts.extend((0..self.queries).map(|query| part(query, 1, together..seen(query))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AttentionShape, SegmentFormat};
    use crate::plan::{Page, QueryRun, SpanView, StoreView};
    use proptest::prelude::*;

    /// A kernel for many queries does not take few of them where a run is one query too long.
    #[test]
    fn long_runs_are_cut_evenly() {
        let pages = [Page { shard: 0, index: 0 }; 8];
        let spans = [0, 1].map(|sequence| SpanView { sequence, start: 0, tokens: 1000, pages: &pages, range_slot: 0 });
        let store = StoreView { format: SegmentFormat::F16, calibration: None, spans: spans.to_vec() };
        let runs = [QueryRun::causal(0, 130), QueryRun::causal(1, 3)];
        let plan = AttendPlan::new(AttentionShape::new(1, 1, 64).unwrap(), &runs, &[store]).unwrap();
        let queries = |most, least| {
            blocks(&plan, BlockQueries { most, least }).iter().map(|block| block.queries).collect::<Vec<_>>()
        };
        assert_eq!(queries(64, 16), [44, 43, 43, 1, 1, 1]);
        assert_eq!(queries(64, 1), [64, 64, 2, 3]);
    }

    proptest! {
        /// Every query gets every token that it sees once, and no other, however long blocks and spans are.
        #[test]
        fn every_query_gets_what_it_sees_once(
            lengths in prop::collection::vec(0usize..400, 1..6),
            (queries, all) in (1usize..200, any::<bool>()),
            (most, least) in (1usize..10, 1usize..20),
        ) {
            let total: usize = lengths.iter().sum();
            prop_assume!(total > 0);
            let queries = queries.min(total);
            let pages = [Page { shard: 0, index: 0 }; 4];
            let mut start = 0;
            let spans: Vec<SpanView<'_>> = lengths.iter().map(|&tokens| {
                start += tokens;
                let pages = &pages[..tokens.div_ceil(TILE_TOKENS)];
                SpanView { sequence: 0, start: start - tokens, tokens, pages, range_slot: 0 }
            }).collect();
            let run = if all { QueryRun { sequence: 0, queries, visible: crate::plan::Visible::All } }
                else { QueryRun::causal(0, queries) };
            let shape = AttentionShape::new(1, 1, 64).unwrap();
            let (evens, odds): (Vec<_>, Vec<_>) = spans.into_iter().enumerate().partition(|(i, _)| i % 2 == 0);
            let stores = [evens, odds].map(|spans| StoreView {
                format: SegmentFormat::F16, calibration: None, spans: spans.into_iter().map(|(_, span)| span).collect(),
            });
            let plan = AttendPlan::new(shape, &[run], &stores).unwrap();
            let mut seen = vec![vec![0u8; total]; queries];
            let mut alone = vec![0; queries];
            let blocks = blocks(&plan, BlockQueries { most, least });
            for segment in plan.segments() {
                for span in segment.spans() {
                    for (index, block) in blocks.iter().enumerate() {
                        let mut parts = Vec::new();
                        block.add_parts(index, &plan.runs()[0], span, &mut parts);
                        for part in parts {
                            prop_assert!(part.tokens.start % TILE_TOKENS == 0 && !part.tokens.is_empty());
                            for query in block.first + part.first..block.first + part.first + part.queries {
                                alone[query] += usize::from(part.queries < block.queries);
                                part.tokens.clone().for_each(|token| seen[query][span.start + token] += 1);
                            }
                        }
                    }
                }
            }
            let most = if queries < least { 1 } else { most };
            prop_assert!(blocks.iter().all(|block| block.queries <= most));
            prop_assert_eq!(blocks.iter().map(|block| block.queries).sum::<usize>(), queries);
            prop_assert!(alone.iter().all(|&parts| parts <= 1));
            for (query, seen) in seen.iter().enumerate() {
                let visible = plan.runs()[0].visible(query);
                prop_assert!(seen[..visible].iter().all(|&n| n == 1) && seen[visible..].iter().all(|&n| n == 0));
            }
        }
    }
}
