//! Reads tiles line by line, for the CPU kernels.
//!
//! A *line* of a tile is the axis that one product sums over: the channels of a token for keys, the 128 tokens of a
//! channel for values. Both are stored alike, in groups of one vector of words. The same groups of all lines lie next
//! to each other.
//!
//! Unpacking takes 64 consecutive words, a *block* of lines, and shifts out one field after another. That is a plain
//! loop over words, which leaves the elements in an order of its own, `[field][group][line of the block][word of the
//! vector]`. Instead of reordering them, the code permutes the other factor of the product (query or weights) once, to
//! `[field][group][word of the vector]`.

use super::simd::{Kernel, dispatch, multiply_add};
use crate::format::{KeyOrValue, TILE_TOKENS, TensorFormat, TileLayout};

/// Words that are unpacked together. Every group of every tile is a multiple of them.
pub(super) const BLOCK: usize = 64;

/// Floats of one vector register, and of one step of a permuted factor.
const LANES: usize = 8;

/// How to read the lines of the tiles of one tensor.
///
/// Vectors of three words with 3-bit codes are widened on reading to four words with fields of 4 bits, and count as
/// such here.
#[derive(Clone, Debug)]
pub(super) struct TileLines {
    /// 16 for f16.
    bits: usize,
    /// Words of a group of one line, after widening.
    vector: usize,
    /// Groups of a line.
    groups: usize,
    /// Lines of a tile.
    lines: usize,
    /// The element (channel of a key, token of a value) at `[field][group][word of the vector]`. In the padding of a
    /// line the element lies beyond the last.
    order: Vec<usize>,
}

/// Unpacked lines: one array of 64 for each field and group.
pub(super) type Unpacked = Vec<[f32; BLOCK]>;

/// The other factor of a product, permuted: one array of 8 for each field and group, the words of the vector repeated.
pub(super) type Factor = [f32; LANES];

impl TileLines {
    pub(super) fn new(which: KeyOrValue, format: &TensorFormat, head_dim: usize) -> Self {
        let layout = TileLayout::of(format, head_dim);
        let (vector, words, lines) = match which {
            KeyOrValue::Key => (layout.key_vector(), layout.key_row_words(), TILE_TOKENS),
            KeyOrValue::Value => (layout.value_vector(), layout.value_column_words(), head_dim),
        };
        let bits = format.element_bits();
        let (vector, words, width) = if bits == 3 { (4, words / 3 * 4, 4) } else { (vector, words, bits) };
        let element = |position: usize| {
            let (field, word) = (position / words, position % words);
            let (field_group, lane) = field_group(width, word, field);
            match which {
                KeyOrValue::Key => 4 * field_group + lane,
                KeyOrValue::Value => field_group + TILE_TOKENS / 4 * lane,
            }
        };
        let order = (0..words * 32 / width).map(element).collect();
        Self { bits, vector, groups: words / vector, lines, order }
    }

    /// Arrays of an unpacked block and of a permuted factor.
    pub(super) fn steps(&self) -> usize {
        self.order.len() / self.vector
    }

    /// Lines of one block.
    pub(super) fn block_lines(&self) -> usize {
        BLOCK / self.vector
    }

    /// The elements of a step, one per word of the vector.
    pub(super) fn elements(&self, step: usize) -> &[usize] {
        &self.order[step * self.vector..][..self.vector]
    }

    /// Permutes elements from natural order, with 0 in the padding of a line.
    pub(super) fn permute(&self, natural: &[f32], permuted: &mut [Factor]) {
        for (to, elements) in permuted.iter_mut().zip(self.order.chunks_exact(self.vector)) {
            for (to, &element) in to.iter_mut().zip(elements) {
                *to = natural.get(element).copied().unwrap_or(0.0);
            }
            // Repeat the words of the vector.
            for from in 0..LANES - self.vector {
                to[self.vector + from] = to[from];
            }
        }
    }

    /// Unpacks block `block` of a tile: codes as unsigned integers, or f16 elements.
    pub(super) fn unpack(&self, words: &[u32], block: usize, out: &mut [[f32; BLOCK]]) {
        let unpack = Unpack { lines: self, words, block, out };
        match self.bits {
            16 => dispatch(UnpackF16(unpack)),
            8 => dispatch(UnpackCodes::<8>(unpack)),
            4 => dispatch(UnpackCodes::<4>(unpack)),
            3 => dispatch(UnpackThree(unpack)),
            2 => dispatch(UnpackCodes::<2>(unpack)),
            _ => dispatch(UnpackCodes::<1>(unpack)),
        }
    }

    /// Sums the products of an unpacked block with a factor, line by line.
    pub(super) fn products(&self, unpacked: &[[f32; BLOCK]], factor: &[Factor], sums: &mut [f32; BLOCK]) {
        let mut partial = [0.0; BLOCK];
        dispatch(Products { unpacked, factor, sums: &mut partial });
        match self.vector {
            4 => partial.as_chunks::<4>().0.iter().zip(sums).for_each(|([a, b, c, d], sum)| *sum = (a + b) + (c + d)),
            2 => partial.as_chunks::<2>().0.iter().zip(sums).for_each(|([a, b], sum)| *sum = a + b),
            _ => *sums = partial,
        }
    }

    /// [`Self::products`] by byte lane of the field groups: lane `l` of a value line has tokens 32·l to 32·l + 31.
    pub(super) fn products_of_byte_lane(
        &self,
        lane: usize,
        unpacked: &[[f32; BLOCK]],
        factor: &[Factor],
        sums: &mut [f32; BLOCK],
    ) {
        let steps = self.steps() / 4;
        self.products(&unpacked[lane * steps..][..steps], &factor[lane * steps..][..steps], sums);
    }
}

/// Field group within the line, and lane within the field group, of a field of a word. Fields are counted byte lane by
/// byte lane; in f16, half by half.
fn field_group(bits: usize, word: usize, field: usize) -> (usize, usize) {
    if bits == 16 {
        return (word / 2, word % 2 * 2 + field);
    }
    let planes = 8 / bits;
    (word * planes + field % planes, field / planes)
}

struct Unpack<'a> {
    lines: &'a TileLines,
    words: &'a [u32],
    block: usize,
    out: &'a mut [[f32; BLOCK]],
}

impl Unpack<'_> {
    /// Calls `unpack` with every field, the words that hold it and the floats for its elements.
    #[inline(always)]
    fn each_field(self, unpack: impl Fn(usize, &[u32; BLOCK], &mut [f32; BLOCK])) {
        let Self { lines, words, block, out } = self;
        let blocks = lines.lines * lines.vector / BLOCK;
        let words = words.as_chunks::<BLOCK>().0;
        for (field, out) in out.chunks_exact_mut(lines.groups).enumerate() {
            for (group, out) in out.iter_mut().enumerate() {
                unpack(field, &words[group * blocks + block], out);
            }
        }
    }
}

/// Unpacks codes of `BITS` bits.
struct UnpackCodes<'a, const BITS: usize>(Unpack<'a>);

impl<const BITS: usize> Kernel for UnpackCodes<'_, BITS> {
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let (mask, top_bit) = (u32::MAX >> (32 - BITS), 1 << (BITS - 1));
        self.0.each_field(
            #[inline(always)]
            |field, words, out| {
                let planes = 8 / BITS;
                let shift = (field / planes * 8 + field % planes * BITS) as u32 % u32::BITS;
                for (out, word) in out.iter_mut().zip(words) {
                    // As a signed integer, because that converts to float in one instruction everywhere.
                    *out = (((word >> shift) & mask) ^ top_bit) as i32 as f32;
                }
            },
        );
    }
}

/// Unpacks codes of 3 bits.
struct UnpackThree<'a>(Unpack<'a>);

impl Kernel for UnpackThree<'_> {
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Unpack { lines, words, block, out } = self.0;
        for group in 0..lines.groups {
            let first = (group * lines.lines + block * lines.block_lines()) * 3;
            let mut wide = [0; BLOCK];
            let vectors = words[first..].as_chunks::<3>().0.iter();
            for (wide, [low, high, top]) in wide.as_chunks_mut::<4>().0.iter_mut().zip(vectors) {
                for (i, wide) in wide.iter_mut().enumerate() {
                    // Field groups 2i and 2i + 1 of the eight.
                    let pairs = if i < 2 { low } else { high } >> (i % 2 * 4);
                    let tops = top >> (2 * i);
                    *wide = (pairs & 0x0303_0303) | (tops & 0x0101_0101) << 2;
                    *wide |= ((pairs >> 2) & 0x0303_0303) << 4 | ((tops >> 1) & 0x0101_0101) << 6;
                }
            }
            for (field, out) in out.chunks_exact_mut(lines.groups).enumerate() {
                let shift = (field / 2 * 8 + field % 2 * 4) as u32 % u32::BITS;
                for (out, word) in out[group].iter_mut().zip(&wide) {
                    *out = (((word >> shift) & 7) ^ 4) as i32 as f32;
                }
            }
        }
    }
}

struct UnpackF16<'a>(Unpack<'a>);

impl Kernel for UnpackF16<'_> {
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        self.0.each_field(
            #[inline(always)]
            |half, words, out| {
                for (out, word) in out.iter_mut().zip(words) {
                    *out = finite_f16_to_f32(if half == 0 { word & 0xffff } else { word >> 16 });
                }
            },
        );
    }
}

/// The value of a finite f16 in plain integer and float operations, which vectorise on every machine.
#[inline(always)]
fn finite_f16_to_f32(half: u32) -> f32 {
    // Exponent and fraction in their f32 places are too small by 2^112, the difference of the exponent biases.
    let magnitude = f32::from_bits((half & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    f32::from_bits(magnitude.to_bits() | ((half & 0x8000) << 16))
}

/// Sums of products, for every word of a block.
struct Products<'a> {
    unpacked: &'a [[f32; BLOCK]],
    factor: &'a [Factor],
    sums: &'a mut [f32; BLOCK],
}

impl Kernel for Products<'_> {
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let mut sums = [[0f32; LANES]; BLOCK / LANES];
        for (elements, factor) in self.unpacked.iter().zip(self.factor) {
            for (sums, elements) in sums.iter_mut().zip(elements.as_chunks::<LANES>().0) {
                for lane in 0..LANES {
                    sums[lane] = multiply_add::<FMA>(elements[lane], factor[lane], sums[lane]);
                }
            }
        }
        self.sums.copy_from_slice(sums.as_flattened());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AffineFormat, Bits, Grouping, HEAD_DIMS};

    /// Unpacking finds every element where the layout puts it.
    #[test]
    fn lines_follow_the_tile_layout() {
        let affine = |bits| TensorFormat::Affine(AffineFormat::new(bits, Grouping::Channel));
        for format in std::iter::once(TensorFormat::F16).chain(Bits::ALL.map(affine)) {
            for head_dim in HEAD_DIMS {
                for which in [KeyOrValue::Key, KeyOrValue::Value] {
                    check_lines(which, &format, head_dim);
                }
            }
        }
    }

    fn check_lines(which: KeyOrValue, format: &TensorFormat, head_dim: usize) {
        let layout = TileLayout::of(format, head_dim);
        let words = layout.key_tile_words().max(layout.value_tile_words());
        let tile: Vec<u32> = (0..words as u32).map(|i| i.wrapping_mul(0x9e37_79b9) & 0xbbff_bbff).collect();
        let lines = TileLines::new(which, format, head_dim);
        let elements = if which == KeyOrValue::Key { head_dim } else { TILE_TOKENS };
        for block in [0, lines.lines / lines.block_lines() - 1] {
            let mut out = vec![[f32::NAN; BLOCK]; lines.steps()];
            lines.unpack(&tile, block, &mut out);
            for i in 0..lines.block_lines() * lines.order.len() {
                let (line, position) = (i / lines.order.len(), i % lines.order.len());
                let (step, word) = (position / lines.vector, position % lines.vector);
                let (element, line_of_tile) = (lines.elements(step)[word], block * lines.block_lines() + line);
                if element >= elements {
                    continue;
                }
                let field = match which {
                    KeyOrValue::Key => layout.key_field(line_of_tile, element),
                    KeyOrValue::Value => layout.value_field(element, line_of_tile),
                };
                let bits = field.get(&tile);
                let expected = match format.code_bits() {
                    None => half::f16::from_bits(bits as u16).to_f32(),
                    Some(width) => (bits ^ (1 << (width.count() - 1))) as f32,
                };
                assert_eq!(out[step][line * lines.vector + word], expected, "{which} {format} {head_dim}");
            }
        }
    }

    #[test]
    fn f16_conversion_is_exact() {
        for bits in 0..=u16::MAX {
            let half = half::f16::from_bits(bits);
            if half.is_finite() {
                assert_eq!(finite_f16_to_f32(bits.into()).to_bits(), half.to_f32().to_bits());
            }
        }
    }
}
