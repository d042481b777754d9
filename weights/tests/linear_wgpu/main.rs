//! The checks of layers on a wgpu device, and what it refuses.
//!
//! `KVPACK_TEST_DRIVER` (lavapipe, swiftshader, system) says which driver is expected, and `KVPACK_PATH=matrices` asks for
//! kernels with cooperative matrices, as for kvpack's own tests.

#[path = "../golden_files/mod.rs"]
mod golden_files;
#[path = "../golden_products/mod.rs"]
mod golden_products;

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use kvpack_device::ElementType;
use kvpack_device::wgpu::{Checks, Kernels, Requirements, Tensor, choose_adapter, open_device};
use kvpack_weights::conformance::{Check, Kind, LayerCase, checks};
use kvpack_weights::wgpu::{Linear, Wgpu};
use kvpack_weights::{Error, MOST_ROWS};
use pollster::block_on;

struct Device {
    device: wgpu::Device,
    queue: wgpu::Queue,
    kernels: Kernels,
}

impl Device {
    fn backend(&self) -> Wgpu<'_> {
        Wgpu::new(&self.queue, &self.kernels)
    }
}

/// Whether the kernels with cooperative matrices are asked for.
fn has_matrices() -> bool {
    std::env::var("KVPACK_PATH").as_deref() == Ok("matrices")
}

fn device() -> Device {
    let adapter = block_on(choose_adapter(None)).unwrap();
    let expected = match std::env::var("KVPACK_TEST_DRIVER").as_deref() {
        Ok("lavapipe") => "llvmpipe",
        Ok("swiftshader") => "SwiftShader",
        Ok("system") | Err(_) => "",
        Ok(other) => panic!("KVPACK_TEST_DRIVER is '{other}'; lavapipe, swiftshader and system are known"),
    };
    let name = adapter.get_info().name;
    assert!(name.contains(expected), "the adapter is '{name}'");
    let experimental = if has_matrices() {
        // SAFETY: A test, which finds out whether the kernels with matrices are right on this driver.
        unsafe { wgpu::ExperimentalFeatures::enabled() }
    } else {
        wgpu::ExperimentalFeatures::disabled()
    };
    let requirements = Requirements::of(&adapter, experimental);
    let (device, queue) = block_on(open_device(&adapter, requirements)).unwrap();
    let checks = match std::env::var("KVPACK_CHECKS").as_deref() {
        Ok("safe") => Checks::Safe,
        Ok("trusted") | Err(_) => Checks::Trusted,
        Ok(other) => panic!("KVPACK_CHECKS is '{other}'; safe and trusted are known"),
    };
    Device { kernels: Kernels::new(&device, checks), device, queue }
}

/// Runs the checks, and returns the kernels that the quick ones took.
fn pass(checks: impl Iterator<Item = Check>) -> BTreeSet<String> {
    let on = device();
    let (mut kernels, mut count) = (BTreeSet::new(), 0);
    for check in checks {
        let report = block_on(check.run(&on.backend())).unwrap();
        assert!(report.passed(), "{}: {}", check.name(), report.reason());
        kernels.extend(report.path.filter(|_| check.is_quick()).map(|path| path.to_string()));
        count += 1;
    }
    assert!(count > 0);
    kernels
}

/// The checks of products with these numbers of rows.
fn products(rows: RangeInclusive<usize>) -> impl Iterator<Item = Check> {
    checks().into_iter().filter(move |check| check.kind() == Kind::Linear && rows.contains(&check.case().rows))
}

#[test]
fn products_of_few_rows() {
    let matrices = if has_matrices() { &["matrix rows"][..] } else { &[] };
    let all = ["one row", "four rows"].iter().chain(matrices);
    assert_eq!(pass(products(1..=16)), all.map(ToString::to_string).collect());
}

#[test]
fn products_of_many_rows() {
    let tiles = if has_matrices() { "matrix tiles" } else { "tiles" };
    assert_eq!(pass(products(17..=MOST_ROWS)), [tiles.to_owned()].into());
}

#[test]
fn dequantized_weights() {
    assert!(pass(checks().into_iter().filter(|check| check.kind() == Kind::Dequantize)).is_empty());
}

#[test]
fn published_products() {
    golden_products::pass(&device().backend());
}

#[test]
fn what_does_not_fit_is_refused() {
    let on = device();
    let linear = Linear::upload(&on.device, &LayerCase { outputs: 7, ..LayerCase::PLAIN }.layer().unwrap()).unwrap();
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
