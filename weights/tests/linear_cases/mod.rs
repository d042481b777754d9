//! Layers whose products are compared with f64 products over the stored codes, on any device.

use half::f16;
use kvpack_device::ElementType;
use kvpack_weights::{Bits, GroupSize, Groups, LinearShape, PackedCodes, Path, QuantizedLinear};
use rayon::prelude::*;

/// The most rows that kernels for few rows take.
pub const FEW_ROWS: usize = 16;

/// How the groups of a layer lie.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    Natural,
    ByActivation,
}

/// Scales that f16 holds, or not.
#[derive(Clone, Copy, Debug)]
pub enum ScaleKind {
    Half,
    Single,
}

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub bits: Bits,
    pub outputs: usize,
    pub inputs: usize,
    pub group: usize,
    pub order: Order,
    pub scales: ScaleKind,
    pub rows: usize,
    pub x: ElementType,
    pub y: ElementType,
}

pub const PLAIN: Case = Case {
    bits: Bits::Four,
    outputs: 12,
    inputs: 256,
    group: 128,
    order: Order::Natural,
    scales: ScaleKind::Half,
    rows: 1,
    x: ElementType::F16,
    y: ElementType::F32,
};

/// Numbers below `below` that look random.
fn numbers(count: usize, below: u32, seed: u32) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state % below
    };
    (0..count).map(|_| next()).collect()
}

pub fn floats(count: usize, seed: u32) -> Vec<f32> {
    numbers(count, 1 << 20, seed).into_iter().map(|x| (x as f32 / (1 << 19) as f32) - 1.0).collect()
}

pub fn layer(case: &Case) -> QuantizedLinear {
    let shape = LinearShape::new(case.outputs, case.inputs).unwrap();
    let size = GroupSize::Inputs(case.group);
    let groups = match case.order {
        Order::Natural => Groups::in_order(shape, size),
        Order::ByActivation => {
            // Input k is the (7 · k)-th by its activations; the sizes are no multiples of 7.
            let group = |input: usize| (7 * input % case.inputs / case.group) as u32;
            Groups::indexed(shape, size, (0..case.inputs).map(group).collect()).unwrap()
        }
    };
    let codes: Vec<u8> =
        numbers(shape.weights(), case.bits.largest() + 1, 1).into_iter().map(|code| code as u8).collect();
    let count = case.outputs * groups.count();
    let scale = |x: f32| match case.scales {
        ScaleKind::Half => f16::from_f32(0.01 * (x + 1.5)).to_f32(),
        ScaleKind::Single => 0.01 * (x + 1.5),
    };
    // The largest zero is the one that no code reaches.
    let zeros = numbers(count, case.bits.largest() + 2, 3).into_iter().map(|zero| zero as u16).collect();
    let scales = floats(count, 2).into_iter().map(scale).collect();
    QuantizedLinear::new(PackedCodes::pack(case.bits, shape, &codes).unwrap(), groups, scales, zeros).unwrap()
}

/// Compares outputs with those of f64 for the activations that the device holds. Some kernels multiply with weights in
/// f16.
pub fn compare(case: &Case, quantized: &QuantizedLinear, path: Path, held: &[f64], got: &[f32]) {
    let weights: Vec<f64> = match path.rounds_weights() {
        true => quantized.dequantize_f16().into_iter().map(f64::from).collect(),
        false => quantized.dequantize(),
    };
    let step = match case.y {
        ElementType::F32 => 0.0,
        ElementType::F16 => 1.0 / 2048.0,
        ElementType::Bf16 => 1.0 / 256.0,
    };
    got[..case.rows * case.outputs].par_iter().enumerate().for_each(|(at, &got)| {
        let (row, output) = (at / case.outputs, at % case.outputs);
        let (x, w) = (&held[row * case.inputs..][..case.inputs], &weights[output * case.inputs..][..case.inputs]);
        let want: f64 = x.iter().zip(w).map(|(x, w)| x * w).sum();
        let absolute: f64 = x.iter().zip(w).map(|(x, w)| (x * w).abs()).sum();
        let allowed = 2e-5 * absolute + step * want.abs();
        let error = (f64::from(got) - want).abs();
        assert!(error <= allowed, "{case:?}: row {row}, output {output}: {got}, not {want}");
    });
}

/// Cases for every device.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for bits in Bits::ALL {
        cases.push(Case { bits, ..PLAIN });
        // More chunks than invocations, rows that do not fill the workgroups.
        cases.push(Case { bits, inputs: 4160, group: 64, outputs: 6, rows: 5, ..PLAIN });
    }
    for (x, y) in ElementType::ALL.into_iter().zip([ElementType::F16, ElementType::Bf16, ElementType::F32]) {
        cases.push(Case { x, y, rows: 3, outputs: 10, ..PLAIN });
        // One row: more chunks than invocations, outputs that fill no workgroup.
        cases.push(Case { x, y, outputs: 38, inputs: 4160, group: 64, ..PLAIN });
        // One row of at least 20480 inputs: wgpu takes workgroups of 64 invocations and 16 outputs.
        cases.push(Case { x, y, outputs: 38, inputs: 20608, ..PLAIN });
    }
    cases.push(Case { rows: FEW_ROWS, outputs: 7, ..PLAIN });
    for (bits, rows) in Bits::ALL.into_iter().zip([FEW_ROWS, 4, 9, 15]) {
        // By matrices, where the device has them: rows that do not fill a matrix, outputs that fill no workgroup.
        cases.push(Case { bits, rows, outputs: 76, inputs: 1024, ..PLAIN });
        cases.push(Case { bits, rows, outputs: 264, inputs: 512, x: ElementType::Bf16, ..PLAIN });
    }
    cases.push(Case { scales: ScaleKind::Single, ..PLAIN });
    cases.push(Case { group: 256, bits: Bits::Eight, x: ElementType::F32, ..PLAIN });
    cases
}

/// Cases whose activations are put in order first.
pub fn ordered_cases() -> Vec<Case> {
    let by_activation = |x| Case { order: Order::ByActivation, x, rows: 2, ..PLAIN };
    let mut cases: Vec<Case> = ElementType::ALL.map(by_activation).into();
    for bits in [Bits::Three, Bits::Four] {
        cases.push(Case { bits, inputs: 200, group: 40, rows: 3, ..PLAIN });
        cases.push(Case { bits, inputs: 65, group: 16, order: Order::ByActivation, ..PLAIN });
    }
    cases
}

/// Cases of many rows: numbers that fill no tile, every width, every type, act-order, padded groups, f32 scales,
/// outputs that are no multiple of a tile.
pub fn many_row_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for bits in Bits::ALL {
        for rows in [17, 33, 300] {
            cases.push(Case { bits, rows, outputs: 76, ..PLAIN });
        }
        for x in ElementType::ALL {
            cases.push(Case { bits, x, rows: 33, outputs: 20, order: Order::ByActivation, ..PLAIN });
            // Groups of 40 inputs, padded to 64; 320 places are no whole steps.
            cases.push(Case { bits, x, y: x, rows: 17, outputs: 130, inputs: 200, group: 40, ..PLAIN });
        }
        cases.push(Case { bits, rows: 65, outputs: 300, inputs: 1056, group: 32, y: ElementType::F16, ..PLAIN });
    }
    for (x, y) in ElementType::ALL.into_iter().zip([ElementType::F16, ElementType::Bf16, ElementType::F32]) {
        cases.push(Case { x, y, rows: 70, outputs: 264, inputs: 384, ..PLAIN });
    }
    // Few tiles of many inputs, which two to eight workgroups share.
    for (bits, inputs) in Bits::ALL.into_iter().zip([1024, 4096, 2048, 2048]) {
        for (x, y) in ElementType::ALL.into_iter().zip([ElementType::F16, ElementType::Bf16, ElementType::F32]) {
            cases.push(Case { bits, x, y, rows: 20, outputs: 132, inputs, ..PLAIN });
        }
    }
    cases.push(Case { rows: 140, outputs: 36, inputs: 1024, ..PLAIN });
    cases.push(Case { order: Order::ByActivation, rows: 40, outputs: 20, inputs: 2048, ..PLAIN });
    cases.push(Case { scales: ScaleKind::Single, rows: 20, outputs: 18, ..PLAIN });
    cases.push(Case {
        bits: Bits::Three,
        outputs: 7,
        inputs: 65,
        group: 16,
        order: Order::ByActivation,
        rows: 18,
        ..PLAIN
    });
    cases
}

/// Layers whose weights are dequantised.
pub fn weight_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for bits in Bits::ALL {
        cases.push(Case { bits, outputs: 6, inputs: 4160, group: 64, ..PLAIN });
        cases.push(Case { bits, outputs: 48, inputs: 2176, ..PLAIN });
        cases.push(Case { bits, order: Order::ByActivation, ..PLAIN });
        cases.push(Case { bits, inputs: 201, group: 40, ..PLAIN });
    }
    cases.push(Case { scales: ScaleKind::Single, ..PLAIN });
    cases.push(Case { scales: ScaleKind::Single, inputs: 200, group: 40, ..PLAIN });
    cases
}

/// Outputs, inputs and rows of the layers that are timed.
pub const TIMED: [(usize, usize); 5] = [(4096, 4096), (8192, 8192), (14336, 4096), (8192, 28672), (5120, 13824)];

/// A layer with groups of 128 whose codes look random.
pub fn large_layer(bits: Bits, outputs: usize, inputs: usize) -> QuantizedLinear {
    let shape = LinearShape::new(outputs, inputs).unwrap();
    let groups = Groups::in_order(shape, GroupSize::Inputs(128));
    let words =
        (0..outputs * bits.words(inputs)).map(|at| (at as u32).wrapping_mul(0x9e37_79b9) ^ 0x5bd1_e995).collect();
    let count = outputs * groups.count();
    let scales = vec![f16::from_f32(0.01).to_f32(); count];
    let codes = PackedCodes::new(bits, shape, words).unwrap();
    QuantizedLinear::new(codes, groups, scales, vec![bits.middle() as u16; count]).unwrap()
}

/// Copies of a layer of `bytes` bytes that are several times as large as the caches of any device together.
pub const fn copies(bytes: u64) -> usize {
    (300 << 20) as usize / bytes as usize + 2
}
