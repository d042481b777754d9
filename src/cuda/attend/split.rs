//! Cuts the spans of a step into items: one wave of blocks, wherever that is possible.
//!
//! Times are estimates in microseconds, from measurements on an H200; only their order matters.

use crate::format::TILE_TOKENS;

/// Bytes that a multiprocessor's share of the memory bandwidth delivers in a microsecond.
const SHARED_RATE: f64 = 34e3;

/// Bytes that one multiprocessor can read in a microsecond while others idle.
const ALONE_RATE: f64 = 50e3;

/// Tokens of one head that a multiprocessor attends to in a microsecond, whatever their bits, for the query heads of
/// `attend`.
pub(super) const TOKEN_RATE: f64 = 780.0;

/// The same rate where keys stay bits, for the one query head of each KV head.
pub(super) const BIT_TOKEN_RATE: f64 = 1300.0;

/// The same rate for the rows of `attend_run`.
pub(super) const RUN_TOKEN_RATE: f64 = 34.0;

/// The same rate for `attend_run_pipelined`, at 128 channels.
pub(super) const PIPELINED_TOKEN_RATE: f64 = 85.0;

/// The same rate for `attend_drafts`, at 128 channels.
pub(super) const DRAFT_TOKEN_RATE: f64 = 250.0;

/// Start and end of a block.
pub(super) const BLOCK_TIME: f64 = 3.0;

/// The same time for `attend_run`, with its many queries.
pub(super) const RUN_BLOCK_TIME: f64 = 8.0;

/// The same time for a work of `attend_run_pipelined`.
pub(super) const WORK_TIME: f64 = 4.0;

/// States that the last block of a query loads at once: `MERGED_AT_ONCE` in `cuda/merge_states.cu`.
const MERGED_AT_ONCE: usize = 16;

/// Merging within a cluster, through memory, for every further round of loads there, and by a launch of its own.
const CLUSTER_TIME: f64 = 0.7;
const ARRIVAL_TIME: f64 = 2.3;
const ROUND_TIME: f64 = 1.1;
const MERGE_LAUNCH_TIME: f64 = 5.0;

/// Maximum number of pieces of a span.
const MOST_PIECES: usize = 1024;

/// Maximum number of blocks in a cluster; `MOST_CLUSTER` in `cuda/merge_states.cu`.
pub(super) const MOST_CLUSTER: usize = 8;

/// The blocks that a device runs at once, and their work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wave {
    pub(super) multiprocessors: usize,
    /// Blocks that share a multiprocessor.
    pub(super) blocks_each: usize,
    /// Blocks of one item: KV heads times chunks of query heads.
    pub(super) blocks_per_item: usize,
    /// Bytes of keys and values of one tile of one head.
    pub(super) tile_bytes: usize,
    /// True if blocks can form clusters.
    pub(super) clusters: bool,
    /// Tokens of one head that a multiprocessor attends to in a microsecond, whatever their bits.
    pub(super) token_rate: f64,
    /// Start and end of a block, in microseconds.
    pub(super) block_time: f64,
    /// Bytes of the states that a block leaves where others have tokens of the same rows.
    pub(super) state_bytes: usize,
}

impl Wave {
    /// Tiles of an item for spans of these lengths in tiles, and the estimated microseconds of the step: the minimum,
    /// if every wave takes as long as its longest item.
    pub(super) fn tiles_per_item(&self, spans: &[usize]) -> (usize, f64) {
        Self::fastest(spans, |spans, tiles| self.time(spans, tiles))
    }

    /// The same for `attend_run`, whose blocks of causal queries differ in length by far: the longest begin first, and a
    /// multiprocessor takes the next one as soon as it is free.
    pub(super) fn tiles_per_run_item(&self, spans: &[usize]) -> (usize, f64) {
        Self::fastest(spans, |spans, tiles| self.time_longest_first(spans, tiles))
    }

    fn fastest(spans: &[usize], time: impl Fn(&[Counted], usize) -> f64) -> (usize, f64) {
        let longest = spans.iter().copied().max().unwrap_or(1).max(1);
        let mut best = (longest, f64::INFINITY);
        let spans = counted(spans);
        let mut before = 0;
        for pieces in 1..=longest.min(MOST_PIECES) {
            let tiles = longest.div_ceil(pieces);
            if tiles == before {
                continue;
            }
            before = tiles;
            let time = time(&spans, tiles);
            if time < best.1 {
                best = (tiles, time);
            }
        }
        best
    }

    /// Blocks that run at the same time.
    const fn blocks(&self) -> usize {
        if self.multiprocessors == 0 { 1 } else { self.multiprocessors * self.blocks_each }
    }

    fn time(&self, spans: &[Counted], tiles: usize) -> f64 {
        let pieces = spans.iter().map(|&(span, count)| (span.div_ceil(tiles), count));
        let items: usize = pieces.clone().map(|(pieces, count)| pieces * count).sum();
        let blocks = items * self.blocks_per_item;
        let waves = blocks.div_ceil(self.blocks()) as f64;
        let bytes = (tiles * self.tile_bytes) as f64;
        // A block that shares its multiprocessor gets only a part of it, even if it is alone there.
        let parts = self.blocks_each as f64;
        let together = bytes * (blocks as f64 / waves) / (self.multiprocessors.max(1) as f64 * SHARED_RATE);
        let item = together.max(parts * bytes / ALONE_RATE).max(parts * tiles as f64 * 128.0 / self.token_rate);
        let cluster = self.cluster_of(items, pieces.clone().map(|(pieces, _)| pieces));
        let merge = match pieces.map(|(pieces, _)| pieces).max() {
            Some(most) if most > cluster => {
                let rounds = most.div_ceil(cluster).div_ceil(MERGED_AT_ONCE);
                ARRIVAL_TIME + (rounds - 1) as f64 * ROUND_TIME
            }
            _ if cluster > 1 => CLUSTER_TIME,
            _ => 0.0,
        };
        waves * (item + self.block_time) + merge
    }

    /// At least the mean of the multiprocessors. Of blocks that are as long as the n-th longest or longer, one
    /// multiprocessor takes several where there are more of them than multiprocessors.
    fn time_longest_first(&self, spans: &[Counted], tiles: usize) -> f64 {
        let mut blocks_of = vec![0usize; tiles + 1];
        let mut states = 0;
        for &(span, count) in spans {
            let pieces = span.div_ceil(tiles);
            let longer = span % pieces.max(1);
            blocks_of[span / pieces.max(1)] += (pieces - longer) * count * self.blocks_per_item;
            if longer > 0 {
                blocks_of[span / pieces + 1] += longer * count * self.blocks_per_item;
            }
            if pieces > 1 {
                states += pieces * count * self.blocks_per_item;
            }
        }
        let (mut before, mut all, mut least) = (0, 0.0, 0.0f64);
        for (tiles, &blocks) in blocks_of.iter().enumerate().rev().filter(|(_, blocks)| **blocks > 0) {
            let time = (tiles * TILE_TOKENS) as f64 / self.token_rate + self.block_time;
            before += blocks;
            all += blocks as f64 * time;
            least = least.max(before.div_ceil(self.blocks()) as f64 * time);
        }
        // States are written once and read once.
        let merge = match states {
            0 => 0.0,
            _ => {
                let bytes = 2.0 * states as f64 * self.state_bytes as f64;
                MERGE_LAUNCH_TIME + bytes / (self.multiprocessors.max(1) as f64 * SHARED_RATE)
            }
        };
        least.max(all / self.blocks() as f64) + merge
    }

    /// Blocks of a cluster, given the number of items of each sequence: the largest number that divides all of them and
    /// fits. Clusters lie within a processing cluster of the device, where large ones leave multiprocessors unused:
    /// with one block per multiprocessor, 128 blocks in clusters of 4 or 8 did not run at once on an H200; 64 in
    /// clusters of 8 did.
    pub(super) fn cluster(&self, items: &[usize]) -> usize {
        self.cluster_of(items.iter().sum(), items.iter().copied())
    }

    /// [`Self::cluster`] for `all` items together, given the number of items of each sequence.
    fn cluster_of(&self, all: usize, items: impl Iterator<Item = usize> + Clone) -> usize {
        if !self.clusters {
            return 1;
        }
        let blocks = all * self.blocks_per_item;
        let room = |cluster: usize| match cluster {
            0..=2 => true,
            3..=4 => 3 * blocks <= 2 * self.multiprocessors,
            _ => 2 * blocks <= self.multiprocessors,
        };
        let divides = |cluster: usize| items.clone().all(|items| items.is_multiple_of(cluster));
        (1..=MOST_CLUSTER).rev().find(|&cluster| room(cluster) && divides(cluster)).unwrap_or(1)
    }
}

/// A length of spans in tiles, and the number of such spans.
type Counted = (usize, usize);

/// The lengths of spans, each once: a batch has few.
fn counted(spans: &[usize]) -> Vec<Counted> {
    let longest = spans.iter().copied().max().unwrap_or(0);
    if longest < spans.len() {
        let mut counts = vec![0; longest + 1];
        spans.iter().for_each(|&span| counts[span] += 1);
        return counts.into_iter().enumerate().filter(|&(_, count)| count > 0).collect();
    }
    let mut sorted = spans.to_vec();
    sorted.sort_unstable();
    sorted.chunk_by(|a, b| a == b).map(|alike| (alike[0], alike.len())).collect()
}

/// Cuts `tiles` tiles into ranges of almost equal length, no longer than `most`. Returns the start and the length of
/// each.
pub(super) fn cut(tiles: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let pieces = tiles.div_ceil(most.max(1)).max(1);
    let (each, longer) = (tiles / pieces, tiles % pieces);
    (0..pieces).map(move |piece| (piece * each + piece.min(longer), each + usize::from(piece < longer)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(blocks_per_item: usize) -> Wave {
        Wave {
            multiprocessors: 132,
            blocks_each: 1,
            blocks_per_item,
            tile_bytes: 8192,
            clusters: true,
            token_rate: TOKEN_RATE,
            block_time: BLOCK_TIME,
            state_bytes: 0,
        }
    }

    fn run_wave() -> Wave {
        let rates = Wave { token_rate: RUN_TOKEN_RATE, block_time: RUN_BLOCK_TIME, ..wave(8) };
        Wave { clusters: false, state_bytes: 256 * 128 * 4, ..rates }
    }

    #[test]
    fn lengths_are_counted() {
        assert_eq!(counted(&[]), []);
        assert_eq!(counted(&[7, 2, 7]), [(2, 1), (7, 2)]);
        assert_eq!(counted(&[2, 1, 2, 2]), [(1, 1), (2, 3)]);
        assert_eq!(counted(&[0, 0]), [(0, 2)]);
    }

    #[test]
    fn items_fill_one_wave() {
        // 8 sequences of 32k tokens over 8 KV heads: two items each are 128 blocks.
        assert_eq!(wave(8).tiles_per_item(&[256; 8]).0, 128);
        // One of 128k: 16 items are 128 blocks.
        assert_eq!(wave(8).tiles_per_item(&[1024]).0, 64);
        // One of 4k: 64 blocks, since more would find no room as clusters.
        assert_eq!(wave(8).tiles_per_item(&[32]).0, 4);
        // 256 blocks without a cut: two waves, and cutting would not help.
        assert_eq!(wave(32).tiles_per_item(&[64; 8]).0, 64);
    }

    #[test]
    fn blocks_share_multiprocessors_where_one_wave_of_them_suffices() {
        let shared = |blocks_per_item| Wave { blocks_each: 2, ..wave(blocks_per_item) };
        // 256 blocks of 64 tiles: one wave of twos takes less than two waves.
        let ((tiles, together), (_, alone)) = (shared(32).tiles_per_item(&[64; 8]), wave(32).tiles_per_item(&[64; 8]));
        assert_eq!(tiles, 64);
        assert!(together < alone, "{together} {alone}");
        // One of 128k and a token: 25 states would be merged in two rounds of loads, 13 in one.
        let of = |wave: Wave| Wave { tile_bytes: 17_408, ..wave }.tiles_per_item(&[1025]).1;
        assert!(of(wave(8)) < of(shared(8)));
        // 64 rows of 256 tiles: cut in twos they fill the multiprocessors.
        assert!(wave(8).tiles_per_item(&[256; 8]).1 < shared(8).tiles_per_item(&[256; 8]).1);
    }

    #[test]
    fn clusters_divide_all_sequences_and_find_room() {
        assert_eq!(wave(8).cluster(&[2; 8]), 2);
        assert_eq!(wave(8).cluster(&[8]), 8);
        assert_eq!(wave(8).cluster(&[16]), 2);
        assert_eq!(wave(8).cluster(&[2, 3]), 1);
        assert_eq!(Wave { clusters: false, ..wave(8) }.cluster(&[8]), 1);
    }

    /// Blocks of whole prompts fill the device by themselves, and leave no states. Few long ones are cut.
    #[test]
    fn prompts_are_cut_only_where_blocks_do_not_fill_the_device() {
        let causal = |blocks: usize, tokens: usize| -> Vec<usize> {
            (1..=blocks).map(|block| (tokens - (blocks - block) * 64).div_ceil(TILE_TOKENS)).collect()
        };
        let prompt = causal(256, 16_384);
        assert_eq!(run_wave().tiles_per_run_item(&prompt).0, 128);
        let batch: Vec<usize> = (0..16).flat_map(|_| causal(16, 1024)).collect();
        assert_eq!(run_wave().tiles_per_run_item(&batch).0, 8);
        assert_eq!(run_wave().tiles_per_run_item(&causal(32, 34_816)).0, 272);
        // 64 blocks for 132 multiprocessors.
        assert_eq!(run_wave().tiles_per_run_item(&[256; 8]).0, 128);
    }

    #[test]
    fn long_spans_are_cut_beside_short_ones() {
        assert!(wave(8).tiles_per_item(&[1024, 8, 8, 8]).0 <= 128);
    }

    #[test]
    fn runs_cover_all_tiles_once() {
        for tiles in 1..200 {
            for most in 1..70 {
                let mut next = 0;
                for (start, length) in cut(tiles, most) {
                    assert_eq!(start, next);
                    assert!(length >= 1 && length <= most, "{tiles} {most}");
                    next += length;
                }
                assert_eq!(next, tiles);
            }
        }
    }
}
