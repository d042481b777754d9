//! How the spans of a step are cut into items: one wave of blocks, wherever that is possible.

/// What a block costs beside the tiles that it reads, in bytes that a multiprocessor would read meanwhile: about 3 µs at
/// 34 kB/µs (H200).
const BLOCK_BYTES: f64 = 100e3;

/// What merging one more state costs, in the same unit: a tenth of a microsecond.
const STATE_BYTES: f64 = 3.4e3;

/// Most pieces that a span is cut into.
const MOST_PIECES: usize = 1024;

/// The blocks that a device runs at once, and what they do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wave {
    /// Blocks that run at the same time: one for each multiprocessor.
    pub(super) blocks: usize,
    /// Blocks of one item: KV heads times chunks of query heads.
    pub(super) blocks_per_item: usize,
    /// Bytes of keys and values of one tile of one head.
    pub(super) tile_bytes: usize,
}

impl Wave {
    /// Tiles of an item for spans of so many tiles: what takes the least time if every wave takes as long as its
    /// longest item.
    pub(super) fn tiles_per_item(&self, spans: &[usize]) -> usize {
        let longest = spans.iter().copied().max().unwrap_or(1).max(1);
        let mut best = (f64::INFINITY, longest);
        for pieces in 1..=longest.min(MOST_PIECES) {
            let tiles = longest.div_ceil(pieces);
            let items: usize = spans.iter().map(|span| span.div_ceil(tiles)).sum();
            let waves = (items * self.blocks_per_item).div_ceil(self.blocks.max(1));
            let of_item = (tiles * self.tile_bytes) as f64 + BLOCK_BYTES;
            let time = waves as f64 * of_item + pieces as f64 * STATE_BYTES;
            if time < best.0 {
                best = (time, tiles);
            }
        }
        best.1
    }
}

/// Cuts `tiles` tiles into runs of almost equal length, at most `most` each: where each begins, and its length.
pub(super) fn cut(tiles: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let pieces = tiles.div_ceil(most.max(1)).max(1);
    let (each, longer) = (tiles / pieces, tiles % pieces);
    (0..pieces).map(move |piece| (piece * each + piece.min(longer), each + usize::from(piece < longer)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(blocks_per_item: usize) -> Wave {
        Wave { blocks: 132, blocks_per_item, tile_bytes: 8192 }
    }

    #[test]
    fn items_fill_one_wave() {
        // 8 sequences of 32k tokens over 8 KV heads: two items each are 128 blocks.
        assert_eq!(wave(8).tiles_per_item(&[256; 8]), 128);
        // One of 128k: 16 items are 128 blocks.
        assert_eq!(wave(8).tiles_per_item(&[1024]), 64);
        // One of 4k: short items, but not so short that merging costs more than it saves.
        assert_eq!(wave(8).tiles_per_item(&[32]), 4);
        // 256 blocks without a cut: two waves, and cutting would not help.
        assert_eq!(wave(32).tiles_per_item(&[64; 8]), 64);
    }

    #[test]
    fn long_spans_are_cut_beside_short_ones() {
        assert!(wave(8).tiles_per_item(&[1024, 8, 8, 8]) <= 128);
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
