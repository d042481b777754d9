//! Blocks of queries: what of a plan a piece of work takes together.
//!
//! Queries of one run that see the same tokens read them together: a part is a run of tokens for a *block* of
//! neighbouring queries. Causal queries differ only at the end, and those of a window at both ends: a block sees the
//! tiles between together, and the rest query by query. A part of which its query does not see every token is masked.
//!
//! Long runs have *spread* blocks (`spread.rs`): one part for many queries that workgroups take one by one.

use std::ops::Range;

use super::attend::{AttendPlan, PlannedSpan};
use super::runs::PlannedRun;
use super::spread::even_queries;
use super::visible::Seen;
use crate::format::TILE_TOKENS;

/// Neighbouring queries of a run.
///
/// The last tokens that they see lie in the same span, so that causal queries have at most one part each alone.
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
    /// How they are spread over workgroups.
    pub spread: Spread,
    /// Tokens of the span; the first is a multiple of 128.
    pub tokens: Range<usize>,
    /// Whether some of the tokens are hidden from its query, which then is alone.
    pub masked: bool,
    /// Tokens at the end that its first query does not see. Each further query sees one more, up to all.
    pub later: usize,
}

/// How the queries of a part are spread over workgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spread {
    /// One workgroup takes all of them.
    Whole,
    /// A workgroup takes as many as it can. All of them see all tokens.
    Even,
    /// Each has a workgroup of its own.
    Each {
        /// Where windows begin in the part: tokens at its beginning that the first query does not see. Each further
        /// query sees one less.
        hidden: Option<usize>,
    },
}

impl Part {
    /// Whether a workgroup takes several queries.
    pub(super) fn is_shared(&self) -> bool {
        match self.spread {
            Spread::Whole => self.queries > 1,
            Spread::Even => true,
            Spread::Each { .. } => false,
        }
    }

    /// Workgroups of a KV head that take its tokens, where each has up to `most` queries.
    pub(super) fn workgroups(&self, most: usize) -> usize {
        match self.spread {
            Spread::Whole => 1,
            Spread::Even => self.queries.div_ceil(most.max(1)),
            Spread::Each { .. } => self.queries,
        }
    }
}

/// How runs are cut into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockQueries {
    /// Most queries of a block.
    pub most: usize,
    /// Runs of fewer queries than this are taken query by query, and longer ones, if this is more than 1,
    /// in even blocks.
    pub least: usize,
    /// Fewest queries of a block that takes together also what some of its causal queries do not see yet: its kernel
    /// limits what each row sees. [`usize::MAX`] where no kernel does.
    pub least_limited: usize,
    /// Fewest queries of a run with spread blocks, in which a workgroup takes up to `most` queries of an item.
    /// [`usize::MAX`] where kernels take whole items.
    pub least_spread: usize,
    /// What becomes of the state of a query that has no other.
    pub only_states: OnlyStates,
}

/// What items of several queries do with the state of a query that has no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnlyStates {
    /// They write it as any other.
    Kept,
    /// They write the query's output, and no state.
    #[cfg_attr(not(any(feature = "wgpu", test)), expect(dead_code, reason = "wgpu alone writes outputs so"))]
    Outputs,
}

impl BlockQueries {
    /// Blocks of up to `most` queries.
    pub(crate) const fn up_to(most: usize) -> Self {
        let (least_limited, least_spread) = (usize::MAX, usize::MAX);
        Self { most, least: 1, least_limited, least_spread, only_states: OnlyStates::Kept }
    }

    /// Whether a run has spread blocks: where all its queries go on evenly.
    pub(super) fn spreads(&self, run: &PlannedRun) -> bool {
        run.run.queries >= self.least_spread && run.advance(0).is_some()
    }

    /// Most queries of a block that a workgroup takes together.
    pub(super) fn of_workgroup(&self, block: &Block, run: &PlannedRun) -> usize {
        if self.spreads(run) { block.queries.min(self.most) } else { block.queries }
    }
}

/// The blocks of all runs.
pub(crate) fn blocks(plan: &AttendPlan, of: BlockQueries) -> Vec<Block> {
    let BlockQueries { most, least, least_spread, .. } = of;
    let mut spans = vec![Vec::new(); plan.runs().len()];
    if most > 1 || least_spread < usize::MAX {
        for span in plan.segments().iter().flat_map(|segment| segment.spans()) {
            spans[span.run].push(span);
        }
    }
    let mut blocks = Vec::with_capacity(plan.runs().len());
    for (index, (run, spans)) in plan.runs().iter().zip(&spans).enumerate() {
        let most = if run.run.queries < least { 1 } else { most };
        let mut first = 0;
        while of.spreads(run) && first < run.run.queries {
            let queries = even_queries(run, spans, first);
            blocks.push(Block { run: index, first, queries });
            first += queries;
        }
        while first < run.run.queries {
            let left = run.run.queries - first;
            let most = if least > 1 { left.div_ceil(left.div_ceil(most.max(1))) } else { most.max(1) };
            let longest = most.min(left);
            let crosses = |queries: &usize| {
                let (before, after) = (run.limits(first).to as usize, run.limits(first + queries - 1).to as usize);
                most > 1 && spans.iter().any(|span| before <= span.start && span.start < after)
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
        let seen = |query: usize| run.seen(self.first + query, span);
        if !run.sees_prefixes() {
            let seen: Vec<Seen> = (0..self.queries).map(seen).collect();
            return self.add_intervals(index, &seen, parts);
        }
        let spread = Spread::Whole;
        let part =
            |first, queries, tokens| Part { block: index, first, queries, spread, tokens, masked: false, later: 0 };
        let (least, most) = (seen(0).to, seen(self.queries - 1).to);
        if least == most {
            parts.extend((most > 0).then(|| part(0, self.queries, 0..most)));
            return;
        }
        // Everyone has some of the last tile alone, so that all have the same number of parts.
        let together = least.saturating_sub(1) / TILE_TOKENS * TILE_TOKENS;
        parts.extend((together > 0).then(|| part(0, self.queries, 0..together)));
        parts.extend((0..self.queries).map(|query| part(query, 1, together..seen(query).to)));
    }

    /// The same for a kernel that limits what each row sees: all of the block's queries take all tokens together, also
    /// those at the end that some do not see yet.
    pub(crate) fn add_limited_parts(&self, index: usize, run: &PlannedRun, span: &PlannedSpan, parts: &mut Vec<Part>) {
        let (least, most) = (run.seen(self.first, span).to, run.seen(self.first + self.queries - 1, span).to);
        if !run.sees_prefixes() || least == most || least == 0 {
            return self.add_parts(index, run, span, parts);
        }
        let (block, queries, spread, later) = (index, self.queries, Spread::Whole, most - least);
        parts.push(Part { block, first: 0, queries, spread, tokens: 0..most, masked: false, later });
    }

    /// The same for queries that see other than the first tokens of a span.
    fn add_intervals(&self, index: usize, seen: &[Seen], parts: &mut Vec<Part>) {
        let from = seen.iter().map(|seen| seen.from).max().unwrap_or(0).next_multiple_of(TILE_TOKENS);
        let to = seen.iter().map(|seen| seen.tree).min().unwrap_or(0) / TILE_TOKENS * TILE_TOKENS;
        let together = if self.queries > 1 && from < to { from..to } else { 0..0 };
        if !together.is_empty() {
            let (queries, spread, tokens) = (self.queries, Spread::Whole, together.clone());
            parts.push(Part { block: index, first: 0, queries, spread, tokens, masked: false, later: 0 });
        }
        for (first, seen) in seen.iter().enumerate() {
            let whole = seen.from / TILE_TOKENS * TILE_TOKENS..seen.to;
            let alone = match together.is_empty() {
                true => [whole, 0..0],
                false => [whole.start..together.start, together.end..whole.end],
            };
            for tokens in alone.into_iter().filter(|tokens| !tokens.is_empty()) {
                let masked = seen.hides_some_of(&tokens);
                let spread = Spread::Whole;
                parts.push(Part { block: index, first, queries: 1, spread, tokens, masked, later: 0 });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AttentionShape, SegmentFormat};
    use crate::plan::{Page, QueryRun, SpanView, StoreView, TreeMask, Visible};
    use proptest::prelude::*;

    /// A kernel for many queries does not take few of them where a run is one query too long.
    #[test]
    fn long_runs_are_cut_evenly() {
        let pages = [Page { shard: 0, index: 0 }; 8];
        let spans = [0, 1].map(|sequence| SpanView {
            sequence,
            start: 0,
            tokens: 1000,
            gathered: None,
            pages: &pages,
            range_slot: 0,
        });
        let store = StoreView { format: SegmentFormat::F16, calibration: None, spans: spans.to_vec() };
        let runs = [QueryRun::causal(0, 130), QueryRun::causal(1, 3)];
        let plan = AttendPlan::new(AttentionShape::new(1, 1, 64).unwrap(), &runs, &[store]).unwrap();
        let queries = |most, least| {
            let queries = BlockQueries { least, ..BlockQueries::up_to(most) };
            blocks(&plan, queries).iter().map(|block| block.queries).collect::<Vec<_>>()
        };
        assert_eq!(queries(64, 16), [44, 43, 43, 1, 1, 1]);
        assert_eq!(queries(64, 1), [64, 64, 2, 3]);
    }

    /// What one query of a run may see, with limits that cross tiles and spans.
    fn visibilities(queries: usize, total: usize) -> impl Strategy<Value = Visible> {
        prop_oneof![
            Just(Visible::All),
            Just(Visible::Causal),
            (1..total + 9).prop_map(|left| Visible::Window { left }),
            (0..total, 1..total + 9, any::<bool>()).prop_map(move |(start, left, window)| {
                let middle = start + (total - start) / 2;
                let spans = [start..middle, middle..total].into_iter().filter(|span| !span.is_empty()).collect();
                Visible::Spans { left: window.then_some(left), spans }
            }),
            (queries..=total.min(queries + 200), any::<u64>()).prop_map(move |(tokens, seed)| {
                let byte = |i: usize| (seed.wrapping_mul(i as u64 + 1) >> 13) as u8;
                let bits: Vec<u8> = (0..(queries * tokens).div_ceil(8)).map(byte).collect();
                Visible::Tree(TreeMask::from_bits(queries, tokens, &bits).unwrap())
            }),
        ]
    }

    proptest! {
        /// Every query gets every token that it sees once, and no other, however long blocks and spans are.
        #[test]
        fn every_query_gets_what_it_sees_once(
            (lengths, queries, visible) in (prop::collection::vec(0usize..400, 1..6), 1usize..200)
                .prop_filter("tokens", |(lengths, _)| lengths.iter().sum::<usize>() > 0)
                .prop_flat_map(|(lengths, queries)| {
                    let total: usize = lengths.iter().sum();
                    let queries = queries.min(total);
                    (Just(lengths), Just(queries), visibilities(queries, total))
                }),
            (most, least) in (1usize..10, 1usize..20),
        ) {
            let total: usize = lengths.iter().sum();
            let pages = [Page { shard: 0, index: 0 }; 4];
            let mut start = 0;
            let spans: Vec<SpanView<'_>> = lengths.iter().map(|&tokens| {
                start += tokens;
                let pages = &pages[..tokens.div_ceil(TILE_TOKENS)];
                SpanView { sequence: 0, start: start - tokens, tokens, gathered: None, pages, range_slot: 0 }
            }).collect();
            let run = QueryRun::new(0, queries, visible.clone());
            let shape = AttentionShape::new(1, 1, 64).unwrap();
            let (evens, odds): (Vec<_>, Vec<_>) = spans.into_iter().enumerate().partition(|(i, _)| i % 2 == 0);
            let stores = [evens, odds].map(|spans| StoreView {
                format: SegmentFormat::F16, calibration: None, spans: spans.into_iter().map(|(_, span)| span).collect(),
            });
            let plan = AttendPlan::new(shape, &[run], &stores).unwrap();
            let mut seen = vec![vec![0u8; total]; queries];
            let mut alone = vec![0; queries];
            let blocks = blocks(&plan, BlockQueries { least, ..BlockQueries::up_to(most) });
            for segment in plan.segments() {
                for span in segment.spans() {
                    for (index, block) in blocks.iter().enumerate() {
                        let mut parts = Vec::new();
                        block.add_parts(index, &plan.runs()[0], span, &mut parts);
                        for part in parts {
                            prop_assert!(part.tokens.start % TILE_TOKENS == 0 && !part.tokens.is_empty());
                            prop_assert!(!part.masked || part.queries == 1);
                            for query in block.first + part.first..block.first + part.first + part.queries {
                                alone[query] += usize::from(part.queries < block.queries);
                                for token in part.tokens.clone() {
                                    let is_seen = !part.masked || plan.runs()[0].sees(query, span.start + token);
                                    seen[query][span.start + token] += u8::from(is_seen);
                                }
                            }
                        }
                    }
                }
            }
            let most = if queries < least { 1 } else { most };
            prop_assert!(blocks.iter().all(|block| block.queries <= most));
            prop_assert_eq!(blocks.iter().map(|block| block.queries).sum::<usize>(), queries);
            let prefixes = matches!(visible, Visible::All | Visible::Causal);
            prop_assert!(!prefixes || alone.iter().all(|&parts| parts <= 1));
            for (query, seen) in seen.iter().enumerate() {
                for (position, &times) in seen.iter().enumerate() {
                    prop_assert_eq!(times, u8::from(plan.runs()[0].sees(query, position)), "{} {}", query, position);
                }
            }
        }
    }
}
