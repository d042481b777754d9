//! CalibQuant's own storage: codes packed into words from the most significant bit down (arXiv 2502.14882, A.1).
//!
//! An `M`-bit word holds `M/N` `N`-bit codes (rounded down: words of 3-bit codes have unused low bits, which are 0).
//! The first code is in the highest bits: codes 0, 1, 2, 3 at 2 bits are the byte `0x1b`. Caches of other projects come
//! in this form. [`tile_from_codes`] brings them into kvpack's tiles, and [`codes_from_tile`] takes them out again.

use crate::format::{Bits, KeyOrValue, TILE_TOKENS, TensorFormat, TileLayout};
use crate::{Error, Result};

/// A word that codes are packed into: `u8`, `u16` or `u32`.
pub trait MsbWord: Copy + Default + private::Sealed {
    /// Bits of the word.
    const BITS: usize;

    #[doc(hidden)]
    fn from_u32(bits: u32) -> Self;

    #[doc(hidden)]
    fn to_u32(self) -> u32;
}

mod private {
    pub trait Sealed {}
}

macro_rules! msb_word {
    ($($word:ty),*) => {$(
        impl private::Sealed for $word {}
        impl MsbWord for $word {
            const BITS: usize = <$word>::BITS as usize;

            fn from_u32(bits: u32) -> Self {
                bits as Self
            }

            fn to_u32(self) -> u32 {
                self.into()
            }
        }
    )*};
}

msb_word!(u8, u16, u32);

/// Packs codes, the first into the highest bits.
///
/// ```
/// use kvpack::Bits;
/// use kvpack::format::interchange::msb_bytes::{pack, unpack};
/// assert_eq!(pack::<u8>(&[0, 1, 2, 3], Bits::Two)?, [0x1b]);
/// assert_eq!(pack::<u32>(&[1, 2, 3, 4], Bits::Eight)?, [0x0102_0304]);
/// assert_eq!(unpack(&[0x1bu8], Bits::Two), [0, 1, 2, 3]);
/// # Ok::<(), kvpack::Error>(())
/// ```
///
/// # Errors
/// [`Error::Format`] when the codes do not fill whole words or one is too large for its bits.
pub fn pack<W: MsbWord>(codes: &[u8], bits: Bits) -> Result<Vec<W>> {
    let per_word = W::BITS / bits.count() as usize;
    if !codes.len().is_multiple_of(per_word) {
        let format = format!("{bits}-bit codes in {}-bit words", W::BITS);
        return Err(Error::Format { format, reason: format!("{} codes do not fill words of {per_word}", codes.len()) });
    }
    check_codes(codes, bits)?;
    let spare = W::BITS % bits.count() as usize;
    let word = |codes: &[u8]| codes.iter().fold(0u32, |word, &code| (word << bits.count()) | u32::from(code)) << spare;
    Ok(codes.chunks_exact(per_word).map(|codes| W::from_u32(word(codes))).collect())
}

fn check_codes(codes: &[u8], bits: Bits) -> Result<()> {
    let Some(at) = codes.iter().position(|&code| u32::from(code) > bits.max_code()) else { return Ok(()) };
    let reason = format!("code {} at {at} is above {}", codes[at], bits.max_code());
    Err(Error::Format { format: format!("{bits}-bit codes"), reason })
}

/// Unpacks words that [`pack`] packed.
pub fn unpack<W: MsbWord>(words: &[W], bits: Bits) -> Vec<u8> {
    let per_word = W::BITS / bits.count() as usize;
    let code = |word: W, i: usize| (word.to_u32() >> (W::BITS - (i + 1) * bits.count() as usize)) & bits.max_code();
    words.iter().flat_map(|&word| (0..per_word).map(move |i| code(word, i) as u8)).collect()
}

/// Puts codes `[tokens, head_dim]` of one KV head into the words of a tile. There are no more than 128 tokens. Unused
/// fields are zero.
///
/// ```
/// use kvpack::Bits;
/// use kvpack::format::interchange::msb_bytes;
/// use kvpack::format::{AffineFormat, Grouping, KeyOrValue, TensorFormat};
/// let format = TensorFormat::Affine(AffineFormat::new(Bits::One, Grouping::Channel));
/// let bytes = [0b1010_0000u8; 3 * 64 / 8]; // 3 tokens of 64 channels
/// let codes = msb_bytes::unpack(&bytes, Bits::One);
/// let tile = msb_bytes::tile_from_codes(KeyOrValue::Key, &format, 64, &codes)?;
/// assert_eq!(msb_bytes::codes_from_tile(KeyOrValue::Key, &format, 64, &tile, 3)?, codes);
/// # Ok::<(), kvpack::Error>(())
/// ```
///
/// # Errors
/// [`Error::Format`] when the format has no codes, [`Error::Elements`] when there are more than 128 tokens or the last
/// is incomplete. A code that needs more bits is an [`Error::Format`] too.
pub fn tile_from_codes(which: KeyOrValue, format: &TensorFormat, head_dim: usize, codes: &[u8]) -> Result<Vec<u32>> {
    let tile = Tile::new(which, format, head_dim)?;
    if !codes.len().is_multiple_of(head_dim) || codes.len() > TILE_TOKENS * head_dim {
        return Err(wrong_length("codes", codes.len(), codes.len().min(TILE_TOKENS * head_dim) / head_dim * head_dim));
    }
    check_codes(codes, tile.bits)?;
    let mut words = vec![0; tile.words()];
    for (i, &code) in codes.iter().enumerate() {
        let field = tile.field(i / head_dim, i % head_dim);
        field.set(&mut words, u32::from(code) ^ tile.top_bit());
    }
    Ok(words)
}

/// The codes `[tokens, head_dim]` of the first tokens of a tile.
///
/// # Errors
/// [`Error::Format`] when the format has no codes, [`Error::Elements`] when `words` is not a tile or holds fewer
/// tokens.
pub fn codes_from_tile(
    which: KeyOrValue,
    format: &TensorFormat,
    head_dim: usize,
    words: &[u32],
    tokens: usize,
) -> Result<Vec<u8>> {
    let tile = Tile::new(which, format, head_dim)?;
    if words.len() != tile.words() {
        return Err(wrong_length("tile words", words.len(), tile.words()));
    }
    if tokens > TILE_TOKENS {
        return Err(wrong_length("tokens of a tile", tokens, TILE_TOKENS));
    }
    let code = |i: usize| tile.field(i / head_dim, i % head_dim).get(words) ^ tile.top_bit();
    Ok((0..tokens * head_dim).map(|i| code(i) as u8).collect())
}

struct Tile {
    which: KeyOrValue,
    layout: TileLayout,
    bits: Bits,
}

impl Tile {
    fn new(which: KeyOrValue, format: &TensorFormat, head_dim: usize) -> Result<Self> {
        let Some(bits) = format.code_bits() else {
            return Err(Error::Format { format: format.to_string(), reason: "it holds no codes".into() });
        };
        if !crate::format::HEAD_DIMS.contains(&head_dim) {
            return Err(Error::HeadDim { given: head_dim });
        }
        Ok(Self { which, layout: TileLayout::of(format, head_dim), bits })
    }

    fn words(&self) -> usize {
        match self.which {
            KeyOrValue::Key => self.layout.key_tile_words(),
            KeyOrValue::Value => self.layout.value_tile_words(),
        }
    }

    fn field(&self, token: usize, channel: usize) -> crate::format::Field {
        match self.which {
            KeyOrValue::Key => self.layout.key_field(token, channel),
            KeyOrValue::Value => self.layout.value_field(token, channel),
        }
    }

    fn top_bit(&self) -> u32 {
        1 << (self.bits.count() - 1)
    }
}

fn wrong_length(what: &'static str, given: usize, expected: usize) -> Error {
    Error::Elements { what, given, expected, shape: "one tile of 128 tokens".into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AffineFormat, Grouping};
    use proptest::prelude::*;

    #[test]
    fn the_first_code_is_the_highest() {
        assert_eq!(pack::<u8>(&[1, 0, 0, 0, 0, 0, 0, 1], Bits::One).unwrap(), [0x81]);
        assert_eq!(pack::<u16>(&[1, 2, 3, 4], Bits::Four).unwrap(), [0x1234]);
        assert_eq!(pack::<u32>(&[3; 16], Bits::Two).unwrap(), [u32::MAX]);
        assert_eq!(pack::<u8>(&[7, 200], Bits::Eight).unwrap(), [7, 200]);
    }

    #[test]
    fn wrong_codes_are_refused() {
        assert!(pack::<u8>(&[0; 3], Bits::Two).is_err());
        assert!(pack::<u8>(&[0, 4, 0, 0], Bits::Two).is_err());
        let format = TensorFormat::Affine(AffineFormat::new(Bits::Two, Grouping::Channel));
        assert!(tile_from_codes(KeyOrValue::Key, &format, 64, &[0; 65]).is_err());
        let refused = tile_from_codes(KeyOrValue::Key, &format, 64, &[255; 64]).unwrap_err().to_string();
        assert!(refused.contains("code 255 at 0"), "{refused}");
        assert!(tile_from_codes(KeyOrValue::Key, &format, 64, &[0; 129 * 64]).is_err());
        assert!(tile_from_codes(KeyOrValue::Key, &format, 65, &[0; 65]).is_err());
        assert!(tile_from_codes(KeyOrValue::Key, &TensorFormat::F16, 64, &[0; 64]).is_err());
        assert!(codes_from_tile(KeyOrValue::Key, &format, 64, &[0; 7], 1).is_err());
        assert!(codes_from_tile(KeyOrValue::Key, &format, 64, &[0; 512], 129).is_err());
    }

    proptest! {
        #[test]
        fn everything_comes_back(words in prop::collection::vec(any::<u32>(), 1..20), tokens in 0usize..=128) {
            for bits in Bits::ALL {
                let packed = pack::<u32>(&unpack(&words, bits), bits).unwrap();
                let spare = 32 % bits.count();
                let used: Vec<u32> = words.iter().map(|word| word >> spare << spare).collect();
                prop_assert_eq!(packed, used);
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
                if bits == Bits::Three {
                    prop_assert_eq!(unpack(&bytes, bits).len(), 8 * words.len());
                    continue;
                }
                prop_assert_eq!(unpack(&bytes, bits), unpack(&words, bits));
                let halves: Vec<u16> = words.iter().flat_map(|&word| [(word >> 16) as u16, word as u16]).collect();
                prop_assert_eq!(unpack(&halves, bits), unpack(&words, bits));
            }
            for bits in Bits::ALL {
                let format = TensorFormat::Affine(AffineFormat::new(bits, Grouping::Channel));
                let codes: Vec<u8> = unpack(&words, bits).into_iter().cycle().take(tokens * 80).collect();
                for which in [KeyOrValue::Key, KeyOrValue::Value] {
                    let tile = tile_from_codes(which, &format, 80, &codes).unwrap();
                    prop_assert_eq!(&codes_from_tile(which, &format, 80, &tile, tokens).unwrap(), &codes);
                }
            }
        }
    }
}
