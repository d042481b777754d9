//! What of a plan the launches of a step take: blocks of queries, and their parts of spans.

use super::run_variant::{BLOCK_ROWS, LEAST_ROWS, RunVariant};
use crate::cuda::device::driver::DeviceFacts;
use crate::cuda::device::page_format::PageFormat;
use crate::format::AttentionShape;
use crate::plan::{AttendPlan, Block, BlockQueries, Part, PlannedRun, PlannedSpan, StorePart, Visible, blocks};

/// Most query heads of a block of `attend`: columns of an MMA.
const MOST_HEADS: usize = 8;

/// Maximum number of queries of a run that a block of `attend` takes together.
pub(super) const fn few_queries(shape: &AttentionShape) -> usize {
    let queries = MOST_HEADS / shape.group();
    if queries == 0 { 1 } else { queries }
}

/// Maximum number of queries of a run that a block of `attend_run` takes together; 1 if the kernel is not used.
pub(super) const fn many_queries(shape: &AttentionShape) -> usize {
    let queries = BLOCK_ROWS / shape.group();
    if queries == 0 { 1 } else { queries }
}

/// Whether `queries` queries are enough for `attend_run`.
pub(super) const fn are_many(shape: &AttentionShape, queries: usize) -> bool {
    queries > 1 && many_queries(shape) > 1 && queries * shape.group() >= LEAST_ROWS
}

/// The blocks of all runs: long runs in even blocks for `attend_run`, where it has a kernel for every segment, and the
/// others in those of `attend`.
pub(super) fn query_blocks(facts: &DeviceFacts, plan: &AttendPlan) -> Vec<Block> {
    let shape = plan.shape();
    let few = blocks(plan, BlockQueries { most: few_queries(shape), least: 1 });
    if !plan.runs().iter().any(|run| are_many(shape, run.run.queries))
        || !plan.segments().iter().all(serves(shape, facts))
    {
        return few;
    }
    let most = many_queries(shape);
    let of_run = |(run, planned): (usize, &PlannedRun)| {
        let queries = planned.run.queries;
        if !are_many(shape, queries) {
            return few.iter().filter(|block| block.run == run).copied().collect::<Vec<_>>();
        }
        let count = queries.div_ceil(most);
        let first = |block: usize| block * queries / count;
        (0..count).map(|at| Block { run, first: first(at), queries: first(at + 1) - first(at) }).collect()
    };
    plan.runs().iter().enumerate().flat_map(of_run).collect()
}

/// Whether `attend_run` supports a segment. It does not compute extremes, and each query would need its own.
fn serves(shape: &AttentionShape, facts: &DeviceFacts) -> impl Fn(&StorePart) -> bool {
    move |segment| {
        let pages = PageFormat::new(shape, segment.format()).ok();
        segment.calibration().is_none()
            && pages.is_some_and(|pages| RunVariant::new(pages, BLOCK_ROWS, facts).is_some())
    }
}

/// The queries of the items of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ItemQueries {
    /// Up to this many, which see the same tokens: `attend`.
    Few(usize),
    /// Up to this many, each of which may see one more token than the previous one: `attend_run`.
    Many(usize),
}

/// What of a segment one launch takes.
pub(super) struct SegmentParts {
    pub(super) queries: ItemQueries,
    /// The runs of the plan.
    pub(super) runs: Vec<PlannedRun>,
    /// The index of its span, and the part, whose queries are counted within their run.
    pub(super) parts: Vec<(usize, Part)>,
}

impl SegmentParts {
    /// The parts of blocks of many queries, of few, and of single queries. Empty ones are left out.
    pub(super) fn of(plan: &AttendPlan, segment: &StorePart, blocks: &[Block]) -> Vec<Self> {
        let first_block: Vec<usize> =
            (0..=plan.runs().len()).map(|run| blocks.partition_point(|block| block.run < run)).collect();
        let (mut many, mut few, mut single) = (Vec::new(), Vec::new(), Vec::new());
        let mut of_block = Vec::new();
        for (of_span, span) in segment.spans().iter().enumerate() {
            let of_run = first_block[span.run]..first_block[span.run + 1];
            let run = &plan.runs()[span.run];
            for (index, block) in of_run.clone().zip(&blocks[of_run]) {
                if are_many(plan.shape(), block.queries) {
                    many.extend(whole_part(index, block, run, span).map(|part| (of_span, part)));
                    continue;
                }
                block.add_parts(index, run, span, &mut of_block);
                for mut part in of_block.drain(..) {
                    part.first += block.first;
                    match (segment.calibration(), part.queries) {
                        (_, 1) => single.push((of_span, part)),
                        (None, _) => few.push((of_span, part)),
                        // A query has extremes of its own.
                        (Some(_), queries) => {
                            let alone = |first| (of_span, Part { first, queries: 1, ..part.clone() });
                            single.extend((part.first..part.first + queries).map(alone));
                        }
                    }
                }
            }
        }
        let most = |many: bool| {
            let of =
                blocks.iter().map(|block| block.queries).filter(|&queries| are_many(plan.shape(), queries) == many);
            of.max().unwrap_or(1)
        };
        let all = [
            (ItemQueries::Many(most(true)), many),
            (ItemQueries::Few(most(false)), few),
            (ItemQueries::Few(1), single),
        ];
        let some = all.into_iter().filter(|(_, parts)| !parts.is_empty());
        some.map(|(queries, parts)| Self { queries, runs: plan.runs().to_vec(), parts }).collect()
    }

    /// Tokens of a span, from token `first` on, that the first query of a part sees.
    pub(super) fn seen(&self, span: &PlannedSpan, part: &Part, first: usize) -> i32 {
        let run = &self.runs[span.run];
        // Queries of a causal run see a token more each, also before the first of the span.
        let seen = match (&run.run.visible, span.gathered) {
            (Visible::Causal, None) => i64::from(run.limits(part.first).to) - span.start as i64,
            _ => run.seen(part.first, span).to as i64,
        };
        (seen - first as i64).clamp(i32::MIN.into(), i32::MAX.into()) as i32
    }
}

/// All of a span that the last query of a block sees.
fn whole_part(index: usize, block: &Block, run: &PlannedRun, span: &PlannedSpan) -> Option<Part> {
    let seen = run.seen(block.first + block.queries - 1, span).to;
    let (first, queries) = (block.first, block.queries);
    (seen > 0).then_some(Part { block: index, first, queries, tokens: 0..seen, masked: false })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::attend_step::AttendStep;
    use super::super::kernel::SegmentKernel;
    use super::*;
    use crate::Bits;
    use crate::format::{SegmentFormat, TILE_TOKENS};
    use crate::plan::{Page, QueryRun, SpanView, StoreView};
    use proptest::prelude::*;

    const H200: DeviceFacts = DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 232_448 };

    proptest! {
        /// Whatever kernel takes a query: it gets every token that it sees once and no other, each of its items
        /// has a state row of its own, and where a launch merges these, one of the blocks that it is launched for
        /// is the query's.
        #[test]
        fn every_query_gets_what_it_sees(
            lengths in prop::collection::vec((0usize..3, 1usize..900), 3..14),
            group in prop::sample::select(vec![1usize, 4, 7, 64, 300]),
            wanted in prop::collection::vec((1usize..400, any::<bool>()), 3),
            sketch in any::<bool>(),
        ) {
            let shape = AttentionShape::new(2 * group, 2, 128).unwrap();
            let mut starts = [0; 3];
            let pages: Vec<Page> = (0..8).map(|index| Page { shard: 0, index }).collect();
            let spans: Vec<SpanView<'_>> = lengths.iter().map(|&(sequence, tokens)| {
                starts[sequence] += tokens;
                let pages = &pages[..tokens.div_ceil(TILE_TOKENS)];
                SpanView { sequence, start: starts[sequence] - tokens, tokens, gathered: None, pages, range_slot: 0 }
            }).collect();
            prop_assume!(starts.iter().all(|&tokens| tokens > 0));
            let packed = match sketch {
                true => SegmentFormat::turboquant_prod(Bits::Four, 128),
                false => SegmentFormat::saw_int4(),
            };
            let of = |parity: usize| spans.iter().skip(parity).step_by(2).cloned().collect::<Vec<_>>();
            let store = |format, spans| StoreView { format, calibration: None, spans };
            let stores = [store(SegmentFormat::F16, of(0)), store(packed, of(1))];
            let runs: Vec<QueryRun> = wanted.iter().enumerate().map(|(sequence, &(queries, all))| {
                let visible = if all { Visible::All } else { Visible::Causal };
                QueryRun::new(sequence, queries.min(starts[sequence]), visible)
            }).collect();
            let plan = AttendPlan::new(shape, &runs, &stores).unwrap();
            let step = AttendStep::for_device(&H200, &plan).unwrap();

            let mut seen = vec![0; plan.rows()];
            let mut states = HashMap::new();
            let mut merged = vec![0; plan.rows()];
            let mut many = false;
            for segment in step.segments() {
                let run_kernel = matches!(segment.kernel, SegmentKernel::Run(_));
                many |= run_kernel;
                for (at, item) in segment.items.iter().enumerate() {
                    for query in 0..item.queries {
                        let row = (item.row + query) as usize;
                        let limit = if run_kernel { item.seen + query as i32 } else { item.tokens as i32 };
                        seen[row] += limit.clamp(0, item.tokens as i32) as usize;
                        let state = item.state + query * item.stride;
                        let first = item.first_state + query * item.stride;
                        prop_assert!((first..first + item.states).contains(&state));
                        prop_assert!(states.insert(state, row).is_none() || segment.cluster > 1);
                        if run_kernel && item.states > 1 && item.state == item.first_state {
                            prop_assert!(at < segment.merged_items);
                            merged[row] += 1;
                        }
                        prop_assert!(!run_kernel || item.states == 1 || merged[row] <= 1);
                    }
                }
            }
            let rows_of_many = plan.runs().iter().filter(|run| are_many(&shape, run.run.queries));
            prop_assert_eq!(many, !sketch && rows_of_many.count() > 0);
            for run in plan.runs() {
                for query in 0..run.run.queries {
                    prop_assert_eq!(seen[run.first_row + query], run.limits(query).to as usize);
                    let own = states.values().filter(|&&row| row == run.first_row + query).count();
                    let by_launch = many && are_many(&shape, run.run.queries) && own > 1;
                    // Blocks of at most two queries leave a single query of an odd run to `attend`.
                    prop_assert!(merged[run.first_row + query] == usize::from(by_launch) || many_queries(&shape) < 3);
                }
            }
        }
    }
}
