//! Shorter work items where tokens lie in several shards.

use super::scratch::Sizing;
use crate::plan::{AttendPlan, Split};

/// Bytes of a tile of keys and one of values whose items are as long in one shard as in several.
const SMALL_TILES: u64 = 16 << 10;
/// How many times as many items the largest tiles get.
const MOST_TIMES: u64 = 4;

/// The split of a plan: the given one, or more items where all runs decode over several shards in an engine's pass.
///
/// Every shard is a launch of its own. In a call that submits its own commands they run side by side: see
/// [`buffer_rows`](super::state_buffers::buffer_rows). In an engine's pass they do not, so that `target_items` for all
/// of them leave a small shard too few to keep the device busy. Smaller items cost more at their start and their end
/// than they gain where tiles have few bytes. On an H200, one query for each of 8 sequences of 32k tokens in shards of
/// 256, 256, 512 and 1024 pages: f16 468 µs with a target of 2048 items, 373 with 4096 and 343 with 8192; 4 bits per
/// channel 187, 198 and 220.
pub(super) fn split_of(plan: &AttendPlan, split: Split, room: Sizing) -> Split {
    let Some(largest) = plan.segments().iter().max_by_key(|segment| segment.pages().len()) else { return split };
    let decodes = plan.runs().iter().all(|planned| planned.run.queries == 1);
    if room == Sizing::Exact || !decodes || largest.pages().windows(2).all(|pages| pages[0].shard == pages[1].shard) {
        return split;
    }
    let shape = plan.shape();
    let tile_bytes = (largest.format().page_bytes(shape) / shape.kv_heads()) as u64;
    let times = (tile_bytes / SMALL_TILES).clamp(1, MOST_TIMES) as usize;
    Split { target_items: split.target_items.saturating_mul(times), ..split }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AttentionShape, Bits, SegmentFormat, TILE_TOKENS};
    use crate::plan::{Page, QueryRun, SpanView, StoreView};

    /// Items of a plan of two pages.
    fn items(format: SegmentFormat, pages: [Page; 2], queries: usize, room: Sizing) -> usize {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        let span =
            SpanView { sequence: 0, start: 0, tokens: 2 * TILE_TOKENS, gathered: None, pages: &pages, range_slot: 0 };
        let view = StoreView { format, spans: vec![span], calibration: None };
        let plan = AttendPlan::new(shape, &[QueryRun::causal(0, queries)], &[view]).unwrap();
        split_of(&plan, Split::default(), room).target_items
    }

    #[test]
    fn large_tiles_in_several_shards_are_cut_into_more_items() {
        let [one, two] = [[0, 0], [0, 1]].map(|shards| shards.map(|shard| Page { shard, index: shard }));
        let usual = Split::default().target_items;
        let in_a_pass = Sizing::Classes { parts: 1 };
        let of = |format, queries| [one, two].map(|pages| items(format, pages, queries, in_a_pass));
        assert_eq!(of(SegmentFormat::F16, 1), [usual, 4 * usual]);
        assert_eq!(of(SegmentFormat::per_channel(Bits::Eight), 1), [usual, 2 * usual]);
        assert_eq!(of(SegmentFormat::per_channel(Bits::Four), 1), [usual; 2]);
        assert_eq!(of(SegmentFormat::F16, 2), [usual; 2]);
        assert_eq!(items(SegmentFormat::F16, two, 1, Sizing::Exact), usual);
    }
}
