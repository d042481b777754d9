//! Prompts evicted, merged and packed, and contexts in chunks of several precisions, through CUDA against the CPU.

use kvpack::Error;
use kvpack::backend::Device;
use kvpack::cache::ModelRecipe;
use kvpack::cuda::{Cuda, KernelCache};
use pollster::block_on;
use proptest::prelude::*;

use any_backend::{compressed, mixed, scored_policies, select_cases};

fn device() -> Cuda {
    Cuda::open(0, KernelCache::of_user()).expect("an NVIDIA GPU")
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_device_keeps_what_the_cpu_keeps() {
    compressed::check_against_cpu(&device());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_grows_is_compressed_again_as_on_the_cpu() {
    compressed::growing::check_growing(&device(), 0.98);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn attention_is_measured_with_the_scale_of_the_layer() {
    scored_policies::check(&device());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn text_goes_first_by_exact_scores() {
    select_cases::check_text_first(&device());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn permuted_is_unpermuted(mixed in mixed::mixed()) {
        mixed.check(&device(), 1e-6);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn embeddings_that_hold_nan_are_refused() {
    let (recipe, backend): (ModelRecipe, Cuda) = ("cocktail".parse().unwrap(), device());
    let upload = |rows: &[f32]| block_on(backend.upload(rows.into())).unwrap();
    let (query, chunks) = (upload(&[1.0, 0.0]), upload(&[1.0, 0.5, f32::NAN, 0.0]));
    let found = block_on(recipe.mixture().unwrap().search(&backend, &query, &chunks));
    assert!(matches!(found, Err(Error::NotANumber { .. })), "{found:?}");
}
