//! Products on a wgpu device against f64 products over the stored codes.
//!
//! `KVPACK_TEST_DRIVER` (lavapipe, swiftshader, system) says which driver is expected, as for kvpack's own tests.

use half::{bf16, f16};
use kvpack_device::wgpu::{Checks, Kernels, Requirements, Tensor, choose_adapter, open_device};
use kvpack_device::{ElementType, Elements};
use kvpack_weights::wgpu::Linear;
use kvpack_weights::{Bits, Error, GroupSize, Groups, LinearShape, MOST_ROWS, PackedCodes, QuantizedLinear};
use pollster::block_on;

struct Device {
    device: wgpu::Device,
    queue: wgpu::Queue,
    kernels: Kernels,
}

fn device() -> Device {
    let adapter = block_on(choose_adapter(None)).unwrap();
    let expected = match std::env::var("KVPACK_TEST_DRIVER").as_deref() {
        Ok("lavapipe") => "llvmpipe",
        Ok("swiftshader") => "SwiftShader",
        _ => "",
    };
    let name = adapter.get_info().name;
    assert!(name.contains(expected), "the adapter is '{name}'");
    let requirements = Requirements::of(&adapter, wgpu::ExperimentalFeatures::disabled());
    let (device, queue) = block_on(open_device(&adapter, requirements)).unwrap();
    let checks = match std::env::var("KVPACK_CHECKS").as_deref() {
        Ok("safe") => Checks::Safe,
        _ => Checks::Trusted,
    };
    Device { kernels: Kernels::new(&device, checks), device, queue }
}

/// How the groups of a layer lie.
#[derive(Clone, Copy, Debug)]
enum Order {
    Natural,
    ByActivation,
}

/// Scales that f16 holds, or not.
#[derive(Clone, Copy, Debug)]
enum ScaleKind {
    Half,
    Single,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    bits: Bits,
    outputs: usize,
    inputs: usize,
    group: usize,
    order: Order,
    scales: ScaleKind,
    rows: usize,
    x: ElementType,
    y: ElementType,
}

const PLAIN: Case = Case {
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

fn floats(count: usize, seed: u32) -> Vec<f32> {
    numbers(count, 1 << 20, seed).into_iter().map(|x| (x as f32 / (1 << 19) as f32) - 1.0).collect()
}

fn layer(case: &Case) -> QuantizedLinear {
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

/// A tensor of these numbers, and what it holds.
fn tensor(on: &Device, numbers: &[f32], element_type: ElementType) -> (Tensor, Vec<f64>) {
    let upload = |elements: Elements<'_>| block_on(Tensor::upload(&on.device, &on.queue, elements)).unwrap();
    let tensor = match element_type {
        ElementType::F32 => upload(Elements::F32(numbers)),
        ElementType::F16 => upload(Elements::F16(&numbers.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>())),
        ElementType::Bf16 => upload(Elements::Bf16(&numbers.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>())),
    };
    let held = block_on(tensor.download(&on.device, &on.queue)).unwrap();
    (tensor, held.into_iter().map(f64::from).collect())
}

fn run(on: &Device, linear: &Linear, x: &Tensor, rows: usize, y: &Tensor) -> Vec<f32> {
    let bound = linear.bind(&on.kernels, x, rows, y).unwrap();
    let mut encoder = on.device.create_command_encoder(&Default::default());
    bound.encode(&mut encoder.begin_compute_pass(&Default::default()));
    on.queue.submit([encoder.finish()]);
    block_on(y.download(&on.device, &on.queue)).unwrap()
}

fn check(on: &Device, case: Case) {
    let quantized = layer(&case);
    let (x, held) = tensor(on, &floats(case.rows * case.inputs, 4), case.x);
    // Elements behind the outputs stay as they are.
    let (y, before) = tensor(on, &floats(case.rows * case.outputs + 6, 5), case.y);
    let linear = Linear::upload(&on.device, &quantized).unwrap();
    let got = run(on, &linear, &x, case.rows, &y);
    assert_eq!(got, run(on, &linear, &x, case.rows, &y), "{case:?}: a second run");
    let want = quantized.linear::<f64>(&held).unwrap();
    let weights = quantized.dequantize::<f64>();
    let step = match case.y {
        ElementType::F32 => 0.0,
        ElementType::F16 => 1.0 / 2048.0,
        ElementType::Bf16 => 1.0 / 256.0,
    };
    for (at, (&got, &want)) in got.iter().zip(&want).enumerate() {
        let (row, output) = (at / case.outputs, at % case.outputs);
        let (x, w) = (&held[row * case.inputs..][..case.inputs], &weights[output * case.inputs..][..case.inputs]);
        let absolute: f64 = x.iter().zip(w).map(|(x, w)| (x * w).abs()).sum();
        let allowed = 2e-5 * absolute + step * want.abs();
        let error = (f64::from(got) - want).abs();
        assert!(error <= allowed, "{case:?}: row {row}, output {output}: {got}, not {want}");
    }
    let behind = |of: &[f64]| of[case.rows * case.outputs..].to_vec();
    let after: Vec<f64> = got.iter().map(|&x| x.into()).collect();
    assert_eq!(behind(&after), behind(&before), "{case:?}: behind the outputs");
}

#[test]
fn products_equal_those_of_f64() {
    let on = device();
    for bits in Bits::ALL {
        check(&on, Case { bits, ..PLAIN });
        // More chunks than invocations, rows that do not fill the workgroups.
        check(&on, Case { bits, inputs: 4160, group: 64, outputs: 6, rows: 5, ..PLAIN });
    }
    for (x, y) in ElementType::ALL.into_iter().zip([ElementType::F16, ElementType::Bf16, ElementType::F32]) {
        check(&on, Case { x, y, rows: 3, outputs: 10, ..PLAIN });
    }
    check(&on, Case { rows: MOST_ROWS, outputs: 7, ..PLAIN });
    check(&on, Case { scales: ScaleKind::Single, ..PLAIN });
    check(&on, Case { group: 256, bits: Bits::Eight, x: ElementType::F32, ..PLAIN });
}

#[test]
fn groups_of_any_order_and_size() {
    let on = device();
    for x in ElementType::ALL {
        check(&on, Case { order: Order::ByActivation, x, rows: 2, ..PLAIN });
    }
    for bits in [Bits::Three, Bits::Four] {
        check(&on, Case { bits, inputs: 200, group: 40, rows: 3, ..PLAIN });
        check(&on, Case { bits, inputs: 65, group: 16, order: Order::ByActivation, ..PLAIN });
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let on = device();
    let linear = Linear::upload(&on.device, &layer(&Case { outputs: 7, ..PLAIN })).unwrap();
    let zeroed = |elements, of| Tensor::zeroed(&on.device, elements, of).unwrap();
    let (x, y) = (zeroed(512, ElementType::F16), zeroed(14, ElementType::F32));
    let refused = |x: &Tensor, rows, y: &Tensor| linear.bind(&on.kernels, x, rows, y).unwrap_err();
    for rows in [0, MOST_ROWS + 1] {
        assert!(matches!(refused(&x, rows, &y), Error::Size { .. }));
    }
    assert!(matches!(refused(&x, 3, &y), Error::Device(kvpack_device::Error::Elements { .. })));
    assert!(matches!(refused(&x, 2, &y.slice(0, 13).unwrap()), Error::Device(kvpack_device::Error::Elements { .. })));
    assert!(matches!(refused(&x.slice(1, 256).unwrap(), 1, &y), Error::Device(kvpack_device::Error::Buffer { .. })));
    // Rows of 7 outputs in 16 bits do not begin at words.
    let half = zeroed(14, ElementType::F16);
    assert!(matches!(refused(&x, 2, &half), Error::Device(kvpack_device::Error::Buffer { .. })));
}
