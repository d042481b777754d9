//! A cache whose layers were parted: a prompt was compressed, and they have page tables of their own, over a layout of
//! steps that they still share.

use kvpack::backend::Backend;
use kvpack::cache::{ModelCache, StoreRoom, TokenRun};
use pollster::block_on;

use crate::compressed::Prompt;
use crate::kept_together::{TOKENS, dense, selection};
use crate::model_steps::{LAYERS, recipe, shape};

/// Steps of the test.
pub const STEPS: usize = 3;

/// Every layer keeps another number of tokens of the prompt.
pub fn cache<B: Backend + Clone>(backend: &B) -> ModelCache<B> {
    let prompt = Prompt::new(shape(), LAYERS, TOKENS, 11);
    let mut cache = prompt.cache(backend, &recipe("saw-int4"));
    // Room for all that follows, in a layout that says so before the layers are parted.
    block_on(cache.reserve(&[StoreRoom { pages: 8, spans: 8 }; 2])).unwrap();
    cache.begin_append(&[TokenRun::decode(0)]).unwrap();
    cache.abandon();
    block_on(cache.keep(0, dense(&prompt, backend), &selection(|layer| 64 + layer))).unwrap();
    cache
}

/// Checks that the layers share the layout of their steps, without which the test would show nothing.
pub fn check_layout<B: Backend + Clone>(cache: &ModelCache<B>) {
    let layout = cache.step_kind(0).unwrap().layout;
    assert!((1..LAYERS).all(|layer| std::sync::Arc::ptr_eq(layout, cache.step_kind(layer).unwrap().layout)));
}
