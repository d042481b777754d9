//! Kernel `find_non_finite`.

use half::f16;
use kvpack::AttentionShape;
use kvpack::backend::NonFinite;
use kvpack::backend::{Device, Packing};
use kvpack::format::KeyOrValue;
use kvpack::plan::RowLayout;
use pollster::block_on;

use super::expected::values;
use crate::gpu_device::shared;

/// The first in token order is found, whatever lies behind it, in both layouts of rows.
#[test]
fn the_first_is_found() {
    let backend = shared();
    let shape = AttentionShape::new(3, 3, 80).unwrap();
    for rows in [RowLayout::token_major(50, &shape), RowLayout::head_major(50, &shape)] {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 65505.0, -65520.0, f32::MAX] {
            let mut elements = values(50 * 3 * 80, 8);
            let mut put = |token, head, channel, value| elements[rows.row(token, head) + channel] = value;
            put(17, 1, 79, bad);
            put(17, 2, 0, f32::NAN);
            put(18, 0, 0, f32::INFINITY);
            put(16, 2, 79, 65504.0);
            put(3, 0, 0, -65504.0);
            let tensor = block_on(backend.upload(elements.as_slice().into())).unwrap();
            let found = block_on(backend.first_non_finite(KeyOrValue::Key, &tensor, &rows, &shape, 65504.0)).unwrap();
            let NonFinite { token, kv_head, channel, value } = found.unwrap();
            assert_eq!((token, kv_head, channel), (17, 1, 79));
            assert_eq!(value.is_nan(), bad.is_nan());
            assert!(bad.is_nan() || value == bad);
        }
    }
}

#[test]
fn halves_are_searched_too() {
    let backend = shared();
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let rows = RowLayout::token_major(3, &shape);
    let mut elements: Vec<f16> = values(192, 8).into_iter().map(f16::from_f32).collect();
    elements[0] = f16::MAX;
    elements[1] = f16::MIN_POSITIVE_SUBNORMAL;
    let search = |elements: &[f16]| {
        let tensor = block_on(backend.upload(elements.into())).unwrap();
        block_on(backend.first_non_finite(KeyOrValue::Value, &tensor, &rows, &shape, 65504.0)).unwrap()
    };
    assert_eq!(search(&elements), None);
    elements[129] = f16::INFINITY;
    let expected = NonFinite { token: 2, kv_head: 0, channel: 1, value: f32::INFINITY };
    assert_eq!(search(&elements), Some(expected));
}
