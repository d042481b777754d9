//! What of a plan the launches of a step take: blocks of queries, and their parts of spans.

use std::ops::Range;

use super::logits::TokenMask;
use super::run_variant::{DRAFT_ROWS, LEAST_PACKED_ROWS, RunVariant, item_rows};
use super::variant_sizes::most_moving;
use crate::Result;
use crate::cuda::device::driver::DeviceFacts;
use crate::cuda::device::page_format::PageFormat;
use crate::format::{AttentionShape, SegmentFormat, TILE_TOKENS};
use crate::plan::{AttendPlan, Block, BlockQueries, Part, PlannedRun, PlannedSpan, Spread, StorePart, Visible, blocks};

/// Most query heads of a block of `attend`: columns of an MMA.
const MOST_HEADS: usize = 8;

/// Maximum number of queries of a run that a block of `attend` takes together.
pub(super) const fn few_queries(shape: &AttentionShape) -> usize {
    let queries = MOST_HEADS / shape.group();
    if queries == 0 { 1 } else { queries }
}

/// The rows that an item of `attend_run` may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunRows {
    /// From as many on it pays off.
    pub(super) least: usize,
    pub(super) most: usize,
}

impl RunRows {
    /// Those over all segments of a plan; none where the kernels do not serve one of them.
    pub(super) fn of(facts: &DeviceFacts, plan: &AttendPlan) -> Option<Self> {
        let shape = plan.shape();
        let most = item_rows(shape.head_dim(), facts);
        let of_segment = |segment: &StorePart| {
            let pages = PageFormat::new(shape, segment.format()).ok()?;
            match segment.calibration() {
                None => RunVariant::new(pages, most, facts)
                    .or_else(|| RunVariant::over_unpacked(pages, facts))
                    .map(|_| RunVariant::least_rows(pages, facts)),
                Some(_) => RunVariant::pipelined(pages, facts).map(|_| LEAST_PACKED_ROWS),
            }
        };
        let least =
            plan.segments().iter().map(of_segment).try_fold(0, |most, least| least.map(|least| most.max(least)));
        least.map(|least| Self { least, most })
    }

    /// Maximum number of queries of an item.
    pub(super) const fn most_queries(self, shape: &AttentionShape) -> usize {
        self.most / shape.group()
    }

    /// Whether `queries` queries are enough for the kernel, and several fit an item.
    const fn are_many(self, shape: &AttentionShape, queries: usize) -> bool {
        queries > 1 && self.most_queries(shape) > 1 && queries * shape.group() >= self.least
    }
}

/// The kernel of a run's queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunKernel {
    /// `attend_run`.
    Many,
    /// `attend`, for queries each of which may see one more token than the one before it.
    Moving,
    /// `attend`, for queries that see the same tokens.
    Few,
}

/// The kernels that take the runs of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueryKernels {
    shape: AttentionShape,
    /// The rows of `attend_run`; none where it does not serve all segments.
    rows: Option<RunRows>,
    /// Maximum number of moving queries of an item of `attend`.
    most_moving: usize,
}

impl QueryKernels {
    /// Those over all segments of a plan. Where `attend_run` pays off from many rows on alone, `attend` takes several
    /// queries over packed pages, so that tokens are read once for them. A calibrated query has extremes of its own.
    pub(super) fn of(facts: &DeviceFacts, plan: &AttendPlan) -> Self {
        let shape = *plan.shape();
        let is_packed = plan.segments().iter().any(|segment| *segment.format() != SegmentFormat::F16);
        let calibrated = plan.segments().iter().any(|segment| segment.calibration().is_some());
        let pages = plan.segments().iter().map(|segment| PageFormat::new(&shape, segment.format()));
        let most_moving = match pages.collect::<Result<Vec<_>>>() {
            Ok(pages) if is_packed && !calibrated => most_moving(&pages, shape.group(), facts),
            _ => 1,
        };
        Self { shape, rows: RunRows::of(facts, plan), most_moving }
    }

    /// The kernel of a run.
    pub(super) fn of_run(&self, run: &PlannedRun) -> RunKernel {
        let queries = run.run.queries;
        if !run.moves_evenly() || queries == 1 {
            RunKernel::Few
        } else if self.rows.is_some_and(|rows| rows.are_many(&self.shape, queries)) {
            RunKernel::Many
        } else if self.most_moving > 1 {
            RunKernel::Moving
        } else {
            RunKernel::Few
        }
    }

    /// Maximum number of queries of an item of a kernel.
    fn most_queries(&self, kernel: RunKernel) -> usize {
        match kernel {
            RunKernel::Many => self.rows.map_or(1, |rows| rows.most_queries(&self.shape)),
            RunKernel::Moving => self.most_moving,
            RunKernel::Few => few_queries(&self.shape),
        }
    }
}

/// Whether as many queries have so few rows that they take a launch of their own, with smaller blocks.
const fn is_draft(shape: &AttentionShape, queries: usize) -> bool {
    queries * shape.group() <= DRAFT_ROWS
}

/// The blocks of all runs: even ones for queries that move, and those of the plan for others.
pub(super) fn query_blocks(plan: &AttendPlan, kernels: QueryKernels) -> Vec<Block> {
    let few = || blocks(plan, BlockQueries::up_to(few_queries(plan.shape())));
    let is_few = |run: &PlannedRun| kernels.of_run(run) == RunKernel::Few;
    if plan.runs().iter().all(is_few) {
        return few();
    }
    let few = if plan.runs().iter().any(is_few) { few() } else { Vec::new() };
    let of_run = |(run, planned): (usize, &PlannedRun)| {
        let queries = planned.run.queries;
        let kernel = kernels.of_run(planned);
        if kernel == RunKernel::Few {
            let first = few.partition_point(|block| block.run < run);
            return few[first..].iter().take_while(|block| block.run == run).copied().collect::<Vec<_>>();
        }
        let count = queries.div_ceil(kernels.most_queries(kernel));
        let first = |block: usize| block * queries / count;
        (0..count).map(|at| Block { run, first: first(at), queries: first(at + 1) - first(at) }).collect()
    };
    plan.runs().iter().enumerate().flat_map(of_run).collect()
}

/// The queries of the items of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ItemQueries {
    /// Up to this many, which see the same tokens: `attend`.
    Few(usize),
    /// Up to this many, each of which may see one more token than the previous one: `attend`.
    Moving(usize),
    /// As many more: `attend_run`.
    Many(usize),
}

/// What of a segment one launch takes.
pub(super) struct SegmentParts {
    pub(super) queries: ItemQueries,
    /// Which tokens of the items are hidden.
    pub(super) mask: TokenMask,
    /// Rows that an item of `attend_run` may have.
    pub(super) most_rows: usize,
    /// The runs of the plan.
    pub(super) runs: Vec<PlannedRun>,
    /// The index of its span, and the part, whose queries are counted within their run.
    pub(super) parts: Vec<(usize, Part)>,
}

impl SegmentParts {
    /// The parts of blocks of many queries, of few, and of single queries. Empty ones are left out.
    pub(super) fn of(plan: &AttendPlan, segment: &StorePart, blocks: &[Block], kernels: QueryKernels) -> Vec<Self> {
        let most_rows = kernels.rows.map_or(0, |rows| rows.most);
        let first_block: Vec<usize> =
            (0..=plan.runs().len()).map(|run| blocks.partition_point(|block| block.run < run)).collect();
        let (mut many, mut drafts, mut moving) = (Vec::new(), Vec::new(), Vec::new());
        let (mut few, mut single, mut windowed, mut trees) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut of_block = Vec::new();
        for (of_span, span) in segment.spans().iter().enumerate() {
            let of_run = first_block[span.run]..first_block[span.run + 1];
            let run = &plan.runs()[span.run];
            let kernel = kernels.of_run(run);
            for (index, block) in of_run.clone().zip(&blocks[of_run]) {
                if kernel != RunKernel::Few {
                    let of_kernel = match kernel {
                        RunKernel::Many if !is_draft(plan.shape(), block.queries) => &mut many,
                        RunKernel::Many => &mut drafts,
                        _ => &mut moving,
                    };
                    of_kernel.extend(whole_part(index, block, run, span).map(|part| (of_span, part)));
                    continue;
                }
                block.add_parts(index, run, span, &mut of_block);
                for mut part in of_block.drain(..) {
                    part.first += block.first;
                    match (segment.calibration(), part.queries) {
                        (_, 1) if part.masked => match run.run.visible {
                            Visible::Tree(_) => {
                                trees.extend(tree_parts(run, span, part).map(|part| (of_span, part)));
                            }
                            _ => windowed.push((of_span, part)),
                        },
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
        let most = |parts: &[(usize, Part)]| parts.iter().map(|(_, part)| part.queries).max().unwrap_or(1);
        let mask = |parts: &[(usize, Part)]| {
            let run = |span: usize| &plan.runs()[segment.spans()[span].run];
            let has_windows = parts.iter().any(|&(span, _)| run(span).window_start(0).is_some());
            if has_windows { TokenMask::Window } else { TokenMask::None }
        };
        let all = [
            (ItemQueries::Many(most(&many)), mask(&many), many),
            (ItemQueries::Many(most(&drafts)), mask(&drafts), drafts),
            (ItemQueries::Moving(most(&moving)), mask(&moving), moving),
            (ItemQueries::Few(most(&few)), TokenMask::None, few),
            (ItemQueries::Few(1), TokenMask::None, single),
            (ItemQueries::Few(1), TokenMask::Window, windowed),
            (ItemQueries::Few(1), TokenMask::Tree, trees),
        ];
        let some = all.into_iter().filter(|(_, _, parts)| !parts.is_empty());
        some.map(|(queries, mask, parts)| Self { queries, mask, most_rows, runs: plan.runs().to_vec(), parts })
            .collect()
    }

    /// What an item that begins at token `first` of a span is told of what its first query sees.
    pub(super) fn seen(&self, span: &PlannedSpan, part: &Part, first: usize) -> ItemLimits {
        let run = &self.runs[span.run];
        let (limits, seen) = (run.limits(part.first), run.seen(part.first, span));
        let word = |token: i64| (token - first as i64).clamp(i32::MIN.into(), i32::MAX.into()) as i32;
        match (self.mask, self.queries) {
            (TokenMask::Tree, _) => {
                let from = seen.tree.max(first);
                let mut tree = [0; TILE_TOKENS / 32];
                let bits = (part.tokens.end - from).min(TILE_TOKENS);
                for bit in (0..bits).filter(|bit| run.sees(part.first, span.start + from + bit)) {
                    tree[bit / 32] |= 1 << (bit % 32);
                }
                ItemLimits { seen: word(from as i64), from: 0, tree }
            }
            (TokenMask::Window, ItemQueries::Few(_)) => {
                ItemLimits { seen: word(seen.from as i64), from: 0, tree: [0; 4] }
            }
            _ => {
                // Counted from the span's first token, also before it and behind its last. A gathered span is seen as
                // if its tokens stood at its first positions: queries that differ over it are over one of one token.
                let to = i64::from(limits.to) - span.start as i64;
                let from = run.window_start(part.first).map_or(i64::from(i32::MIN / 2), |at| at - span.start as i64);
                ItemLimits { seen: word(to), from: word(from), tree: [0; 4] }
            }
        }
    }
}

/// What an item is told of what its first query sees: fields of `Item` in `cuda/common/attend_call.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ItemLimits {
    pub(super) seen: i32,
    pub(super) from: i32,
    /// Bits of a tree, the lowest first.
    pub(super) tree: [u32; TILE_TOKENS / 32],
}

/// A part of which the bits of a tree decide some tokens, in parts of which they decide no more than an item has bits
/// for. Parts of which the query sees nothing are left out.
fn tree_parts(run: &PlannedRun, span: &PlannedSpan, part: Part) -> impl Iterator<Item = Part> {
    let tree = run.seen(part.first, span).tree.max(part.tokens.start);
    let first_end = match part.tokens.end - tree <= TILE_TOKENS {
        true => part.tokens.end,
        false => (tree / TILE_TOKENS + 1) * TILE_TOKENS,
    };
    let others = (first_end..part.tokens.end).step_by(TILE_TOKENS);
    let ends = others.clone().map(|start| (start + TILE_TOKENS).min(part.tokens.end));
    let all = std::iter::once(part.tokens.start..first_end).chain(others.zip(ends).map(|(start, end)| start..end));
    let is_seen = |tokens: &Range<usize>| {
        tokens.start < tree || tokens.clone().any(|token| run.sees(part.first, span.start + token))
    };
    let seen: Vec<Range<usize>> = all.filter(is_seen).collect();
    seen.into_iter().map(move |tokens| Part { tokens, ..part.clone() })
}

/// What the queries of a block together see of a span. Each sees what the one before it sees, moved by a position, so
/// that this is one interval, though the first query may be past the span and the last one not yet there.
fn whole_part(index: usize, block: &Block, run: &PlannedRun, span: &PlannedSpan) -> Option<Part> {
    let (first, queries) = (block.first, block.queries);
    let seen = run.seen_between(first, first + queries - 1, span);
    let tokens = seen.from / TILE_TOKENS * TILE_TOKENS..seen.to;
    let spread = Spread::Whole;
    (!seen.is_empty()).then_some(Part { block: index, first, queries, spread, tokens, masked: false, later: 0 })
}

#[cfg(test)]
mod coverage;

#[cfg(test)]
mod tests {
    use super::super::attend_step::AttendStep;
    use super::super::kernel::SegmentKernel;
    use super::super::segment::PlannedLaunch;
    use super::*;
    use crate::Bits;
    use crate::format::SegmentFormat;
    use crate::plan::{Page, QueryRun, SpanView, StoreView, TreeMask};

    pub(super) const H200: DeviceFacts =
        DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 232_448 };

    /// Long runs whose queries move evenly take the kernel of many queries.
    #[test]
    fn long_runs_share_blocks() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        let pages: Vec<Page> = (0..8).map(|index| Page { shard: 0, index }).collect();
        let tree = TreeMask::from_bits(64, 64, &[255; 512]).unwrap();
        for (visible, is_many) in [
            (Visible::All, true),
            (Visible::Causal, true),
            (Visible::Window { left: 100 }, true),
            (Visible::Tree(tree), false),
        ] {
            let span = SpanView { sequence: 0, start: 0, tokens: 1000, gathered: None, pages: &pages, range_slot: 0 };
            let store = StoreView { format: SegmentFormat::F16, calibration: None, spans: vec![span] };
            let plan = AttendPlan::new(shape, &[QueryRun::new(0, 64, visible.clone())], &[store]).unwrap();
            let step = AttendStep::for_device(&H200, &plan).unwrap();
            let takes_many = step.segments().iter().any(|launch| matches!(launch.kernel, SegmentKernel::Run(_)));
            assert_eq!(takes_many, is_many, "{visible:?}");
        }
    }

    /// What the host pays for planning a prompt: `cargo test --features cuda --lib -- --ignored --nocapture planning`.
    #[test]
    #[ignore = "prints times"]
    fn planning_of_prompts() {
        let heads = |head_dim| AttentionShape::new(32, 8, head_dim).unwrap();
        let packed = SegmentFormat::per_channel(Bits::Four);
        let calibration = crate::Calibration::new(0.0, 3.0).ok();
        let window = Visible::Window { left: 1023 };
        let cases = [
            ("f16", heads(128), SegmentFormat::F16, None, Visible::Causal),
            ("4 bits", heads(128), packed, None, Visible::Causal),
            ("4 bits, 256 channels", heads(256), packed, None, Visible::Causal),
            ("4 bits, 256 channels, window", heads(256), packed, None, window),
            ("calibrated", heads(128), packed, calibration, Visible::Causal),
        ];
        for (sequences, tokens) in [(1, 16_384), (4, 4096), (16, 1024)] {
            let pages: Vec<Page> = (0..tokens as u32 / 128).map(|index| Page { shard: 0, index }).collect();
            for (name, shape, format, calibration, visible) in &cases {
                let span =
                    |sequence| SpanView { sequence, start: 0, tokens, gathered: None, pages: &pages, range_slot: 0 };
                let spans = (0..sequences).map(span).collect();
                let store = StoreView { format: *format, calibration: *calibration, spans };
                let runs: Vec<QueryRun> =
                    (0..sequences).map(|sequence| QueryRun::new(sequence, tokens, visible.clone())).collect();
                let plan = AttendPlan::new(*shape, &runs, &[store]).unwrap();
                let mut least = (f64::MAX, 0);
                for _ in 0..20 {
                    let begun = std::time::Instant::now();
                    let step = AttendStep::for_device(&H200, &plan).unwrap();
                    let items = step.segments().iter().map(PlannedLaunch::item_count).sum();
                    least = (least.0.min(begun.elapsed().as_secs_f64() * 1e3), items);
                }
                println!("{sequences} × {tokens} {name}: {:.3} ms, {} items", least.0, least.1);
            }
        }
    }
}
