//! Affine codes: `value = min + scale · code`.
//!
//! The arithmetic here is the contract that every backend reproduces bit for bit. Wherever a result decides a code,
//! only f32 operations that IEEE 754 rounds correctly everywhere are used (subtraction, multiplication, comparison). No
//! code depends on a division, because GPUs round divisions differently.

use super::{AffineFormat, Bits, Grouping};

/// How the range of a group is computed from its smallest and largest element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum RangeRule {
    /// From the smallest to the largest element.
    #[default]
    MinMax,
    /// About 0, without a zero point: `scale = max |x| / (2^(bits−1) − 1)`, and code `2^(bits−1)`, whose field is 0,
    /// is 0. It is stored as a range like any other, with `min = −2^(bits−1) · scale`, which is exact. 2 bits at
    /// least. Next to tiles f16 must hold the minimum: there elements beyond ±65504 · (1 − 2^(1−bits)) take the last
    /// code.
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

    /// The same rounded to f16, as ranges next to tiles are. A group that spans less than
    /// [`CodeRange::SMALLEST_STEP`] is stored as its middle.
    pub fn tile_range(&self, min: f32, max: f32) -> CodeRange {
        let range = self.span_range(min, max);
        match self.ranges {
            RangeRule::MinMax => {
                let (low, high) = (range.min, shrunk(max, self.shrink));
                // One step is more than such a group spans: its middle is off by less than its minimum.
                let within_a_step = high - low < CodeRange::SMALLEST_STEP;
                let range = if within_a_step { CodeRange::constant(flushed(0.5 * flushed(low + high))) } else { range };
                range.rounded_to_f16()
            }
            RangeRule::Symmetric => {
                // A scale whose minimum f16 still holds.
                let scale = range.scale.min(MAX_HALF / middle(self.bits));
                CodeRange::about_zero(CodeRange { scale, min: 0.0 }.rounded_to_f16().scale, self.bits)
            }
        }
    }

    /// The most by which what is stored of an element differs from it, where `min` and `max` are the extremes of the
    /// group that shares its range, in the same unit. Rotated rows are compared before they are rotated back.
    ///
    /// ```text
    /// step / 2 + rounding + cut
    ///   step      distance of neighbouring codes: (max − min) / (2^bits − 1), or max |x| / (2^(bits−1) − 1) about 0;
    ///             at least 2^-14 where ranges are f16, which all are but those over whole spans. A step larger than
    ///             the group counts as max − min, or as 2 max |x| about 0
    ///   rounding  of the range: (|min| + max − min) · 2^-11 + 2^-25 in f16, · 2^-22 in f32
    ///   cut       what shrinking takes off: (1 − shrink) · max |x|
    /// ```
    ///
    /// It holds up to [`TensorFormat::largest_element`](super::TensorFormat::largest_element), for finite extremes.
    ///
    /// ```
    /// use kvpack::Bits;
    /// use kvpack::format::{AffineFormat, Grouping};
    /// let error = |bits, largest: f32| {
    ///     AffineFormat::new(bits, Grouping::Token).largest_error(-largest, largest) / largest
    /// };
    /// assert!(error(Bits::Eight, 1.0) < 0.006);
    /// // Values up to 0.001 have the smallest step of f16, 2^-14, at 8 bits, and a larger one at 4.
    /// assert!(error(Bits::Eight, 1e-3) < 0.033 && error(Bits::Four, 1e-3) < 0.069);
    /// ```
    pub fn largest_error(&self, min: f32, max: f32) -> f32 {
        let in_f16 = self.grouping != Grouping::Channel;
        let largest = min.abs().max(max.abs());
        let (spread, levels) = match self.ranges {
            RangeRule::MinMax => (max - min, self.bits.max_code() as f32),
            RangeRule::Symmetric => (largest, (middle(self.bits) - 1.0).max(1.0)),
        };
        let smallest = if in_f16 { CodeRange::SMALLEST_STEP } else { MIN_SCALE };
        // The step itself is rounded.
        let step = (spread / levels * 1.001).max(smallest);
        let half_step = match self.ranges {
            RangeRule::MinMax => 0.5 * step.min(spread),
            RangeRule::Symmetric => (0.5 * step).min(largest),
        };
        let reach = if self.ranges == RangeRule::MinMax { min.abs() + spread } else { spread };
        let rounding = if in_f16 { reach * 2f32.powi(-11) + 2f32.powi(-25) } else { reach * 2f32.powi(-22) };
        half_step + rounding + (1.0 - self.shrink) * largest
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
    /// The smallest distance between neighbouring codes of a range that is stored in f16, 2^-14: the smallest normal
    /// f16.
    pub const SMALLEST_STEP: f32 = f32::from_bits((127 - 14) << 23);

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

    /// The range whose codes all stand for `value`.
    fn constant(value: f32) -> Self {
        Self { scale: 0.0, min: value }
    }

    /// The range of this scale whose middle code is 0.
    fn about_zero(scale: f32, bits: Bits) -> Self {
        Self { scale, min: if scale == 0.0 { 0.0 } else { -middle(bits) * scale } }
    }

    /// The same range with scale and minimum rounded to f16, as tile ranges are stored. What lies beyond the range of
    /// f16, as the spread of the largest elements or rotated ones can, becomes ±65504.
    ///
    /// A scale above 0 is at least [`CodeRange::SMALLEST_STEP`], which adds at most half of that to the error.
    /// Subnormal scales would be finer, but WGSL lets a device read a subnormal f16 as 0 (`unpack2x16float`, and every
    /// operation on `f16`), and a code is up to 255 steps: such a device would lose the group. A minimum may be
    /// subnormal, because it is added and not multiplied by a code: a device that reads it as 0 is off by less than
    /// 2^-14.
    pub fn rounded_to_f16(self) -> Self {
        let half = |x: f32| half::f16::from_f32(x.clamp(-MAX_HALF, MAX_HALF)).to_f32();
        let scale = if self.scale == 0.0 { 0.0 } else { half(self.scale).max(Self::SMALLEST_STEP) };
        Self { scale, min: half(self.min) }
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
            let format = AffineFormat::new(bits, Grouping::Token).symmetric();
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
            assert_eq!(format.tile_range(0.0, 0.5 * MIN_SCALE), CodeRange::default());
            // Elements of which f16 would not hold the minimum.
            let widest = format.tile_range(-65504.0, 65504.0);
            assert_eq!(widest, CodeRange::from_word(widest.to_word()), "{bits} bits");
            assert_eq!(widest.decode(1 << (bits.count() - 1)), 0.0);
        }
    }

    /// Scales that would be subnormal in f16 are stored as the smallest normal one; only 0 stays 0.
    #[test]
    fn scales_in_f16_are_normal() {
        let stored = |scale: f32| CodeRange { scale, min: 1.0 }.rounded_to_f16().scale;
        let smallest = half::f16::MIN_POSITIVE.to_f32();
        assert_eq!(CodeRange::SMALLEST_STEP, smallest);
        assert_eq!([smallest, 0.5 * smallest, 2f32.powi(-24), MIN_SCALE].map(stored), [smallest; 4]);
        assert_eq!(stored(smallest * (1.0 + 2f32.powi(-10))), smallest * (1.0 + 2f32.powi(-10)));
        assert_eq!(stored(0.0), 0.0);
    }

    /// A group within one step of f16 is its middle, whatever the sign; one as wide as a step has its extremes.
    #[test]
    fn groups_within_a_step_are_their_middle() {
        let step = CodeRange::SMALLEST_STEP;
        let format = AffineFormat::new(Bits::Eight, Grouping::Token);
        let constant = |value: f32| CodeRange { scale: 0.0, min: value };
        assert_eq!(format.tile_range(-0.25 * step, 0.5 * step), constant(0.125 * step));
        assert_eq!(format.tile_range(-0.5 * step, 0.25 * step), constant(-0.125 * step));
        assert_eq!(format.tile_range(1.0, 1.0 + 0.5 * step), constant(1.0));
        assert_eq!(format.tile_range(-0.5 * step, 0.5 * step), CodeRange { scale: step, min: -0.5 * step });
        assert_eq!(format.span_range(0.0, 0.5 * step).min, 0.0, "f32 ranges have finer steps");
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
