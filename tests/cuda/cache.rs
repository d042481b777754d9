//! The cache on the CUDA backend against the naive model.

use kvpack::AttentionShape;
use kvpack::cpu::Cpu;
use kvpack::cuda::{Cuda, KernelCache};
use proptest::prelude::*;

use any_backend::cache_model::recipes::recipes;
use any_backend::cache_model::{Operation, cases, check, operations};
use any_backend::key_means::means;
use any_backend::{growing_stores, swap_out};

fn device() -> Cuda {
    Cuda::open(0, KernelCache::of_user()).expect("an NVIDIA GPU")
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn the_cache_agrees_with_the_model(
        operations in operations(),
        recipe in prop::sample::select(recipes()),
        (query_heads, kv_heads, head_dim) in prop::sample::select(vec![(2, 2, 64), (4, 1, 128)]),
        seed in any::<u64>(),
    ) {
        let shape = AttentionShape::new(query_heads, kv_heads, head_dim).unwrap();
        check(device(), shape, &recipe, &operations, seed);
    }
}

/// Two full windows in a row, at every recipe: the second joins the first where ranges belong to tiles.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn windows_are_packed_when_they_are_full() {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    for recipe in recipes() {
        let prefill = Operation::Prefill { sequence: 0, spans: vec![(10, 0), (128, 1)], half: false };
        let append = |tokens| Operation::Append { tokens, sequences: 0b11, half: false };
        check(device(), shape, &recipe, &[prefill, append(127), append(1), append(127), append(2)], 1);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn means_of_keys_are_those_of_the_cpu() {
    assert!(means(&device()) == means(&Cpu::new()));
}

/// More often than a step reads shards at once.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_grows_by_little_is_what_was_reserved() {
    growing_stores::check(&device());
}

/// Copies to pinned memory, while steps go on.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_sequence_leaves_while_others_go_on() {
    swap_out::check(&device());
    swap_out::check_misuse(&device());
}
