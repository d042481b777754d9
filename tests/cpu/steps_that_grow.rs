//! Steps of decoding whose tokens lie in pages that sequences have. Plan and write table go on from step to step, and are
//! those of the page tables. Such steps take no memory for a part.
//!
//! The property fails if a fork or a step that was rolled back does not end a run of such steps, if another step fills the
//! table between, and if a full page, a window, a sink, a sliding window or a query at an earlier position is overlooked:
//! each was tried.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvpack::cache::{ModelCache, StoreRoom, TokenRun};
use kvpack::cpu::Cpu;
use kvpack::plan::{LayerAttention, QueryRun};
use kvpack::{AttentionShape, Result};
use pollster::block_on;
use proptest::prelude::*;

use any_backend::compressed::Prompt;
use any_backend::kept_together::{TOKENS, dense, selection};
use any_backend::model_steps::{LAYERS, recipe, shape};

/// The system's allocator, which counts what every thread asks for.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is handed to the system's allocator with the arguments that it came with.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from the system's allocator, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

const SEQUENCES: usize = 3;

fn decoded() -> Vec<TokenRun> {
    (0..SEQUENCES).map(TokenRun::decode).collect()
}

/// A cache with room.
fn begun(text: &str, attention: LayerAttention) -> ModelCache<Cpu> {
    let of: Vec<(AttentionShape, _)> = vec![(shape(), recipe(text).with_attention(attention)); LAYERS];
    let mut cache = ModelCache::new(&Cpu::new(), &of, SEQUENCES).unwrap();
    let stores = cache.recipe(0).unwrap().stores().len();
    block_on(cache.reserve(&vec![StoreRoom { pages: 60, spans: 20 }; stores])).unwrap();
    cache
}

/// A cache with room, whose layers keep tokens of a prompt.
fn kept(text: &str, count: impl Fn(usize) -> usize) -> ModelCache<Cpu> {
    let mut cache = begun(text, LayerAttention::default());
    let prompt = dense(&Prompt::new(shape(), LAYERS, TOKENS, 3), &Cpu::new());
    block_on(cache.keep(0, prompt, &selection(count))).unwrap();
    cache
}

/// Opens a step, notes all layers as stored, and commits it.
fn step(cache: &mut ModelCache<Cpu>, runs: &[TokenRun]) -> Result<()> {
    cache.begin_append(runs)?;
    cache.open_steps()?.iter().for_each(|part| part.layers.iter().for_each(|&layer| part.stored.mark(layer)));
    cache.commit()
}

/// Allocations of the calls of a step, without those of the engine between them.
fn allocations(cache: &mut ModelCache<Cpu>, runs: &[TokenRun]) -> (usize, usize) {
    let before = ALLOCATIONS.get();
    cache.begin_append(runs).unwrap();
    let begun = ALLOCATIONS.get() - before;
    let parts = cache.open_steps().unwrap();
    parts.iter().for_each(|part| part.layers.iter().for_each(|&layer| part.stored.mark(layer)));
    let count = parts.len();
    drop(parts);
    let before = ALLOCATIONS.get();
    cache.commit().unwrap();
    (count, begun + ALLOCATIONS.get() - before)
}

/// What is taken is for the step: its queries, changes, plans, and the layers that have stored.
#[test]
fn steps_within_pages_take_no_memory_for_a_part() {
    for text in ["f16", "saw-int4", "kivi:4", "saw-int4+centre", "calibquant:2"] {
        let mut cache = kept(text, |layer| 30 + 7 * layer);
        (1..SEQUENCES).for_each(|sequence| cache.fork(0, sequence).unwrap());
        for turn in 0..40 {
            let (parts, taken) = allocations(&mut cache, &decoded());
            assert_eq!(parts, LAYERS, "{text}");
            // The first steps take pages of their own, and make what the next ones use.
            assert!(turn < 3 || taken <= 4, "{text}, step {turn}: {taken} allocations");
        }
    }
}

/// What happens to both caches.
#[derive(Clone, Debug)]
enum Event {
    Decode(usize),
    DecodeOn(usize),
    AttendEarlier(usize),
    Abandon,
    Chunk(usize, usize),
    Prompt(usize, usize),
    Fork(usize, usize),
    Truncate(usize, usize),
    Clear(usize),
    Forget(usize),
    Windows(usize),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let sequence = || 0..SEQUENCES;
    let event = prop_oneof![
        9 => (1usize..=SEQUENCES).prop_map(Event::Decode),
        3 => (1usize..90).prop_map(Event::DecodeOn),
        2 => (0usize..100).prop_map(Event::AttendEarlier),
        1 => Just(Event::Abandon),
        1 => (sequence(), 1usize..150).prop_map(|(of, tokens)| Event::Chunk(of, tokens)),
        1 => (sequence(), 1usize..150).prop_map(|(of, tokens)| Event::Prompt(of, tokens)),
        1 => (sequence(), sequence()).prop_map(|(from, to)| Event::Fork(from, to)),
        1 => (sequence(), 1usize..4).prop_map(|(of, tokens)| Event::Truncate(of, tokens)),
        1 => sequence().prop_map(Event::Clear),
        1 => sequence().prop_map(Event::Forget),
        1 => sequence().prop_map(Event::Windows),
    ];
    prop::collection::vec(event, 1..60)
}

/// Does the event, and something between its steps; whether the cache took it.
fn happen(cache: &mut ModelCache<Cpu>, event: &Event, between: fn(&mut ModelCache<Cpu>)) -> bool {
    let of = |cache: &ModelCache<Cpu>, sequence: usize| cache.length(sequence).unwrap();
    match *event {
        Event::Decode(sequences) => step(cache, &decoded()[..sequences]).is_ok(),
        Event::DecodeOn(steps) => (0..steps).all(|_| {
            between(cache);
            step(cache, &decoded()).is_ok()
        }),
        Event::AttendEarlier(back) => {
            let earlier = |sequence| {
                let end = of(cache, sequence).saturating_sub(back).max(1);
                QueryRun { end: Some(end), ..QueryRun::decode(sequence) }
            };
            let runs: Vec<QueryRun> = (0..SEQUENCES).map(earlier).collect();
            cache.begin_attend(&runs).is_ok() && cache.commit().is_ok()
        }
        Event::Abandon => {
            let opened = cache.begin_append(&decoded()).is_ok();
            cache.abandon();
            opened
        }
        Event::Chunk(sequence, tokens) => step(cache, &[TokenRun::chunk(sequence, tokens)]).is_ok(),
        Event::Prompt(sequence, tokens) => step(cache, &[TokenRun::prompt(sequence, tokens)]).is_ok(),
        Event::Fork(from, to) => {
            // Between steps of the others, which would go on: the open page of one of them is shared now.
            let others: Vec<TokenRun> = decoded().into_iter().filter(|run| run.sequence() != to).collect();
            from != to && cache.clear(to).is_ok() && step(cache, &others).is_ok() && cache.fork(from, to).is_ok() && {
                between(cache);
                step(cache, &others).is_ok()
            }
        }
        Event::Truncate(sequence, tokens) => {
            let length = of(cache, sequence).saturating_sub(tokens);
            cache.truncate(sequence, length).is_ok()
        }
        Event::Clear(sequence) => cache.clear(sequence).is_ok(),
        Event::Forget(sequence) => {
            let end = of(cache, sequence).max(1);
            cache.forget(sequence, kvpack::plan::TokenRange::new(0, end / 2 + 1).unwrap()).is_ok()
        }
        Event::Windows(sequence) => block_on(cache.pack_windows(sequence)).is_ok(),
    }
}

/// Opens a step of all sequences in both, which has the same plans and tables, and notes all layers as stored.
fn open_both(cache: &mut ModelCache<Cpu>, twin: &mut ModelCache<Cpu>) {
    cache.begin_append(&decoded()).unwrap();
    twin.begin_append(&decoded()).unwrap();
    for layer in 0..LAYERS {
        assert_eq!(cache.plan(layer).unwrap(), twin.plan(layer).unwrap());
    }
    for (part, other) in cache.open_steps().unwrap().iter().zip(twin.open_steps().unwrap()) {
        assert_eq!(part.table.words(), other.table.words());
        part.layers.iter().for_each(|&layer| part.stored.mark(layer));
        other.layers.iter().for_each(|&layer| other.stored.mark(layer));
    }
}

/// A decode step after queries that stood at an earlier position sees the newest tokens.
#[test]
fn queries_at_an_earlier_position_are_not_gone_on_from() {
    let new = || {
        let mut cache = begun("f16", LayerAttention::default().with_window(127));
        (0..SEQUENCES).for_each(|sequence| step(&mut cache, &[TokenRun::chunk(sequence, 200)]).unwrap());
        cache
    };
    let (mut cache, mut twin) = (new(), new());
    let earlier = |sequence| QueryRun { end: Some(150), ..QueryRun::decode(sequence) };
    cache.begin_attend(&(0..SEQUENCES).map(earlier).collect::<Vec<_>>()).unwrap();
    cache.commit().unwrap();
    open_both(&mut cache, &mut twin);
    assert_eq!(cache.plan(0).unwrap().runs()[0].limits(0).from, 73);
}

/// Steps go on across pages, windows and the end of a sink, which lies within a page where a prompt was compressed.
#[test]
fn long_runs_of_steps_are_those_of_the_page_tables() {
    for text in [
        "f16",
        "saw-int4+sink=384",
        "kivi:4",
        "kivi:4+window=0",
        "kivi:2+sink=384+window=200",
        "f16+centre",
        "kivi:2+window=18446744073709551615",
    ] {
        let count = |layer: usize| 30 + 7 * layer;
        let (mut cache, mut twin) = (kept(text, count), kept(text, count));
        for _ in 0..300 {
            forget_last(&mut twin);
            open_both(&mut cache, &mut twin);
            cache.commit().unwrap();
            twin.commit().unwrap();
        }
    }
}

/// Makes the next step begin with nothing that the last one left: a step that attends has no tokens to go on with.
fn forget_last(cache: &mut ModelCache<Cpu>) {
    if cache.begin_attend(&[QueryRun::decode(0)]).is_ok() {
        cache.abandon();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]
    /// The plans and tables of a cache whose steps go on from each other, and of one that plans every step.
    #[test]
    fn steps_that_go_on_are_those_of_the_page_tables(
        events in events(),
        text in prop::sample::select(
            vec![
                "f16", "saw-int4", "kivi:4", "kivi:4+window=0", "kivi:4+window=200", "kivi:2+sink=128", "saw-int4+sink=384",
                "calibquant:2", "f16+centre",
            ]),
        left in prop::option::of(1usize..150),
        apart in any::<bool>(),
    ) {
        let count = |layer: usize| if apart { 30 + 7 * layer } else { 90 };
        let new = || match left {
            // What was gathered is not seen through a window: the sequences begin with their events.
            Some(left) => begun(text, LayerAttention::default().with_window(left)),
            None => kept(text, count),
        };
        let (mut cache, mut twin) = (new(), new());
        for event in &events {
            let happened = [happen(&mut cache, event, |_| ()), happen(&mut twin, event, forget_last)];
            prop_assert_eq!(happened[0], happened[1], "{:?}", event);
            forget_last(&mut twin);
            let open = [cache.begin_append(&decoded()).is_ok(), twin.begin_append(&decoded()).is_ok()];
            prop_assert_eq!(open[0], open[1]);
            if !open[0] {
                continue;
            }
            for layer in 0..LAYERS {
                prop_assert_eq!(cache.plan(layer).unwrap(), twin.plan(layer).unwrap(), "{:?}", event);
            }
            for (part, other) in cache.open_steps().unwrap().iter().zip(twin.open_steps().unwrap()) {
                prop_assert_eq!(part.table.words(), other.table.words(), "{:?}", event);
                part.layers.iter().for_each(|&layer| part.stored.mark(layer));
                other.layers.iter().for_each(|&layer| other.stored.mark(layer));
            }
            // One that goes on and one that does not are committed, or rolled back.
            if matches!(event, Event::Forget(_)) {
                cache.abandon();
                twin.abandon();
            } else {
                cache.commit().unwrap();
                twin.commit().unwrap();
            }
            for sequence in 0..SEQUENCES {
                let of = |cache: &ModelCache<Cpu>| {
                    let tokens = |layer| cache.tokens(layer, sequence).unwrap();
                    (cache.length(sequence).unwrap(), (0..LAYERS).map(tokens).collect::<Vec<_>>())
                };
                prop_assert_eq!(of(&cache), of(&twin));
            }
        }
    }
}
