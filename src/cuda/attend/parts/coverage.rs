//! A property of every step: its items give each query the tokens that it sees, each once.

use std::collections::HashMap;

use proptest::prelude::*;

use super::super::attend_step::AttendStep;
use super::super::kernel::SegmentKernel;
use super::super::segment::{Item, PlannedLaunch};
use super::tests::H200;
use super::*;
use crate::Bits;
use crate::format::{SegmentFormat, TILE_TOKENS};
use crate::plan::{AttendPlan, Page, QueryRun, SpanView, StoreView, TreeMask};

/// Whether a query of an item sees a token of it: what the kernels make of its limits.
fn is_seen(launch: &PlannedLaunch, item: &Item, query: i32, token: i32) -> bool {
    let mask = match launch.kernel {
        SegmentKernel::Attend(variant) if variant.moving => {
            let windowed = variant.logits.mask == TokenMask::Window;
            return (!windowed || item.from + query <= token) && token < item.seen + query;
        }
        SegmentKernel::Run(_) => return item.from + query <= token && token < item.seen + query,
        SegmentKernel::Attend(variant) => variant.logits.mask,
    };
    match mask {
        TokenMask::None => true,
        TokenMask::Window => token >= item.seen,
        TokenMask::Tree => {
            let bit = (token - item.seen) as usize;
            token < item.seen || item.tree[bit / 32] >> (bit % 32) & 1 == 1
        }
    }
}

/// What this many queries of a sequence of `tokens` tokens see.
fn visible(kind: usize, left: usize, queries: usize, tokens: usize) -> Visible {
    let bits = || (0..(queries * queries).div_ceil(8)).map(|i| (i * left) as u8).collect::<Vec<_>>();
    match kind {
        0 => Visible::All,
        1 => Visible::Causal,
        2 => Visible::Window { left },
        3 => Visible::Tree(TreeMask::from_bits(queries, queries, &bits()).unwrap()),
        _ => {
            let at = left.min(tokens - 1);
            let spans = std::iter::once(at / 2..at + 1).collect();
            Visible::Spans { left: left.is_multiple_of(2).then_some(left), spans }
        }
    }
}

/// What the items of a step cover.
struct Coverage {
    /// Tokens that every query sees in its items.
    seen: Vec<usize>,
    /// The query of every state row that is merged.
    states: HashMap<u32, usize>,
    /// How many launches merge the states of every query.
    merged: Vec<usize>,
    /// Whether a segment takes the kernel of many queries.
    many: bool,
}

type Checked<T> = std::result::Result<T, TestCaseError>;

impl Coverage {
    fn of(plan: &AttendPlan, step: &AttendStep) -> Checked<Self> {
        let rows = plan.rows();
        let mut found = Self { seen: vec![0; rows], states: HashMap::new(), merged: vec![0; rows], many: false };
        for segment in step.segments() {
            found.many |= matches!(segment.kernel, SegmentKernel::Run(_));
            for (at, item) in segment.items.iter().enumerate() {
                for query in 0..item.queries {
                    found.count(segment, (at, item), query)?;
                }
            }
        }
        Ok(found)
    }

    fn count(&mut self, segment: &PlannedLaunch, (at, item): (usize, &Item), query: u32) -> Checked<()> {
        let run_kernel = matches!(segment.kernel, SegmentKernel::Run(_));
        let row = (item.row + query) as usize;
        let sees = |&token: &i32| is_seen(segment, item, query as i32, token);
        self.seen[row] += (0..item.tokens as i32).filter(sees).count();
        let state = item.state + query * item.stride;
        let first = item.first_state + query * item.stride;
        prop_assert!((first..first + item.states).contains(&state));
        // A state that is an output shares its row.
        if item.states > 1 {
            prop_assert!(self.states.insert(state, row).is_none() || segment.cluster > 1);
        }
        if run_kernel && item.states > 1 && item.state == item.first_state {
            prop_assert!(at < segment.merged_items);
            self.merged[row] += 1;
        }
        prop_assert!(!run_kernel || item.states == 1 || self.merged[row] <= 1);
        Ok(())
    }

    /// Checks the counts; `lengths` are those of the sequences.
    fn check(&self, plan: &AttendPlan, lengths: &[usize]) -> Checked<()> {
        let kernels = QueryKernels::of(&H200, plan);
        for run in plan.runs() {
            for query in 0..run.run.queries {
                let row = run.first_row + query;
                let sees = (0..lengths[run.run.sequence]).filter(|&position| run.sees(query, position)).count();
                prop_assert_eq!(self.seen[row], sees);
                let own = self.states.values().filter(|&&of| of == row).count();
                let by_launch = self.many && kernels.of_run(run) == RunKernel::Many && own > 1;
                // Blocks of at most two queries leave a single query of an odd run to `attend`.
                let is_small = kernels.rows.is_none_or(|rows| rows.most_queries(plan.shape()) < 3);
                prop_assert!(self.merged[row] == usize::from(by_launch) || is_small);
            }
        }
        Ok(())
    }
}

/// Checks that every item of a query knows how many states there are to wait for and to merge.
fn check_states(plan: &AttendPlan, step: &AttendStep) -> Checked<()> {
    let mut count = vec![0; plan.rows()];
    for segment in step.segments() {
        for item in segment.items.iter().step_by(segment.cluster) {
            (item.row..item.row + item.queries).for_each(|row| count[row as usize] += 1);
        }
    }
    for item in step.segments().iter().flat_map(|segment| &segment.items) {
        for row in item.row..item.row + item.queries {
            prop_assert_eq!(item.states, count[row as usize], "row {} of {:?}", row, item);
        }
    }
    Ok(())
}

proptest! {
    /// Whatever kernel takes a query: it gets every token that it sees once and no other, each of its items
    /// has a state row of its own, and where a launch merges these, one of the blocks that it is launched for
    /// is the query's.
    #[test]
    fn every_query_gets_what_it_sees(
        lengths in prop::collection::vec((0usize..3, 1usize..900), 3..14),
        group in prop::sample::select(vec![1usize, 4, 7, 64, 300]),
        wanted in prop::collection::vec((1usize..400, 0usize..5, 1usize..500), 3),
        sketch in any::<bool>(),
    ) {
        let shape = AttentionShape::new(2 * group, 2, 128).unwrap();
        let mut ends = [0; 3];
        let pages: Vec<Page> = (0..8).map(|index| Page { shard: 0, index }).collect();
        let span = |&(sequence, tokens): &(usize, usize)| {
            let start = ends[sequence];
            ends[sequence] += tokens;
            let pages = &pages[..tokens.div_ceil(TILE_TOKENS)];
            SpanView { sequence, start, tokens, gathered: None, pages, range_slot: 0 }
        };
        let spans: Vec<SpanView<'_>> = lengths.iter().map(span).collect();
        prop_assume!(ends.iter().all(|&tokens| tokens > 0));
        let packed = match sketch {
            true => SegmentFormat::turboquant_prod(Bits::Four, 128),
            false => SegmentFormat::saw_int4(),
        };
        let of = |parity: usize| spans.iter().skip(parity).step_by(2).cloned().collect::<Vec<_>>();
        let store = |format, spans| StoreView { format, calibration: None, spans };
        let stores = [store(SegmentFormat::F16, of(0)), store(packed, of(1))];
        let run = |(sequence, &(queries, kind, left)): (usize, &(usize, usize, usize))| {
            let queries = queries.min(ends[sequence]);
            QueryRun::new(sequence, queries, visible(kind, left, queries, ends[sequence]))
        };
        let runs: Vec<QueryRun> = wanted.iter().enumerate().map(run).collect();
        let plan = AttendPlan::new(shape, &runs, &stores).unwrap();
        let step = AttendStep::for_device(&H200, &plan).unwrap();
        let coverage = Coverage::of(&plan, &step)?;
        check_states(&plan, &step)?;
        let kernels = QueryKernels::of(&H200, &plan);
        let is_many = |run: &PlannedRun| kernels.of_run(run) == RunKernel::Many;
        prop_assert_eq!(coverage.many, !sketch && plan.runs().iter().any(is_many));
        coverage.check(&plan, &ends)?;
    }
}
