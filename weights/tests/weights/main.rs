//! The crate from outside.

mod checkpoints;
mod golden;
#[path = "../golden_files/mod.rs"]
mod golden_files;
mod hostile;
mod quantise;
mod references;
mod round_trips;

use kvpack_weights::{Bits, GroupSize, Groups, LinearShape, PackedCodes, QuantizedLinear};

/// Values from a normal distribution, nearly.
pub fn normal(random: &mut fastrand::Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| (0..6).map(|_| random.f32() - 0.5).sum()).collect()
}

/// A layer of random codes, f16 scales and zeros from 0 to 2^b - 1; with `shuffled`, groups in no order.
pub fn random_layer(bits: Bits, shape: LinearShape, group: GroupSize, shuffled: bool, seed: u64) -> QuantizedLinear {
    let mut random = fastrand::Rng::with_seed(seed);
    let codes: Vec<u8> = (0..shape.weights()).map(|_| random.u32(..=bits.largest()) as u8).collect();
    let mut groups = Groups::in_order(shape, group);
    if shuffled {
        let mut index: Vec<u32> = (0..shape.inputs()).map(|input| groups.of(input) as u32).collect();
        random.shuffle(&mut index);
        groups = Groups::indexed(shape, group, index).unwrap();
    }
    let count = shape.outputs() * groups.count();
    let scales = (0..count).map(|_| half::f16::from_f32(random.f32() + 0.01).to_f32()).collect();
    let zeros = (0..count).map(|_| random.u32(..=bits.largest()) as u16).collect();
    QuantizedLinear::new(PackedCodes::pack(bits, shape, &codes).unwrap(), groups, scales, zeros).unwrap()
}
