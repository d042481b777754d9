//! A property of every cut: items cover what queries see, each token once.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::Bits;
use crate::plan::{PlannedSpan, QueryRun, SpanView, StorePart, StoreView, TreeMask, Visible};

/// The spans of three sequences, one behind the other, and how many tokens each sequence has.
fn spans<'a>(lengths: &[(usize, usize)], tables: &'a [Vec<Page>]) -> (Vec<SpanView<'a>>, [usize; 3]) {
    let mut ends = [0; 3];
    let span = |(range_slot, (&(sequence, tokens), pages)): (usize, (&(usize, usize), &'a Vec<Page>))| {
        let start = ends[sequence];
        ends[sequence] += tokens;
        SpanView { sequence, start, tokens, gathered: None, pages, range_slot }
    };
    let spans = lengths.iter().zip(tables).enumerate().map(span).collect();
    (spans, ends)
}

/// What this many queries of a sequence see: all before them, or the window and a tree where there is a window.
fn visible(window: Option<usize>, sequence: usize, queries: usize) -> Visible {
    match (window, sequence) {
        (None, _) | (_, 0) => Visible::Causal,
        (Some(left), 1) => Visible::Window { left },
        (Some(left), _) => {
            let bytes: Vec<u8> = (0..(queries * queries).div_ceil(8)).map(|i| (i * left) as u8).collect();
            Visible::Tree(TreeMask::from_bits(queries, queries, &bytes).unwrap())
        }
    }
}

/// Kernels by what they make of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    /// Rows see less than their item has.
    Limited,
    /// Several workgroups take the queries of an item.
    Spread,
    /// As `Limited`, and items may write outputs.
    Writing,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Plain, Self::Limited, Self::Spread, Self::Writing];

    fn blocks(self, block_queries: usize) -> BlockQueries {
        let up_to = BlockQueries::up_to(block_queries);
        match self {
            Self::Plain => up_to,
            Self::Limited => BlockQueries { least: 2, least_limited: 3, ..up_to },
            Self::Spread => BlockQueries { least_spread: 3, ..up_to },
            Self::Writing => BlockQueries { least: 2, least_limited: 3, only_states: OnlyStates::Outputs, ..up_to },
        }
    }

    fn is_limited(self) -> bool {
        matches!(self, Self::Limited | Self::Writing)
    }
}

/// Counts what the items of a plan cover.
struct Coverage<'a> {
    plan: &'a AttendPlan,
    work: &'a Work,
    kind: Kind,
    /// How often every state row is written.
    states: Vec<usize>,
    /// Tokens that every query sees in its items.
    seen: Vec<usize>,
    /// How often the outputs of every query are written.
    written: Vec<usize>,
}

type Checked = std::result::Result<(), TestCaseError>;

impl<'a> Coverage<'a> {
    fn new(plan: &'a AttendPlan, work: &'a Work, kind: Kind) -> Self {
        let rows = plan.rows();
        Self { plan, work, kind, states: vec![0; work.states()], seen: vec![0; rows], written: vec![0; rows] }
    }

    /// Counts and checks the items of a segment.
    fn count(&mut self, segment: &StoreWork, planned: &StorePart, split: &Split) -> Checked {
        let mut scores = HashSet::new();
        for dispatch in segment.dispatches() {
            let items = segment.items_of(dispatch);
            prop_assert!(items.iter().map(|item| item.tokens).is_sorted_by(|a, b| a >= b), "the largest run first");
            for item in items {
                self.check_size(dispatch, item, split)?;
                let at = item.page_offset as usize;
                let tiles = (item.tokens as usize).div_ceil(TILE_TOKENS);
                let has = |span: &PlannedSpan| {
                    (span.first_page..span.first_page + span.tokens.div_ceil(TILE_TOKENS)).contains(&at)
                };
                let span = planned.spans().iter().find(|span| has(span)).unwrap();
                prop_assert_eq!(span.range_slot, item.range_slot as usize);
                prop_assert!(segment.pages_of(dispatch, item).eq(planned.pages()[at..at + tiles].iter().copied()));
                for query in 0..item.queries {
                    self.count_tokens((segment, dispatch, span), item, query)?;
                    self.count_state((segment, dispatch), item, query)?;
                }
                if segment.calibration().is_some() {
                    prop_assert_eq!(dispatch.most_queries, 1);
                    for first in (0..item.queries).map(|query| (item.scores + query * item.score_stride) as usize) {
                        let is_new = |tile| tile < segment.score_tiles() && scores.insert(tile);
                        prop_assert!((first..first + tiles).all(is_new));
                    }
                }
            }
        }
        Ok(())
    }

    fn check_size(&self, dispatch: &Dispatch, item: &WorkItem, split: &Split) -> Checked {
        let tiles = (item.tokens as usize).div_ceil(TILE_TOKENS);
        let most_tiles = if self.kind.is_limited() { 4 * split.max_tiles } else { split.max_tiles };
        prop_assert!(tiles >= 1 && tiles <= most_tiles.next_multiple_of(split.tile_step));
        prop_assert!(dispatch.most_queries <= self.work.block_queries());
        let queries = dispatch.workgroups.unwrap_or(1) * dispatch.most_queries;
        prop_assert!((1..=queries).contains(&(item.queries as usize)));
        prop_assert!(dispatch.most_queries == 1 || item.later == 0 || self.kind.is_limited());
        prop_assert!(dispatch.mask != ItemMask::Bits || item.queries == 1);
        Ok(())
    }

    /// Counts the tokens of an item that one of its queries sees.
    fn count_tokens(
        &mut self,
        (segment, dispatch, span): (&StoreWork, &Dispatch, &PlannedSpan),
        item: &WorkItem,
        query: u32,
    ) -> Checked {
        let row = (item.row + query) as usize;
        let first = span.start + (item.page_offset as usize - span.first_page) * TILE_TOKENS;
        let run = &self.plan.runs()[span.run];
        for token in 0..item.tokens as usize {
            let shown = token as u32 + item.later.saturating_sub(query) < item.tokens;
            let is_seen = shown
                && match dispatch.mask {
                    ItemMask::None => true,
                    ItemMask::Bits => segment.sees(item, token),
                    ItemMask::Start => token as u32 >= item.scores + query * item.score_stride,
                };
            prop_assert_eq!(is_seen, run.sees(row - run.first_row, first + token));
            self.seen[row] += usize::from(is_seen);
        }
        Ok(())
    }

    /// Counts the state row, or the output, that an item writes for one of its queries.
    fn count_state(&mut self, (segment, dispatch): (&StoreWork, &Dispatch), item: &WorkItem, query: u32) -> Checked {
        let row = (item.row + query) as usize;
        let (state, states) = (item.state + query * item.stride, self.work.rows()[row]);
        if states == StateRows::WRITTEN {
            let is_shared = item.queries > 1 && dispatch.most_queries > 2;
            prop_assert!(self.kind == Kind::Writing && is_shared && item.states == 0);
            self.written[row] += 1;
        } else {
            prop_assert!((states.first..states.end).contains(&state));
            self.states[state as usize] += 1;
        }
        let of_first = self.work.rows()[item.row as usize];
        prop_assert_eq!((item.first_state, item.states), (of_first.first, of_first.end - of_first.first));
        prop_assert_eq!(segment.queries()[(item.query + query) as usize].row as usize, row);
        Ok(())
    }

    /// Checks the counts when all items were counted; `lengths` are those of the sequences.
    fn check(&self, lengths: &[usize]) -> Checked {
        let rows = self.work.rows();
        for run in self.plan.runs() {
            for query in 0..run.run.queries {
                let (row, length) = (run.first_row + query, lengths[run.run.sequence]);
                let sees = (0..length).filter(|&position| run.sees(query, position)).count();
                prop_assert_eq!(self.seen[row], sees);
                let is_written = rows[row] == StateRows::WRITTEN;
                prop_assert_eq!(self.written[row], usize::from(is_written));
                prop_assert!(is_written || rows[row].end > rows[row].first || sees == 0);
            }
        }
        for rows in rows {
            prop_assert!((rows.first..rows.end).all(|row| self.states[row as usize] == 1));
        }
        let most = rows.iter().map(|rows| (rows.first..rows.end).len()).max();
        prop_assert_eq!(most, Some(self.work.most_states()));
        Ok(())
    }
}

proptest! {
    /// Every token that a query sees is in exactly one of its items, and every state row of a query
    /// is written once.
    #[test]
    fn items_cover_all_tokens_once(
        lengths in prop::collection::vec((0usize..3, 0usize..2000), 1..12),
        shard_pages in 1u32..9,
        target_items in prop_oneof![1usize..200, Just(usize::MAX)],
        (tile_step, max_tiles) in (1usize..6, 1usize..40),
        (queries, block_queries) in (prop::collection::vec(prop_oneof![1usize..40, 1usize..400], 3), 1usize..9),
        window in prop::option::of(1usize..700),
        kind in (0..4).prop_map(|kind: i32| Kind::ALL[kind as usize]),
    ) {
        let shape = AttentionShape::new(6, 2, 64).unwrap();
        let mut next = 0;
        let mut page = || {
            next += 1;
            Page { shard: next / shard_pages, index: next % shard_pages }
        };
        let tables = lengths.iter().map(|&(_, tokens)| (0..tokens.div_ceil(TILE_TOKENS)).map(|_| page()).collect());
        let tables: Vec<Vec<Page>> = tables.collect();
        let (spans, ends) = spans(&lengths, &tables);
        let of = |parity: usize| spans.iter().skip(parity).step_by(2).cloned().collect::<Vec<_>>();
        let calibration = crate::Calibration::new(0.0, 1.0).ok().filter(|_| window.is_none());
        let stores = [
            StoreView { format: SegmentFormat::F16, calibration: None, spans: of(0) },
            StoreView { format: SegmentFormat::per_channel(Bits::Two), calibration, spans: of(1) },
        ];
        let run = |(sequence, &queries): (usize, &usize)| {
            let queries = queries.min(ends[sequence]).max(1);
            QueryRun::new(sequence, queries, visible(window, sequence, queries))
        };
        let runs: Vec<QueryRun> = queries.iter().enumerate().map(run).collect();
        let plan = AttendPlan::new(shape, &runs, &stores);
        prop_assert_eq!(plan.is_ok(), ends.iter().all(|&tokens| tokens > 0));
        let Ok(plan) = plan else { return Ok(()) };
        let split = Split { target_items, tile_step, max_tiles };
        let work = Work::in_blocks(&plan, split, kind.blocks(block_queries)).unwrap();
        let mut coverage = Coverage::new(&plan, &work, kind);
        prop_assert!(work.block_queries() <= block_queries);
        for (segment, planned) in work.segments().iter().zip(plan.segments()) {
            coverage.count(segment, planned, &split)?;
        }
        coverage.check(&ends)?;
    }
}
