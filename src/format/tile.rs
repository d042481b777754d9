//! The tile: 128 tokens of one KV head, the unit of storage and of paging. Layout version [`LAYOUT_VERSION`].
//!
//! A *page* holds the tiles of all KV heads for one run of 128 tokens of one sequence, keys in one pool and values in
//! another: tile of KV head `h` in page `p` starts at word `(p · kv_heads + h) · tile words`.
//!
//! Codes live in `u32` words. Keys are packed along the channels and values along the tokens, each along the axis that
//! its product sums over. Four codes that meet in one packed dot product form a *field group*:
//!
//! | | field group `f` holds | its tile position |
//! | --- | --- | --- |
//! | key | channels `4f .. 4f+4` of one token | word `f / planes` of the token's row, bit plane `f % planes` |
//! | value | tokens `f, f+32, f+64, f+96` of one channel | word `f / planes` of the channel's column, bit plane `f % planes` |
//!
//! where `planes = 8 / bits`. Element `i` of a field group in bit plane `j` sits at bit `8·i + bits·j`, so that
//! `(word >> bits·j) & mask` yields four byte-wide codes. In f16 a field group is two words: elements 0, 1 in the first
//! and 2, 3 in the second, low half first.
//!
//! Packed codes are stored signed (top bit flipped): the field is `code XOR 2^(bits−1)`, the two's complement of
//! `code − 2^(bits−1)`.
//!
//! Words are ordered for coalesced 16-byte loads:
//! - key tile: `[word group][token]` of vectors of [`TileLayout::key_vector`] words, the widest of 4, 2, 1 that divides
//!   the row. A row that fills no whole word (head_dim 80 at 1 bit) is padded with zero words' worth of channels;
//! - value tile: `[word group][channel]` of vectors of 4 words.

use super::{TILE_TOKENS, TensorFormat};

/// Version of the tile layout. It changes when a tile written by one release could not be read by the next.
pub const LAYOUT_VERSION: u32 = 1;

/// Tokens of a tile that share a field group of values, one per byte lane.
const FIELD_GROUPS_PER_TILE: usize = TILE_TOKENS / 4;

/// The place of one element: a word of the tile and the lowest bit of its field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Word index within the tile.
    pub word: usize,
    /// Lowest bit of the field within the word.
    pub shift: u32,
}

/// Sizes and positions of the tiles of one tensor format at one head dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileLayout {
    element_bits: usize,
    head_dim: usize,
}

impl TileLayout {
    /// The layout of `format` at `head_dim` channels.
    pub const fn new(format: &TensorFormat, head_dim: usize) -> Self {
        Self { element_bits: format.element_bits(), head_dim }
    }

    /// Words of one token's keys.
    pub const fn key_row_words(&self) -> usize {
        (self.head_dim * self.element_bits).div_ceil(32)
    }

    /// Channels of one token's row of keys, padding included.
    pub const fn key_row_channels(&self) -> usize {
        self.key_row_words() * 32 / self.element_bits
    }

    /// Words that one load of keys takes: the widest of 4, 2, 1 that divides the row.
    pub const fn key_vector(&self) -> usize {
        match self.key_row_words() % 4 {
            0 => 4,
            2 => 2,
            _ => 1,
        }
    }

    /// Words of a key tile.
    pub const fn key_tile_words(&self) -> usize {
        TILE_TOKENS * self.key_row_words()
    }

    /// Words of one channel's values in a tile: always a multiple of 4.
    pub const fn value_column_words(&self) -> usize {
        TILE_TOKENS * self.element_bits / 32
    }

    /// Words of a value tile.
    pub const fn value_tile_words(&self) -> usize {
        self.head_dim * self.value_column_words()
    }

    /// Where the key of `channel` at `token` of the tile lies.
    pub const fn key_field(&self, token: usize, channel: usize) -> Field {
        let (row_word, shift) = self.field_in_run(channel / 4, channel % 4);
        let vector = self.key_vector();
        let word = (row_word / vector * TILE_TOKENS + token) * vector + row_word % vector;
        Field { word, shift }
    }

    /// Where the value of `channel` at `token` of the tile lies.
    pub const fn value_field(&self, token: usize, channel: usize) -> Field {
        let group = token % FIELD_GROUPS_PER_TILE;
        let (column_word, shift) = self.field_in_run(group, token / FIELD_GROUPS_PER_TILE);
        let word = (column_word / 4 * self.head_dim + channel) * 4 + column_word % 4;
        Field { word, shift }
    }

    /// Word of a row or column and lowest bit of element `lane` of field group `group`.
    const fn field_in_run(&self, group: usize, lane: usize) -> (usize, u32) {
        if self.element_bits == 16 {
            (group * 2 + lane / 2, 16 * (lane as u32 % 2))
        } else {
            let planes = 8 / self.element_bits;
            (group / planes, (8 * lane + self.element_bits * (group % planes)) as u32)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AffineFormat, Bits, Grouping, HEAD_DIMS};

    fn formats() -> Vec<TensorFormat> {
        let affine = |bits| TensorFormat::Affine(AffineFormat::new(bits, Grouping::Channel));
        std::iter::once(TensorFormat::F16).chain(Bits::ALL.map(affine)).collect()
    }

    /// Every element has bits of its own: the fields neither overlap nor leave the tile.
    #[test]
    fn fields_are_disjoint() {
        for format in formats() {
            for head_dim in HEAD_DIMS {
                let layout = TileLayout::new(&format, head_dim);
                let field_mask = ((1u64 << format.element_bits()) - 1) as u32;
                let mut key = vec![0u32; layout.key_tile_words()];
                let mut value = vec![0u32; layout.value_tile_words()];
                for token in 0..TILE_TOKENS {
                    for channel in 0..head_dim {
                        for (tile, field) in [
                            (&mut key, layout.key_field(token, channel)),
                            (&mut value, layout.value_field(token, channel)),
                        ] {
                            assert_eq!(tile[field.word] & (field_mask << field.shift), 0, "{format} {head_dim}");
                            tile[field.word] |= field_mask << field.shift;
                        }
                    }
                }
                assert!(value.iter().all(|&word| word == u32::MAX));
            }
        }
    }

    #[test]
    fn rows_that_fill_no_vector() {
        let layout = |bits, head_dim| {
            TileLayout::new(&TensorFormat::Affine(AffineFormat::new(bits, Grouping::Channel)), head_dim)
        };
        assert_eq!((layout(Bits::One, 64).key_row_words(), layout(Bits::One, 64).key_vector()), (2, 2));
        assert_eq!((layout(Bits::One, 80).key_row_words(), layout(Bits::One, 80).key_vector()), (3, 1));
        assert_eq!((layout(Bits::Two, 80).key_row_words(), layout(Bits::Two, 80).key_vector()), (5, 1));
        assert_eq!((layout(Bits::Four, 80).key_row_words(), layout(Bits::Four, 80).key_vector()), (10, 2));
        assert_eq!((layout(Bits::One, 128).key_row_words(), layout(Bits::One, 128).key_vector()), (4, 4));
        assert_eq!(layout(Bits::One, 80).key_row_channels(), 96);
    }
}
