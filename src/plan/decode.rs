//! The plan of one decode step: every sequence's query attends to all its spans.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Page;
use crate::format::{AttentionShape, Calibration, SegmentFormat, TILE_TOKENS};
use crate::{Error, Result};

/// A span: consecutive tokens of one sequence in one store, with ranges of their own.
#[derive(Clone, Debug)]
pub struct SpanView<'a> {
    /// The sequence.
    pub sequence: usize,
    /// Tokens of the span; 0 is allowed and adds nothing.
    pub tokens: usize,
    /// Its pages in token order, `tokens / 128` rounded up.
    pub pages: &'a [Page],
    /// Its slot among the span ranges of the store (any value where the format has none).
    pub range_slot: usize,
}

/// The spans that a step attends to in one store.
#[derive(Clone, Debug)]
pub struct StoreView<'a> {
    /// Format of the store.
    pub format: SegmentFormat,
    /// Calibration of the scores of every span of this store, each with its own extremes.
    pub calibration: Option<Calibration>,
    /// The spans.
    pub spans: Vec<SpanView<'a>>,
}

/// How finely the spans are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Work items to aim for in each segment, all KV heads together, counted once for every four query heads of a KV head:
    /// enough to fill the device a few times. A segment is a launch, and launches do not overlap.
    pub target_items: usize,
    /// Tiles of an item are a multiple of this (except at the end of a span).
    pub tile_step: usize,
    /// Most tiles of one item, rounded up to `tile_step`. The GPU kernels take 64.
    pub max_tiles: usize,
}

impl Default for Split {
    /// Items of at most 32 tiles: on an H200, 64 leave a longer tail (8 bits at four query heads per KV head 4 % slower,
    /// one bit 1 to 2 %) and make only f16 at one query head 2 % faster.
    fn default() -> Self {
        Self { target_items: 2048, tile_step: 4, max_tiles: 32 }
    }
}

/// How the runs of a segment are cut: into items of at most `most` tiles, but the last of every run into items of half and of
/// a quarter as many. They run last, so that no device waits long for its last workgroups.
struct Cut {
    step: usize,
    most: usize,
    /// The part of a run that goes into the smaller items.
    small_part: f64,
}

/// Query heads that a work item counts once for: what a workgroup of the GPU kernels takes.
const ITEM_HEADS: usize = 4;

/// A run of tiles of one span, attended by one workgroup per KV head (and chunk of query heads). The layout is that of
/// the GPU kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct WorkItem {
    /// Index of the first page in [`SegmentPlan::page_table`]. It also places the scores of the unfused path: those of
    /// query head h lie at `(page_offset · Hq + h) · 128` onwards, tile after tile `Hq · 128` apart.
    pub page_offset: u32,
    /// Tokens of the item.
    pub tokens: u32,
    /// Index of the span within the segment plan: selects the prepared query and the score map.
    pub span: u32,
    /// Row of states that the item writes.
    pub state: u32,
    /// Slot of the span ranges.
    pub range_slot: u32,
    /// The sequence: selects the query.
    pub sequence: u32,
    /// First state row of the sequence.
    pub first_state: u32,
    /// State rows of the sequence, those of all its items.
    pub states: u32,
}

/// Work items whose pages lie in one shard: one dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dispatch {
    /// The shard.
    pub shard: u32,
    /// First item.
    pub first_item: usize,
    /// Number of items.
    pub items: usize,
}

/// A span of a segment plan as the kernels see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct PlannedSpan {
    /// The sequence whose query attends to the span.
    pub sequence: u32,
    /// Slot of the span ranges.
    pub range_slot: u32,
    /// Index of the span's first page in [`SegmentPlan::page_table`].
    pub page_offset: u32,
    /// Tokens of the span.
    pub tokens: u32,
}

/// The part of a plan that concerns one store.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentPlan {
    /// Index of the store among those handed to [`DecodePlan::new`].
    pub store: usize,
    /// Its format.
    pub format: SegmentFormat,
    /// Calibration of its scores.
    pub calibration: Option<Calibration>,
    /// The spans that have tokens.
    pub spans: Vec<PlannedSpan>,
    /// Page indices within the shard of the item that points at them.
    pub page_table: Vec<u32>,
    /// Items, grouped by shard, those of the most tokens first.
    pub items: Vec<WorkItem>,
    /// One per shard that holds any of the items.
    pub dispatches: Vec<Dispatch>,
}

/// Everything a backend needs to know to run one decode step, but the buffers.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodePlan {
    /// Shape of the layer.
    pub shape: AttentionShape,
    /// One per store that has tokens.
    pub segments: Vec<SegmentPlan>,
    /// First state row of each sequence, and the total at the end: sequence s owns rows
    /// `first_state[s] .. first_state[s + 1]`. A row holds the states of all query heads.
    pub first_state: Vec<u32>,
}

impl DecodePlan {
    /// Plans a step of `sequences` sequences over `stores`.
    ///
    /// # Errors
    /// [`Error::Sequence`] for a span of a sequence that does not exist, [`Error::Plan`] when a span has more or fewer
    /// pages than its tokens need, [`Error::NoTokens`] when a sequence has nothing to attend to.
    pub fn new(shape: AttentionShape, sequences: usize, stores: &[StoreView<'_>], split: Split) -> Result<Self> {
        check(&shape, sequences, stores)?;
        let mut segments: Vec<SegmentPlan> = stores
            .iter()
            .enumerate()
            .map(|(index, store)| {
                let tiles: usize = store.spans.iter().map(|span| span.pages.len()).sum();
                SegmentPlan::new(index, store, &split.cut(tiles * shape.kv_heads(), shape.group()))
            })
            .filter(|segment| !segment.items.is_empty())
            .collect();
        let first_state = assign_state_rows(sequences, &mut segments)?;
        Ok(Self { shape, segments, first_state })
    }

    /// Sequences of the step.
    pub fn sequences(&self) -> usize {
        self.first_state.len() - 1
    }

    /// Rows of states that the attend kernels write.
    pub fn states(&self) -> usize {
        self.first_state[self.sequences()] as usize
    }
}

impl Split {
    /// The cut of a segment of `tiles` tiles, counted for each KV head, with `group` query heads each.
    fn cut(&self, tiles: usize, group: usize) -> Cut {
        let tiles = tiles * group.div_ceil(ITEM_HEADS);
        let (target, step) = (self.target_items.max(1), self.tile_step.max(1));
        let most = (2 * tiles).div_ceil(target).clamp(1, self.max_tiles.max(1)).next_multiple_of(step);
        // The beginning and the end of an item take longer with more heads.
        let most_small = if group <= 2 { 0.5 } else { 0.25 };
        let small_part = target as f64 * most as f64 / (4 * tiles).max(1) as f64;
        Cut { step, most, small_part: small_part.min(most_small) }
    }
}

impl Cut {
    /// Cuts a run of tiles.
    fn pieces(&self, run: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let small = (run.len() as f64 * self.small_part) as usize / self.step * self.step;
        let middle = run.end - small;
        let last = run.end - small / 2 / self.step * self.step;
        let smaller = |parts: usize| (self.most / parts).max(1).next_multiple_of(self.step);
        cut_evenly(run.start..middle, self.step, self.most)
            .chain(cut_evenly(middle..last, self.step, smaller(2)))
            .chain(cut_evenly(last..run.end, self.step, smaller(4)))
    }
}

impl SegmentPlan {
    fn new(index: usize, store: &StoreView<'_>, cut: &Cut) -> Self {
        let mut page_table = Vec::new();
        let mut spans = Vec::new();
        let mut items_by_shard: BTreeMap<u32, Vec<WorkItem>> = BTreeMap::new();
        for span in store.spans.iter().filter(|span| span.tokens > 0) {
            let planned = PlannedSpan {
                sequence: span.sequence as u32,
                range_slot: span.range_slot as u32,
                page_offset: page_table.len() as u32,
                tokens: span.tokens as u32,
            };
            page_table.extend(span.pages.iter().map(|page| page.index));
            for run in runs_in_one_shard(span.pages) {
                let items = items_by_shard.entry(span.pages[run.start].shard).or_default();
                for tiles in cut.pieces(run) {
                    items.push(WorkItem {
                        page_offset: planned.page_offset + tiles.start as u32,
                        tokens: ((tiles.end * TILE_TOKENS).min(span.tokens) - tiles.start * TILE_TOKENS) as u32,
                        span: spans.len() as u32,
                        state: 0, // known once all segments are cut
                        range_slot: planned.range_slot,
                        sequence: planned.sequence,
                        first_state: 0,
                        states: 0,
                    });
                }
            }
            spans.push(planned);
        }
        let mut items = Vec::new();
        let mut dispatches = Vec::new();
        for (shard, mut shard_items) in items_by_shard {
            shard_items.sort_by_key(|item| std::cmp::Reverse(item.tokens));
            dispatches.push(Dispatch { shard, first_item: items.len(), items: shard_items.len() });
            items.extend(shard_items);
        }
        Self {
            store: index,
            format: store.format,
            calibration: store.calibration,
            spans,
            page_table,
            items,
            dispatches,
        }
    }
}

fn check(shape: &AttentionShape, sequences: usize, stores: &[StoreView<'_>]) -> Result<()> {
    if sequences == 0 {
        return Err(Error::NoTokens { what: "decode plan", hint: "a step needs at least one sequence" });
    }
    for store in stores {
        store.format.check(shape)?;
        for span in &store.spans {
            if span.sequence >= sequences {
                return Err(Error::Sequence { given: span.sequence, sequences });
            }
            let needed = span.tokens.div_ceil(TILE_TOKENS);
            if span.pages.len() != needed {
                return Err(Error::Plan {
                    what: "span",
                    reason: format!("{} tokens lie in {needed} pages, {} were given", span.tokens, span.pages.len()),
                });
            }
        }
    }
    Ok(())
}

/// Maximal runs of pages in the same shard.
fn runs_in_one_shard(pages: &[Page]) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    pages.chunk_by(|a, b| a.shard == b.shard).map(move |run| {
        let range = start..start + run.len();
        start = range.end;
        range
    })
}

/// Cuts a run of tiles into the fewest pieces of at most `most` tiles, of nearly equal size in steps of `step`.
fn cut_evenly(run: Range<usize>, step: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let pieces = run.len().div_ceil(most).max(1);
    let size = run.len().div_ceil(pieces).next_multiple_of(step).max(1);
    run.clone().step_by(size).map(move |start| start..(start + size).min(run.end))
}

/// Gives every item its state row so that the rows of a sequence are contiguous, and returns where each begins.
fn assign_state_rows(sequences: usize, segments: &mut [SegmentPlan]) -> Result<Vec<u32>> {
    let mut first_state = vec![0u32; sequences + 1];
    for item in segments.iter().flat_map(|segment| &segment.items) {
        first_state[item.sequence as usize + 1] += 1;
    }
    if let Some(empty) = first_state[1..].iter().position(|&rows| rows == 0) {
        return Err(Error::Plan {
            what: "decode plan",
            reason: format!("sequence {empty} has no tokens to attend to; prefill or append first"),
        });
    }
    for sequence in 0..sequences {
        first_state[sequence + 1] += first_state[sequence];
    }
    let mut next = first_state.clone();
    for item in segments.iter_mut().flat_map(|segment| &mut segment.items) {
        let sequence = item.sequence as usize;
        item.state = next[sequence];
        item.first_state = first_state[sequence];
        item.states = first_state[sequence + 1] - first_state[sequence];
        next[sequence] += 1;
    }
    Ok(first_state)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bits;
    use proptest::prelude::*;

    fn pages(shards: &[(u32, u32)]) -> Vec<Page> {
        shards.iter().map(|&(shard, index)| Page { shard, index }).collect()
    }

    #[test]
    fn a_span_that_changes_shard_is_cut_there() {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let pages = pages(&[(0, 3), (0, 4), (1, 0)]);
        let span = SpanView { sequence: 0, tokens: 300, pages: &pages, range_slot: 0 };
        let store = StoreView { format: SegmentFormat::F16, calibration: None, spans: vec![span] };
        let plan = DecodePlan::new(shape, 1, &[store], Split::default()).unwrap();
        let segment = &plan.segments[0];
        assert_eq!(segment.page_table, [3, 4, 0]);
        assert_eq!(segment.items.iter().map(|i| (i.page_offset, i.tokens)).collect::<Vec<_>>(), [(0, 256), (2, 44)]);
        assert_eq!(segment.dispatches.len(), 2);
        assert_eq!(plan.states(), 2);
    }

    #[test]
    fn a_sequence_without_tokens_is_named() {
        let shape = AttentionShape::new(1, 1, 64).unwrap();
        let error = DecodePlan::new(shape, 1, &[], Split::default()).unwrap_err();
        assert!(error.to_string().contains("sequence 0"), "{error}");
    }

    proptest! {
        /// Every token of every span is in exactly one item, and every state row of a sequence is written once.
        #[test]
        fn items_cover_all_tokens_once(
            lengths in prop::collection::vec((0usize..3, 0usize..3000), 1..12),
            shard_pages in 1u32..9,
            target_items in prop_oneof![1usize..200, Just(usize::MAX)],
            (tile_step, max_tiles) in (1usize..6, 1usize..40),
        ) {
            let shape = AttentionShape::new(6, 2, 64).unwrap();
            let mut next = 0;
            let tables: Vec<Vec<Page>> = lengths.iter().map(|&(_, tokens)| {
                (0..tokens.div_ceil(TILE_TOKENS)).map(|_| {
                    next += 1;
                    Page { shard: next / shard_pages, index: next % shard_pages }
                }).collect()
            }).collect();
            let spans = |parity: usize| lengths.iter().zip(&tables).enumerate()
                .filter(|(i, _)| i % 2 == parity)
                .map(|(i, (&(sequence, tokens), pages))| SpanView { sequence, tokens, pages, range_slot: i })
                .collect::<Vec<_>>();
            let stores = [
                StoreView { format: SegmentFormat::F16, calibration: None, spans: spans(0) },
                StoreView { format: SegmentFormat::per_channel(Bits::Two), calibration: None, spans: spans(1) },
            ];
            let filled = (0..3).all(|s| lengths.iter().any(|&(sequence, tokens)| sequence == s && tokens > 0));
            let plan = DecodePlan::new(shape, 3, &stores, Split { target_items, tile_step, max_tiles });
            prop_assert_eq!(plan.is_ok(), filled);
            let Ok(plan) = plan else { return Ok(()) };

            let mut states = vec![0; plan.states()];
            for segment in &plan.segments {
                let mut covered = vec![0usize; segment.page_table.len()];
                for dispatch in &segment.dispatches {
                    let tokens = segment.items[dispatch.first_item..][..dispatch.items].iter().map(|item| item.tokens);
                    prop_assert!(tokens.is_sorted_by(|a, b| a >= b), "the largest run first");
                    for item in &segment.items[dispatch.first_item..][..dispatch.items] {
                        let span = &segment.spans[item.span as usize];
                        let tiles = (item.tokens as usize).div_ceil(TILE_TOKENS);
                        prop_assert!(tiles <= max_tiles.next_multiple_of(tile_step));
                        covered[item.page_offset as usize..][..tiles].iter_mut().for_each(|n| *n += 1);
                        let last = item.page_offset as usize + tiles
                            == span.page_offset as usize + (span.tokens as usize).div_ceil(TILE_TOKENS);
                        prop_assert!(last || (item.tokens as usize).is_multiple_of(TILE_TOKENS));
                        states[item.state as usize] += 1;
                        let owner = plan.first_state.partition_point(|&first| first <= item.state) - 1;
                        prop_assert_eq!(owner, item.sequence as usize);
                    }
                }
                prop_assert!(covered.iter().all(|&n| n == 1));
                let items: u64 = segment.items.iter().map(|i| u64::from(i.tokens)).sum();
                let spans: u64 = segment.spans.iter().map(|s| u64::from(s.tokens)).sum();
                prop_assert_eq!(items, spans);
            }
            prop_assert!(states.iter().all(|&n| n == 1));
        }
    }
}
