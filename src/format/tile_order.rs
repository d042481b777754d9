//! The orders of codes inside a tile on different backends.

use super::{Field, HEAD_DIMS, KeyOrValue, TILE_TOKENS, TensorFormat, TileLayout, TopBit};
use crate::{Error, Result};

/// The order of codes inside a tile. The meaning of codes, the tile's tokens and its ranges are the same in all orders.
/// So is the tile's size at head dimensions that are multiples of 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileOrder {
    /// Four codes that one packed dot product multiplies share a word: the order of [`super::tile`], for the CPU and
    /// WGSL.
    DotProduct,
    /// The words of a tile are the registers of matrix fragments (CUDA's `mma.sync`).
    ///
    /// A tile is a series of loads of 512 bytes. Lane `4g + c` (g < 8, c < 4) of a warp finds its words `r` = 0..4 of a
    /// load at `(32 · load + lane) · 4 + r`. With `planes = 8 / bits`, load `l` and bit plane `j` hold block `l ·
    /// planes + j` of the tile. Blocks are counted channels first.
    ///
    /// | | a block is | the field in word `r`, byte `e`, plane `j` of block `(m, f)` |
    /// | --- | --- | --- |
    /// | key of 8, 4, 2 bits | 16 tokens × 32 channels | token `16m + g + 8(r & 1)`, channel `32f + 16(r >> 1) + 4c + e`, at bit `8e + bits · j` |
    /// | key of 1 bit | the same | the same, at bit `4e + j % 4 + 16(j / 4)` |
    /// | value of 8, 4, 2, 1 bits | 32 tokens × 16 channels | token `32m + 16(e & 1) + 8(r >> 1) + 2c + (e >> 1)`, channel `16f + g + 8(r & 1)`, at bit `8e + bits · j` |
    ///
    /// Tiles of f16 are matrices of 8 rows by 8 halves, one row after the other, 128 bytes each: the operands of
    /// `wgmma` in shared memory, and of `ldmatrix`, which makes fragments of them. With `channels` as stored, the key
    /// of `token` and `channel` is in matrix `token / 8 · channels / 8 + channel / 8`, row `token % 8`, column `channel
    /// % 8`; the value is in matrix `(token / 16 · channels / 8 + channel / 8) · 2 + token / 8 % 2`, row `channel % 8`,
    /// column `token % 8`.
    ///
    /// At 3 bits, the tile of the low two bits of all codes, laid out as at 2 bits, is followed by the tile of their
    /// top bits. In both, byte `e` of plane `j` begins at bit `8e + bits · j`.
    ///
    /// Keys of 8 bits and of 1 bit have their top bit flipped. All other codes are stored directly. Tiles have the next
    /// multiple of 32 channels; those beyond the head (head_dim 80) are zero bits.
    MmaFragment,
}

impl TileOrder {
    /// The place of the element of `channel` at `token` of a tile.
    ///
    /// # Errors
    /// [`Error::HeadDim`] when `head_dim` is not one of [`HEAD_DIMS`](super::HEAD_DIMS), [`Error::Plan`] when a tile
    /// has no such token or channel.
    pub fn field(
        self,
        which: KeyOrValue,
        format: &TensorFormat,
        head_dim: usize,
        token: usize,
        channel: usize,
    ) -> Result<Field> {
        check_head_dim(head_dim)?;
        if token >= TILE_TOKENS || channel >= head_dim {
            let reason = format!("token {token} and channel {channel} of {TILE_TOKENS} tokens and {head_dim} channels");
            return Err(Error::Plan { what: "element of a tile", reason });
        }
        Ok(self.place(which, format, head_dim, (token, channel)))
    }

    /// Words of a tile.
    ///
    /// # Errors
    /// [`Error::HeadDim`] when `head_dim` is not one of [`HEAD_DIMS`](super::HEAD_DIMS).
    pub fn tile_words(self, which: KeyOrValue, format: &TensorFormat, head_dim: usize) -> Result<usize> {
        check_head_dim(head_dim)?;
        Ok(self.words(which, format, head_dim))
    }

    /// [`TileOrder::field`] of an element that a tile has: token and channel.
    const fn place(self, which: KeyOrValue, format: &TensorFormat, head_dim: usize, element: (usize, usize)) -> Field {
        let layout = TileLayout::of(format, head_dim);
        match (self, which) {
            (Self::DotProduct, KeyOrValue::Key) => layout.key_field(element.0, element.1),
            (Self::DotProduct, KeyOrValue::Value) => layout.value_field(element.0, element.1),
            (Self::MmaFragment, which) => {
                fragment_field(which, format.element_bits(), stored_channels(head_dim), element)
            }
        }
    }

    /// [`TileOrder::tile_words`] at a head dimension that was checked.
    const fn words(self, which: KeyOrValue, format: &TensorFormat, head_dim: usize) -> usize {
        let layout = TileLayout::of(format, head_dim);
        match (self, which) {
            (Self::DotProduct, KeyOrValue::Key) => layout.key_tile_words(),
            (Self::DotProduct, KeyOrValue::Value) => layout.value_tile_words(),
            (Self::MmaFragment, _) => TILE_TOKENS * stored_channels(head_dim) * format.element_bits() / 32,
        }
    }

    /// The mask that is XORed with a code before it is stored.
    pub const fn flip(self, which: KeyOrValue, format: &TensorFormat) -> u32 {
        let Some(bits) = format.code_bits() else { return 0 };
        let bits = bits.count();
        match (self, which, bits) {
            (Self::DotProduct, _, _) | (Self::MmaFragment, KeyOrValue::Key, 8 | 1) => 1 << (bits - 1),
            (Self::MmaFragment, _, _) => 0,
        }
    }

    /// The words of a tile in the order `to`. The padding of the old order is dropped, and that of the new order is
    /// zero.
    ///
    /// # Errors
    /// [`Error::HeadDim`] when `head_dim` is not one of [`HEAD_DIMS`](super::HEAD_DIMS); [`Error::Elements`] when the
    /// tile has the wrong number of words.
    pub fn convert(
        self,
        to: Self,
        which: KeyOrValue,
        format: &TensorFormat,
        head_dim: usize,
        tile: &[u32],
    ) -> Result<Vec<u32>> {
        let words = self.tile_words(which, format, head_dim)?;
        if tile.len() != words {
            return Err(Error::Elements {
                what: "tile in words",
                given: tile.len(),
                expected: words,
                shape: format!("format {format}, head_dim {head_dim}"),
            });
        }
        let flip = self.flip(which, format) ^ to.flip(which, format);
        let mut converted = vec![0; to.words(which, format, head_dim)];
        for (token, channel) in (0..TILE_TOKENS).flat_map(|token| (0..head_dim).map(move |channel| (token, channel))) {
            let bits = self.place(which, format, head_dim, (token, channel)).get(tile);
            to.place(which, format, head_dim, (token, channel)).set(&mut converted, bits ^ flip);
        }
        Ok(converted)
    }
}

fn check_head_dim(head_dim: usize) -> Result<()> {
    if HEAD_DIMS.contains(&head_dim) { Ok(()) } else { Err(Error::HeadDim { given: head_dim }) }
}

/// Channels of a tile in fragment order.
const fn stored_channels(head_dim: usize) -> usize {
    head_dim.next_multiple_of(32)
}

const fn fragment_field(which: KeyOrValue, bits: usize, channels: usize, element: (usize, usize)) -> Field {
    if bits == 3 {
        let low = width_field(which, 2, channels, element);
        let top = width_field(which, 1, channels, element);
        let low_words = TILE_TOKENS * channels * 2 / 32;
        return Field { top: Some(TopBit { word: low_words + top.word, shift: top.shift }), ..low };
    }
    match (which, bits) {
        // The only case with a different order of bits: see `cuda/common/scores.cuh`.
        (KeyOrValue::Key, 1) => {
            let field = width_field(which, 1, channels, element);
            let (byte, plane) = (field.shift / 8, field.shift % 8);
            Field { shift: 4 * byte + plane % 4 + 16 * (plane / 4), ..field }
        }
        _ => width_field(which, bits, channels, element),
    }
}

const fn width_field(which: KeyOrValue, bits: usize, channels: usize, element: (usize, usize)) -> Field {
    match which {
        KeyOrValue::Key => key_fragment(bits, channels, element),
        KeyOrValue::Value => value_fragment(bits, channels, element),
    }
}

/// Word of register `r` of lane `4g + c`.
const fn word(load: usize, g: usize, c: usize, r: usize) -> usize {
    (32 * load + 4 * g + c) * 4 + r
}

/// An element of a matrix of 8 × 8 halves.
const fn half_of(matrix: usize, row: usize, column: usize) -> Field {
    Field::within(32 * matrix + 4 * row + column / 2, 16 * (column % 2) as u32, 16)
}

const fn key_fragment(bits: usize, head_dim: usize, (token, channel): (usize, usize)) -> Field {
    let (m, g) = (token / 16, token % 8);
    if bits == 16 {
        let matrix = token / 8 * (head_dim / 8) + channel / 8;
        return half_of(matrix, g, channel % 8);
    }
    let (f, c, e) = (channel / 32, channel % 16 / 4, channel % 4);
    let r = token % 16 / 8 + 2 * (channel % 32 / 16);
    let (block, planes) = (m * (head_dim / 32) + f, 8 / bits);
    Field::within(word(block / planes, g, c, r), (8 * e + bits * (block % planes)) as u32, bits)
}

const fn value_fragment(bits: usize, head_dim: usize, (token, channel): (usize, usize)) -> Field {
    let (f, g) = (channel / 16, channel % 8);
    let (c, next) = (token % 8 / 2, token % 2);
    let r = channel % 16 / 8 + 2 * (token % 16 / 8);
    if bits == 16 {
        let matrix = token / 16 * (head_dim / 4) + channel / 8 * 2 + token / 8 % 2;
        return half_of(matrix, g, token % 8);
    }
    let (block, planes) = (token / 32 * (head_dim / 16) + f, 8 / bits);
    let shift = 16 * next + 8 * (token % 32 / 16) + bits * (block % planes);
    Field::within(word(block / planes, g, c, r), shift as u32, bits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AffineFormat, Bits, CodebookFormat, Grouping};

    fn formats() -> Vec<TensorFormat> {
        let affine = |bits| TensorFormat::Affine(AffineFormat::new(bits, Grouping::Channel));
        let sketch = TensorFormat::Codebook(CodebookFormat::turboquant_prod(Bits::Three, 128));
        [TensorFormat::F16, sketch].into_iter().chain(Bits::ALL.map(affine)).collect()
    }

    fn each(test: impl Fn(KeyOrValue, &TensorFormat, usize)) {
        for format in formats() {
            for head_dim in HEAD_DIMS {
                test(KeyOrValue::Key, &format, head_dim);
                test(KeyOrValue::Value, &format, head_dim);
            }
        }
    }

    /// Every element has bits of its own, and together they fill the tile, except for the padding of head_dim 80.
    #[test]
    fn fragments_fill_the_tile() {
        each(|which, format, head_dim| {
            let mask = u32::MAX >> (32 - format.element_bits());
            let mut tile = vec![0u32; TileOrder::MmaFragment.tile_words(which, format, head_dim).unwrap()];
            for token in 0..TILE_TOKENS {
                for channel in 0..head_dim {
                    let field = TileOrder::MmaFragment.field(which, format, head_dim, token, channel).unwrap();
                    assert_eq!(field.get(&tile), 0, "{which} {format} {head_dim}");
                    field.set(&mut tile, mask);
                    assert_eq!(field.get(&tile), mask, "{which} {format} {head_dim}");
                }
            }
            let bits: usize = tile.iter().map(|word| word.count_ones() as usize).sum();
            assert_eq!(bits, TILE_TOKENS * head_dim * format.element_bits(), "{which} {format} {head_dim}");
        });
    }

    /// Converting there and back restores every bit, and codes are the same on both sides.
    #[test]
    fn conversion_keeps_every_code() {
        each(|which, format, head_dim| {
            let (dot, mma) = (TileOrder::DotProduct, TileOrder::MmaFragment);
            let mask = u32::MAX >> (32 - format.element_bits());
            let mut tile = vec![0; dot.tile_words(which, format, head_dim).unwrap()];
            for token in 0..TILE_TOKENS {
                for channel in 0..head_dim {
                    let code = (token * head_dim + channel) as u32;
                    dot.field(which, format, head_dim, token, channel)
                        .unwrap()
                        .set(&mut tile, code.wrapping_mul(0x9e37_79b9) >> 9 & mask);
                }
            }
            let fragments = dot.convert(mma, which, format, head_dim, &tile).unwrap();
            assert_ne!(fragments, tile);
            for (token, channel) in [(0, 0), (1, 5), (77, head_dim - 1), (127, 33)] {
                let code = |order: TileOrder, tile: &[u32]| {
                    order.field(which, format, head_dim, token, channel).unwrap().get(tile) ^ order.flip(which, format)
                };
                assert_eq!(code(dot, &tile), code(mma, &fragments), "{which} {format} {head_dim}");
            }
            assert_eq!(mma.convert(dot, which, format, head_dim, &fragments).unwrap(), tile);
        });
    }

    /// Fields computed by hand from the table.
    #[test]
    fn fields_of_the_table() {
        let field = |which, bits: Bits, token, channel| {
            let format = TensorFormat::Affine(AffineFormat::new(bits, Grouping::Channel));
            let field = TileOrder::MmaFragment.field(which, &format, 128, token, channel).unwrap();
            (field.word, field.shift)
        };
        // Block (1, 2) is number 6: load 1 and plane 2 of 4. Token 16 + 3 + 8, channel 64 + 16 + 4 · 1 + 2.
        assert_eq!(field(KeyOrValue::Key, Bits::Two, 27, 86), ((32 + 4 * 3 + 1) * 4 + 3, 8 * 2 + 2 * 2));
        // At 1 bit number 6 is plane 6 of load 0.
        assert_eq!(field(KeyOrValue::Key, Bits::One, 27, 86), ((4 * 3 + 1) * 4 + 3, 4 * 2 + 2 + 16));
        // Block (1, 5) is number 13: load 6 and plane 1 of 2. Token 32 + 16 + 8 + 2 · 2 + 1, channel 80 + 3 + 8.
        assert_eq!(field(KeyOrValue::Value, Bits::Four, 61, 91), ((6 * 32 + 4 * 3 + 2) * 4 + 3, 8 * 3 + 4));
    }

    /// Rows of matrices are tokens for keys, and channels for values.
    #[test]
    fn halves_are_in_matrices() {
        let field = |which, token, channel| {
            let field = TileOrder::MmaFragment.field(which, &TensorFormat::F16, 80, token, channel).unwrap();
            (field.word, field.shift)
        };
        // 96 channels are stored: matrix 3 · 12 + 5, row 3, column 7.
        assert_eq!(field(KeyOrValue::Key, 27, 47), (32 * 41 + 4 * 3 + 3, 16));
        // Matrix (12 + 5) · 2 + 1, row 7, column 3.
        assert_eq!(field(KeyOrValue::Value, 27, 47), (32 * 35 + 4 * 7 + 1, 16));
    }

    /// Low bits as at 2 bits, followed by top bits in planes of one bit.
    #[test]
    fn three_bits_are_two_tiles() {
        let three = TensorFormat::Affine(AffineFormat::new(Bits::Three, Grouping::Channel));
        let field = TileOrder::MmaFragment.field(KeyOrValue::Key, &three, 128, 27, 86).unwrap();
        assert_eq!((field.word, field.shift, field.bits), ((32 + 4 * 3 + 1) * 4 + 3, 8 * 2 + 2 * 2, 2));
        assert_eq!(field.top, Some(TopBit { word: 1024 + (4 * 3 + 1) * 4 + 3, shift: 8 * 2 + 6 }));
    }

    #[test]
    fn tiles_of_other_sizes_are_refused() {
        let (dot, mma) = (TileOrder::DotProduct, TileOrder::MmaFragment);
        let error = dot.convert(mma, KeyOrValue::Key, &TensorFormat::F16, 80, &[0; 128]).unwrap_err();
        assert!(matches!(error, Error::Elements { expected: 5120, .. }), "{error}");
        let beyond = |head_dim, token, channel| {
            mma.field(KeyOrValue::Key, &TensorFormat::F16, head_dim, token, channel).unwrap_err()
        };
        assert!(matches!(beyond(usize::MAX, 0, 0), Error::HeadDim { .. }));
        assert!(matches!(beyond(64, 128, 0), Error::Plan { .. }) && matches!(beyond(64, 0, 64), Error::Plan { .. }));
        assert_eq!(mma.tile_words(KeyOrValue::Key, &TensorFormat::F16, 80).unwrap(), 128 * 96 / 2);
    }
}
