//! Products on a wgpu device against f64 products over the stored codes.
//!
//! `KVPACK_TEST_DRIVER` (lavapipe, swiftshader, system) says which driver is expected, as for kvpack's own tests.

#[path = "../golden_files/mod.rs"]
mod golden_files;
#[path = "../linear_cases/mod.rs"]
mod linear_cases;

use half::{bf16, f16};
use kvpack_device::wgpu::{Checks, Kernels, Requirements, Tensor, choose_adapter, open_device};
use kvpack_device::{ElementType, Elements};
use kvpack_weights::wgpu::{BoundLinear, Linear};
use kvpack_weights::{Bits, Error, MOST_ROWS, Path, QuantizedLinear};
use linear_cases::{
    Case, PLAIN, TIMED, cases, compare, copies, floats, large_layer, layer, many_row_cases, ordered_cases, weight_cases,
};
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
    let experimental = match std::env::var("KVPACK_PATH").as_deref() {
        // SAFETY: A test, which finds out whether the kernels with matrices are right on this driver.
        Ok("matrices") => unsafe { wgpu::ExperimentalFeatures::enabled() },
        _ => wgpu::ExperimentalFeatures::disabled(),
    };
    let requirements = Requirements::of(&adapter, experimental);
    let (device, queue) = block_on(open_device(&adapter, requirements)).unwrap();
    let checks = match std::env::var("KVPACK_CHECKS").as_deref() {
        Ok("safe") => Checks::Safe,
        _ => Checks::Trusted,
    };
    Device { kernels: Kernels::new(&device, checks), device, queue }
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

/// A layer on the device. It takes the kernels with matrices where the device was opened with them.
fn uploaded(on: &Device, quantized: &QuantizedLinear) -> Linear {
    Linear::upload(&on.device, quantized).unwrap()
}

fn run(on: &Device, bound: &BoundLinear, y: &Tensor) -> Vec<f32> {
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
    let linear = uploaded(on, &quantized);
    let bound = linear.bind(&on.kernels, &x, case.rows, &y).unwrap();
    let got = run(on, &bound, &y);
    assert_eq!(got, run(on, &bound, &y), "{case:?}: a second run");
    compare(&case, &quantized, bound.path(), &held, &got);
    let behind = |of: &[f64]| of[case.rows * case.outputs..].to_vec();
    let after: Vec<f64> = got.iter().map(|&x| x.into()).collect();
    assert_eq!(behind(&after), behind(&before), "{case:?}: behind the outputs");
}

#[test]
fn products_equal_those_of_f64() {
    let on = device();
    cases().into_iter().for_each(|case| check(&on, case));
}

/// The kernel of one row turns activations into integers, relative to the largest of a chunk.
#[test]
fn one_row_of_any_size() {
    let on = device();
    for (of, factors) in [
        (ElementType::F16, [0.0, 1.0 / (1 << 20) as f32, 6e4]),
        (ElementType::Bf16, [0.0, 1e-25, 1e33]),
        (ElementType::F32, [0.0, 1e-25, 1e33]),
    ] {
        let case = Case { x: of, outputs: 38, inputs: 512, ..PLAIN };
        let quantized = layer(&case);
        let linear = uploaded(&on, &quantized);
        let product = |numbers: &[f32]| {
            let ((x, held), (y, _)) = (tensor(&on, numbers, of), tensor(&on, &[1.0; 38], case.y));
            let bound = linear.bind(&on.kernels, &x, 1, &y).unwrap();
            (bound.path(), held, run(&on, &bound, &y))
        };
        for factor in factors {
            // Every third chunk is 0.
            let of_chunk = |at: usize| if at / 32 % 3 == 1 { 0.0 } else { factor };
            let numbers = floats(512, 4).into_iter().enumerate().map(|(at, x)| x * of_chunk(at));
            let (path, held, got) = product(&numbers.collect::<Vec<_>>());
            compare(&case, &quantized, path, &held, &got);
        }
        for wrong in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let mut numbers = floats(512, 4);
            numbers[77] = wrong;
            let (_, _, got) = product(&numbers);
            assert!(got.iter().all(|y| !y.is_finite()), "{of:?} with {wrong}: {got:?}");
        }
    }
}

/// Other activations of a chunk lose bits to an activation far above them, less than by being f16: docs/weights.md.
#[test]
fn one_row_with_outliers() {
    let on = device();
    let case = Case { outputs: 152, inputs: 2048, ..PLAIN };
    let quantized = layer(&case);
    let linear = uploaded(&on, &quantized);
    for factor in [1.0, 100.0, 1000.0, 10000.0] {
        let mut numbers = floats(case.inputs, 4);
        [5, 700, 1999].iter().for_each(|&outlier: &usize| numbers[outlier] *= factor);
        let ((x, held), (y, _)) = (tensor(&on, &numbers, ElementType::F16), tensor(&on, &[1.0; 152], case.y));
        let bound = linear.bind(&on.kernels, &x, 1, &y).unwrap();
        assert_eq!(bound.path(), Path::OneRow);
        let got = run(&on, &bound, &y);
        let product = |row: &[f64]| row.iter().zip(&held).map(|(w, x)| w * x).sum::<f64>();
        let want: Vec<f64> = quantized.dequantize().chunks(case.inputs).map(product).collect();
        let error: f64 = want.iter().zip(&got).map(|(want, &got)| (want - f64::from(got)).powi(2)).sum();
        let nmse = error / want.iter().map(|want| want * want).sum::<f64>();
        assert!(nmse < 3e-8, "outliers of {factor}: NMSE {nmse:.1e}");
    }
}

#[test]
fn groups_of_any_order_and_size() {
    let on = device();
    ordered_cases().into_iter().for_each(|case| check(&on, case));
}

#[test]
fn products_of_many_rows() {
    let on = device();
    many_row_cases().into_iter().for_each(|case| check(&on, case));
}

#[test]
fn weights_equal_those_of_the_reference() {
    let on = device();
    for case in weight_cases() {
        let quantized = layer(&case);
        let linear = uploaded(&on, &quantized);
        let want: Vec<f32> = quantized.dequantize_f16().into_iter().map(f32::from).collect();
        // Elements behind the weights stay as they are.
        let (weights, before) = tensor(&on, &floats(want.len() + 10, 5), ElementType::F16);
        let bound = linear.dequantize_weights(&on.kernels, &weights).unwrap();
        let mut encoder = on.device.create_command_encoder(&Default::default());
        bound.encode(&mut encoder.begin_compute_pass(&Default::default()));
        on.queue.submit([encoder.finish()]);
        let got = block_on(weights.download(&on.device, &on.queue)).unwrap();
        assert_eq!(got[..want.len()], want, "{case:?}");
        let behind: Vec<f64> = got[want.len()..].iter().map(|&x| x.into()).collect();
        assert_eq!(behind, before[want.len()..], "{case:?}: behind the weights");
    }
}

/// The published products, from activations in f32, and in f16 where it holds them.
#[test]
fn golden_products() {
    let on = device();
    for case in golden_files::cases("w4a16.matmul", 3) {
        let (quantized, _) = golden_files::gptq_layer(&case);
        let linear = uploaded(&on, &quantized);
        let given = case.floats("in.x");
        let rows = given.len() / quantized.shape().inputs();
        for of in [ElementType::F32, ElementType::F16] {
            let (x, held) = tensor(&on, &given, of);
            if held != case.values("in.x") {
                continue;
            }
            let (y, _) = tensor(&on, &vec![0.0; rows * quantized.shape().outputs()], ElementType::F32);
            let bound = linear.bind(&on.kernels, &x, rows, &y).unwrap();
            let got = run(&on, &bound, &y);
            case.check("y", got.into_iter().map(f64::from));
        }
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
    let weights = |tensor: &Tensor| linear.dequantize_weights(&on.kernels, tensor).unwrap_err();
    let of_f32 = zeroed(7 * 256, ElementType::F32);
    assert!(matches!(weights(&of_f32), Error::Device(kvpack_device::Error::Buffer { .. })));
    assert!(matches!(weights(&x), Error::Device(kvpack_device::Error::Elements { .. })));
    // Rows of 7 outputs in 16 bits do not begin at words.
    let half = zeroed(14, ElementType::F16);
    assert!(matches!(refused(&x, 2, &half), Error::Device(kvpack_device::Error::Buffer { .. })));
}

/// Products go round copies of the layer. The time of one is the difference between many and half as many, so that what
/// a submission costs falls out.
#[test]
#[ignore = "prints times; kvpack bench --suite linear measures"]
fn times() {
    let on = device();
    for bits in [Bits::Four, Bits::Two, Bits::Three, Bits::Eight] {
        for (outputs, inputs) in TIMED {
            if bits != Bits::Four && outputs * inputs != 1 << 26 {
                continue;
            }
            let quantized = large_layer(bits, outputs, inputs);
            let first = uploaded(&on, &quantized);
            let bytes = first.bytes();
            let more = (1..copies(bytes)).map(|_| uploaded(&on, &quantized));
            let layers: Vec<Linear> = std::iter::once(first.clone()).chain(more).collect();
            for rows in [1, 4, 16, 17, 512] {
                let (x, _) = tensor(&on, &floats(rows * inputs, 4), ElementType::F16);
                let (y, _) = tensor(&on, &floats(rows * outputs, 4), ElementType::F16);
                let bound: Vec<_> = layers.iter().map(|layer| layer.bind(&on.kernels, &x, rows, &y).unwrap()).collect();
                let run = |products: usize| {
                    let mut encoder = on.device.create_command_encoder(&Default::default());
                    let mut pass = encoder.begin_compute_pass(&Default::default());
                    bound.iter().cycle().take(products).for_each(|bound| bound.encode(&mut pass));
                    drop(pass);
                    let start = std::time::Instant::now();
                    on.queue.submit([encoder.finish()]);
                    on.device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
                    start.elapsed().as_secs_f64()
                };
                let few = if rows > 64 { 20 } else { 400 };
                run(few);
                let best = |products| (0..5).map(|_| run(products)).fold(f64::MAX, f64::min);
                let seconds = (best(3 * few) - best(few)) / (2 * few) as f64;
                let rate = bytes as f64 / seconds / 1e9;
                let operations = 2e-12 * (rows * outputs * inputs) as f64 / seconds;
                println!(
                    "{bits}, {outputs} x {inputs}, {rows} rows, {}: {:.2} us, {rate:.0} GB/s, {operations:.1} TFLOP/s",
                    bound[0].path(),
                    seconds * 1e6
                );
            }
        }
    }
}
