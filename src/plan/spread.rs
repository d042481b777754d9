//! Spread blocks: many neighbouring queries that workgroups take one by one, or a few at a time, from one item.
//!
//! A prompt of which a workgroup takes one query has as many queries as tokens. An item of its own for each would take
//! the host longer than the device takes for many prompts. The queries of a spread block begin in the same tile of
//! every span, and end in the same tile. So their items are alike but for where they begin and end, by a token from one
//! query to the next, and one item tells all of them.

use super::attend::PlannedSpan;
use super::blocks::{Block, Part, Spread};
use super::runs::PlannedRun;
use crate::format::TILE_TOKENS;

/// Most queries of a spread block. Queries that move see the next tile after as many.
const MOST_QUERIES: usize = TILE_TOKENS;

/// Queries of a run from `first` on that begin and end in the same tiles of its spans.
pub(super) fn even_queries(run: &PlannedRun, spans: &[&PlannedSpan], first: usize) -> usize {
    let Some(advance) = run.advance(first) else { return 1 };
    let most = advance.queries.min(MOST_QUERIES) as i64 - 1;
    let to = advance.moves.then(|| i64::from(run.limits(first).to));
    let of_span = |span: &&PlannedSpan| {
        let end_moves = to.map_or(most, |to| until_end_leaves(to, span));
        end_moves.min(advance.window.map_or(most, |from| until_start_leaves(from, span)))
    };
    // What is negative would be a query that stands before what it sees.
    (spans.iter().map(of_span).fold(most, i64::min).max(0) + 1) as usize
}

const TILE: i64 = TILE_TOKENS as i64;

/// Positions that the end of what is seen can move from `to` on until it lies in another tile of a span.
fn until_end_leaves(to: i64, span: &PlannedSpan) -> i64 {
    let (start, end) = (span.start as i64, (span.start + span.tokens) as i64);
    match span.gathered {
        // All of it is seen, or nothing.
        Some(end) if to < end as i64 => end as i64 - 1 - to,
        None if to <= start => start - to,
        None if to < end => (TILE - (to - start) % TILE) % TILE,
        _ => i64::MAX,
    }
}

/// Positions that the beginning can move from `from` on until it lies in another tile of a span, or is its first
/// token's and moves on.
fn until_start_leaves(from: i64, span: &PlannedSpan) -> i64 {
    let (start, end) = (span.start as i64, (span.start + span.tokens) as i64);
    match span.gathered {
        Some(_) if from <= start => start - from,
        None if from < start => start - from,
        None if from < end => (TILE - 1 - (from - start) % TILE).min(end - 1 - from),
        _ => i64::MAX,
    }
}

impl Block {
    /// Adds what the queries of a spread block see of a span of its run. A workgroup takes up to `most` queries.
    pub(super) fn add_spread_parts(
        &self,
        index: usize,
        (run, span): (&PlannedRun, &PlannedSpan),
        most: usize,
        parts: &mut Vec<Part>,
    ) {
        let (seen, last) = (run.seen(self.first, span), run.seen(self.first + self.queries - 1, span));
        if seen.is_empty() {
            return;
        }
        let part = |spread, tokens, later| Part {
            block: index,
            first: 0,
            queries: self.queries,
            spread,
            tokens,
            masked: false,
            later,
        };
        let (start, later) = (seen.from / TILE_TOKENS * TILE_TOKENS, last.to - seen.to);
        let hidden = (last.from > start).then_some(seen.from - start);
        // Everyone has some of the first and of the last tile alone.
        let from = if hidden.is_some() { start + TILE_TOKENS } else { start };
        let to = if later > 0 { seen.to / TILE_TOKENS * TILE_TOKENS } else { seen.to };
        if most == 1 || from >= to {
            parts.push(part(Spread::Each { hidden }, start..last.to, later));
            return;
        }
        parts.extend((start < from).then(|| part(Spread::Each { hidden }, start..from, 0)));
        parts.push(part(Spread::Even, from..to, 0));
        parts.extend((to < last.to).then(|| part(Spread::Each { hidden: None }, to..last.to, later)));
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::{BlockQueries, blocks};
    use super::*;
    use crate::format::{AttentionShape, SegmentFormat};
    use crate::plan::{AttendPlan, Page, QueryRun, SpanView, StoreView, Visible};
    use proptest::prelude::*;

    /// What a query of a part sees of the span, as kernels find it.
    fn seen_of(part: &Part, query: usize) -> std::ops::Range<usize> {
        let hidden = match part.spread {
            Spread::Each { hidden: Some(hidden) } => hidden + query,
            _ => 0,
        };
        part.tokens.start + hidden..part.tokens.end - part.later.saturating_sub(query)
    }

    /// Spans one after the other, some after positions of which none is left. A gathered one holds every other
    /// position, or one alone.
    fn views<'a>(lengths: &[(usize, bool, usize)], pages: &'a [Page]) -> Vec<SpanView<'a>> {
        let mut start = 0;
        let span = |&(tokens, is_gathered, before): &(usize, bool, usize)| {
            let begun = start + before;
            let end = begun + if is_gathered && tokens > 1 { 2 * tokens } else { tokens };
            start = end;
            let pages = &pages[..tokens.div_ceil(TILE_TOKENS)];
            let gathered = is_gathered.then_some(end);
            SpanView { sequence: 0, start: begun, tokens, gathered, pages, range_slot: 0 }
        };
        lengths.iter().map(span).collect()
    }

    proptest! {
        /// Every query of a block has the same parts, sees some of the first and of the last tile of each, and of all
        /// together what it sees of the span, once.
        #[test]
        fn every_query_finds_what_it_sees(
            lengths in prop::collection::vec(
                (prop_oneof![4 => 1usize..500, 1 => Just(1)], prop::bool::weighted(0.3), prop_oneof![Just(0), 0usize..9]),
                1..5,
            ),
            (queries, end, left) in (1usize..600, 0usize..300, 1usize..900),
            (kind, first, middle) in (0..4, 0usize..600, 0usize..300),
            most in 1usize..6,
        ) {
            let pages = [Page { shard: 0, index: 0 }; 4];
            let spans = views(&lengths, &pages);
            let length = spans.iter().map(SpanView::end).max().unwrap_or(0);
            let end = length.saturating_sub(end).max(1);
            let queries = queries.min(end);
            let visible = match kind {
                0 => Visible::All,
                1 => Visible::Causal,
                2 => Visible::Window { left },
                _ => {
                    let all = [first..first + middle + 1, first + middle + 9..first + 2 * middle + 40];
                    Visible::spans(&all.into_iter().filter(|span| span.end <= end).collect::<Vec<_>>())
                }
            };
            let run = QueryRun { end: Some(end), ..QueryRun::new(0, queries, visible) };
            let store = StoreView { format: SegmentFormat::F16, calibration: None, spans };
            // A query may see a part of a gathered span, which plans refuse.
            let Ok(plan) = AttendPlan::new(AttentionShape::new(1, 1, 64).unwrap(), &[run], &[store]) else {
                return Ok(());
            };
            let run = &plan.runs()[0];
            let blocks = blocks(&plan, BlockQueries { least_spread: 1, ..BlockQueries::up_to(most) });
            prop_assert_eq!(blocks.iter().map(|block| block.queries).sum::<usize>(), queries);
            let mut before = 0;
            for (index, block) in blocks.iter().enumerate() {
                prop_assert_eq!(block.first, before);
                before += block.queries;
                for span in plan.segments()[0].spans() {
                    let mut parts = Vec::new();
                    block.add_spread_parts(index, (run, span), most, &mut parts);
                    for query in 0..block.queries {
                        let mut found = Vec::new();
                        for part in &parts {
                            prop_assert_eq!((part.queries, part.first, part.masked), (block.queries, 0, false));
                            let seen = seen_of(part, query);
                            prop_assert_eq!(part.tokens.start % TILE_TOKENS, 0);
                            prop_assert!(!seen.is_empty() && seen.start < part.tokens.start + TILE_TOKENS);
                            prop_assert_eq!(seen.end.div_ceil(TILE_TOKENS), part.tokens.end.div_ceil(TILE_TOKENS));
                            prop_assert!(part.spread != Spread::Even || seen == part.tokens);
                            found.extend(seen);
                        }
                        let seen = run.seen(block.first + query, span);
                        prop_assert_eq!(found, (seen.from..seen.to).collect::<Vec<_>>());
                    }
                }
            }
        }
    }
}
