//! Affine codes: `value = min + scale · code`.
//!
//! The arithmetic here is the contract that every backend reproduces bit for bit. It uses only f32 operations that
//! IEEE 754 rounds correctly everywhere (subtraction, multiplication, comparison) where a result decides a code; a
//! division decides none, because GPUs round it differently.

use super::Bits;

/// The range of one group of elements as stored: where code 0 lies and how far codes are apart.
#[derive(Clone, Copy, Debug, PartialEq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct CodeRange {
    /// Distance between neighbouring codes; 0 for a group without spread.
    pub scale: f32,
    /// The value of code 0.
    pub min: f32,
}

impl CodeRange {
    /// The range of a group whose smallest and largest elements are `min` and `max`, both multiplied by `shrink`
    /// first (CalibQuant shrinks about zero; 1 leaves them).
    ///
    /// `scale = (max − min) / (2^bits − 1)`. A group without spread, or with so little that the scale would be below
    /// 2^-100, gets scale 0: all its codes are 0 and decode to `min · shrink` exactly. Subnormal extremes count as 0,
    /// because some GPUs flush them, and so does the negative zero.
    pub fn new(min: f32, max: f32, shrink: f32, bits: Bits) -> Self {
        let shrunk = |x: f32| flushed(flushed(x) * shrink);
        let (min, max) = (shrunk(min), shrunk(max));
        let scale = (max - min) / bits.max_code() as f32;
        Self { scale: if scale < MIN_SCALE { 0.0 } else { scale }, min }
    }

    /// The same range with scale and minimum rounded to f16, as tile ranges are stored. A scale that is subnormal
    /// in f16 becomes 0, because some GPUs flush it. What lies beyond the range of f16, as the spread of the largest
    /// elements or rotated ones can, becomes ±65504.
    pub fn rounded_to_f16(self) -> Self {
        const MAX: f32 = 65504.0;
        let scale = half::f16::from_f32(self.scale.min(MAX));
        let scale = if scale < half::f16::MIN_POSITIVE { 0.0 } else { scale.to_f32() };
        Self { scale, min: half::f16::from_f32(self.min.clamp(-MAX, MAX)).to_f32() }
    }

    /// The code of `value`: the nearest level, clamped to the codes there are, ties to the even code.
    pub fn encode(self, value: f32, bits: Bits) -> u32 {
        if self.scale == 0.0 {
            return 0;
        }
        let distance = value - self.min;
        // An estimate that is at most one off, then decided by comparing with the midpoints between levels. The
        // midpoints are single rounded products, so every IEEE machine decides alike.
        let estimate = (distance / self.scale + 0.5).floor().clamp(0.0, bits.max_code() as f32);
        let code = estimate as u32;
        let below = (estimate - 0.5) * self.scale;
        let above = (estimate + 0.5) * self.scale;
        let odd = code % 2 == 1;
        if code > 0 && (distance < below || (distance == below && odd)) {
            code - 1
        } else if code < bits.max_code() && (distance > above || (distance == above && odd)) {
            code + 1
        } else {
            code
        }
    }

    /// The value of `code`.
    pub fn decode(self, code: u32) -> f32 {
        self.scale * code as f32 + self.min
    }

    /// Scale (low half) and minimum (high half) as two f16 in one word, the form of tile ranges in memory.
    pub fn to_word(self) -> u32 {
        let half = |x: f32| u32::from(half::f16::from_f32(x).to_bits());
        half(self.scale) | half(self.min) << 16
    }

    /// The inverse of [`CodeRange::to_word`].
    pub fn from_word(word: u32) -> Self {
        let single = |bits: u32| half::f16::from_bits(bits as u16).to_f32();
        Self { scale: single(word & 0xffff), min: single(word >> 16) }
    }
}

/// Smaller scales count as 0, so that nothing that decides a code is ever subnormal: 2^-100.
const MIN_SCALE: f32 = f32::from_bits((127 - 100) << 23);

fn flushed(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0 } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ties_go_to_the_even_code() {
        let range = CodeRange::new(0.0, 15.0, 1.0, Bits::Four);
        assert_eq!(range.scale, 1.0);
        let codes: Vec<u32> = [0.5, 1.5, 2.5, 13.5, 14.5].map(|x| range.encode(x, Bits::Four)).to_vec();
        assert_eq!(codes, [0, 2, 2, 14, 14]);
    }

    #[test]
    fn a_constant_group_decodes_exactly() {
        for bits in Bits::ALL {
            let range = CodeRange::new(-3.25, -3.25, 1.0, bits);
            assert_eq!(range.scale, 0.0);
            assert_eq!(range.encode(-3.25, bits), 0);
            assert_eq!(range.decode(0), -3.25);
        }
    }

    #[test]
    fn what_gpus_flush_counts_as_zero() {
        let range = CodeRange::new(-1e-40, -0.0, 1.0, Bits::Four);
        assert_eq!((range.scale.to_bits(), range.min.to_bits()), (0, 0));
        assert_eq!(CodeRange::new(0.0, 1e-30, 1.0, Bits::Eight).scale, 0.0);
    }

    proptest! {
        #[test]
        fn codes_are_nearest(min in -100f32..100.0, spread in 1e-3f32..100.0, at in 0f32..=1.0) {
            for bits in Bits::ALL {
                let range = CodeRange::new(min, min + spread, 1.0, bits);
                let value = min + at * spread;
                let error = (range.decode(range.encode(value, bits)) - value).abs();
                prop_assert!(error <= range.scale * 0.5 + 1e-4, "{bits} bits: {error} of {}", range.scale);
            }
        }
    }
}
