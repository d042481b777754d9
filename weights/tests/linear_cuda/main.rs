//! The checks of layers on an NVIDIA GPU, more and larger layers, and what it refuses. `-- --ignored` runs them.

#[path = "../golden_files/mod.rs"]
mod golden_files;
#[path = "../golden_products/mod.rs"]
mod golden_products;

use std::collections::BTreeSet;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use kvpack_device::ElementType;
use kvpack_device::cuda::driver::open_context;
use kvpack_device::cuda::{KernelCache, Kernels, Tensor, cudarc};
use kvpack_weights::conformance::{Check, InputOrder, Kind, LayerCase, ScaleKind, checks};
use kvpack_weights::cuda::{Cuda, Linear};
use kvpack_weights::{Bits, Error, MOST_ROWS, Path};
use pollster::block_on;

const PLAIN: LayerCase = LayerCase::PLAIN;

/// The most rows that kernels for few rows take.
const FEW_ROWS: usize = 16;

struct Device {
    stream: Arc<CudaStream>,
    kernels: Kernels,
}

impl Device {
    fn backend(&self) -> Cuda<'_> {
        Cuda::new(&self.stream, &self.kernels)
    }
}

fn device() -> Device {
    let context = open_context(0).unwrap();
    Device { stream: context.new_stream().unwrap(), kernels: Kernels::new(context, KernelCache::None).unwrap() }
}

fn pass(on: &Device, check: &Check) -> Option<Path> {
    let report = block_on(check.run(&on.backend())).unwrap();
    assert!(report.passed(), "{}: {}", check.name(), report.reason());
    report.path
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn all_checks() {
    let on = device();
    let mut kernels = BTreeSet::new();
    for check in checks() {
        kernels.extend(pass(&on, &check).filter(|_| check.is_quick()).map(|path| path.to_string()));
    }
    let all = ["four rows", "matrix tiles", "mma", "strips"];
    assert_eq!(kernels, all.map(String::from).into());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn products_of_few_rows() {
    let on = device();
    let check = |case| {
        pass(&on, &Check::new(Kind::Linear, case));
    };
    for bits in Bits::ALL {
        // By MMAs: rows of one and of two tiles, steps that do not fill the warps.
        check(LayerCase { bits, outputs: 40, inputs: 2176, rows: FEW_ROWS, ..PLAIN });
        check(LayerCase { bits, outputs: 17, inputs: 4096, rows: 7, y: ElementType::F16, ..PLAIN });
        // In strips: any number of rows, steps that do not fill the warps, activations of every type.
        let strips = LayerCase { bits, outputs: 48, inputs: 2176, ..PLAIN };
        (1..=FEW_ROWS).for_each(|rows| check(LayerCase { rows, ..strips }));
        ElementType::ALL.into_iter().for_each(|x| check(LayerCase { x, rows: 3, inputs: 2048, ..strips }));
        // By clusters, from 4096 inputs.
        [1, 4, 8, 16].into_iter().for_each(|rows| check(LayerCase { rows, inputs: 4224, ..strips }));
        check(LayerCase { scales: ScaleKind::Single, inputs: 8832, rows: 5, ..strips });
        check(LayerCase { outputs: 16 * 300, inputs: 4352, rows: 9, ..strips });
        // Some warps have one strip more than others: with two blocks, and with one.
        for (outputs, inputs) in [(16 * 950, 4096), (16 * 700, 2048)] {
            [1, 7, 16].into_iter().for_each(|rows| check(LayerCase { outputs, inputs, rows, ..strips }));
        }
    }
    // More clusters than fit on the device at once.
    check(LayerCase { outputs: 16 * 32 * 70, inputs: 4096, rows: 3, ..PLAIN });
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn products_of_many_rows() {
    let on = device();
    let check = |case| {
        pass(&on, &Check::new(Kind::Linear, case));
    };
    for bits in Bits::ALL {
        let strips = LayerCase { bits, outputs: 176, inputs: 4096, y: ElementType::F16, ..PLAIN };
        // Tiles of 64, 128 and 256 rows, strips that fill no tile: two blocks that share steps, and eight.
        let sizes =
            [(20, 176), (50, 4112), (100, 4096), (130, 4096), (200, 512), (250, 6000), (300, 6000), (513, 4112)];
        sizes.into_iter().for_each(|(rows, outputs)| check(LayerCase { rows, outputs, ..strips }));
        // Outputs that begin at no multiple of 16 bytes, and other types.
        check(LayerCase { rows: 90, outputs: 1000, inputs: 2048, y: ElementType::Bf16, ..strips });
        check(LayerCase { rows: 40, x: ElementType::F32, y: ElementType::F32, inputs: 2176, ..strips });
        check(LayerCase { rows: 40, x: ElementType::Bf16, scales: ScaleKind::Single, ..strips });
        // Not in strips: groups of two steps, of half a step, and of a quarter.
        for group in [256, 64, 32] {
            check(LayerCase { group, rows: 260, outputs: 1040, inputs: 2048, ..strips });
            check(LayerCase { group, rows: 60, scales: ScaleKind::Single, ..strips });
        }
        check(LayerCase { bits, outputs: 2048, inputs: 256, rows: 1300, y: ElementType::Bf16, ..PLAIN });
    }
    // Three blocks that share 256 rows, and those of twice as many, which do not all run at once. More tiles than
    // blocks.
    check(LayerCase { outputs: 5120, inputs: 13824, rows: 512, y: ElementType::F16, ..PLAIN });
    check(LayerCase { outputs: 5120, inputs: 4096, rows: 256, y: ElementType::F16, ..PLAIN });
    check(LayerCase { outputs: 2048, inputs: 256, rows: 2100, ..PLAIN });
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn published_products() {
    golden_products::pass(&device().backend());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_does_not_fit_is_refused() {
    let on = device();
    let linear = Linear::upload(&on.stream, &PLAIN.layer().unwrap()).unwrap();
    let zeroed = |elements, of| Tensor::zeroed(&on.stream, elements, of).unwrap();
    let (x, y) = (zeroed(512, ElementType::F16), zeroed(24, ElementType::F32));
    let refused = |x: &Tensor, rows, y: &Tensor| linear.bind(&on.kernels, x, rows, y).unwrap_err();
    for rows in [0, MOST_ROWS + 1] {
        assert!(matches!(refused(&x, rows, &y), Error::Size { .. }));
    }
    assert!(matches!(refused(&x, 3, &y), Error::Device(kvpack_device::Error::Elements { .. })));
    assert!(matches!(refused(&x, 2, &y.slice(0, 23).unwrap()), Error::Device(kvpack_device::Error::Elements { .. })));
    assert!(matches!(refused(&x.slice(1, 256).unwrap(), 1, &y), Error::Device(kvpack_device::Error::Buffer { .. })));
    // Outputs among the activations, and behind them.
    let whole = zeroed(512 + 24, ElementType::F16);
    let part = |first, elements| whole.slice(first, elements).unwrap();
    let shared = refused(&part(0, 512), 2, &part(510, 24));
    assert!(matches!(shared, Error::Device(kvpack_device::Error::Buffer { what: "the outputs", .. })), "{shared}");
    assert!(linear.bind(&on.kernels, &part(0, 512), 2, &part(512, 24)).is_ok());
    // They may lie there where the activations are copied first.
    let ordered = LayerCase { order: InputOrder::ByActivation, ..PLAIN }.layer().unwrap();
    let ordered = Linear::upload(&on.stream, &ordered).unwrap();
    assert!(ordered.bind(&on.kernels, &part(0, 512), 2, &part(510, 24)).is_ok());
    let weights = |tensor: &Tensor| linear.dequantize_weights(&on.kernels, tensor).unwrap_err();
    let of_f32 = zeroed(12 * 256, ElementType::F32);
    assert!(matches!(weights(&of_f32), Error::Device(kvpack_device::Error::Buffer { .. })));
    assert!(matches!(weights(&x), Error::Device(kvpack_device::Error::Elements { .. })));
    let other = on.stream.context().new_stream().unwrap();
    let elsewhere = Tensor::zeroed(&other, 512, ElementType::F16).unwrap();
    assert!(matches!(refused(&elsewhere, 1, &y), Error::Device(kvpack_device::Error::Plan { .. })));
}
