//! Products on an NVIDIA GPU against f64 products over the stored codes. `-- --ignored` runs them.

#[path = "../golden_files/mod.rs"]
mod golden_files;
#[path = "../linear_cases/mod.rs"]
mod linear_cases;

use std::sync::Arc;

use cudarc::driver::CudaStream;
use half::{bf16, f16};
use kvpack_device::cuda::driver::open_context;
use kvpack_device::cuda::{KernelCache, Kernels, Tensor, cudarc};
use kvpack_device::{ElementType, Elements};
use kvpack_weights::cuda::Linear;
use kvpack_weights::{Bits, Error, MOST_ROWS};
use linear_cases::{
    Case, FEW_ROWS, PLAIN, ScaleKind, TIMED, cases, compare, copies, floats, large_layer, layer, many_row_cases,
    ordered_cases, weight_cases,
};

struct Device {
    stream: Arc<CudaStream>,
    kernels: Kernels,
}

fn device() -> Device {
    let context = open_context(0).unwrap();
    Device { stream: context.new_stream().unwrap(), kernels: Kernels::new(context, KernelCache::None).unwrap() }
}

/// A tensor of these numbers, and what it holds.
fn tensor(on: &Device, numbers: &[f32], element_type: ElementType) -> (Tensor, Vec<f64>) {
    let upload = |elements: Elements<'_>| Tensor::upload(&on.stream, elements).unwrap();
    let tensor = match element_type {
        ElementType::F32 => upload(Elements::F32(numbers)),
        ElementType::F16 => upload(Elements::F16(&numbers.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>())),
        ElementType::Bf16 => upload(Elements::Bf16(&numbers.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>())),
    };
    let held = tensor.download(&on.stream).unwrap();
    (tensor, held.into_iter().map(f64::from).collect())
}

fn check(on: &Device, case: Case) {
    let quantized = layer(&case);
    let (x, held) = tensor(on, &floats(case.rows * case.inputs, 4), case.x);
    // Elements behind the outputs stay as they are.
    let (y, before) = tensor(on, &floats(case.rows * case.outputs + 6, 5), case.y);
    let bound = Linear::upload(&on.stream, &quantized).unwrap().bind(&on.kernels, &x, case.rows, &y).unwrap();
    let run = || {
        bound.launch(&on.stream).unwrap();
        y.download(&on.stream).unwrap()
    };
    let got = run();
    assert_eq!(got, run(), "{case:?}: a second run");
    compare(&case, &quantized, bound.path(), &held, &got);
    let behind: Vec<f64> = got[case.rows * case.outputs..].iter().map(|&x| x.into()).collect();
    assert_eq!(behind, before[case.rows * case.outputs..], "{case:?}: behind the outputs");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn products_equal_those_of_f64() {
    let on = device();
    cases().into_iter().for_each(|case| check(&on, case));
    // By MMAs: every width, rows of one and of two tiles, steps that do not fill the warps.
    for bits in Bits::ALL {
        check(&on, Case { bits, outputs: 40, inputs: 2176, rows: FEW_ROWS, ..PLAIN });
        check(&on, Case { bits, outputs: 17, inputs: 4096, rows: 7, y: ElementType::F16, ..PLAIN });
        // In strips: any number of rows, steps that do not fill the warps, activations of every type.
        let strips = Case { bits, outputs: 48, inputs: 2176, ..PLAIN };
        (1..=FEW_ROWS).for_each(|rows| check(&on, Case { rows, ..strips }));
        ElementType::ALL.into_iter().for_each(|x| check(&on, Case { x, rows: 3, inputs: 2048, ..strips }));
        // By clusters, from 4096 inputs.
        [1, 4, 8, 16].into_iter().for_each(|rows| check(&on, Case { rows, inputs: 4224, ..strips }));
        check(&on, Case { scales: ScaleKind::Single, inputs: 8832, rows: 5, ..strips });
        check(&on, Case { outputs: 16 * 300, inputs: 4352, rows: 9, ..strips });
        // Some warps have one strip more than others: with two blocks, and with one.
        for (outputs, inputs) in [(16 * 950, 4096), (16 * 700, 2048)] {
            [1, 7, 16].into_iter().for_each(|rows| check(&on, Case { outputs, inputs, rows, ..strips }));
        }
    }
    // More clusters than fit on the device at once.
    check(&on, Case { outputs: 16 * 32 * 70, inputs: 4096, rows: 3, ..PLAIN });
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn groups_of_any_order_and_size() {
    let on = device();
    ordered_cases().into_iter().for_each(|case| check(&on, case));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn products_of_many_rows() {
    let on = device();
    many_row_cases().into_iter().for_each(|case| check(&on, case));
    for bits in Bits::ALL {
        let strips = Case { bits, outputs: 176, inputs: 4096, y: ElementType::F16, ..PLAIN };
        // Tiles of 64, 128 and 256 rows, strips that fill no tile: two blocks that share steps, and eight.
        let sizes =
            [(20, 176), (50, 4112), (100, 4096), (130, 4096), (200, 512), (250, 6000), (300, 6000), (513, 4112)];
        sizes.into_iter().for_each(|(rows, outputs)| check(&on, Case { rows, outputs, ..strips }));
        // Outputs that begin at no multiple of 16 bytes, and other types.
        check(&on, Case { rows: 90, outputs: 1000, inputs: 2048, y: ElementType::Bf16, ..strips });
        check(&on, Case { rows: 40, x: ElementType::F32, y: ElementType::F32, inputs: 2176, ..strips });
        check(&on, Case { rows: 40, x: ElementType::Bf16, scales: ScaleKind::Single, ..strips });
        // Not in strips: groups of two steps, of half a step, and of a quarter.
        for group in [256, 64, 32] {
            check(&on, Case { group, rows: 260, outputs: 1040, inputs: 2048, ..strips });
            check(&on, Case { group, rows: 60, scales: ScaleKind::Single, ..strips });
        }
        check(&on, Case { bits, outputs: 2048, inputs: 256, rows: 1300, y: ElementType::Bf16, ..PLAIN });
    }
    // Three blocks that share 256 rows, and those of twice as many, which do not all run at once. More tiles than blocks.
    check(&on, Case { outputs: 5120, inputs: 13824, rows: 512, y: ElementType::F16, ..PLAIN });
    check(&on, Case { outputs: 5120, inputs: 4096, rows: 256, y: ElementType::F16, ..PLAIN });
    check(&on, Case { outputs: 2048, inputs: 256, rows: 2100, ..PLAIN });
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn weights_equal_those_of_the_reference() {
    let on = device();
    for case in weight_cases() {
        let quantized = layer(&case);
        let linear = Linear::upload(&on.stream, &quantized).unwrap();
        let want: Vec<f32> = quantized.dequantize_f16().into_iter().map(f32::from).collect();
        // Elements behind the weights stay as they are.
        let (weights, before) = tensor(&on, &floats(want.len() + 10, 5), ElementType::F16);
        linear.dequantize_weights(&on.kernels, &weights).unwrap().launch(&on.stream).unwrap();
        let got = weights.download(&on.stream).unwrap();
        assert_eq!(got[..want.len()], want, "{case:?}");
        let behind: Vec<f64> = got[want.len()..].iter().map(|&x| x.into()).collect();
        assert_eq!(behind, before[want.len()..], "{case:?}: behind the weights");
    }
}

/// The published products, from activations in f32, and in f16 where it holds them.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn golden_products() {
    let on = device();
    for case in golden_files::cases("w4a16.matmul", 3) {
        let (quantized, _) = golden_files::gptq_layer(&case);
        let linear = Linear::upload(&on.stream, &quantized).unwrap();
        let given = case.floats("in.x");
        let rows = given.len() / quantized.shape().inputs();
        for of in [ElementType::F32, ElementType::F16] {
            let (x, held) = tensor(&on, &given, of);
            if held != case.values("in.x") {
                continue;
            }
            let (y, _) = tensor(&on, &vec![0.0; rows * quantized.shape().outputs()], ElementType::F32);
            let bound = linear.bind(&on.kernels, &x, rows, &y).unwrap();
            bound.launch(&on.stream).unwrap();
            let got = y.download(&on.stream).unwrap();
            case.check("y", got.into_iter().map(f64::from));
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_does_not_fit_is_refused() {
    let on = device();
    let linear = Linear::upload(&on.stream, &layer(&PLAIN)).unwrap();
    let zeroed = |elements, of| Tensor::zeroed(&on.stream, elements, of).unwrap();
    let (x, y) = (zeroed(512, ElementType::F16), zeroed(24, ElementType::F32));
    let refused = |x: &Tensor, rows, y: &Tensor| linear.bind(&on.kernels, x, rows, y).unwrap_err();
    for rows in [0, MOST_ROWS + 1] {
        assert!(matches!(refused(&x, rows, &y), Error::Size { .. }));
    }
    assert!(matches!(refused(&x, 3, &y), Error::Device(kvpack_device::Error::Elements { .. })));
    assert!(matches!(refused(&x, 2, &y.slice(0, 23).unwrap()), Error::Device(kvpack_device::Error::Elements { .. })));
    assert!(matches!(refused(&x.slice(1, 256).unwrap(), 1, &y), Error::Device(kvpack_device::Error::Buffer { .. })));
    let weights = |tensor: &Tensor| linear.dequantize_weights(&on.kernels, tensor).unwrap_err();
    let of_f32 = zeroed(12 * 256, ElementType::F32);
    assert!(matches!(weights(&of_f32), Error::Device(kvpack_device::Error::Buffer { .. })));
    assert!(matches!(weights(&x), Error::Device(kvpack_device::Error::Elements { .. })));
    let other = on.stream.context().new_stream().unwrap();
    let elsewhere = Tensor::zeroed(&other, 512, ElementType::F16).unwrap();
    assert!(matches!(refused(&elsewhere, 1, &y), Error::Device(kvpack_device::Error::Plan { .. })));
}

const TIMED_ROWS: [(ElementType, usize); 8] = [
    (ElementType::F16, 1),
    (ElementType::F16, 4),
    (ElementType::F16, 16),
    (ElementType::Bf16, 1),
    (ElementType::F16, 17),
    (ElementType::F16, 64),
    (ElementType::F16, 256),
    (ElementType::F16, 4096),
];

/// Products go round copies of the layer, between two events of the stream.
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
            let first = Linear::upload(&on.stream, &quantized).unwrap();
            let bytes = first.bytes();
            let more = (1..copies(bytes)).map(|_| Linear::upload(&on.stream, &quantized).unwrap());
            let layers: Vec<Linear> = std::iter::once(first.clone()).chain(more).collect();
            for (of, rows) in TIMED_ROWS {
                let (x, _) = tensor(&on, &floats(rows * inputs, 4), of);
                let (y, _) = tensor(&on, &floats(rows * outputs, 4), of);
                let bound: Vec<_> = layers.iter().map(|layer| layer.bind(&on.kernels, &x, rows, &y).unwrap()).collect();
                let run = |products: usize| {
                    let flags = Some(cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT);
                    let start = on.stream.record_event(flags).unwrap();
                    bound.iter().cycle().take(products).for_each(|bound| bound.launch(&on.stream).unwrap());
                    let end = on.stream.record_event(flags).unwrap();
                    f64::from(start.elapsed_ms(&end).unwrap()) * 1e-3
                };
                let few = if rows > 64 { 20 } else { 400 };
                run(few);
                let best = |products| (0..5).map(|_| run(products)).fold(f64::MAX, f64::min);
                let seconds = (best(3 * few) - best(few)) / (2 * few) as f64;
                let rate = bytes as f64 / seconds / 1e9;
                let operations = 2e-12 * (rows * outputs * inputs) as f64 / seconds;
                println!(
                    "{bits}, {outputs} x {inputs}, {rows} rows of {of:?}, {}: {:.2} us, {rate:.0} GB/s, {operations:.1} \
                     TFLOP/s",
                    bound[0].path(),
                    seconds * 1e6
                );
            }
        }
    }
}
