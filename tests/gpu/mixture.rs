//! Contexts in chunks of several precisions through wgpu. `gpu_device` says on which adapter.

use kvpack::Error;
use kvpack::backend::Device;
use kvpack::cache::ModelRecipe;
use pollster::block_on;
use proptest::prelude::*;

use crate::gpu_device;
use any_backend::mixed::mixed;

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn permuted_is_unpermuted(mixed in mixed()) {
        mixed.check(&gpu_device::shared(), 1e-6);
    }
}

#[test]
fn embeddings_that_hold_nan_are_refused() {
    let recipe: ModelRecipe = "cocktail".parse().unwrap();
    let backend = gpu_device::shared();
    for (query, chunks) in [([1.0, f32::NAN], [1.0f32; 4]), ([1.0, 0.0], [1.0, 0.5, f32::NAN, 0.0])] {
        let upload = |rows: &[f32]| block_on(backend.upload(rows.into())).unwrap();
        let search = recipe.mixture().unwrap();
        let found = block_on(search.search(&backend, &upload(&query), &upload(&chunks)));
        assert!(matches!(found, Err(Error::NotANumber { .. })), "{found:?}");
    }
}
