//! Tiles as the CPU kernels read them: line by line.
//!
//! A *line* of a tile is what one product sums over: the channels of a token for keys, the 128 tokens of a channel for
//! values. Both are stored alike: groups of one vector of words each, with the same group of all lines side by side.
//! Unpacking a line plane by plane yields its elements in an order of its own; instead of putting them in order, the
//! other factor of the product (query or weights) is permuted once.

use super::simd::{Kernel, dispatch, multiply_add};
use crate::format::{KeyOrValue, TILE_TOKENS, TensorFormat, TileLayout};

/// Lines that are unpacked at a time, so that they stay in the first-level cache for all heads of a group.
pub(super) const LINE_BLOCK: usize = 32;

/// Floats that are summed side by side in a product.
const LANES: usize = 16;

/// How the lines of the tiles of one tensor are read.
#[derive(Clone, Debug)]
pub(super) struct TileLines {
    /// 16 for f16.
    bits: usize,
    /// Words of a group.
    vector: usize,
    /// Groups of a line.
    groups: usize,
    /// Lines of a tile.
    lines: usize,
    /// The element (channel of a key, token of a value) at each position of an unpacked line; positions that pad the
    /// line name elements beyond the last.
    order: Vec<usize>,
}

impl TileLines {
    pub(super) fn new(which: KeyOrValue, format: &TensorFormat, head_dim: usize) -> Self {
        let layout = TileLayout::new(format, head_dim);
        let (vector, words, lines) = match which {
            KeyOrValue::Key => (layout.key_vector(), layout.key_row_words(), TILE_TOKENS),
            KeyOrValue::Value => (4, layout.value_column_words(), head_dim),
        };
        let bits = format.element_bits();
        let element = |position: usize| {
            let (field_group, lane) = field_at(position, bits, vector);
            match which {
                KeyOrValue::Key => 4 * field_group + lane,
                KeyOrValue::Value => field_group + TILE_TOKENS / 4 * lane,
            }
        };
        let order = (0..words * 32 / bits).map(element).collect();
        Self { bits, vector, groups: words / vector, lines, order }
    }

    /// Elements of an unpacked line, padding included: a multiple of 16.
    pub(super) fn positions(&self) -> usize {
        self.order.len()
    }

    /// The element at each position.
    pub(super) fn order(&self) -> &[usize] {
        &self.order
    }

    /// Puts elements in natural order into the order of an unpacked line, 0 where it is padded.
    pub(super) fn permute(&self, natural: &[f32], permuted: &mut [f32]) {
        for (to, &element) in permuted.iter_mut().zip(&self.order) {
            *to = natural.get(element).copied().unwrap_or(0.0);
        }
    }

    /// Unpacks `count` lines from `first` on into `[line][position]`: codes as unsigned integers, or f16 elements.
    pub(super) fn unpack(&self, words: &[u32], first: usize, count: usize, out: &mut [f32]) {
        let unpack = Unpack { lines: self, words, first, out: &mut out[..count * self.positions()] };
        match (self.bits, self.vector) {
            (16, _) => dispatch(UnpackF16(unpack)),
            (8, 4) => dispatch(UnpackCodes::<8, 4>(unpack)),
            (4, 4) => dispatch(UnpackCodes::<4, 4>(unpack)),
            (4, 2) => dispatch(UnpackCodes::<4, 2>(unpack)),
            (2, 4) => dispatch(UnpackCodes::<2, 4>(unpack)),
            (2, 2) => dispatch(UnpackCodes::<2, 2>(unpack)),
            (2, 1) => dispatch(UnpackCodes::<2, 1>(unpack)),
            (1, 4) => dispatch(UnpackCodes::<1, 4>(unpack)),
            (1, 2) => dispatch(UnpackCodes::<1, 2>(unpack)),
            (1, 1) => dispatch(UnpackCodes::<1, 1>(unpack)),
            (bits, vector) => unreachable!("no head_dim has {bits}-bit lines in vectors of {vector} words"),
        }
    }
}

/// Field group within the line and lane within the field group of an unpacked position.
fn field_at(position: usize, bits: usize, vector: usize) -> (usize, usize) {
    if bits == 16 {
        return (position / 4, position % 4);
    }
    let (planes, bytes) = (8 / bits, vector * 4);
    let (group, plane, byte) = (position / (planes * bytes), position / bytes % planes, position % bytes);
    ((group * vector + byte / 4) * planes + plane, byte % 4)
}

struct Unpack<'a> {
    lines: &'a TileLines,
    words: &'a [u32],
    first: usize,
    out: &'a mut [f32],
}

impl<'a> Unpack<'a> {
    /// The words of one group of one line.
    #[inline(always)]
    fn group(&self, line: usize, group: usize) -> &'a [u32] {
        &self.words[(group * self.lines.lines + self.first + line) * self.lines.vector..][..self.lines.vector]
    }
}

struct UnpackCodes<'a, const BITS: usize, const VECTOR: usize>(Unpack<'a>);

impl<const BITS: usize, const VECTOR: usize> Kernel for UnpackCodes<'_, BITS, VECTOR> {
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let unpack = self.0;
        let top_bits: u32 = match BITS {
            1 => u32::MAX,
            2 => 0xaaaa_aaaa,
            4 => 0x8888_8888,
            _ => 0x8080_8080,
        };
        let (bytes, planes, mask) = (4 * VECTOR, 8 / BITS, (u32::MAX >> (32 - BITS)) as u8);
        let positions = unpack.lines.positions();
        let groups = unpack.lines.groups;
        for line in 0..unpack.out.len() / positions {
            for group in 0..groups {
                let mut codes = [0u8; 16];
                for (to, word) in codes.chunks_exact_mut(4).zip(unpack.group(line, group)) {
                    to.copy_from_slice(&(word ^ top_bits).to_le_bytes());
                }
                let out = &mut unpack.out[line * positions + group * planes * bytes..][..planes * bytes];
                for (plane, out) in out.chunks_exact_mut(bytes).enumerate() {
                    for (to, code) in out.iter_mut().zip(&codes[..bytes]) {
                        *to = f32::from((code >> (plane * BITS)) & mask);
                    }
                }
            }
        }
    }
}

struct UnpackF16<'a>(Unpack<'a>);

impl Kernel for UnpackF16<'_> {
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let unpack = self.0;
        let positions = unpack.lines.positions();
        for line in 0..unpack.out.len() / positions {
            for group in 0..unpack.lines.groups {
                let mut halves = [0u32; 8];
                for (to, word) in halves.chunks_exact_mut(2).zip(unpack.group(line, group)) {
                    to[0] = word & 0xffff;
                    to[1] = word >> 16;
                }
                let out = &mut unpack.out[line * positions + group * 8..][..8];
                for (to, half) in out.iter_mut().zip(halves) {
                    *to = finite_f16_to_f32(half);
                }
            }
        }
    }
}

/// The value of a finite f16 in plain integer and float operations, which vectorise on every machine.
#[inline(always)]
fn finite_f16_to_f32(half: u32) -> f32 {
    // Exponent and fraction in their f32 places are too small by 2^112, the difference of the exponent biases.
    let magnitude = f32::from_bits((half & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    f32::from_bits(magnitude.to_bits() | ((half & 0x8000) << 16))
}

/// Sums of products of unpacked lines with one vector in the order of lines.
pub(super) struct LineProducts<'a> {
    /// `[line][position]`.
    pub(super) lines: &'a [f32],
    /// One position vector.
    pub(super) factor: &'a [f32],
    /// Per line the sums over positions by position modulo 4, that is, over the byte lanes of field groups.
    pub(super) sums: &'a mut [[f32; 4]],
}

impl Kernel for LineProducts<'_> {
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let positions = self.factor.len();
        for (line, sums) in self.lines.chunks_exact(positions).zip(self.sums) {
            let mut partial = [0f32; LANES];
            for (line, factor) in line.chunks_exact(LANES).zip(self.factor.chunks_exact(LANES)) {
                for lane in 0..LANES {
                    partial[lane] = multiply_add::<FMA>(line[lane], factor[lane], partial[lane]);
                }
            }
            for lane in 0..4 {
                sums[lane] = (partial[lane] + partial[lane + 4]) + (partial[lane + 8] + partial[lane + 12]);
            }
        }
    }
}

impl LineProducts<'_> {
    pub(super) fn compute(self) {
        dispatch(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AffineFormat, Bits, Grouping, HEAD_DIMS};

    /// Unpacking finds every element where the layout put it.
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
        let layout = TileLayout::new(format, head_dim);
        let words = layout.key_tile_words().max(layout.value_tile_words());
        let tile: Vec<u32> = (0..words as u32).map(|i| i.wrapping_mul(0x9e37_79b9) & 0xbbff_bbff).collect();
        let lines = TileLines::new(which, format, head_dim);
        let first = 32;
        let count = LINE_BLOCK.min(lines.lines - first);
        let mut out = vec![f32::NAN; count * lines.positions()];
        lines.unpack(&tile, first, count, &mut out);
        for (i, out) in out.chunks_exact(lines.positions()).enumerate() {
            for (&element, &value) in lines.order().iter().zip(out) {
                let (field, inside) = match which {
                    KeyOrValue::Key => (layout.key_field(first + i, element), element < head_dim),
                    KeyOrValue::Value => (layout.value_field(element, first + i), true),
                };
                let word = tile[field.word] >> field.shift;
                let expected = match format {
                    TensorFormat::F16 => half::f16::from_bits(word as u16).to_f32(),
                    TensorFormat::Affine(a) => ((word & a.bits.max_code()) ^ (1 << (a.bits.count() - 1))) as f32,
                };
                assert!(!inside || value == expected, "{which} {format} {head_dim}: {value} {expected}");
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
