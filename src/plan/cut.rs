//! A segment of a plan cut into work items.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Page;
use super::attend::{AttendPlan, StorePart};
use super::blocks::{Block, Part};
use super::split::Split;
use super::work::{Dispatch, PreparedRow, StoreWork, WorkItem};
use crate::format::TILE_TOKENS;

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

/// Cuts a segment into items, and says of which block each is.
///
/// Parts of single queries and of blocks are cut as their `splits` say.
pub(super) fn cut_segment(
    plan: &AttendPlan,
    segment: &StorePart,
    (blocks, least_limited): (&[Block], usize),
    splits: [&Split; 2],
) -> (StoreWork, Vec<usize>) {
    let shape = plan.shape();
    let prepared = Prepared::new(plan, segment);
    let first_block: Vec<usize> =
        (0..=plan.runs().len()).map(|run| blocks.partition_point(|block| block.run < run)).collect();
    // Of every span, one after the other, and where those of each end.
    let (mut parts, mut ends) = (Vec::with_capacity(segment.spans().len()), Vec::with_capacity(segment.spans().len()));
    for span in segment.spans() {
        let first = parts.len();
        let of_run = first_block[span.run]..first_block[span.run + 1];
        for (index, block) in of_run.clone().zip(&blocks[of_run]) {
            match segment.calibration() {
                None if block.queries >= least_limited => {
                    block.add_limited_parts(index, &plan.runs()[span.run], span, &mut parts);
                }
                _ => block.add_parts(index, &plan.runs()[span.run], span, &mut parts),
            }
        }
        // A query has scores of its own where they are calibrated, by its own extremes.
        if segment.calibration().is_some() {
            let of_span = parts.split_off(first);
            parts.extend(of_span.into_iter().flat_map(single_queries));
        }
        ends.push(parts.len());
    }
    let tiles_where = |of: fn(&Part) -> bool| -> usize {
        parts.iter().filter(|part| of(part)).map(|part| part.tokens.len().div_ceil(TILE_TOKENS)).sum()
    };
    let cuts = match splits {
        [single, blocks] if single == blocks => {
            [single.cut(tiles_where(|_| true) * shape.kv_heads(), shape.group()); 2]
        }
        [single, blocks] => {
            let counts = [tiles_where(|part| part.queries == 1), tiles_where(|part| part.queries > 1)];
            let [singles, of_blocks] = counts.map(|tiles| tiles * shape.kv_heads());
            [single.cut(singles, shape.group()), blocks.cut_evenly(of_blocks)]
        }
    };

    // By shard, and whether items have several queries and are masked.
    let mut token_bits = Vec::new();
    let mut by_dispatch: BTreeMap<(u32, bool, bool), Vec<(WorkItem, usize)>> = BTreeMap::new();
    let mut start = 0;
    for ((span, end), &(first_query, first_score)) in segment.spans().iter().zip(ends).zip(&prepared.spans) {
        let of_span = &parts[start..end];
        start = end;
        let span_tiles = span.tokens.div_ceil(TILE_TOKENS);
        let pages = segment.pages_of(span);
        for part in of_span {
            let block = &blocks[part.block];
            // Within the run.
            let query = block.first + part.first;
            let first_tile = part.tokens.start / TILE_TOKENS;
            let seen = part.masked.then(|| plan.runs()[span.run].seen(query, span));
            for run in runs_in_one_shard(&pages[first_tile..part.tokens.end.div_ceil(TILE_TOKENS)]) {
                let shard = pages[first_tile + run.start].shard;
                for tiles in cuts[usize::from(part.queries > 1)].pieces(run.start + first_tile..run.end + first_tile) {
                    let tokens = tiles.start * TILE_TOKENS..(tiles.end * TILE_TOKENS).min(part.tokens.end);
                    let masked = seen.is_some_and(|seen| seen.hides_some_of(&tokens));
                    let sees = |token| plan.runs()[span.run].sees(query, span.start + token);
                    if masked && !tokens.clone().any(sees) {
                        continue;
                    }
                    let item = WorkItem {
                        page_offset: (span.first_page + tiles.start) as u32,
                        tokens: tokens.len() as u32,
                        query: (first_query + query) as u32,
                        state: 0, // these are known once all segments are cut
                        range_slot: span.range_slot as u32,
                        row: (plan.runs()[span.run].first_row + query) as u32,
                        first_state: 0,
                        states: 0,
                        queries: part.queries as u32,
                        stride: 0,
                        scores: match masked {
                            false => (first_score + query * span_tiles + tiles.start) as u32,
                            true => (segment.pages().len() + token_bits.len()) as u32,
                        },
                        // Of a part that was cut, the first query may see no token of the last items.
                        later: (tokens.end + part.later).saturating_sub(part.tokens.end) as u32,
                    };
                    if masked {
                        add_bits(&mut token_bits, tokens, sees);
                    }
                    by_dispatch.entry((shard, part.queries > 1, masked)).or_default().push((item, part.block));
                }
            }
        }
    }
    let (mut items, mut item_blocks, mut dispatches) = (Vec::new(), Vec::new(), Vec::new());
    let most_queries = blocks.iter().map(|block| block.queries).max().unwrap_or(1);
    for ((shard, several, masked), mut of_dispatch) in by_dispatch {
        of_dispatch.sort_by_key(|(item, _)| std::cmp::Reverse(item.tokens));
        let most_queries = if several { most_queries } else { 1 };
        dispatches.push(Dispatch { shard, most_queries, masked, first_item: items.len(), items: of_dispatch.len() });
        items.extend(of_dispatch.iter().map(|(item, _)| *item));
        item_blocks.extend(of_dispatch.iter().map(|(_, block)| *block));
    }
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
