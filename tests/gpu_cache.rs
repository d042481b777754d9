//! The cache on the wgpu backend against the naive model. `gpu_device` says on which adapter.
#![cfg(feature = "wgpu")]

mod cache_model;
mod gpu_device;
mod random_rows;
mod rounding;

use cache_model::decode_loop::{Filled, formats, reuse_pages};
use cache_model::recipes::recipes;
use cache_model::{Operation, cases, check, operations};
use kvpack::{AttentionShape, TILE_TOKENS};
use proptest::prelude::*;

proptest! {
    #![proptest_config(cases(6))]

    #[test]
    fn the_cache_agrees_with_the_model(
        operations in operations(),
        recipe in prop::sample::select(recipes()),
        (query_heads, kv_heads, head_dim) in prop::sample::select(vec![(2, 2, 64), (3, 1, 64), (4, 2, 80)]),
        seed in any::<u64>(),
    ) {
        let shape = AttentionShape::new(query_heads, kv_heads, head_dim).unwrap();
        // Three pages of the f16 store to a shard, so that decode steps meet several bindings.
        let shard = (3 * TILE_TOKENS * 2 * kv_heads * head_dim) as u64;
        check(gpu_device::shared().with_binding_limit(shard), shape, &recipe, &operations, seed);
    }
}

/// Two full windows in a row, at every recipe: the second joins the first where ranges belong to tiles.
#[test]
fn windows_are_packed_when_they_are_full() {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    for recipe in recipes() {
        let prefill = Operation::Prefill { sequence: 0, spans: vec![(10, 0), (128, 1)], half: false };
        let append = |tokens| Operation::Append { tokens, sequences: 0b11, half: false };
        let operations = [prefill, append(127), append(1), append(127), append(2)];
        check(gpu_device::shared(), shape, &recipe, &operations, 1);
    }
}

/// Appended tokens are those of a prefill, bit for bit.
#[test]
fn a_decode_loop_stores_what_a_prefill_stores() {
    for (format, tokens) in formats().into_iter().zip([300, 260, 200, 130]) {
        Filled::new(gpu_device::shared, format, tokens).compare_decoded();
    }
}

#[test]
fn what_an_earlier_sequence_left_does_not_count() {
    reuse_pages(gpu_device::shared);
}

#[test]
fn outputs_are_rounded_to_even() {
    rounding::outputs_are_rounded_to_even(gpu_device::shared());
}
