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
mod coverage;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{QueryRun, SpanView, StoreView};

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
}
