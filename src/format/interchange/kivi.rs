//! KIVI's own storage and arithmetic (arXiv 2402.02750), equal to its published code to the bit.
//!
//! Keys are grouped per channel over consecutive tokens, values per token over consecutive channels. These are the
//! groupings [`ChannelTokens`](crate::format::Grouping::ChannelTokens) and
//! [`TokenChannels`](crate::format::Grouping::TokenChannels) of this library. An `i32` holds `32 / bits` codes (rounded
//! down), the first in the lowest bits: at 2 bits the codes 0, 1, 2, 3, repeated four times, are the word `0xe4e4e4e4`.
//!
//! [`quantize_group`] rounds every step to the element type of the input, as that code does. kvpack's kernels round
//! only the stored scale and minimum, to f16. At f16 a code may therefore differ by one if an element lies within f16
//! rounding of the midpoint between two levels.

use half::f16;

use crate::format::{Bits, CodeRange};
use crate::{Error, Result};

/// The precision to which [`quantize_group`] rounds every step: the element type of KIVI's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleRounding {
    /// f32 steps.
    F32,
    /// f16 steps, to nearest even.
    F16,
}

impl ScaleRounding {
    fn round(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            // A single f32 operation on f16 operands, rounded once more, is the f16 operation: f32 has more than twice
            // as many digits.
            Self::F16 => f16::from_f32(x).to_f32(),
        }
    }
}

/// A quantised group: its codes and its range.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedGroup {
    /// One code per element.
    pub codes: Vec<u8>,
    /// Scale and minimum, rounded like every step.
    pub range: CodeRange,
}

/// Quantises the elements that share a range: `scale = (max − min) / (2^bits − 1)`, `code = round(clamp((x − min) /
/// scale))`, ties to even, each step rounded. A group without spread gets scale 0 and codes 0; the published code
/// divides by zero there.
pub fn quantize_group(elements: &[f32], bits: Bits, rounding: ScaleRounding) -> QuantizedGroup {
    let round = |x: f32| rounding.round(x);
    let min = elements.iter().copied().fold(f32::INFINITY, f32::min);
    let max = elements.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let most = bits.max_code() as f32;
    let scale = if max > min { round(round(max - min) / most) } else { 0.0 };
    let code = |&x: &f32| match scale > 0.0 {
        true => round(round(x - min) / scale).clamp(0.0, most).round_ties_even() as u8,
        false => 0,
    };
    QuantizedGroup { codes: elements.iter().map(code).collect(), range: CodeRange { scale, min } }
}

impl QuantizedGroup {
    /// The values of the codes: `code · scale + min`, each step rounded.
    pub fn dequantize(&self, rounding: ScaleRounding) -> Vec<f32> {
        let value = |&code: &u8| rounding.round(rounding.round(f32::from(code) * self.range.scale) + self.range.min);
        self.codes.iter().map(value).collect()
    }
}

/// Packs codes into words, the first into the lowest bits.
///
/// ```
/// use kvpack::Bits;
/// use kvpack::format::interchange::kivi::{pack, unpack};
/// let codes = [0, 1, 2, 3].repeat(4);
/// assert_eq!(pack(&codes, Bits::Two)?, [0xe4e4_e4e4u32 as i32]);
/// assert_eq!(unpack(&[0xe4e4_e4e4u32 as i32], Bits::Two), codes);
/// # Ok::<(), kvpack::Error>(())
/// ```
///
/// # Errors
/// [`Error::Format`] when the codes do not fill whole words or one is too large for its bits.
pub fn pack(codes: &[u8], bits: Bits) -> Result<Vec<i32>> {
    let per_word = bits.codes_per_word();
    let reject = |reason: String| Error::Format { format: format!("{bits}-bit codes in i32 words"), reason };
    if !codes.len().is_multiple_of(per_word) {
        return Err(reject(format!("{} codes do not fill words of {per_word} codes", codes.len())));
    }
    if let Some(at) = codes.iter().position(|&code| u32::from(code) > bits.max_code()) {
        return Err(reject(format!("code {} at {at} is above {}", codes[at], bits.max_code())));
    }
    let word = |codes: &[u8]| codes.iter().rev().fold(0u32, |word, &code| (word << bits.count()) | u32::from(code));
    Ok(codes.chunks_exact(per_word).map(|codes| word(codes) as i32).collect())
}

/// Unpacks words that [`pack`] packed.
pub fn unpack(words: &[i32], bits: Bits) -> Vec<u8> {
    let code = |word: i32, i: usize| (word as u32 >> (i as u32 * bits.count())) & bits.max_code();
    words.iter().flat_map(|&word| (0..bits.codes_per_word()).map(move |i| code(word, i) as u8)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_code_is_the_lowest() {
        assert_eq!(pack(&[1, 2, 3, 4], Bits::Eight).unwrap(), [0x0403_0201]);
        assert_eq!(pack(&[15, 0, 0, 0, 0, 0, 0, 8], Bits::Four).unwrap(), [0x8000_000fu32 as i32]);
        assert!(pack(&[0; 5], Bits::Eight).is_err());
        assert!(pack(&[0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], Bits::Two).is_err());
    }

    #[test]
    fn a_group_without_spread_is_its_minimum() {
        let group = quantize_group(&[2.5; 8], Bits::Two, ScaleRounding::F16);
        assert_eq!(group, QuantizedGroup { codes: vec![0; 8], range: CodeRange { scale: 0.0, min: 2.5 } });
        assert_eq!(group.dequantize(ScaleRounding::F16), [2.5; 8]);
    }

    proptest! {
        #[test]
        fn everything_comes_back(words in prop::collection::vec(any::<i32>(), 1..20)) {
            for bits in Bits::ALL {
                let used = u32::MAX >> (32 % bits.count());
                let words: Vec<i32> = words.iter().map(|&word| (word as u32 & used) as i32).collect();
                prop_assert_eq!(pack(&unpack(&words, bits), bits).unwrap(), words);
            }
        }
    }
}
