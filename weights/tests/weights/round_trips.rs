//! What is packed is unpacked, whatever the shape.

use kvpack_weights::format::awq_gemm::AwqTensors;
use kvpack_weights::format::awq_gemv_fast::AwqFastTensors;
use kvpack_weights::format::compressed_tensors::CompressedTensors;
use kvpack_weights::format::gptq::{AllOnes, GptqLayout, StoredZeros};
use kvpack_weights::format::{Table, awq_gemm, awq_gemv, awq_gemv_fast, compressed_tensors, gptq};
use kvpack_weights::{Bits, Error, GroupSize, LinearShape, PackedCodes, QuantizedLinear};
use proptest::prelude::*;

use crate::random_layer;

fn bits() -> impl Strategy<Value = Bits> {
    prop::sample::select(Bits::ALL.to_vec())
}

/// A group size of up to 100 inputs, or a row.
fn group() -> impl Strategy<Value = GroupSize> {
    prop_oneof![Just(GroupSize::Row), (1usize..100).prop_map(GroupSize::Inputs)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn codes(bits in bits(), outputs in 1usize..9, inputs in 1usize..150, seed: u64) {
        let shape = LinearShape::new(outputs, inputs).unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        let codes: Vec<u8> = (0..shape.weights()).map(|_| random.u32(..=bits.largest()) as u8).collect();
        let packed = PackedCodes::pack(bits, shape, &codes).unwrap();
        prop_assert_eq!(&packed.unpack(), &codes);
        prop_assert_eq!(PackedCodes::new(bits, shape, packed.words().to_vec()).unwrap(), packed);
    }

    #[test]
    fn gptq_v2(bits in bits(), n in 1usize..4, k in 1usize..5, group in group(), shuffled: bool, seed: u64) {
        let shape = LinearShape::new(32 * n, 32 * k).unwrap();
        let linear = random_layer(bits, shape, group, shuffled, seed);
        let tensors = gptq::pack(&linear, StoredZeros::Plain).unwrap();
        let layout = GptqLayout { bits, group, zeros: StoredZeros::Plain, all_ones: AllOnes::Refused };
        prop_assert_eq!(gptq::unpack(&tensors, &layout).unwrap(), linear);
    }

    /// Version 1 says all zeros but 0.
    #[test]
    fn gptq_v1(bits in bits(), n in 1usize..4, k in 1usize..5, group in group(), seed: u64) {
        let shape = LinearShape::new(32 * n, 32 * k).unwrap();
        let linear = random_layer(bits, shape, group, true, seed);
        let layout = GptqLayout { bits, group, zeros: StoredZeros::MinusOne, all_ones: AllOnes::Refused };
        match gptq::pack(&linear, StoredZeros::MinusOne) {
            Ok(tensors) => prop_assert_eq!(gptq::unpack(&tensors, &layout).unwrap(), linear),
            Err(error) => {
                let is_format = matches!(error, Error::Format { .. });
                prop_assert!(is_format && linear.zeros().contains(&0), "{}", error);
            }
        }
    }

    #[test]
    fn awq(n in 1usize..6, groups in 1usize..5, size in 1usize..70, seed: u64) {
        let shape = LinearShape::new(8 * n, groups * size).unwrap();
        let linear = random_layer(Bits::Four, shape, GroupSize::Inputs(size), false, seed);
        let tensors = awq_gemm::pack(&linear).unwrap();
        prop_assert_eq!(awq_gemm::unpack(&tensors, GroupSize::Inputs(size)).unwrap(), linear);
    }

    /// Another writer: codes and zeros by the formulas of the module.
    #[test]
    fn gemv(n in 1usize..9, groups in 1usize..12, size in prop::sample::select(vec![32, 64, 128, 256usize]),
        seed: u64) {
        let shape = LinearShape::new(n, groups * size).unwrap();
        let linear = random_layer(Bits::Four, shape, GroupSize::Inputs(size), false, seed);
        let multiple = match size { 32 => 4, 64 => 2, _ => 1 };
        let width = groups.div_ceil(8).div_ceil(multiple) * multiple;
        let (mut zeros, mut scales) = (vec![0u32; n * width], vec![7.5; n * 8 * width]);
        for output in 0..n {
            for group in 0..groups {
                let at = output * groups + group;
                zeros[output * width + group / 8] |= u32::from(linear.zeros()[at]) << (4 * (group % 8));
                scales[output * 8 * width + group] = linear.scales()[at];
            }
        }
        let tensors = AwqTensors {
            qweight: Table::new(n, shape.inputs() / 8, linear.codes().words().to_vec()).unwrap(),
            qzeros: Table::new(n, width, zeros).unwrap(),
            scales: Table::new(n, 8 * width, scales).unwrap(),
        };
        prop_assert_eq!(awq_gemv::unpack(&tensors, GroupSize::Inputs(size)).unwrap(), linear);
    }

    #[test]
    fn gemv_fast(n in 1usize..4, groups in 1usize..7, size in prop::sample::select(vec![64usize, 128]), seed: u64) {
        let shape = LinearShape::new(4 * n, groups * size).unwrap();
        let linear = random_layer(Bits::Four, shape, GroupSize::Inputs(size), false, seed);
        prop_assert_eq!(awq_gemv_fast::unpack(&fast(&linear), GroupSize::Inputs(size)).unwrap(), linear);
    }

    #[test]
    fn compressed(bits in bits(), n in 1usize..40, k in 1usize..150, group in group(), shuffled: bool, seed: u64) {
        let shape = LinearShape::new(n, k).unwrap();
        let linear = random_layer(bits, shape, group, shuffled, seed);
        let groups = linear.groups();
        let zero_rows = bits.words(n);
        let mut zeros = vec![0u32; zero_rows * groups.count()];
        // Bit by bit.
        for (at, &zero) in linear.zeros().iter().enumerate() {
            let (output, group) = (at / groups.count(), at % groups.count());
            for bit in 0..bits.count() as usize {
                let to = output * bits.count() as usize + bit;
                zeros[to / 32 * groups.count() + group] |= u32::from(zero >> bit & 1) << (to % 32);
            }
        }
        let tensors = CompressedTensors {
            weight_packed: Table::new(n, bits.words(k), linear.codes().words().to_vec()).unwrap(),
            weight_scale: Table::new(n, groups.count(), linear.scales().to_vec()).unwrap(),
            weight_zero_point: Some(Table::new(zero_rows, groups.count(), zeros).unwrap()),
            weight_shape: [n as i64, k as i64],
            weight_g_idx: groups.index().map(|index| index.iter().map(|&group| group as i32).collect()),
        };
        match compressed_tensors::unpack(&tensors, bits, group) {
            Ok(read) => prop_assert_eq!(read, linear),
            Err(error) => prop_assert!(bits == Bits::Three && !k.is_multiple_of(32), "{}", error),
        }
    }

    #[test]
    fn permutations_undo_each_other(bits in bits(), n in 1usize..5, k in 1usize..90, group in group(), seed: u64) {
        let linear = random_layer(bits, LinearShape::new(n, k).unwrap(), group, true, seed);
        let order = linear.order_by_group();
        let mut back = vec![0; order.len()];
        order.iter().enumerate().for_each(|(at, &input)| back[input as usize] = at as u32);
        let sorted = linear.permuted(&order).unwrap();
        prop_assert!(sorted.groups().index().is_none());
        prop_assert_eq!(sorted.permuted(&back).unwrap(), linear);
    }
}

/// Older versions of compressed-tensors put 10 codes of 3 bits into a word.
#[test]
fn compressed_layers_of_two_possible_layouts() {
    let read = |outputs, inputs, words, has_zeros: bool| {
        let tensors = CompressedTensors {
            weight_packed: Table::new(outputs, words, vec![0; outputs * words]).unwrap(),
            weight_scale: Table::new(outputs, 1, vec![1.0; outputs]).unwrap(),
            weight_zero_point: has_zeros.then(|| {
                let words = Bits::Three.words(outputs);
                Table::new(words, 1, vec![0; words]).unwrap()
            }),
            weight_shape: [outputs as i64, inputs as i64],
            weight_g_idx: None,
        };
        compressed_tensors::unpack(&tensors, Bits::Three, GroupSize::Row)
    };
    for inputs in 1usize..=2048 {
        let (dense, old) = ((3 * inputs).div_ceil(32), inputs.div_ceil(10));
        let is_refused = |words| matches!(read(1, inputs, words, true), Err(Error::Tensor { .. }));
        assert!(dense == old || is_refused(old), "{inputs}");
        // 10 codes are the same in both.
        assert_eq!(is_refused(dense), dense == old && inputs > 10, "{inputs}");
    }
    // Zeros are packed along the outputs, in the layout that the codes show.
    for (outputs, inputs, has_zeros, is_read) in
        [(40, 10, true, false), (40, 10, false, true), (40, 64, true, true), (64, 10, true, true)]
    {
        let read = read(outputs, inputs, Bits::Three.words(inputs), has_zeros);
        assert_eq!(read.is_ok(), is_read, "{outputs} times {inputs}: {read:?}");
    }
}

/// Element `[i, j, k]` of a list as if its axes were `axes`, moved so that axis `order[0]` comes first.
fn transposed<T: Copy>(values: &[T], axes: &[usize], order: &[usize]) -> Vec<T> {
    let strides: Vec<usize> = (0..axes.len()).map(|axis| axes[axis + 1..].iter().product()).collect();
    let sizes: Vec<usize> = order.iter().map(|&axis| axes[axis]).collect();
    (0..values.len())
        .map(|mut at| {
            let mut from = 0;
            for (&axis, &size) in order.iter().zip(&sizes).rev() {
                from += at % size * strides[axis];
                at /= size;
            }
            values[from]
        })
        .collect()
}

/// gemv_fast in the four steps of AutoAWQ's packer: two reorderings of 32 codes, four rows interleaved, four codes to a
/// word.
pub fn fast(linear: &QuantizedLinear) -> AwqFastTensors {
    let (n, k, groups) = (linear.shape().outputs(), linear.shape().inputs(), linear.groups());
    let codes = transposed(&linear.codes().unpack(), &[n * k / 32, 4, 4, 2], &[0, 2, 1, 3]);
    let codes = transposed(&codes, &[n * k / 8, 4, 2], &[0, 2, 1]);
    let codes = transposed(&codes, &[n / 4, 4, k / 64, 64], &[0, 2, 1, 3]);
    let words =
        codes.chunks_exact(4).map(|codes| codes.iter().rev().fold(0u16, |word, &code| word << 4 | u16::from(code)));
    let multiple = if groups.size() == 64 { 2 } else { 1 };
    let stored = 8 * groups.count().div_ceil(8).div_ceil(multiple) * multiple;
    let (mut scales, mut zeros) = (vec![0.0; stored * n], vec![0.0; stored * n]);
    for output in 0..n {
        for group in 0..groups.count() {
            let (scale, zero) =
                (linear.scales()[output * groups.count() + group], linear.zeros()[output * groups.count() + group]);
            scales[group * n + output] = scale;
            zeros[group * n + output] = half::f16::from_f32(-scale * f32::from(zero)).to_f32();
        }
    }
    AwqFastTensors {
        qweight: Table::new(n / 4, k, words.collect()).unwrap(),
        scales: Table::new(stored, n, scales).unwrap(),
        scaled_zeros: Table::new(stored, n, zeros).unwrap(),
    }
}
