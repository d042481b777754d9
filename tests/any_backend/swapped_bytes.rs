//! Sequences that leave a cache as bytes and enter another one.

use kvpack::backend::Backend;
use kvpack::cache::{ModelCache, SwappedSequence};
use pollster::block_on;

use crate::compressed::growing::append;
use crate::compressed::{Held, Prompt, held};
use crate::kept_together::{TOKENS, dense, selection};
use crate::model_steps::{LAYERS, shape};

/// Spans with ranges of their own, tiles packed by windows behind a sink, single tokens, centres, and groups.
pub const RECIPES: [&str; 7] = [
    "f16",
    "saw-int4",
    "calibquant:2+window=0",
    "kivi:2+window=0+sink=128",
    "saw-int4+window=1+centre",
    "turboquant:3",
    "int8+layers=0:f16",
];

/// An empty cache of two sequences.
pub fn cache<B: Backend + Clone>(backend: &B, text: &str) -> ModelCache<B> {
    let recipe: kvpack::cache::ModelRecipe = text.parse().unwrap();
    let layers: Vec<_> = (0..LAYERS).map(|layer| (shape(), recipe.layer(layer, &shape()))).collect();
    ModelCache::new(backend, &layers, 2).unwrap()
}

/// A cache with a sequence of which layers keep `count` tokens of a prompt each, and that grew by others.
pub fn filled<B: Backend + Clone>(backend: &B, text: &str, count: impl Fn(usize) -> usize) -> ModelCache<B> {
    let mut cache = cache(backend, text);
    let prompt = Prompt::new(shape(), LAYERS, TOKENS, 11);
    append(&mut cache, 0, &Prompt::new(shape(), LAYERS, 3, 5));
    block_on(cache.keep(0, dense(&prompt, backend), &selection(count))).unwrap();
    append(&mut cache, 0, &Prompt::new(shape(), LAYERS, 150, 2));
    cache
}

pub fn all_held<B: Backend + Clone>(cache: &ModelCache<B>, sequence: usize) -> Vec<Held> {
    (0..LAYERS).map(|layer| held(cache, layer, sequence)).collect()
}

/// A sequence through bytes, and the bytes.
pub fn through_bytes<B: Backend + Clone>(
    cache: &ModelCache<B>,
    swapped: &SwappedSequence<B::Indices>,
) -> (SwappedSequence<B::Indices>, Vec<u8>) {
    let bytes = block_on(cache.swapped_to_bytes(swapped)).unwrap();
    (block_on(cache.swapped_from_bytes(&bytes)).unwrap(), bytes)
}

/// What comes back is what went, in a cache that knew nothing of it, and it says the same bytes again.
pub fn check<B: Backend + Clone>(backend: &B) {
    for text in RECIPES {
        for parted in [false, true] {
            let mut from = filled(backend, text, |layer| if parted { 20 + 60 * layer } else { 50 });
            let before = all_held(&from, 0);
            let swapped = block_on(from.swap_out(0)).unwrap();
            let mut to = cache(backend, text);
            let bytes = block_on(from.swapped_to_bytes(&swapped)).unwrap();
            let read = block_on(to.swapped_from_bytes(&bytes)).unwrap();
            assert_eq!((read.length(), read.bytes()), (swapped.length(), swapped.bytes()), "{text}");
            assert!(through_bytes(&to, &read).1 == bytes, "{text}: other bytes");
            block_on(to.swap_in(1, &read)).unwrap();
            assert!(all_held(&to, 1) == before, "{text}, parted {parted}: something else came back");
            // It goes on as the other does.
            block_on(from.swap_in(0, &swapped)).unwrap();
            let more = Prompt::new(shape(), LAYERS, 1, 8);
            append(&mut from, 0, &more);
            append(&mut to, 1, &more);
            assert!(all_held(&to, 1) == all_held(&from, 0), "{text}");
        }
    }
}
