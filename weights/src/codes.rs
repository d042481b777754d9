//! Codes in 32-bit words.

use rayon::prelude::*;

use crate::error::{Error, Result, check_elements};
use crate::shape::{Bits, LinearShape};

/// Codes `[N, K]`, each row a dense little-endian bit stream that begins at a word.
///
/// Code k of a row is at the bits `b·k .. b·k + b - 1` of the row. At 3 bits the codes 10 and 21 of every 32 lie in two
/// words. The bits behind the last code of a row are 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedCodes {
    bits: Bits,
    shape: LinearShape,
    row_words: usize,
    words: Vec<u32>,
}

impl PackedCodes {
    /// Takes words that are packed in this order.
    ///
    /// # Errors
    /// [`Error::Elements`] for another number of words than N · ceil(K · b / 32).
    pub fn new(bits: Bits, shape: LinearShape, mut words: Vec<u32>) -> Result<Self> {
        let row_words = bits.words(shape.inputs());
        let of = || format!("{shape} with {bits}");
        check_elements("the words of codes", words.len(), row_words * shape.outputs(), of)?;
        let used = (shape.inputs() * bits.count() as usize) % 32;
        if used != 0 {
            words.chunks_exact_mut(row_words).for_each(|row| row[row_words - 1] &= (1 << used) - 1);
        }
        Ok(Self { bits, shape, row_words, words })
    }

    /// Packs codes `[N, K]`.
    ///
    /// # Errors
    /// [`Error::Elements`] for another number of codes, [`Error::Value`] for a code beyond 2^b - 1.
    pub fn pack(bits: Bits, shape: LinearShape, codes: &[u8]) -> Result<Self> {
        check_elements("the codes", codes.len(), shape.weights(), || shape.to_string())?;
        if let Some(index) = codes.iter().position(|&code| u32::from(code) > bits.largest()) {
            return Err(Error::Value {
                what: "code",
                index,
                given: codes[index].to_string(),
                allowed: format!("0 to {}", bits.largest()),
            });
        }
        let row_words = bits.words(shape.inputs());
        let mut words = vec![0; row_words * shape.outputs()];
        let rows = words.par_chunks_exact_mut(row_words).zip(codes.par_chunks_exact(shape.inputs()));
        rows.for_each(|(words, codes)| {
            codes.iter().enumerate().for_each(|(k, &code)| put(words, bits, k, code.into()));
        });
        Ok(Self { bits, shape, row_words, words })
    }

    /// Bits of a code.
    pub fn bits(&self) -> Bits {
        self.bits
    }

    /// N and K.
    pub fn shape(&self) -> LinearShape {
        self.shape
    }

    /// The words of an output's codes.
    ///
    /// # Panics
    /// For an output that the layer does not have.
    pub fn row(&self, output: usize) -> &[u32] {
        &self.words[output * self.row_words..][..self.row_words]
    }

    /// All words, `[N, ceil(K · b / 32)]`.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The code of a weight.
    ///
    /// # Panics
    /// For an output or an input that the layer does not have.
    pub fn code(&self, output: usize, input: usize) -> u32 {
        assert!(input < self.shape.inputs(), "input {input} of {}", self.shape);
        get(self.row(output), self.bits, input)
    }

    /// All codes, `[N, K]`.
    pub fn unpack(&self) -> Vec<u8> {
        let mut codes = vec![0; self.shape.weights()];
        codes.par_chunks_exact_mut(self.shape.inputs()).enumerate().for_each(|(output, codes)| {
            let row = self.row(output);
            codes.iter_mut().enumerate().for_each(|(input, code)| *code = get(row, self.bits, input) as u8);
        });
        codes
    }
}

/// Code `index` of a bit stream.
pub(crate) fn get(words: &[u32], bits: Bits, index: usize) -> u32 {
    get_from(|word| words[word], bits, index)
}

/// Code `index` of a bit stream whose words `word` returns.
pub(crate) fn get_from(word: impl Fn(usize) -> u32, bits: Bits, index: usize) -> u32 {
    let at = index * bits.count() as usize;
    let (first, shift) = (at / 32, at as u32 % 32);
    let mut code = word(first) >> shift;
    if shift + bits.count() > 32 {
        code |= word(first + 1) << (32 - shift);
    }
    code & bits.largest()
}

/// Writes code `index` of a bit stream, whose bits are 0 so far.
pub(crate) fn put(words: &mut [u32], bits: Bits, index: usize, code: u32) {
    let at = index * bits.count() as usize;
    let (first, shift) = (at / 32, at as u32 % 32);
    words[first] |= code << shift;
    if shift + bits.count() > 32 {
        words[first + 1] |= code >> (32 - shift);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 32 codes of 3 bits: codes 10 and 21 lie in two words.
    #[test]
    fn three_bits_straddle_words() {
        let mut words = [0; 3];
        put(&mut words, Bits::Three, 10, 0b101);
        put(&mut words, Bits::Three, 21, 0b110);
        assert_eq!(words, [0b01 << 30, 0b1, 0b11], "{words:x?}");
        assert_eq!(get(&words, Bits::Three, 10), 0b101);
        assert_eq!(get(&words, Bits::Three, 21), 0b110);
    }

    #[test]
    fn bits_behind_the_last_code_are_cleared() {
        let shape = LinearShape::new(2, 3).unwrap();
        let codes = PackedCodes::new(Bits::Four, shape, vec![0xffff_f321, 0xf654]).unwrap();
        assert_eq!(codes.words(), [0x321, 0x654]);
        assert_eq!(codes.unpack(), [1, 2, 3, 4, 5, 6]);
        assert_eq!(PackedCodes::pack(Bits::Four, shape, &[1, 2, 3, 4, 5, 6]).unwrap(), codes);
    }
}
