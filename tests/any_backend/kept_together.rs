//! Layers that keep as many tokens of a prompt, each its own, go on to share their page tables; layers that do not, part.

use kvpack::backend::Backend;
use kvpack::cache::{DenseLayer, ModelCache, SpanPositions, TokenRun};
use kvpack::policy::{LayerSelection, Selection};
use pollster::block_on;

use crate::any_backend::compressed::growing::{append, compress_again};
use crate::any_backend::compressed::{Held, Prompt, held, policies};
use crate::any_backend::model_steps::{LAYERS, recipe, shape};

pub const TOKENS: usize = 300;

/// What layer `layer` keeps: `count` tokens of each KV head, others in every layer and head.
pub fn selection(count: impl Fn(usize) -> usize) -> Selection {
    let of_head = |layer: usize, head: usize| {
        let first = 7 * layer + 3 * head;
        (0..count(layer)).map(|at| (first + 2 * at) as u32).collect::<Vec<u32>>()
    };
    let of_layer = |layer| LayerSelection::new(TOKENS, vec![of_head(layer, 0), of_head(layer, 1)]).unwrap();
    Selection::new((0..LAYERS).map(of_layer).collect()).unwrap()
}

pub fn dense<B: Backend>(prompt: &Prompt, backend: &B) -> Vec<DenseLayer<B::Tensor>> {
    (0..LAYERS).map(|layer| prompt.dense(backend, layer)).collect()
}

/// Parts of a step.
pub fn parts<B: Backend + Clone>(cache: &mut ModelCache<B>) -> usize {
    let runs = [TokenRun::decode(1)];
    block_on(cache.reserve_for_append(&runs)).unwrap();
    cache.begin_append(&runs).unwrap();
    let parts = cache.open_steps().unwrap().len();
    cache.abandon();
    parts
}

fn all_held<B: Backend + Clone>(cache: &ModelCache<B>, sequence: usize) -> Vec<Held> {
    (0..LAYERS).map(|layer| held(cache, layer, sequence)).collect()
}

pub fn check<B: Backend + Clone>(backend: &B) {
    let prompt = Prompt::new(shape(), LAYERS, TOKENS, 11);
    let together = ["h2o", "snapkv", "streaming", "random"];
    for (name, policy) in policies(0.3).into_iter().filter(|(name, _)| together.contains(name)) {
        let mut cache = prompt.cache(backend, &recipe(if name == "h2o" { "f16" } else { "saw-int4" }));
        let kept = block_on(cache.compress(0, &prompt.observe(&cache, policy.clone()))).unwrap();
        assert_eq!(parts(&mut cache), 1, "{name}");
        block_on(cache.keep(1, dense(&prompt, backend), &kept)).unwrap();
        assert_eq!(parts(&mut cache), 1, "{name}");
        let before = all_held(&cache, 0);
        assert!(before == all_held(&cache, 1), "{name}: the caller's choice is stored as the policy's");
        for (layer, (held, kept)) in before.iter().zip(kept.layers()).enumerate() {
            let expected = kept.indices().into_iter().map(|at| at as usize).collect();
            assert_eq!(held[0].1, SpanPositions::PerHead(expected), "{name}, layer {layer}");
        }
        // A sequence goes and comes back, also to layers that parted while it was away.
        let swapped = block_on(cache.swap_out(0)).unwrap();
        block_on(cache.swap_in(0, &swapped)).unwrap();
        assert!(before == all_held(&cache, 0), "{name}: something else came back");
        let swapped = block_on(cache.swap_out(0)).unwrap();
        block_on(cache.keep(0, dense(&prompt, backend), &selection(|layer| 40 + 9 * layer))).unwrap();
        assert_eq!(parts(&mut cache), LAYERS, "{name}");
        assert!(before == all_held(&cache, 1), "{name}: layers that part keep what they hold");
        cache.clear(0).unwrap();
        block_on(cache.swap_in(0, &swapped)).unwrap();
        assert!(before == all_held(&cache, 0), "{name}: something else came back to layers that parted");
        [0, 1].into_iter().for_each(|sequence| cache.clear(sequence).unwrap());
        assert_eq!(cache.memory().in_use_bytes(), 0, "{name}");

        // Compressed again, layers stay together too.
        let (mut cache, appended) = (prompt.cache(backend, &recipe("saw-int4")), Prompt::new(shape(), LAYERS, 90, 2));
        append(&mut cache, 0, &prompt);
        for _ in 0..2 {
            append(&mut cache, 0, &appended);
            let kept = compress_again(&mut cache, 0, &policy, (&appended, 90)).unwrap();
            assert_eq!(parts(&mut cache), 1, "{name}");
            for (held, kept) in all_held(&cache, 0).iter().zip(kept.layers()) {
                let expected = kept.indices().into_iter().map(|at| at as usize).collect();
                assert_eq!(held.iter().map(|span| &span.1).collect::<Vec<_>>(), [&SpanPositions::PerHead(expected)]);
            }
        }
    }
}
