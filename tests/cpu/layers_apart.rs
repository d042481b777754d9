//! Layers that hold different tokens of a sequence: what they hold stays theirs, and they join where it is the same.

use std::cell::Cell;
use std::rc::Rc;

use kvpack::backend::{Forward, Forwarding, Packing, SpanWrite};
use kvpack::cache::{Budget, Growth, ModelCache, StoreId, TokenRun};
use kvpack::cpu::{Cpu, CpuIndices, CpuStore, CpuTensor};
use kvpack::policy::Policy;
use kvpack::{Error, Result, SegmentFormat};
use pollster::block_on;

use any_backend::compressed::growing::append;
use any_backend::compressed::{Prompt, state};
use any_backend::kept_together::{TOKENS, dense, parts, selection};
use any_backend::model_steps::{LAYERS, recipe, shape};
use any_backend::swapped_bytes::all_held;

fn prompt(seed: u64) -> Prompt {
    Prompt::new(shape(), LAYERS, TOKENS, seed)
}

fn cache(text: &str) -> ModelCache<Cpu> {
    prompt(1).cache(&Cpu::new(), &recipe(text))
}

/// Keeps `count` tokens of a prompt in every layer.
fn keep(cache: &mut ModelCache<Cpu>, sequence: usize, seed: u64, count: impl Fn(usize) -> usize) {
    block_on(cache.keep(sequence, dense(&prompt(seed), &Cpu::new()), &selection(count))).unwrap();
}

/// A sequence that comes and goes lets layers join that hold the same.
fn come_and_go(cache: &mut ModelCache<Cpu>, sequence: usize) {
    append(cache, sequence, &Prompt::new(shape(), LAYERS, 5, 8));
    cache.clear(sequence).unwrap();
}

/// As many tokens of one prompt or of another are at other positions.
#[test]
fn layers_that_kept_other_prompts_stay_apart() {
    let mut cache = cache("saw-int4");
    keep(&mut cache, 0, 3, |layer| if layer == 0 { 10 } else { 0 });
    keep(&mut cache, 0, 4, |layer| if layer == 0 { 0 } else { 10 });
    let before = all_held(&cache, 0);
    come_and_go(&mut cache, 1);
    assert!(all_held(&cache, 0) == before);
}

/// A share that leaves a remainder of the layers' tokens: all keep the same number, and a step stays in one part.
#[test]
fn layers_with_one_share_stay_together() {
    for (tokens, kept) in [(301, 60), (304, 60), (305, 61)] {
        let prompt = Prompt::new(shape(), 3, tokens, 5);
        let mut cache = prompt.cache(&Cpu::new(), &recipe("saw-int4"));
        let observed = prompt.observe(&cache, Policy::h2o(0.2).unwrap());
        block_on(cache.compress(0, &observed)).unwrap();
        assert_eq!([0, 1, 2].map(|layer| cache.tokens(layer, 0)), [Ok(kept), Ok(kept), Ok(kept)], "{tokens}");
        assert_eq!(parts(&mut cache), 1, "{tokens} tokens");
    }
}

/// A layer that holds what another does and more holds something else.
#[test]
fn layers_that_kept_more_stay_apart() {
    let mut cache = cache("saw-int4");
    keep(&mut cache, 0, 3, |_| 10);
    keep(&mut cache, 0, 4, |layer| if layer == 0 { 0 } else { 10 });
    let before = all_held(&cache, 0);
    come_and_go(&mut cache, 1);
    assert!(all_held(&cache, 0) == before);
}

/// The same tokens at other places.
#[test]
fn layers_that_hold_the_same_elsewhere_stay_apart() {
    let mut cache = cache("saw-int4");
    keep(&mut cache, 0, 3, |layer| if layer == 0 { 140 } else { 40 });
    keep(&mut cache, 1, 4, |_| 40);
    let before = all_held(&cache, 1);
    cache.clear(0).unwrap();
    assert!(all_held(&cache, 1) == before);
}

/// What a policy chose in each layer does not hold them apart where it is as much.
#[test]
fn layers_join_over_what_each_gathered() {
    let mut cache = cache("saw-int4");
    keep(&mut cache, 1, 3, |_| 40);
    let before = all_held(&cache, 1);
    keep(&mut cache, 0, 4, |layer| 20 + layer);
    assert_eq!(parts(&mut cache), LAYERS);
    cache.clear(0).unwrap();
    assert_eq!(parts(&mut cache), 1);
    assert!(all_held(&cache, 1) == before);
    let swapped = block_on(cache.swap_out(1)).unwrap();
    block_on(cache.swap_in(1, &swapped)).unwrap();
    assert_eq!(parts(&mut cache), 1, "nothing holds them apart");
    assert!(all_held(&cache, 1) == before);
}

/// A prompt of which no layer keeps anything changes nothing of what they kept before.
#[test]
fn nothing_kept_is_nothing_changed() {
    let mut cache = cache("saw-int4");
    keep(&mut cache, 0, 3, |_| 40);
    let before = all_held(&cache, 0);
    keep(&mut cache, 0, 4, |_| 0);
    assert!(all_held(&cache, 0) == before);
    assert_eq!(cache.length(0), Ok(2 * TOKENS));
}

/// Layers grew apart by shards of other sizes: those that not all have are given back.
#[test]
fn shards_that_not_all_layers_have_are_given_back() {
    let page = SegmentFormat::F16.page_bytes(&shape()) as u64;
    let mut cache = cache("f16").with_budget(Budget::unlimited().growing(Growth::Exact));
    append(&mut cache, 1, &Prompt::new(shape(), LAYERS, 100, 2));
    let before = all_held(&cache, 1);
    keep(&mut cache, 0, 3, |layer| if layer == 0 { 140 } else { 40 });
    assert_eq!(cache.memory().allocated_bytes(), (3 + 2 + 2) * page);
    cache.clear(0).unwrap();
    assert_eq!(cache.memory().allocated_bytes(), LAYERS as u64 * page);
    append(&mut cache, 0, &prompt(5));
    assert_eq!(cache.memory().allocated_bytes(), 4 * LAYERS as u64 * page);
    assert!(all_held(&cache, 1) == before);
}

/// A cut that one layer cannot make cuts none.
#[test]
fn a_cut_is_one_of_all_layers() {
    let mut cache = cache("f16");
    append(&mut cache, 0, &Prompt::new(shape(), LAYERS, 150, 2));
    keep(&mut cache, 0, 3, |layer| if layer == 2 { 40 } else { 0 });
    let before = state(&cache);
    let refused = cache.truncate(0, 200);
    assert!(matches!(&refused, Err(Error::Plan { what: "truncation", .. })), "{refused:?}");
    assert!(state(&cache) == before);
    append(&mut cache, 0, &Prompt::new(shape(), LAYERS, 1, 7));
    cache.truncate(0, 150).unwrap();
    assert_eq!((0..LAYERS).map(|layer| cache.tokens(layer, 0).unwrap()).collect::<Vec<_>>(), [150; LAYERS]);
}

/// A window that something follows does not grow, however few tokens it lacks; a full one is packed once it is pushed
/// out.
#[test]
fn only_the_newest_window_grows() {
    let mut cache = cache("saw-int4+window=0");
    append(&mut cache, 0, &Prompt::new(shape(), LAYERS, 127, 2));
    let before = all_held(&cache, 0);
    keep(&mut cache, 0, 3, |_| 10);
    append(&mut cache, 0, &Prompt::new(shape(), LAYERS, 1, 7));
    for (before, now) in before.iter().zip(all_held(&cache, 0)) {
        let stores: Vec<_> = now.iter().map(|span| span.0).collect();
        assert_eq!(stores, [StoreId::F16, StoreId::PACKED, StoreId::F16]);
        assert!(before[0] == now[0]);
    }
    // A chunk packs nothing, and the token after it what is full.
    let runs = [TokenRun::chunk(1, 128)];
    let rows = Prompt::new(shape(), LAYERS, 128, 4);
    block_on(cache.reserve_for_append(&runs)).unwrap();
    cache.begin_append(&runs).unwrap();
    for layer in 0..LAYERS {
        let of = rows.dense(&Cpu::new(), layer);
        block_on(cache.store(layer, of.rows, &of.keys, &of.values)).unwrap();
    }
    cache.commit().unwrap();
    let needed = cache.room_for_append(0, &[TokenRun::decode(1)]).unwrap();
    assert_eq!(needed.iter().map(|room| room.pages).collect::<Vec<_>>(), [1, 1]);
}

/// A backend whose packing fails when it is told to.
#[derive(Clone)]
struct Failing(Cpu, Rc<Cell<bool>>);

impl Forward for Failing {
    type Inner = Cpu;

    fn inner(&self) -> &Cpu {
        &self.0
    }

    fn quantize(
        &self,
        store: &mut CpuStore,
        keys: &CpuTensor,
        values: &CpuTensor,
        write: SpanWrite<'_, CpuIndices>,
    ) -> Result<()> {
        if self.1.get() {
            return Err(Error::OutOfMemory { what: "a test", bytes: 0, message: "it fails".into() });
        }
        self.0.quantize(store, keys, values, write)
    }
}

/// Layers that parted for a prompt which cannot be stored join again.
#[test]
fn layers_join_after_a_prompt_that_failed() {
    let fails = Rc::new(Cell::new(false));
    let backend = Forwarding(Failing(Cpu::new(), fails.clone()));
    let mut cache = prompt(1).cache(&backend, &recipe("saw-int4"));
    for failing in [true, false] {
        fails.set(failing);
        let kept = block_on(cache.keep(0, dense(&prompt(3), &backend), &selection(|layer| 40 + layer)));
        assert_eq!(kept.is_err(), failing, "{kept:?}");
        assert_eq!(parts(&mut cache), if failing { 1 } else { LAYERS });
    }
}
