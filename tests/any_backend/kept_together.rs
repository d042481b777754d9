//! Layers that keep as many tokens of a prompt, each its own, go on to share their page tables; layers that do not, part.

use kvpack::Error;
use kvpack::backend::Backend;
use kvpack::cache::{Budget, DenseLayer, Growth, ModelCache, SpanPositions, StoreRoom, TokenRun};
use kvpack::policy::{LayerSelection, Selection};
use pollster::block_on;

use crate::compressed::growing::{append, compress_again};
use crate::compressed::{Held, Prompt, held, policies};
use crate::model_steps::{LAYERS, recipe, shape};

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

/// Layers that hold different numbers of tokens of one sequence part, and join again when it is gone, although another
/// sequence grew meanwhile; where the other lies in shards that layers got apart, when that is gone too. It comes back to
/// them, and enters a cache that knows nothing of it.
pub fn check_joining<B: Backend + Clone>(backend: &B) {
    let (prompt, grown) = (Prompt::new(shape(), LAYERS, TOKENS, 11), Prompt::new(shape(), LAYERS, 150, 3));
    for recipe in ["f16", "saw-int4+sink=128", "calibquant:2+window=0", "saw-int4+centre"].map(recipe) {
        let stores = recipe.stores().len();
        for budget in [Growth::None, Growth::Exact, Growth::Doubling].map(|of| Budget::unlimited().growing(of)) {
            let mut cache = prompt.cache(backend, &recipe).with_budget(budget);
            let room = StoreRoom { pages: 10, spans: 10 };
            block_on(
                cache.reserve(&vec![if budget.growth() == Growth::None { room } else { StoreRoom::default() }; stores]),
            )
            .unwrap();
            append(&mut cache, 1, &grown);
            block_on(cache.keep(0, dense(&prompt, backend), &selection(|layer| 20 + 60 * layer))).unwrap();
            assert_eq!(parts(&mut cache), LAYERS);
            append(&mut cache, 0, &Prompt::new(shape(), LAYERS, 5, 1));
            append(&mut cache, 1, &grown);
            append(&mut cache, 1, &grown);
            let before = [all_held(&cache, 0), all_held(&cache, 1)];
            let pages = cache.memory().packed().iter().map(|of| of.pages).collect::<Vec<_>>();

            let swapped = block_on(cache.swap_out(0)).unwrap();
            if budget.growth() == Growth::None {
                assert_eq!(parts(&mut cache), 1, "nothing holds the layers apart");
            }
            assert!(all_held(&cache, 1) == before[1], "joining moved tokens");
            append(&mut cache, 1, &grown);
            let grown_on = all_held(&cache, 1);

            let mut fresh = prompt.cache(backend, &recipe);
            assert_eq!(fresh.fits_swap_in(&swapped), Ok(true));
            let needed = |cache: &ModelCache<B>, layer| cache.room_for_swap_in(layer, &swapped).unwrap();
            assert_ne!(needed(&fresh, 0), needed(&fresh, LAYERS - 1), "layers need different room");
            block_on(fresh.swap_in(1, &swapped)).unwrap();
            assert!(all_held(&fresh, 1) == before[0], "something else came into a fresh cache");
            assert_eq!(parts(&mut fresh), LAYERS);
            fresh.clear(1).unwrap();
            assert_eq!((parts(&mut fresh), fresh.memory().in_use_bytes()), (1, 0));

            block_on(cache.swap_in(0, &swapped)).unwrap();
            assert!(all_held(&cache, 0) == before[0], "something else came back");
            assert!(all_held(&cache, 1) == grown_on, "parting moved tokens");
            if budget.growth() == Growth::None {
                assert_eq!(cache.memory().packed().iter().map(|of| of.pages).max(), pages.into_iter().max());
            }
            cache.truncate(0, 0).unwrap();
            if budget.growth() == Growth::None {
                assert_eq!(parts(&mut cache), 1, "a sequence that keeps nothing holds nothing apart");
            }
            [0, 1].into_iter().for_each(|sequence| cache.clear(sequence).unwrap());
            assert_eq!((parts(&mut cache), cache.memory().in_use_bytes()), (1, 0));
            append(&mut cache, 0, &prompt);
        }
    }
}

/// A sequence that does not fit leaves the layers together.
pub fn check_refused_parting<B: Backend + Clone>(backend: &B) {
    let prompt = Prompt::new(shape(), LAYERS, TOKENS, 11);
    let mut cache = prompt.cache(backend, &recipe("saw-int4"));
    block_on(cache.keep(0, dense(&prompt, backend), &selection(|layer| 20 + 60 * layer))).unwrap();
    let swapped = block_on(cache.swap_out(0)).unwrap();
    let mut small = prompt.cache(backend, &recipe("saw-int4")).with_budget(Budget::unlimited().growing(Growth::None));
    block_on(small.reserve(&[StoreRoom { pages: 1, spans: 1 }; 2])).unwrap();
    assert_eq!(small.fits_swap_in(&swapped), Ok(false));
    assert!(matches!(block_on(small.swap_in(0, &swapped)), Err(Error::NoRoom { .. })));
    assert_eq!(parts(&mut small), 1);
    let kept = block_on(small.keep(0, dense(&prompt, backend), &selection(|layer| 20 + 60 * layer)));
    assert!(matches!(kept, Err(Error::NoRoom { .. })), "{kept:?}");
    assert_eq!(parts(&mut small), 1);
}
