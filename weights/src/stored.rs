//! The order in which devices store a layer.
//!
//! Inputs are sorted by group and padded: each group becomes the same number of chunks of 32. A chunk is b words. Its
//! codes come in 16 pairs, code 2j in the low half of a word and code 2j + 1 in the high half, at a bit that leaves
//! them within the mantissa of an f16, or within it after a shift that serves several pairs. Four chunks are a step.

use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::linear::QuantizedLinear;
use crate::shape::Bits;

/// Inputs of a chunk.
pub(crate) const CHUNK: usize = 32;

/// Chunks of a step.
pub(crate) const STEP: usize = 4;

/// Stands for a padded input in [`Stored::order`].
pub(crate) const PADDING: u32 = u32::MAX;

/// A layer as devices store it.
pub(crate) struct Stored {
    /// Chunks of an output.
    pub chunks: usize,
    /// Chunks of a group.
    pub group_chunks: usize,
    /// `[N][chunk][b]`, with the inputs of [`Octets`].
    pub codes: Vec<u32>,
    /// Scale and zero of each group, `[N][group]`.
    pub scales: Scales,
    /// The input at each place, or [`PADDING`]; `None` if inputs are in order and none is padded.
    pub order: Option<Vec<u32>>,
}

/// Scales and zeros.
pub(crate) enum Scales {
    /// A word each: the scale in f16 in the low half, the zero in f16 in the high half.
    Half(Vec<u32>),
    /// Two words each, the scale and the zero in f32, where a scale is no f16.
    Single(Vec<[f32; 2]>),
}

impl Stored {
    /// Sorts, pads and packs.
    ///
    /// # Errors
    /// [`Error::Format`] when groups are so unequal that padding would more than double the layer.
    pub fn new(linear: &QuantizedLinear, octets: Octets) -> Result<Self> {
        let (groups, bits, shape) = (linear.groups(), linear.bits(), linear.shape());
        let mut members = vec![Vec::new(); groups.count()];
        (0..shape.inputs()).for_each(|input| members[groups.of(input)].push(input as u32));
        let largest = members.iter().map(Vec::len).max().unwrap_or(0);
        let group_chunks = largest.div_ceil(CHUNK).max(1);
        let places = group_chunks * CHUNK;
        if places * members.len() > 2 * shape.inputs().next_multiple_of(CHUNK) + places {
            return Err(Error::Format {
                format: "the order of devices",
                what: format!("{} groups of 0 to {largest} inputs, of {}", members.len(), shape.inputs()),
                hint: "use groups of 16 inputs or more, of the same size each",
            });
        }
        let order: Vec<u32> =
            members.iter().flat_map(|of| of.iter().copied().chain([PADDING].repeat(places - of.len()))).collect();
        let chunks = order.len() / CHUNK;
        let mut codes = vec![0; shape.outputs() * chunks * bits.count() as usize];
        let from = linear.codes();
        codes.par_chunks_exact_mut(chunks * bits.count() as usize).enumerate().for_each(|(output, row)| {
            for (chunk, words) in row.chunks_exact_mut(bits.count() as usize).enumerate() {
                let code = |place: usize| match order[octets.position(group_chunks, chunk, place)] {
                    PADDING => 0,
                    input => from.code(output, input as usize),
                };
                (0..CHUNK).for_each(|place| put(words, bits, place, code(place)));
            }
        });
        let in_order = order.iter().enumerate().all(|(place, &input)| place as u32 == input);
        Ok(Self { chunks, group_chunks, codes, scales: scales(linear), order: (!in_order).then_some(order) })
    }

    /// The place of each input among the codes of an output, chunk after chunk; `None` if inputs are in order and none
    /// is padded.
    pub fn homes(&self, octets: Octets) -> Option<Vec<u32>> {
        let order = self.order.as_ref()?;
        let inputs = order.iter().filter(|&&input| input != PADDING).count();
        let mut homes = vec![0; inputs];
        for home in 0..order.len() {
            let input = order[octets.position(self.group_chunks, home / CHUNK, home % CHUNK)];
            if input != PADDING {
                homes[input as usize] = home as u32;
            }
        }
        Some(homes)
    }
}

/// Which inputs a chunk has.
#[derive(Clone, Copy)]
pub(crate) enum Octets {
    /// 32 neighbours.
    #[cfg_attr(not(any(feature = "wgpu", feature = "cuda")), expect(dead_code, reason = "the order of devices"))]
    Neighbours,
    /// Where groups are whole steps, chunk t of a step has the octets t, t + 4, t + 8 and t + 12 of its 16, so that
    /// neighbouring chunks read neighbouring octets of activations. Elsewhere 32 neighbours.
    #[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code, reason = "the order of CUDA"))]
    EveryFourth,
}

impl Octets {
    /// Where the input of place `place` of a chunk comes among the sorted inputs.
    fn position(self, group_chunks: usize, chunk: usize, place: usize) -> usize {
        match self {
            Self::EveryFourth if group_chunks.is_multiple_of(STEP) => {
                let (step, of_step, octet) = (chunk / STEP, chunk % STEP, place / 8);
                step * STEP * CHUNK + octet * CHUNK + of_step * 8 + place % 8
            }
            _ => chunk * CHUNK + place,
        }
    }
}

/// Writes code `place` of a chunk whose words are 0 so far.
fn put(words: &mut [u32], bits: Bits, place: usize, code: u32) {
    let (pair, half) = (place / 2, 16 * (place as u32 % 2));
    match bits {
        Bits::Two => words[pair / 8] |= code << (half + 2 * (pair as u32 % 8)),
        Bits::Three if pair < 15 => words[pair / 5] |= code << (half + 3 * (pair as u32 % 5)),
        Bits::Three => (0..3).for_each(|bit| words[bit] |= (code >> bit & 1) << (half + 15)),
        Bits::Four => words[pair / 4] |= code << (half + 4 * (pair as u32 % 4)),
        Bits::Eight => words[pair / 2] |= code << (half + 8 * (pair as u32 % 2)),
    }
}

fn scales(linear: &QuantizedLinear) -> Scales {
    let pairs = || linear.scales().iter().zip(linear.zeros());
    let half = |x: f32| half::f16::from_f32(x);
    // A device may take subnormal halves for 0, and with them a whole group (docs/small-values.md).
    let is_normal = |scale: f32| scale == 0.0 || scale.abs() >= half::f16::MIN_POSITIVE.to_f32();
    if linear.scales().iter().all(|&scale| half(scale).to_f32() == scale && is_normal(scale)) {
        let word = |(&scale, &zero): (&f32, &u16)| {
            u32::from(half(scale).to_bits()) | u32::from(half(zero.into()).to_bits()) << 16
        };
        return Scales::Half(pairs().map(word).collect());
    }
    Scales::Single(pairs().map(|(&scale, &zero)| [scale, zero.into()]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codes::PackedCodes;
    use crate::shape::{GroupSize, Groups, LinearShape};

    /// Every code has bits of its own, and they are all bits of the chunk.
    #[test]
    fn codes_fill_the_words() {
        for bits in Bits::ALL {
            let mut seen = vec![0; bits.count() as usize];
            for place in 0..CHUNK {
                let mut words = vec![0; bits.count() as usize];
                put(&mut words, bits, place, bits.largest());
                let apart = words.iter().zip(&seen).all(|(word, seen)| word & seen == 0);
                assert!(apart, "{bits}, {place}");
                seen.iter_mut().zip(&words).for_each(|(seen, word)| *seen |= word);
            }
            assert!(seen.iter().all(|&word| word == u32::MAX), "{bits}");
        }
    }

    #[test]
    fn words_to_the_bit() {
        let stored = |bits, place, code| {
            let mut words = vec![0; 8];
            put(&mut words, bits, place, code);
            words
        };
        assert_eq!(stored(Bits::Four, 11, 0xa)[1], 0xa << 20);
        assert_eq!(stored(Bits::Two, 18, 3)[1], 3 << 2);
        assert_eq!(stored(Bits::Eight, 7, 0xff)[1], 0xff << 24);
        assert_eq!(stored(Bits::Three, 13, 5)[1], 5 << 19);
        assert_eq!(stored(Bits::Three, 31, 0b101)[..3], [1 << 31, 0, 1 << 31]);
    }

    fn layer(inputs: usize, size: usize, index: Option<Vec<u32>>) -> QuantizedLinear {
        let shape = LinearShape::new(1, inputs).unwrap();
        let size = GroupSize::Inputs(size);
        let groups = match index {
            None => Groups::in_order(shape, size),
            Some(index) => Groups::indexed(shape, size, index).unwrap(),
        };
        let codes: Vec<u8> = (0..inputs).map(|input| input as u8).collect();
        let count = groups.count();
        let codes = PackedCodes::pack(Bits::Eight, shape, &codes).unwrap();
        QuantizedLinear::new(codes, groups, vec![0.5; count], vec![128; count]).unwrap()
    }

    /// Scales that a device may take for 0 are stored in f32.
    #[test]
    fn subnormal_scales_are_stored_in_f32() {
        for (scale, is_half) in [(0.5, true), (6.1035156e-5, true), (3.0517578e-5, false), (0.0, true)] {
            let layer = layer(64, 32, None);
            let codes = layer.codes().clone();
            let scales = vec![scale; layer.groups().count()];
            let layer = QuantizedLinear::new(codes, layer.groups().clone(), scales, layer.zeros().to_vec()).unwrap();
            assert_eq!(matches!(super::scales(&layer), Scales::Half(_)), is_half, "{scale}");
        }
    }

    /// Every input of two steps has a place, and chunks of a step share runs of 32 inputs.
    #[test]
    fn chunks_of_a_step_have_every_fourth_octet() {
        let positions = |group_chunks| {
            let position = move |at| Octets::EveryFourth.position(group_chunks, at / CHUNK, at % CHUNK);
            let places = (0..8 * CHUNK).map(position);
            places.collect::<Vec<_>>()
        };
        let mut of_steps = positions(8);
        assert_eq!((of_steps[7], of_steps[8], of_steps[32], of_steps[42], of_steps[128]), (7, 32, 8, 42, 128));
        of_steps.sort_unstable();
        assert_eq!(of_steps, positions(2));
        let stored = Stored::new(&layer(128, 128, None), Octets::EveryFourth).unwrap();
        // Codes are the inputs. Place 10 of chunk 1 is input 42.
        assert!(stored.order.is_none());
        assert_eq!(stored.codes[8 + 2] >> 8 & 0xff, 42);
    }

    /// Codes are inputs here, so the code at the home of an input is that input.
    #[test]
    fn homes_name_the_places_of_codes() {
        let index = (0..256).map(|input| (input % 2) as u32).collect();
        let stored = Stored::new(&layer(256, 128, Some(index)), Octets::EveryFourth).unwrap();
        let homes = stored.homes(Octets::EveryFourth).unwrap();
        for (input, &home) in homes.iter().enumerate() {
            let (chunk, place) = (home as usize / CHUNK, home as usize % CHUNK);
            let word = stored.codes[8 * chunk + place / 4];
            assert_eq!(word >> (16 * (place % 2) + 8 * (place / 2 % 2)) & 0xff, input as u32);
        }
    }

    #[test]
    fn groups_are_sorted_and_padded() {
        let stored = Stored::new(&layer(64, 32, None), Octets::Neighbours).unwrap();
        assert!(stored.order.is_none() && stored.chunks == 2 && stored.group_chunks == 1);
        let stored = Stored::new(&layer(40, 20, None), Octets::Neighbours).unwrap();
        let order = stored.order.unwrap();
        assert_eq!((order.len(), order[19], order[20], order[32], order[52]), (64, 19, PADDING, 20, PADDING));
        let stored =
            Stored::new(&layer(64, 32, Some((0..64).map(|input| input % 2).collect())), Octets::Neighbours).unwrap();
        let homes = stored.homes(Octets::Neighbours).unwrap();
        assert_eq!((homes[0], homes[2], homes[1], homes[63]), (0, 1, 32, 63));
        let order = stored.order.unwrap();
        assert_eq!((order[0], order[1], order[32], order[63]), (0, 2, 1, 63));
        // All inputs in the last of many groups.
        let unequal = layer(256, 16, Some(vec![15; 256]));
        assert!(matches!(Stored::new(&unequal, Octets::Neighbours), Err(Error::Format { .. })));
    }
}
