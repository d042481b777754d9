//! Parts of prompts on CUDA.

use kvpack::cuda::{Cuda, KernelCache};

use any_backend::prompt_parts;

/// Queries see their part in f16, the step packs it, and an abandoned step leaves nothing.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn parts_are_seen_in_f16_and_packed_by_their_step() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    prompt_parts::RECIPES.into_iter().for_each(|recipe| prompt_parts::check(&backend, recipe, 1e-4));
}
