//! Cuts the spans of a step into items: one wave of blocks, wherever that is possible.
//!
//! Times are estimates in microseconds, from measurements on an H200; only their order matters.

/// Bytes that a multiprocessor's share of the memory bandwidth delivers in a microsecond.
const SHARED_RATE: f64 = 34e3;

/// Bytes that one multiprocessor can read in a microsecond while others idle.
const ALONE_RATE: f64 = 50e3;

/// Tokens of one head that a multiprocessor attends to in a microsecond, whatever their bits, for the query heads of
/// `attend`.
pub(super) const TOKEN_RATE: f64 = 780.0;

/// The same rate for the rows of `attend_run`.
pub(super) const RUN_TOKEN_RATE: f64 = 34.0;

/// Start and end of a block.
pub(super) const BLOCK_TIME: f64 = 3.0;

/// The same time for `attend_run`, with its many queries.
pub(super) const RUN_BLOCK_TIME: f64 = 8.0;

/// Merging within a cluster, and through memory.
const CLUSTER_TIME: f64 = 0.7;
const ARRIVAL_TIME: f64 = 2.3;

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
}

impl Wave {
    /// Tiles of an item for spans of these lengths in tiles, and the estimated microseconds of the step: the minimum,
    /// if every wave takes as long as its longest item.
    pub(super) fn tiles_per_item(&self, spans: &[usize]) -> (usize, f64) {
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
            let time = self.time(&spans, tiles);
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
            Some(most) if most > cluster => ARRIVAL_TIME,
            _ if cluster > 1 => CLUSTER_TIME,
            _ => 0.0,
        };
        waves * (item + self.block_time) + merge
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
        }
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
