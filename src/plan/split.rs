//! How finely a plan is cut into work items.

use std::ops::Range;

use crate::counts::whole;

/// How finely a plan is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Number of work items to aim for in each segment, over all KV heads, counted once per four query heads of a KV
    /// head. It should fill the device a few times: a segment is a launch, and through wgpu every shard is one. There,
    /// launches in an engine's pass do not overlap: its steps of decoding over several shards aim for up to four times
    /// as many.
    pub target_items: usize,
    /// Tiles of an item are a multiple of this (except at the end of a span).
    pub tile_step: usize,
    /// Maximum number of tiles in an item, rounded up to `tile_step`. The GPU kernels take 64. Items for many queries
    /// of a long prompt may have four times as many.
    pub max_tiles: usize,
}

impl Default for Split {
    /// Items of up to 32 tiles. On an H200, 64 leave a longer tail: 8 bits at four query heads per KV head are 4 %
    /// slower, one bit 1 to 2 %. Only f16 at one query head is faster, by 2 %.
    fn default() -> Self {
        Self { target_items: 2048, tile_step: 4, max_tiles: 32 }
    }
}

/// How the tiles of each span of a segment are cut into items. Most items have up to `most` tiles; the last ones of
/// every span have a half and a quarter as many. They run last, so that no device waits long for its last workgroups.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    step: usize,
    most: usize,
    /// The fraction of a span that goes into the smaller items.
    small_part: f64,
}

/// Query heads that a work item counts once for: those that a workgroup of the GPU kernels takes.
const ITEM_HEADS: usize = 4;

/// The number of items to aim for with wide query blocks. Their workgroups occupy a multiprocessor alone, run longer,
/// and leave a state for every query.
const WIDE_ITEMS: usize = 16;
/// How much longer items of such blocks may be than others, and how many of that length there are for one to aim for:
/// a query that has one state needs no merge, but the longest items must not be what a device waits for in the end.
const WIDE_LENGTH: usize = 4;
const LONGEST_ITEMS: usize = 8;

impl Split {
    /// The split for wide query blocks.
    pub(super) fn of_wide_blocks(self) -> Self {
        Self { target_items: self.target_items.div_ceil(WIDE_ITEMS), ..self }
    }

    /// The cut of a segment of `tiles` tiles, counted for each KV head, into items of nearly equal size,
    /// each counted once.
    pub(super) fn cut_evenly(&self, tiles: usize) -> Cut {
        let (target, step) = (self.target_items.max(1), self.tile_step.clamp(1, tiles.max(1)));
        let most_tiles = self.max_tiles.max(1);
        let longest = (tiles / target.saturating_mul(LONGEST_ITEMS)).min(most_tiles.saturating_mul(WIDE_LENGTH));
        let most = tiles.div_ceil(target).clamp(1, most_tiles).max(longest).next_multiple_of(step);
        Cut { step, most, small_part: 0.0 }
    }

    /// The cut of a segment of `tiles` tiles, counted for each KV head, with `group` query heads each.
    pub(super) fn cut(&self, tiles: usize, group: usize) -> Cut {
        let tiles = tiles * group.div_ceil(ITEM_HEADS);
        // A step larger than all tiles ends with the last tile.
        let (target, step) = (self.target_items.max(1), self.tile_step.clamp(1, tiles.max(1)));
        let most = (2 * tiles).div_ceil(target).clamp(1, self.max_tiles.max(1)).next_multiple_of(step);
        // The start and the end of an item take longer with more heads.
        let most_small = if group <= 2 { 0.5 } else { 0.25 };
        let small_part = target as f64 * most as f64 / (4 * tiles).max(1) as f64;
        Cut { step, most, small_part: small_part.min(most_small) }
    }
}

impl Cut {
    /// Cuts a run of tiles.
    pub(super) fn pieces(self, run: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let small = whole(run.len() as f64 * self.small_part) / self.step * self.step;
        let middle = run.end - small;
        let last = run.end - small / 2 / self.step * self.step;
        let smaller = |parts: usize| (self.most / parts).max(1).next_multiple_of(self.step);
        cut_evenly(run.start..middle, self.step, self.most)
            .chain(cut_evenly(middle..last, self.step, smaller(2)))
            .chain(cut_evenly(last..run.end, self.step, smaller(4)))
    }
}

/// Cuts a run of tiles into the fewest pieces of at most `most` tiles, of nearly equal size in steps of `step`.
fn cut_evenly(run: Range<usize>, step: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let pieces = run.len().div_ceil(most).max(1);
    let size = run.len().div_ceil(pieces).next_multiple_of(step).max(1);
    run.clone().step_by(size).map(move |start| start..(start + size).min(run.end))
}
