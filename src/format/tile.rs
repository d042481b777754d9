//! The tile: 128 tokens of one KV head, the unit of storage and of paging. Layout version [`LAYOUT_VERSION`].
//!
//! A *page* holds the tiles of all KV heads for the same 128 tokens of one sequence, keys in one pool and values in
//! another. The tile of KV head `h` in page `p` starts at word `(p · kv_heads + h) · tile words`.
//!
//! Codes live in `u32` words. Keys are packed along the channels and values along the tokens, each along the axis that
//! its product sums over. Four codes that one packed dot product multiplies form a *field group*:
//!
//! | | field group `f` holds | its tile position |
//! | --- | --- | --- |
//! | key | channels `4f .. 4f+4` of one token | word `f / planes` of the token's row, bit plane `f % planes` |
//! | value | tokens `f, f+32, f+64, f+96` of one channel | word `f / planes` of the channel's column, bit plane `f % planes` |
//!
//! where `planes = 8 / bits`. Element `i` of a field group in bit plane `j` sits at bit `8·i + bits·j`. The expression
//! `(word >> bits·j) & mask` therefore extracts four byte-wide codes. In f16 a field group is two words: elements 0, 1
//! in the first and 2, 3 in the second, low half first.
//!
//! At 3 bits nothing is padded to 4: a vector of three words holds eight field groups. Field group `f` of a row or
//! column has the low two bits of its codes in word `3 (f / 8) + (f % 8) / 4`, bit plane `f % 4` of planes of two bits.
//! Their top bits are in word `3 (f / 8) + 2`, bit plane `f % 8` of planes of one bit.
//!
//! Packed codes are stored signed (top bit flipped): the field is `code XOR 2^(bits−1)`, which is `code − 2^(bits−1)`
//! in two's complement.
//!
//! Words are ordered for coalesced 16-byte loads:
//! - key tile: `[word group][token]` of vectors of [`TileLayout::key_vector`] words, the widest of 4, 2, 1 that divides
//!   the row, or 3 words at 3 bits. A row that fills no whole word (head_dim 80 at 1 bit), or vector of three, is
//!   padded with zero bits;
//! - value tile: `[word group][channel]` of vectors of 4 words, or 3 at 3 bits.

use super::{HEAD_DIMS, TILE_TOKENS, TensorFormat};
use crate::{Error, Result};

/// Version of the tile layout. It changes when one release can no longer read the tiles of another.
pub const LAYOUT_VERSION: u32 = 1;

/// Tokens of a tile that share a field group of values, one per byte lane.
const FIELD_GROUPS_PER_TILE: usize = TILE_TOKENS / 4;

/// The place of one element: a word of the tile and the lowest bit of its field. At 3 bits also the place of its top
/// bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Word index within the tile.
    pub word: usize,
    /// Lowest bit of the field within the word.
    pub shift: u32,
    /// Bits of the field in that word: all of them, or the low two of three.
    pub bits: u32,
    /// The place of the top bit, for 3-bit codes.
    pub top: Option<TopBit>,
}

/// The place of the top bit of a 3-bit field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopBit {
    /// Word index within the tile.
    pub word: usize,
    /// The bit within the word.
    pub shift: u32,
}

impl Field {
    /// A field that lies within one word.
    pub const fn within(word: usize, shift: u32, bits: usize) -> Self {
        Self { word, shift, bits: bits as u32, top: None }
    }

    /// The bits of the element in a tile's words.
    pub const fn get(&self, words: &[u32]) -> u32 {
        let low = (words[self.word] >> self.shift) & self.mask();
        match self.top {
            None => low,
            Some(top) => low | ((words[top.word] >> top.shift) & 1) << self.bits,
        }
    }

    /// Overwrites the bits of the element in a tile's words.
    pub const fn set(&self, words: &mut [u32], bits: u32) {
        words[self.word] = (words[self.word] & !(self.mask() << self.shift)) | (bits & self.mask()) << self.shift;
        if let Some(top) = self.top {
            words[top.word] = (words[top.word] & !(1 << top.shift)) | ((bits >> self.bits) & 1) << top.shift;
        }
    }

    const fn mask(&self) -> u32 {
        u32::MAX >> (u32::BITS - self.bits)
    }
}

/// Sizes and positions of the tiles of one tensor format at one head dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileLayout {
    element_bits: usize,
    head_dim: usize,
}

impl TileLayout {
    /// The layout of `format` at `head_dim` channels.
    ///
    /// # Errors
    /// [`Error::HeadDim`] when `head_dim` is not one of [`HEAD_DIMS`].
    pub fn new(format: &TensorFormat, head_dim: usize) -> Result<Self> {
        if HEAD_DIMS.contains(&head_dim) {
            return Ok(Self::of(format, head_dim));
        }
        Err(Error::HeadDim { given: head_dim })
    }

    /// The layout of `format` at a head dimension that was checked.
    pub(crate) const fn of(format: &TensorFormat, head_dim: usize) -> Self {
        Self { element_bits: format.element_bits(), head_dim }
    }

    /// Words of one token's keys.
    pub const fn key_row_words(&self) -> usize {
        match self.element_bits {
            3 => self.head_dim.div_ceil(32) * 3,
            bits => (self.head_dim * bits).div_ceil(32),
        }
    }

    /// Channels of one token's row of keys, padding included.
    pub const fn key_row_channels(&self) -> usize {
        self.key_row_words() * 32 / self.element_bits
    }

    /// Words that one load of keys takes: the widest of 4, 2, 1 that divides the row; 3 at 3 bits.
    pub const fn key_vector(&self) -> usize {
        match (self.element_bits, self.key_row_words() % 4) {
            (3, _) => 3,
            (_, 0) => 4,
            (_, 2) => 2,
            _ => 1,
        }
    }

    /// Words that one load of values takes: 4, or 3 at 3 bits.
    pub const fn value_vector(&self) -> usize {
        if self.element_bits == 3 { 3 } else { 4 }
    }

    /// Words of a key tile.
    pub const fn key_tile_words(&self) -> usize {
        TILE_TOKENS * self.key_row_words()
    }

    /// Words of one channel's values in a tile: always a multiple of [`TileLayout::value_vector`].
    pub const fn value_column_words(&self) -> usize {
        TILE_TOKENS * self.element_bits / 32
    }

    /// Words of a value tile.
    pub const fn value_tile_words(&self) -> usize {
        self.head_dim * self.value_column_words()
    }

    /// The place of the key of `channel` at `token` of the tile. A token or channel outside the tile lies behind its
    /// last word.
    pub const fn key_field(&self, token: usize, channel: usize) -> Field {
        self.field_in_run(Run { index: token, count: TILE_TOKENS, vector: self.key_vector() }, channel / 4, channel % 4)
    }

    /// The place of the value of `channel` at `token` of the tile, as in [`TileLayout::key_field`].
    pub const fn value_field(&self, token: usize, channel: usize) -> Field {
        let run = Run { index: channel, count: self.head_dim, vector: self.value_vector() };
        self.field_in_run(run, token % FIELD_GROUPS_PER_TILE, token / FIELD_GROUPS_PER_TILE)
    }

    /// Element `lane` of field group `group` of a row or column.
    const fn field_in_run(&self, run: Run, group: usize, lane: usize) -> Field {
        let bits = self.element_bits;
        let (word, shift) = match bits {
            16 => (group.saturating_mul(2).saturating_add(lane / 2), 16 * (lane % 2)),
            3 => (group / 8 * 3 + group % 8 / 4, 8 * (lane % 4) + 2 * (group % 4)),
            _ => (group / (8 / bits), 8 * (lane % 4) + bits * (group % (8 / bits))),
        };
        // A lane is a fourth of a group; a token beyond the tile would be a fifth.
        let word = if lane < 4 { word } else { usize::MAX };
        let top = match bits {
            3 => Some(TopBit { word: run.tile_word(group / 8 * 3 + 2), shift: (8 * (lane % 4) + group % 8) as u32 }),
            _ => None,
        };
        Field { word: run.tile_word(word), shift: shift as u32, bits: if bits == 3 { 2 } else { bits as u32 }, top }
    }
}

/// A row of keys or a column of values: its words lie in vectors, next to the same vectors of its neighbours.
#[derive(Clone, Copy)]
struct Run {
    index: usize,
    /// Rows or columns of the tile.
    count: usize,
    vector: usize,
}

impl Run {
    /// The word of the tile that is word `word` of the run.
    const fn tile_word(self, word: usize) -> usize {
        let vector = (word / self.vector).saturating_mul(self.count).saturating_add(self.index);
        vector.saturating_mul(self.vector).saturating_add(word % self.vector)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AffineFormat, Bits, Grouping};

    fn formats() -> Vec<TensorFormat> {
        let affine = |bits| TensorFormat::Affine(AffineFormat::new(bits, Grouping::Channel));
        std::iter::once(TensorFormat::F16).chain(Bits::ALL.map(affine)).collect()
    }

    /// 3-bit codes take exactly three bits: low pairs in two words of a vector, top bits in the third.
    #[test]
    fn three_bits_are_dense() {
        let format = TensorFormat::Affine(AffineFormat::new(Bits::Three, Grouping::Channel));
        let layout = TileLayout::of(&format, 128);
        assert_eq!((layout.key_tile_words(), layout.value_tile_words()), (128 * 12, 128 * 12));
        // Channel 27 is lane 3 of field group 6; the key of token 5 begins at word 15.
        let field = layout.key_field(5, 27);
        assert_eq!((field.word, field.shift, field.top), (16, 28, Some(TopBit { word: 17, shift: 30 })));
    }

    /// Every element has bits of its own: fields do not overlap or leave the tile.
    #[test]
    fn fields_are_disjoint() {
        for format in formats() {
            for head_dim in HEAD_DIMS {
                let layout = TileLayout::of(&format, head_dim);
                let field_mask = ((1u64 << format.element_bits()) - 1) as u32;
                let mut key = vec![0u32; layout.key_tile_words()];
                let mut value = vec![0u32; layout.value_tile_words()];
                for token in 0..TILE_TOKENS {
                    for channel in 0..head_dim {
                        for (tile, field) in [
                            (&mut key, layout.key_field(token, channel)),
                            (&mut value, layout.value_field(token, channel)),
                        ] {
                            assert_eq!(field.get(tile), 0, "{format} {head_dim}");
                            field.set(tile, field_mask);
                            assert_eq!(field.get(tile), field_mask);
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
            TileLayout::of(&TensorFormat::Affine(AffineFormat::new(bits, Grouping::Channel)), head_dim)
        };
        assert_eq!((layout(Bits::One, 64).key_row_words(), layout(Bits::One, 64).key_vector()), (2, 2));
        assert_eq!((layout(Bits::One, 80).key_row_words(), layout(Bits::One, 80).key_vector()), (3, 1));
        assert_eq!((layout(Bits::Two, 80).key_row_words(), layout(Bits::Two, 80).key_vector()), (5, 1));
        assert_eq!((layout(Bits::Four, 80).key_row_words(), layout(Bits::Four, 80).key_vector()), (10, 2));
        assert_eq!((layout(Bits::One, 128).key_row_words(), layout(Bits::One, 128).key_vector()), (4, 4));
        assert_eq!(layout(Bits::One, 80).key_row_channels(), 96);
        assert_eq!((layout(Bits::Three, 80).key_row_words(), layout(Bits::Three, 80).key_row_channels()), (9, 96));
    }
}
