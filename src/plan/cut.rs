//! A segment of a plan cut into work items.

use std::ops::Range;

use super::Page;
use super::attend::{AttendPlan, StorePart};
use super::blocks::{Block, BlockQueries, Part, Spread};
use super::split::{Cut, Split};
use super::work::{Dispatch, ItemMask, PreparedRow, StoreWork, WorkItem};
use crate::format::{AttentionShape, TILE_TOKENS};

/// Where the prepared queries and the scores of a segment's spans begin.
struct Prepared {
    queries: Vec<PreparedRow>,
    /// For every span: index of the query of its run's first row, and of the first tile of that query's scores.
    spans: Vec<(usize, usize)>,
    score_tiles: usize,
}

impl Prepared {
    fn new(plan: &AttendPlan, segment: &StorePart) -> Self {
        if !segment.format().key.has_span_ranges() && segment.calibration().is_none() {
            // All spans share what is prepared of a query.
            let queries = (0..plan.rows()).map(|row| PreparedRow { row: row as u32, range_slot: 0 }).collect();
            let spans = segment.spans().iter().map(|span| (plan.runs()[span.run].first_row, 0)).collect();
            return Self { queries, spans, score_tiles: 0 };
        }
        let mut prepared = Self { queries: Vec::new(), spans: Vec::new(), score_tiles: 0 };
        for span in segment.spans() {
            prepared.spans.push((prepared.queries.len(), prepared.score_tiles));
            let run = &plan.runs()[span.run];
            let rows = run.first_row..run.first_row + run.run.queries;
            prepared
                .queries
                .extend(rows.map(|row| PreparedRow { row: row as u32, range_slot: span.range_slot as u32 }));
            if segment.calibration().is_some() {
                prepared.score_tiles += run.run.queries * span.tokens.div_ceil(TILE_TOKENS);
            }
        }
        prepared
    }
}

/// What the blocks of queries see of a segment's spans.
struct Parts {
    parts: Vec<Part>,
    /// Where the parts of every span end.
    ends: Vec<usize>,
    /// Most queries of a workgroup of spread blocks.
    most: usize,
}

impl Parts {
    fn of(plan: &AttendPlan, segment: &StorePart, (blocks, queries): (&[Block], BlockQueries)) -> Self {
        let first_block: Vec<usize> =
            (0..=plan.runs().len()).map(|run| blocks.partition_point(|block| block.run < run)).collect();
        // A query has scores of its own where they are calibrated, by its own extremes.
        let most = if segment.calibration().is_some() { 1 } else { queries.most };
        let mut of = Self { parts: Vec::new(), ends: Vec::with_capacity(segment.spans().len()), most };
        for span in segment.spans() {
            let first = of.parts.len();
            let of_run = first_block[span.run]..first_block[span.run + 1];
            let run = &plan.runs()[span.run];
            let spreads = queries.spreads(run);
            for (index, block) in of_run.clone().zip(&blocks[of_run]) {
                match segment.calibration() {
                    _ if spreads => block.add_spread_parts(index, (run, span), most, &mut of.parts),
                    None if block.queries >= queries.least_limited => {
                        block.add_limited_parts(index, run, span, &mut of.parts);
                    }
                    _ => block.add_parts(index, run, span, &mut of.parts),
                }
            }
            if segment.calibration().is_some() && !spreads {
                let of_span = of.parts.split_off(first);
                of.parts.extend(of_span.into_iter().flat_map(single_queries));
            }
            of.ends.push(of.parts.len());
        }
        of
    }

    /// How those of single queries and those of blocks are cut.
    fn cuts(&self, shape: &AttentionShape, splits: [&Split; 2]) -> [Cut; 2] {
        let tiles = |part: &Part| part.tokens.len().div_ceil(TILE_TOKENS) * part.workgroups(self.most);
        let tiles_where =
            |of: fn(&Part) -> bool| -> usize { self.parts.iter().filter(|part| of(part)).map(tiles).sum() };
        match splits {
            [single, blocks] if single == blocks => {
                [single.cut(tiles_where(|_| true) * shape.kv_heads(), shape.group()); 2]
            }
            [single, blocks] => {
                let counts = [tiles_where(|part| !part.is_shared()), tiles_where(Part::is_shared)];
                let [singles, of_blocks] = counts.map(|tiles| tiles * shape.kv_heads());
                [single.cut(singles, shape.group()), blocks.cut_evenly(of_blocks)]
            }
        }
    }

    /// Those of every span, with its index.
    fn by_span(&self) -> impl Iterator<Item = (usize, &[Part])> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| &self.parts[start..end]).enumerate()
    }
}

/// What the items of a dispatch have in common.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct DispatchKey {
    shard: u32,
    /// Whether a workgroup takes several queries.
    shared: bool,
    /// Whether several workgroups take the queries of an item.
    spread: bool,
    mask: ItemMask,
}

/// Items by dispatch, and the token bits of masked ones.
#[derive(Default)]
struct Items {
    token_bits: Vec<u32>,
    /// The items of every dispatch, and their blocks.
    dispatches: Vec<(DispatchKey, Vec<(WorkItem, usize)>)>,
    /// The dispatch of the last item.
    last: usize,
}

impl Items {
    fn push(&mut self, key: DispatchKey, item: (WorkItem, usize)) {
        if self.dispatches.get(self.last).is_none_or(|(other, _)| *other != key) {
            self.last = self.dispatches.iter().position(|(other, _)| *other == key).unwrap_or(self.dispatches.len());
            if self.last == self.dispatches.len() {
                self.dispatches.push((key, Vec::new()));
            }
        }
        self.dispatches[self.last].1.push(item);
    }

    /// In the order of the keys, and within a dispatch those of the most tokens first.
    fn ordered(mut self, most_queries: usize) -> (Vec<Dispatch>, Vec<WorkItem>, Vec<usize>, Vec<u32>) {
        self.dispatches.sort_by_key(|&(key, _)| key);
        let count = self.dispatches.iter().map(|(_, items)| items.len()).sum();
        let (mut items, mut blocks) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let mut dispatches = Vec::with_capacity(self.dispatches.len());
        for (DispatchKey { shard, shared, spread, mask }, of_dispatch) in self.dispatches {
            let most_queries = if shared { most_queries } else { 1 };
            let of_item = of_dispatch.iter().map(|(item, _)| item.queries as usize).max().unwrap_or(1);
            dispatches.push(Dispatch {
                shard,
                most_queries,
                workgroups: if spread { Some(of_item.div_ceil(most_queries)) } else { None },
                mask,
                first_item: items.len(),
                items: of_dispatch.len(),
            });
            for (item, block) in longest_first(&of_dispatch).map(|place| of_dispatch[place]) {
                items.push(item);
                blocks.push(block);
            }
        }
        (dispatches, items, blocks, self.token_bits)
    }
}

/// The places of the items, those of the most tokens first, and of as many tokens in their order. Words are sorted in
/// place of items, which are several times as long.
fn longest_first(items: &[(WorkItem, usize)]) -> impl Iterator<Item = usize> {
    let key = |(place, (item, _)): (usize, &(WorkItem, usize))| u64::from(!item.tokens) << 32 | place as u64;
    let mut keys: Vec<u64> = items.iter().enumerate().map(key).collect();
    keys.sort_unstable();
    keys.into_iter().map(|key| key as u32 as usize)
}

/// Cuts a segment into items, and says of which block each is. Blocks of at least `least_limited` queries take what not
/// all of them see together. A workgroup takes up to `most_queries` queries.
///
/// Parts of single queries and of blocks are cut as their `splits` say.
pub(super) fn cut_segment(
    plan: &AttendPlan,
    segment: &StorePart,
    (blocks, queries, most_queries): (&[Block], BlockQueries, usize),
    splits: [&Split; 2],
) -> (StoreWork, Vec<usize>) {
    let prepared = Prepared::new(plan, segment);
    let parts = Parts::of(plan, segment, (blocks, queries));
    let cuts = parts.cuts(plan.shape(), splits);
    let mut items = Items::default();
    for (index, of_span) in parts.by_span() {
        let pages = segment.pages_of(&segment.spans()[index]);
        let in_shards = runs_in_one_shard(pages).map(|tiles| (pages[tiles.start].shard, tiles)).collect();
        let cutter = Cutter { plan, segment, index, in_shards, prepared: &prepared, cuts: &cuts };
        for part in of_span {
            cutter.cut(part, blocks[part.block].first + part.first, &mut items);
        }
    }
    let (dispatches, items, item_blocks, token_bits) = items.ordered(most_queries);
    let work = StoreWork {
        store: segment.store(),
        format: *segment.format(),
        calibration: segment.calibration().copied(),
        queries: prepared.queries,
        page_table: segment.pages().iter().map(|page| page.index).chain(token_bits).collect(),
        items,
        dispatches,
        score_tiles: prepared.score_tiles,
        scoring: plan.scoring().clone(),
    };
    (work, item_blocks)
}

/// Cuts the parts of one span into items.
struct Cutter<'a> {
    plan: &'a AttendPlan,
    segment: &'a StorePart,
    /// The span.
    index: usize,
    /// Its runs of tiles in one shard.
    in_shards: Vec<(u32, Range<usize>)>,
    prepared: &'a Prepared,
    cuts: &'a [Cut; 2],
}

impl Cutter<'_> {
    /// Cuts a part, whose first query is `query` within the run.
    fn cut(&self, part: &Part, query: usize, items: &mut Items) {
        let (span, (first_query, first_score)) = (&self.segment.spans()[self.index], self.prepared.spans[self.index]);
        let run = &self.plan.runs()[span.run];
        let span_tiles = span.tokens.div_ceil(TILE_TOKENS);
        let seen = part.masked.then(|| run.seen(query, span));
        let sees = |token| run.sees(query, span.start + token);
        for (shard, tiles) in self.pieces(part) {
            let tokens = tiles.start * TILE_TOKENS..(tiles.end * TILE_TOKENS).min(part.tokens.end);
            let masked = seen.is_some_and(|seen| seen.hides_some_of(&tokens));
            if masked && !tokens.clone().any(sees) {
                continue;
            }
            let (mask, scores, score_stride) = match part.spread {
                _ if masked => (ItemMask::Bits, self.segment.pages().len() + items.token_bits.len(), 0),
                // As many are hidden as lie before the window.
                Spread::Each { hidden: Some(hidden) } if tokens.start == part.tokens.start => {
                    (ItemMask::Start, hidden, 1)
                }
                _ => (ItemMask::None, first_score + query * span_tiles + tiles.start, span_tiles),
            };
            let item = WorkItem {
                page_offset: (span.first_page + tiles.start) as u32,
                tokens: tokens.len() as u32,
                query: (first_query + query) as u32,
                state: 0, // these are known once all segments are cut
                range_slot: span.range_slot as u32,
                row: (run.first_row + query) as u32,
                first_state: 0,
                states: 0,
                queries: part.queries as u32,
                stride: 0,
                scores: scores as u32,
                score_stride: score_stride as u32,
                // Of a part that was cut, the first query may see no token of the last items.
                later: (tokens.end + part.later).saturating_sub(part.tokens.end) as u32,
            };
            if masked {
                add_bits(&mut items.token_bits, tokens, sees);
            }
            let key = DispatchKey { shard, shared: part.is_shared(), spread: part.spread != Spread::Whole, mask };
            items.push(key, (item, part.block));
        }
    }

    /// The tiles of a part in pieces, and the shard of each.
    fn pieces(&self, part: &Part) -> impl Iterator<Item = (u32, Range<usize>)> {
        let cut = self.cuts[usize::from(part.is_shared())];
        let of_part = part.tokens.start / TILE_TOKENS..part.tokens.end.div_ceil(TILE_TOKENS);
        self.in_shards.iter().flat_map(move |(shard, tiles)| {
            let tiles = tiles.start.max(of_part.start)..tiles.end.min(of_part.end);
            let pieces = (!tiles.is_empty()).then(|| cut.pieces(tiles));
            pieces.into_iter().flatten().map(move |tiles| (*shard, tiles))
        })
    }
}

/// Adds a bit for every token of whole tiles; those beyond the tokens are 0.
fn add_bits(bits: &mut Vec<u32>, tokens: Range<usize>, sees: impl Fn(usize) -> bool) {
    let first = bits.len();
    bits.resize(first + tokens.len().div_ceil(TILE_TOKENS) * (TILE_TOKENS / 32), 0);
    for (at, _) in tokens.enumerate().filter(|&(_, token)| sees(token)) {
        bits[first + at / 32] |= 1 << (at % 32);
    }
}

/// The same part for every query alone.
fn single_queries(part: Part) -> impl Iterator<Item = Part> {
    (part.first..part.first + part.queries).map(move |first| Part { first, queries: 1, ..part.clone() })
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
