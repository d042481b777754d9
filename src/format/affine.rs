//! Affine codes: `value = min + scale · code`.
//!
//! The arithmetic here is the contract that every backend reproduces bit for bit. Wherever a result decides a code,
//! only f32 operations that IEEE 754 rounds correctly everywhere are used (subtraction, multiplication, comparison). No
//! code depends on a division, because GPUs round divisions differently.

use super::{AffineFormat, Bits};

/// How the range of a group is computed from its smallest and largest element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum RangeRule {
    /// From the smallest to the largest element.
    #[default]
    MinMax,
    /// About 0, without a zero point: `scale = max |x| / (2^(bits−1) − 1)`, and code `2^(bits−1)`, whose field is 0,
    /// is 0. It is stored as a range like any other, with `min = −2^(bits−1) · scale`, which is exact. 2 bits at
    /// least. Beside tiles, where f16 must hold the minimum, elements beyond ±65504 · (1 − 2^(1−bits)) take the last
    /// code, and a group all below (2^(bits−1) − 1) · 2^-14 is 0, as its scale is.
    Symmetric,
}

impl AffineFormat {
    /// The f32 range of a group whose smallest and largest elements are `min` and `max`.
    pub fn span_range(&self, min: f32, max: f32) -> CodeRange {
        match self.ranges {
            RangeRule::MinMax => CodeRange::new(min, max, self.shrink, self.bits),
            RangeRule::Symmetric => CodeRange::symmetric(min, max, self.shrink, self.bits),
        }
    }

    /// The same rounded to f16, as ranges beside tiles are.
    pub fn tile_range(&self, min: f32, max: f32) -> CodeRange {
        let range = self.span_range(min, max);
        match self.ranges {
            RangeRule::MinMax => range.rounded_to_f16(),
            RangeRule::Symmetric => {
                // A scale whose minimum f16 still holds.
                let scale = range.scale.min(MAX_HALF / middle(self.bits));
                CodeRange::about_zero(CodeRange { scale, min: 0.0 }.rounded_to_f16().scale, self.bits)
            }
        }
    }
}

/// The stored range of one group of elements: the value of code 0 and the distance between codes.
#[derive(Clone, Copy, Debug, PartialEq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct CodeRange {
    /// Distance between neighbouring codes; 0 for a group without spread.
    pub scale: f32,
    /// The value of code 0.
    pub min: f32,
}

impl CodeRange {
    /// The range of a group whose smallest and largest elements are `min` and `max`. Both are first multiplied by
    /// `shrink` (CalibQuant shrinks about zero; 1 changes nothing).
    ///
    /// `scale = (max − min) / (2^bits − 1)`. A group without spread, or with so little that the scale would be below
    /// 2^-100, gets scale 0: all its codes are 0 and decode to `min · shrink` exactly. Subnormal extremes count as 0,
    /// because some GPUs flush them, and so does the negative zero.
    pub fn new(min: f32, max: f32, shrink: f32, bits: Bits) -> Self {
        let (min, max) = (shrunk(min, shrink), shrunk(max, shrink));
        Self { scale: kept((max - min) / bits.max_code() as f32), min }
    }

    /// The range about 0 ([`RangeRule::Symmetric`]) of such a group. It needs at least 2 bits.
    pub fn symmetric(min: f32, max: f32, shrink: f32, bits: Bits) -> Self {
        let largest = shrunk(min, shrink).abs().max(shrunk(max, shrink).abs());
        let levels = (middle(bits) - 1.0).max(1.0);
        Self::about_zero(kept(largest / levels), bits)
    }

    /// The range of this scale whose middle code is 0.
    fn about_zero(scale: f32, bits: Bits) -> Self {
        Self { scale, min: if scale == 0.0 { 0.0 } else { -middle(bits) * scale } }
    }

    /// The same range with scale and minimum rounded to f16, as tile ranges are stored. A scale that is subnormal
    /// in f16 becomes 0, because some GPUs flush it. What lies beyond the range of f16, as the spread of the largest
    /// elements or rotated ones can, becomes ±65504.
    pub fn rounded_to_f16(self) -> Self {
        let scale = half::f16::from_f32(self.scale.min(MAX_HALF));
        let scale = if scale < half::f16::MIN_POSITIVE { 0.0 } else { scale.to_f32() };
        Self { scale, min: half::f16::from_f32(self.min.clamp(-MAX_HALF, MAX_HALF)).to_f32() }
    }

    /// The code of `value`: the nearest level, clamped to the valid codes, ties to the even code.
    pub fn encode(self, value: f32, bits: Bits) -> u32 {
        if self.scale == 0.0 {
            return 0;
        }
        let distance = value - self.min;
        // The estimate is at most one off. A comparison with the midpoints between levels decides. The midpoints are
        // products rounded once, so every IEEE machine decides alike.
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

/// Smaller scales count as 0, so that no number that decides a code is ever subnormal: 2^-100.
const MIN_SCALE: f32 = f32::from_bits((127 - 100) << 23);

/// The largest f16.
const MAX_HALF: f32 = 65504.0;

/// The code whose field is 0.
fn middle(bits: Bits) -> f32 {
    (1u32 << (bits.count() - 1)) as f32
}

/// An extreme multiplied by the shrink factor.
fn shrunk(x: f32, shrink: f32) -> f32 {
    flushed(flushed(x) * shrink)
}

/// A scale, or 0 if it is too small.
fn kept(scale: f32) -> f32 {
    if scale < MIN_SCALE { 0.0 } else { scale }
}

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

    /// 0 is 0, and opposite elements have opposite values, whatever the extremes.
    #[test]
    fn symmetric_ranges_have_no_zero_point() {
        for bits in [Bits::Two, Bits::Three, Bits::Four, Bits::Eight] {
            let format = AffineFormat::new(bits, crate::format::Grouping::Token).symmetric();
            for largest in [0.02, 0.7, 5.0, 300.0, 32752.0] {
                let range = format.tile_range(-0.2 * largest, largest);
                assert_eq!(range, CodeRange::from_word(range.to_word()), "stored as it is");
                let value = |x: f32| range.decode(range.encode(x, bits));
                assert_eq!(value(0.0), 0.0);
                let step = largest / (middle(bits) - 1.0);
                for x in [largest, 0.3 * largest, 0.01 * largest] {
                    assert_eq!(value(x), -value(-x), "{bits} bits, {x} of {largest}");
                    let error = (value(x) - x).abs();
                    assert!(error <= 0.53 * step, "{bits} bits, {x} of {largest}: {error}");
                }
            }
            assert_eq!(format.tile_range(0.0, 1e-30), CodeRange::default());
            // Elements of which f16 would not hold the minimum.
            let widest = format.tile_range(-65504.0, 65504.0);
            assert_eq!(widest, CodeRange::from_word(widest.to_word()), "{bits} bits");
            assert_eq!(widest.decode(1 << (bits.count() - 1)), 0.0);
        }
    }

    /// Scales that are subnormal in f16 are 0 beside tiles, and those that are rounded to the smallest normal one stay.
    #[test]
    fn scales_that_f16_flushes_are_zero() {
        let stored = |scale: f32| CodeRange { scale, min: 1.0 }.rounded_to_f16().scale;
        let smallest = 2f32.powi(-14);
        assert_eq!([smallest, smallest * (1.0 - 2f32.powi(-13))].map(stored), [smallest; 2]);
        assert_eq!([smallest * (1.0 - 2f32.powi(-10)), 0.5 * smallest, 2f32.powi(-24)].map(stored), [0.0; 3]);
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
