//! The registry: all checks.

use kvpack_device::ElementType;

use super::check::{Check, Kind};
use super::layer::{Activations, InputOrder, LayerCase, ScaleKind};
use crate::shape::Bits;

/// The most rows that kernels for few rows take.
const FEW_ROWS: usize = 16;

const PLAIN: LayerCase = LayerCase::PLAIN;

/// All checks, kind by kind. Names are unique; the order is stable.
pub fn checks() -> Vec<Check> {
    let products = product_cases().into_iter().map(|case| Check::new(Kind::Linear, case));
    products.chain(dequantize_cases().into_iter().map(|case| Check::new(Kind::Dequantize, case))).collect()
}

/// Layers that are multiplied with activations.
pub fn product_cases() -> Vec<LayerCase> {
    [one_row_cases(), few_row_cases(), ordered_cases(), many_row_cases()].concat()
}

/// Activations and outputs of every type, each once.
fn types() -> [(ElementType, ElementType); 3] {
    let [single, half, brain] = ElementType::ALL;
    [(single, half), (half, brain), (brain, single)]
}

fn one_row_cases() -> Vec<LayerCase> {
    let mut cases: Vec<LayerCase> = Bits::ALL.map(|bits| LayerCase { bits, ..PLAIN }.quick()).into();
    for (x, y) in types() {
        // More chunks than invocations, outputs that fill no workgroup.
        cases.push(LayerCase { x, y, outputs: 38, inputs: 4160, group: 64, ..PLAIN }.quick());
        // From 20480 inputs on wgpu takes workgroups of 64 invocations and 16 outputs.
        cases.push(LayerCase { x, y, outputs: 38, inputs: 20608, ..PLAIN });
    }
    cases.push(LayerCase { outputs: 38, inputs: 20608, ..PLAIN }.quick());
    cases.push(LayerCase { scales: ScaleKind::Single, ..PLAIN }.quick());
    cases.push(LayerCase { group: 256, bits: Bits::Eight, x: ElementType::F32, ..PLAIN });
    // A kernel turns activations into integers, relative to the largest of a chunk.
    for (x, factors) in [
        (ElementType::F16, [0.0, 1e-6, 6e4]),
        (ElementType::Bf16, [0.0, 1e-25, 1e33]),
        (ElementType::F32, [0.0, 1e-25, 1e33]),
    ] {
        let case = LayerCase { x, outputs: 38, inputs: 512, ..PLAIN };
        cases.extend(factors.map(|factor| LayerCase { activations: Activations::Scaled { factor }, ..case }));
        let not_finite = |number| LayerCase { activations: Activations::NotFinite(number), ..case };
        cases.extend([LayerCase { quick: x == ElementType::F16, ..not_finite(f32::INFINITY) }, not_finite(f32::NAN)]);
    }
    // Other activations of a chunk lose bits to one far above them, less than by being f16: docs/weights.md.
    let outliers =
        |factor| LayerCase { activations: Activations::Outliers { factor }, outputs: 152, inputs: 2048, ..PLAIN };
    cases.extend([100.0, 1000.0].map(outliers));
    cases.push(outliers(10_000.0).quick());
    cases
}

/// Rows that kernels for few rows take together.
fn few_row_cases() -> Vec<LayerCase> {
    let mut cases = Vec::new();
    for (bits, rows) in Bits::ALL.into_iter().zip([FEW_ROWS, 4, 9, 15]) {
        // More chunks than invocations, rows that do not fill the workgroups.
        cases.push(LayerCase { bits, inputs: 4160, group: 64, outputs: 6, rows: 5, ..PLAIN });
        // By matrices, where the device has them: rows that do not fill a matrix, outputs that fill no workgroup.
        cases.push(LayerCase { bits, rows, outputs: 76, inputs: 1024, ..PLAIN }.quick());
        cases.push(LayerCase { bits, rows, outputs: 264, inputs: 512, x: ElementType::Bf16, ..PLAIN });
        // Many inputs of few outputs, which several workgroups share.
        cases.push(LayerCase { bits, rows: rows - rows / 4, outputs: 132, inputs: 4096, ..PLAIN });
        // In strips, which a block copies ahead on CUDA: steps that do not fill the warps, and clusters from 4096
        // inputs.
        cases.push(LayerCase { bits, rows, outputs: 48, inputs: 2176, ..PLAIN }.quick());
        cases.push(LayerCase { bits, rows: 4, outputs: 48, inputs: 4224, ..PLAIN }.quick());
    }
    for (x, y) in types() {
        cases.push(LayerCase { x, y, rows: 3, outputs: 10, ..PLAIN }.quick());
    }
    cases.push(LayerCase { rows: 5, outputs: 76, inputs: 4096, y: ElementType::F16, ..PLAIN }.quick());
    let x = ElementType::Bf16;
    cases.push(LayerCase { x, order: InputOrder::ByActivation, rows: 11, outputs: 36, inputs: 2048, ..PLAIN }.quick());
    cases.push(LayerCase { rows: FEW_ROWS, outputs: 7, ..PLAIN });
    cases
}

/// Layers whose activations are put in order first.
fn ordered_cases() -> Vec<LayerCase> {
    let order = InputOrder::ByActivation;
    let mut cases: Vec<LayerCase> = ElementType::ALL.map(|x| LayerCase { order, x, rows: 2, ..PLAIN }.quick()).into();
    for bits in [Bits::Three, Bits::Four] {
        cases.push(LayerCase { bits, inputs: 200, group: 40, rows: 3, ..PLAIN });
        cases.push(LayerCase { bits, inputs: 65, group: 16, order, ..PLAIN });
    }
    cases
}

/// Rows that fill no tile, every width, every type, act-order, padded groups, outputs that are no multiple of a tile.
fn many_row_cases() -> Vec<LayerCase> {
    let order = InputOrder::ByActivation;
    let mut cases = Vec::new();
    for bits in Bits::ALL {
        cases.push(LayerCase { bits, rows: 17, outputs: 76, ..PLAIN });
        cases.push(LayerCase { bits, rows: 33, outputs: 76, ..PLAIN }.quick());
        cases.push(LayerCase { bits, rows: 300, outputs: 76, ..PLAIN });
        for x in ElementType::ALL {
            cases.push(LayerCase { bits, x, rows: 33, outputs: 20, order, ..PLAIN });
            // Groups of 40 inputs, padded to 64; 320 places are no whole steps.
            cases.push(LayerCase { bits, x, y: x, rows: 17, outputs: 130, inputs: 200, group: 40, ..PLAIN });
        }
        cases.push(LayerCase { bits, rows: 65, outputs: 300, inputs: 1056, group: 32, y: ElementType::F16, ..PLAIN });
    }
    for (x, y) in types() {
        cases.push(LayerCase { x, y, rows: 70, outputs: 264, inputs: 384, ..PLAIN }.quick());
    }
    // Few tiles of many inputs, which two to eight workgroups share.
    for (bits, inputs) in Bits::ALL.into_iter().zip([1024, 4096, 2048, 2048]) {
        for (x, y) in types() {
            cases.push(LayerCase { bits, x, y, rows: 20, outputs: 132, inputs, ..PLAIN });
        }
    }
    cases.push(LayerCase { rows: 20, outputs: 176, inputs: 4096, y: ElementType::F16, ..PLAIN }.quick());
    cases.push(LayerCase { rows: 140, outputs: 36, inputs: 1024, ..PLAIN });
    cases.push(LayerCase { order, rows: 40, outputs: 20, inputs: 2048, ..PLAIN }.quick());
    cases.push(LayerCase { scales: ScaleKind::Single, rows: 20, outputs: 18, ..PLAIN }.quick());
    // A device may take subnormal numbers of f16 for 0.
    let scales = ScaleKind::Subnormal;
    cases.extend([1, 4, 16, 20].map(|rows| LayerCase { scales, rows, outputs: 76, inputs: 512, ..PLAIN }.quick()));
    cases.push(LayerCase { bits: Bits::Three, outputs: 7, inputs: 65, group: 16, order, rows: 18, ..PLAIN });
    cases
}

/// Layers that are dequantised.
pub fn dequantize_cases() -> Vec<LayerCase> {
    let mut cases = Vec::new();
    for bits in Bits::ALL {
        cases.push(LayerCase { bits, outputs: 6, inputs: 4160, group: 64, ..PLAIN }.quick());
        // In strips on CUDA.
        cases.push(LayerCase { bits, outputs: 48, inputs: 2176, ..PLAIN }.quick());
        cases.push(LayerCase { bits, order: InputOrder::ByActivation, ..PLAIN }.quick());
        cases.push(LayerCase { bits, outputs: 12, inputs: 201, group: 40, ..PLAIN });
    }
    cases.push(LayerCase { scales: ScaleKind::Single, ..PLAIN }.quick());
    cases.push(LayerCase { scales: ScaleKind::Single, inputs: 200, group: 40, ..PLAIN });
    cases.push(LayerCase { scales: ScaleKind::Subnormal, ..PLAIN }.quick());
    cases
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_plain() {
        let checks = checks();
        let names: BTreeSet<&str> = checks.iter().map(Check::name).collect();
        assert_eq!(names.len(), checks.len());
        assert!(names.iter().all(|n| n.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-')));
    }

    #[test]
    fn the_quick_subset_is_small_and_has_every_kind() {
        for kind in Kind::ALL {
            let quick = checks().iter().filter(|check| check.kind() == kind && check.is_quick()).count();
            assert!((1..=64).contains(&quick), "{quick} quick checks of {kind}");
        }
    }
}
