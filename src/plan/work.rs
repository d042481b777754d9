//! A plan cut into work items, for the CPU and wgpu. (CUDA cuts plans itself, to fill its multiprocessors once.)

use super::Page;
use super::attend::AttendPlan;
use super::blocks::{Block, BlockQueries, OnlyStates, blocks};
use super::cut::cut_segment;
use super::scoring::Scoring;
use super::split::Split;
use super::state_rows::{StateCounts, StateRows};
use crate::Result;
use crate::format::{AttentionShape, Calibration, SegmentFormat, TILE_TOKENS};

/// A run of tiles of one span and some neighbouring queries, attended by one workgroup per KV head (and chunk of query
/// heads). The layout is that of the GPU kernels.
///
/// State row of query q of the item, 0 the first: `state + q · stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct WorkItem {
    /// Index of the first page in [`StoreWork::page_table`].
    pub page_offset: u32,
    /// Tokens of the item.
    pub tokens: u32,
    /// Prepared query of the first query: its index in [`StoreWork::queries`]. Those of the others follow.
    pub query: u32,
    /// Row of states that the first query writes.
    pub state: u32,
    /// Slot of the span ranges.
    pub range_slot: u32,
    /// Row of the first query in the tensor of queries.
    pub row: u32,
    /// First state row of the first query, where the item has no other.
    pub first_state: u32,
    /// State rows of the first query, those of all its items, where the item has no other. None where the item writes
    /// the outputs of its queries: see [`StateRows::WRITTEN`].
    pub states: u32,
    /// Queries of the item.
    pub queries: u32,
    /// State rows from one query to the next.
    pub stride: u32,
    /// Where the item's scores lie in the unfused path: those of query head h and tile t of the item begin at
    /// `((scores + t) · Hq + h) · 128`. Masked items are not calibrated. This is then the index of their token bits in
    /// [`StoreWork::page_table`], or the number of tokens at their beginning that the query does not see.
    pub scores: u32,
    /// Tokens at the item's end that its first query does not see. Each further query sees one more, up to all.
    pub later: u32,
    /// What `scores` of one query is less than that of the next.
    pub score_stride: u32,
}

/// A query that a segment's keys are multiplied with: prepared once for every span where keys have ranges of spans or
/// scores are calibrated, otherwise once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct PreparedRow {
    /// Row of the query in the tensor of queries.
    pub row: u32,
    /// Slot of the span ranges.
    pub range_slot: u32,
}

/// Which tokens of an item are hidden from its queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ItemMask {
    /// None, but for the [later](WorkItem::later) ones.
    None,
    /// Those of which the token bits are 0; the item has one query.
    Bits,
    /// As many at its beginning as [`WorkItem::scores`] says.
    Start,
}

/// Work items that one dispatch takes: their pages lie in one shard, and a workgroup takes one query of each or
/// several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dispatch {
    /// The shard.
    pub shard: u32,
    /// Most queries that a workgroup takes together: 1, or [`Work::block_queries`].
    pub most_queries: usize,
    /// Number of workgroups of a KV head that take the queries of an item one after the other; none where one takes
    /// all.
    pub workgroups: Option<usize>,
    /// Which tokens are hidden.
    pub mask: ItemMask,
    /// First item.
    pub first_item: usize,
    /// Number of items.
    pub items: usize,
}

/// The work of one segment.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreWork {
    pub(super) store: usize,
    pub(super) format: SegmentFormat,
    pub(super) calibration: Option<Calibration>,
    pub(super) queries: Vec<PreparedRow>,
    pub(super) page_table: Vec<u32>,
    pub(super) items: Vec<WorkItem>,
    pub(super) dispatches: Vec<Dispatch>,
    pub(super) score_tiles: usize,
    pub(super) scoring: Scoring,
}

impl StoreWork {
    /// Index of the store.
    pub const fn store(&self) -> usize {
        self.store
    }

    /// Its format.
    pub const fn format(&self) -> &SegmentFormat {
        &self.format
    }

    /// Calibration of its scores.
    pub const fn calibration(&self) -> Option<&Calibration> {
        self.calibration.as_ref()
    }

    /// The queries to prepare.
    pub fn queries(&self) -> &[PreparedRow] {
        &self.queries
    }

    /// Page indices within the shard of the item that points at them, and behind all of them the token bits of masked
    /// items: four words for every tile, the lowest bit of a word first.
    pub fn page_table(&self) -> &[u32] {
        &self.page_table
    }

    /// Items, grouped by dispatch, those of the most tokens first.
    pub fn items(&self) -> &[WorkItem] {
        &self.items
    }

    /// What is dispatched together.
    pub fn dispatches(&self) -> &[Dispatch] {
        &self.dispatches
    }

    /// The items of a dispatch.
    pub fn items_of(&self, dispatch: &Dispatch) -> &[WorkItem] {
        self.items.get(dispatch.first_item..).and_then(|items| items.get(..dispatch.items)).unwrap_or_default()
    }

    /// The pages of an item of a dispatch.
    pub(crate) fn pages_of(&self, dispatch: &Dispatch, item: &WorkItem) -> impl Iterator<Item = Page> {
        let tiles = (item.tokens as usize).div_ceil(TILE_TOKENS);
        let shard = dispatch.shard;
        self.page_table[item.page_offset as usize..][..tiles].iter().map(move |&index| Page { shard, index })
    }

    /// How its scores become logits. Sinks are the merge's.
    pub const fn scoring(&self) -> &Scoring {
        &self.scoring
    }

    /// Whether the query of a masked item sees a token of the item.
    pub(crate) fn sees(&self, item: &WorkItem, token: usize) -> bool {
        self.page_table[item.scores as usize + token / 32] >> (token % 32) & 1 == 1
    }

    /// Tiles of scores that the unfused path stores, for each query head.
    pub const fn score_tiles(&self) -> usize {
        self.score_tiles
    }
}

/// A plan cut into items: what the CPU and wgpu backends run.
///
/// Only [`Work::new`] makes one, from a plan that was checked: items lie within their page tables, their prepared
/// queries and state rows exist, and no two items share a state row.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    shape: AttentionShape,
    pub(super) segments: Vec<StoreWork>,
    rows: Vec<StateRows>,
    states: usize,
    block_queries: usize,
    scoring: Scoring,
}

impl Work {
    /// Cuts a plan into items of at most `block_queries` neighbouring queries.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) when there are more items than a 32-bit word counts.
    pub fn new(plan: &AttendPlan, split: Split, block_queries: usize) -> Result<Self> {
        Self::in_blocks(plan, split, BlockQueries::up_to(block_queries))
    }

    /// The same for such blocks. Where short runs are taken query by query, blocks are wide, and their items fewer.
    pub(crate) fn in_blocks(plan: &AttendPlan, split: Split, queries: BlockQueries) -> Result<Self> {
        let blocks = blocks(plan, queries);
        let blocks_split = if queries.least > 1 { split.of_wide_blocks() } else { split };
        let of_workgroup = |block: &Block| queries.of_workgroup(block, &plan.runs()[block.run]);
        let block_queries = blocks.iter().map(of_workgroup).max().unwrap_or(1);
        let mut segments = Vec::with_capacity(plan.segments().len());
        for segment in plan.segments() {
            segments.push(cut_segment(plan, segment, (&blocks, queries, block_queries), [&split, &blocks_split]));
        }
        let mut counts = StateCounts::new(plan, &blocks);
        for (item, &block) in segments.iter().flat_map(|(segment, of)| segment.items.iter().zip(of)) {
            counts.count(block, item.row as usize, item.queries as usize);
        }
        // Smaller blocks may be left to the kernel of single queries.
        let is_wide = block_queries >= queries.least_limited;
        let mut states = match queries.only_states {
            OnlyStates::Outputs if is_wide => counts.assign_unwritten()?,
            _ => counts.assign()?,
        };
        for (segment, of) in &mut segments {
            for (item, &block) in segment.items.iter_mut().zip(of.iter()) {
                let place = states.take(block, item.row as usize, item.queries as usize);
                (item.state, item.stride) = (place.state, place.stride);
                (item.first_state, item.states) = (place.rows.first, place.rows.end - place.rows.first);
            }
        }
        let segments = segments.into_iter().map(|(segment, _)| segment).collect();
        let (shape, scoring) = (*plan.shape(), plan.scoring().clone());
        Ok(Self { shape, segments, rows: states.rows, states: states.states, block_queries, scoring })
    }

    /// Shape of the layer.
    pub const fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// One per segment of the plan.
    pub fn segments(&self) -> &[StoreWork] {
        &self.segments
    }

    /// The state rows of every query, in the order of the queries.
    pub fn rows(&self) -> &[StateRows] {
        &self.rows
    }

    /// How products of queries and keys become logits.
    pub const fn scoring(&self) -> &Scoring {
        &self.scoring
    }

    /// Rows of states that the items write, and some that nobody writes or reads. A row holds the states of
    /// all query heads.
    pub const fn states(&self) -> usize {
        self.states
    }

    /// Most queries that a workgroup takes together.
    pub const fn block_queries(&self) -> usize {
        self.block_queries
    }

    /// State rows of the query that has the most.
    pub fn most_states(&self) -> usize {
        self.rows.iter().map(|rows| (rows.end - rows.first) as usize).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bits;
    use crate::plan::{QueryRun, SpanView, StoreView, TreeMask, Visible};
    use proptest::prelude::*;

    #[test]
    fn a_span_that_changes_shard_is_cut_there() {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let pages: Vec<Page> = [(0, 3), (0, 4), (1, 0)].iter().map(|&(shard, index)| Page { shard, index }).collect();
        let span = SpanView { sequence: 0, start: 0, tokens: 300, gathered: None, pages: &pages, range_slot: 0 };
        let store = StoreView { format: SegmentFormat::F16, calibration: None, spans: vec![span] };
        let plan = AttendPlan::new(shape, &[QueryRun::decode(0)], &[store]).unwrap();
        let work = Work::new(&plan, Split::default(), 1).unwrap();
        let segment = &work.segments()[0];
        assert_eq!(segment.page_table(), [3, 4, 0]);
        assert_eq!(segment.items().iter().map(|i| (i.page_offset, i.tokens)).collect::<Vec<_>>(), [(0, 256), (2, 44)]);
        assert_eq!(segment.dispatches().len(), 2);
        assert_eq!(work.states(), 2);
    }

    /// Where a kernel limits what rows see, every block has one item for what not all of its queries see.
    #[test]
    fn limited_blocks_have_no_items_of_single_queries() {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let pages: Vec<Page> = (0..128).map(|index| Page { shard: 0, index }).collect();
        let span = SpanView { sequence: 0, start: 0, tokens: 16_384, gathered: None, pages: &pages, range_slot: 0 };
        let store = StoreView { format: SegmentFormat::F16, calibration: None, spans: vec![span] };
        let plan = AttendPlan::new(shape, &[QueryRun::causal(0, 16_384)], &[store]).unwrap();
        let limited = BlockQueries { least: 2, least_limited: 9, ..BlockQueries::up_to(64) };
        let work = Work::in_blocks(&plan, Split::default(), limited).unwrap();
        let items = work.segments()[0].items();
        assert!(items.iter().all(|item| item.queries == 64));
        assert_eq!(items.iter().filter(|item| item.later == 63).count(), 256);
        assert!(items.len() < 5 * 256, "{}", items.len());
        assert_eq!(work.block_queries(), 64);
    }

    /// What queries see together is read once for a block of them, whatever their number.
    #[test]
    fn causal_queries_share_their_items() {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let pages: Vec<Page> = (0..256).map(|index| Page { shard: 0, index }).collect();
        let span = SpanView { sequence: 0, start: 0, tokens: 32_768, gathered: None, pages: &pages, range_slot: 0 };
        let tiles = |queries: usize, block_queries: usize| {
            let store = StoreView { format: SegmentFormat::F16, calibration: None, spans: vec![span.clone()] };
            let plan = AttendPlan::new(shape, &[QueryRun::causal(0, queries)], &[store]).unwrap();
            let work = Work::new(&plan, Split::default(), block_queries).unwrap();
            let tiles = |item: &WorkItem| (item.tokens as usize).div_ceil(TILE_TOKENS);
            work.segments()[0].items().iter().map(tiles).sum::<usize>()
        };
        assert_eq!(tiles(1, 8), 256);
        // 255 tiles for each block of 8, and the last alone.
        assert_eq!(tiles(64, 8), 8 * 255 + 64);
        assert_eq!(tiles(64, 1), 64 * 256);
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
            kind in 0..4,
        ) {
            let shape = AttentionShape::new(6, 2, 64).unwrap();
            let mut next = 0;
            let tables: Vec<Vec<Page>> = lengths.iter().map(|&(_, tokens)| {
                (0..tokens.div_ceil(TILE_TOKENS)).map(|_| {
                    next += 1;
                    Page { shard: next / shard_pages, index: next % shard_pages }
                }).collect()
            }).collect();
            let mut starts = [0; 3];
            let spans: Vec<SpanView<'_>> = lengths.iter().zip(&tables).enumerate().map(|(i, (&(sequence, tokens), pages))| {
                starts[sequence] += tokens;
                SpanView { sequence, start: starts[sequence] - tokens, tokens, gathered: None, pages, range_slot: i }
            }).collect();
            let of = |parity: usize| spans.iter().skip(parity).step_by(2).cloned().collect::<Vec<_>>();
            let calibration = crate::Calibration::new(0.0, 1.0).ok().filter(|_| window.is_none());
            let stores = [
                StoreView { format: SegmentFormat::F16, calibration: None, spans: of(0) },
                StoreView { format: SegmentFormat::per_channel(Bits::Two), calibration, spans: of(1) },
            ];
            let run = |(sequence, &queries): (usize, &usize)| {
                let queries = queries.min(starts[sequence]).max(1);
                let visible = match (window, sequence) {
                    (None, _) | (_, 0) => Visible::Causal,
                    (Some(left), 1) => Visible::Window { left },
                    (Some(left), _) => {
                        let bytes: Vec<u8> = (0..(queries * queries).div_ceil(8)).map(|i| (i * left) as u8).collect();
                        Visible::Tree(TreeMask::from_bits(queries, queries, &bytes).unwrap())
                    }
                };
                QueryRun::new(sequence, queries, visible)
            };
            let runs: Vec<QueryRun> = queries.iter().enumerate().map(run).collect();
            let plan = AttendPlan::new(shape, &runs, &stores);
            prop_assert_eq!(plan.is_ok(), starts.iter().all(|&tokens| tokens > 0));
            let Ok(plan) = plan else { return Ok(()) };
            let split = Split { target_items, tile_step, max_tiles };
            let up_to = BlockQueries::up_to(block_queries);
            let of = match kind {
                0 => up_to,
                1 => BlockQueries { least: 2, least_limited: 3, ..up_to },
                3 => BlockQueries { least: 2, least_limited: 3, only_states: OnlyStates::Outputs, ..up_to },
                _ => BlockQueries { least_spread: 3, ..up_to },
            };
            let work = Work::in_blocks(&plan, split, of).unwrap();

            let mut states = vec![0; work.states()];
            let (mut seen, mut written) = (vec![0; plan.rows()], vec![0; plan.rows()]);
            for (segment, planned) in work.segments().iter().zip(plan.segments()) {
                let mut scores = std::collections::HashSet::new();
                for dispatch in segment.dispatches() {
                    let items = segment.items_of(dispatch);
                    prop_assert!(items.iter().map(|item| item.tokens).is_sorted_by(|a, b| a >= b), "the largest run first");
                    for item in items {
                        let tiles = (item.tokens as usize).div_ceil(TILE_TOKENS);
                        let most_tiles = if kind % 2 == 1 { 4 * max_tiles } else { max_tiles };
                        prop_assert!(tiles >= 1 && tiles <= most_tiles.next_multiple_of(tile_step));
                        prop_assert!(dispatch.most_queries <= block_queries);
                        let queries = dispatch.workgroups.unwrap_or(1) * dispatch.most_queries;
                        prop_assert!((1..=queries).contains(&(item.queries as usize)));
                        prop_assert!(dispatch.most_queries == 1 || item.later == 0 || kind % 2 == 1);
                        prop_assert!(dispatch.mask != ItemMask::Bits || item.queries == 1);
                        let at = item.page_offset as usize;
                        let span = planned.spans().iter().find(|span| {
                            (span.first_page..span.first_page + span.tokens.div_ceil(TILE_TOKENS)).contains(&at)
                        }).unwrap();
                        prop_assert_eq!(span.range_slot, item.range_slot as usize);
                        prop_assert!(segment.pages_of(dispatch, item).eq(planned.pages()[at..at + tiles].iter().copied()));
                        for query in 0..item.queries {
                            let row = (item.row + query) as usize;
                            let first = span.start + (at - span.first_page) * TILE_TOKENS;
                            let run = &plan.runs()[span.run];
                            for token in 0..item.tokens as usize {
                                let shown = token as u32 + item.later.saturating_sub(query) < item.tokens;
                                let is_seen = shown && match dispatch.mask {
                                    ItemMask::None => true,
                                    ItemMask::Bits => segment.sees(item, token),
                                    ItemMask::Start => token as u32 >= item.scores + query * item.score_stride,
                                };
                                prop_assert_eq!(is_seen, run.sees(row - run.first_row, first + token));
                                seen[row] += usize::from(is_seen);
                            }
                            let state = item.state + query * item.stride;
                            if work.rows()[row] == StateRows::WRITTEN {
                                prop_assert!(kind == 3 && item.queries > 1 && item.states == 0 && dispatch.most_queries > 2);
                                written[row] += 1;
                            } else {
                                prop_assert!((work.rows()[row].first..work.rows()[row].end).contains(&state));
                                states[state as usize] += 1;
                            }
                            let rows = work.rows()[item.row as usize];
                            prop_assert_eq!((item.first_state, item.states), (rows.first, rows.end - rows.first));
                            prop_assert_eq!(segment.queries()[(item.query + query) as usize].row as usize, row);
                        }
                        if segment.calibration().is_some() {
                            prop_assert_eq!(dispatch.most_queries, 1);
                            for first in (0..item.queries).map(|query| (item.scores + query * item.score_stride) as usize) {
                                prop_assert!((first..first + tiles).all(|tile| tile < segment.score_tiles() && scores.insert(tile)));
                            }
                        }
                    }
                }
            }
            for run in plan.runs() {
                for query in 0..run.run.queries {
                    let (row, length) = (run.first_row + query, starts[run.run.sequence]);
                    let sees = (0..length).filter(|&position| run.sees(query, position)).count();
                    prop_assert_eq!(seen[row], sees);
                    let states_of = work.rows()[row];
                    let is_written = states_of == StateRows::WRITTEN;
                    prop_assert_eq!(written[row], u32::from(is_written));
                    prop_assert!(is_written || states_of.end > states_of.first || sees == 0);
                }
            }
            for rows in work.rows() {
                prop_assert!((rows.first..rows.end).all(|row| states[row as usize] == 1));
            }
            prop_assert!(work.rows().iter().all(|rows| (rows.first..rows.end).len() <= work.most_states()));
            prop_assert!(work.rows().iter().any(|rows| (rows.first..rows.end).len() == work.most_states()));
        }
    }
}
