//! The budget of a cache: what runs out is refused before anything changes, absurd sizes before anything is allocated,
//! and a scheduler is told beforehand.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use kvpack::backend::{Device, Forward, Forwarding, Storage};
use kvpack::cache::{
    Budget, Growth, KvCache, ModelCache, ModelRecipe, PromptSpan, Recipe, SequencePages, StoreId, StoreRoom, TokenRun,
};
use kvpack::cpu::{Cpu, CpuStore, CpuTensor};
use kvpack::plan::{MOST_TOKENS, RowLayout, TokenRange, WriteLayout};
use kvpack::policy::Policy;
use kvpack::{AttentionShape, Bits, Error, Result, SegmentFormat};
use pollster::block_on;

use any_backend::compressed;

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

fn room(pages: usize, spans: usize) -> StoreRoom {
    StoreRoom { pages, spans }
}

/// Appends tokens to a sequence in all layers.
fn append(cache: &mut ModelCache<Cpu>, run: TokenRun) -> Result<()> {
    let rows = CpuTensor::F32(vec![0.5; run.tokens() * 2 * 64]);
    block_on(cache.reserve_for_append(&[run]))?;
    cache.begin_append(&[run])?;
    for layer in 0..cache.layers() {
        block_on(cache.store(layer, RowLayout::token_major(run.tokens(), &shape()), &rows, &rows)).unwrap();
    }
    cache.commit()
}

fn is_short(refused: Result<()>, needed: u64, free: u64) {
    match refused {
        Err(Error::NoRoom { what: "pages", needed: n, free: f, .. }) => assert_eq!((n, f), (needed, free)),
        other => panic!("{other:?}"),
    }
}

/// 10 pages of a sequence that was swapped out, of which a fork held all: they come back where there is room, and
/// nowhere else.
#[test]
fn swapping_in_keeps_the_budget() {
    for growth in [Growth::None, Growth::Exact, Growth::Doubling] {
        let page = 2 * SegmentFormat::F16.page_bytes(&shape()) as u64;
        let budget = Budget::of_bytes(14 * page).growing(growth);
        let mut cache =
            ModelCache::new(&Cpu::new(), &vec![(shape(), Recipe::f16()); 2], 3).unwrap().with_budget(budget);
        block_on(cache.reserve(&[room(14, 3)])).unwrap();
        append(&mut cache, TokenRun::chunk(0, 1280)).unwrap();
        cache.fork(0, 1).unwrap();
        assert_eq!(cache.pages_of(0, 0), Ok(vec![SequencePages { own: 0, shared: 10 }]));
        let swapped = block_on(cache.swap_out(0)).unwrap();
        assert_eq!(cache.pages_of(0, 1), Ok(vec![SequencePages { own: 10, shared: 0 }]));
        assert_eq!(cache.free_room(0).unwrap()[0].pages, 4, "swapping out what others share frees nothing");
        let before = cache.memory();
        assert_eq!(cache.room_for_swap_in(1, &swapped).unwrap()[0].pages, 10);
        assert_eq!(cache.fits_swap_in(&swapped), Ok(false));
        let refused = block_on(cache.swap_in(0, &swapped));
        assert!(matches!(refused, Err(Error::NoRoom { .. })), "{refused:?}");
        if growth == Growth::None {
            is_short(refused, 10, 4);
        }
        assert_eq!(cache.memory(), before);
        cache.clear(1).unwrap();
        assert_eq!(cache.fits_swap_in(&swapped), Ok(true));
        block_on(cache.swap_in(0, &swapped)).unwrap();
        assert_eq!(cache.memory().allocated_bytes(), 14 * page);
    }
}

/// Windows that are packed, a prompt, and what a policy keeps of one.
#[test]
fn every_call_keeps_the_budget() {
    let none = Budget::unlimited().growing(Growth::None);
    let recipe: Recipe = "saw-int4+window=0".parse::<ModelRecipe>().unwrap().layer(0, &shape());
    let mut cache = ModelCache::new(&Cpu::new(), &vec![(shape(), recipe); 2], 2).unwrap().with_budget(none);
    assert_eq!(block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).map_err(|error| error.to_string()), Err(
        "1 pages are needed for the store of f16 and 0 are free: reserve more, allow a larger budget, or truncate, clear \
         or swap out sequences"
            .into()
    ));
    block_on(cache.reserve(&[room(9, 9), room(8, 8)])).unwrap();
    append(&mut cache, TokenRun::chunk(0, 9 * 128)).unwrap();
    let before = cache.memory();
    is_short(block_on(cache.pack_windows(0)), 9, 8);
    assert_eq!(cache.memory(), before);
    let span = [PromptSpan::packed(TokenRange::new(0, 9 * 128).unwrap())];
    is_short(block_on(cache.reserve_for_prefill(&span)), 9, 8);
    assert_eq!(cache.room_for_prefill(1, &span), Ok(vec![room(0, 0), room(9, 1)]));
    assert_eq!(cache.fits_prefill(&span), Ok(false));
    assert_eq!(cache.memory(), before);

    let prompt = compressed::Prompt::new(shape(), 3, 600, 11);
    let mut cache = prompt.cache(&Cpu::new(), &Recipe::f16()).with_budget(none);
    block_on(cache.reserve(&[room(1, 1)])).unwrap();
    let observed = prompt.observe(&cache, Policy::pyramidkv(0.4).unwrap());
    let rooms = block_on(cache.room_for_compress(&observed)).unwrap();
    let kept = block_on(observed.select()).unwrap();
    let pages = |tokens: usize| vec![room(tokens.div_ceil(128), 1)];
    assert_eq!(rooms, kept.layers().iter().map(|layer| pages(layer.count())).collect::<Vec<_>>());
    let before = cache.memory();
    assert!(matches!(block_on(cache.compress(0, &observed)), Err(Error::NoRoom { free: 1, .. })));
    assert_eq!(cache.memory().in_use_bytes(), before.in_use_bytes());
    assert_eq!(cache.memory().allocated_bytes(), before.allocated_bytes());
    let most = rooms.iter().map(|room| room[0].pages).max().unwrap();
    block_on(cache.reserve(&[room(most, 1)])).unwrap();
    block_on(cache.compress(0, &observed)).unwrap();
}

/// Bytes of the budget are counted over all layers, and doubling ends where they do.
#[test]
fn bytes_of_a_budget_are_those_of_all_layers() {
    let page = 3 * SegmentFormat::F16.page_bytes(&shape()) as u64;
    let new = |growth| {
        let budget = Budget::of_bytes(11 * page + page / 2).growing(growth);
        ModelCache::new(&Cpu::new(), &vec![(shape(), Recipe::f16()); 3], 1).unwrap().with_budget(budget)
    };
    for (growth, expected) in [(Growth::Exact, vec![1, 9, 11]), (Growth::Doubling, vec![8, 9, 11])] {
        let mut cache = new(growth);
        let mut held = Vec::new();
        for tokens in [1, 9 * 128 - 1, 2 * 128] {
            append(&mut cache, TokenRun::chunk(0, tokens)).unwrap();
            held.push(cache.memory().allocated_bytes() / page);
        }
        assert_eq!(held, expected, "{growth:?}");
        let refused = append(&mut cache, TokenRun::decode(0));
        let free = page / 2;
        assert!(
            matches!(&refused, Err(Error::NoRoom { what: "bytes of the budget", needed, free: f, .. })
                if (*needed, *f) == (page, free)),
            "{refused:?}"
        );
        assert_eq!((cache.length(0), cache.fits(&[TokenRun::decode(0)])), (Ok(11 * 128), Ok(false)));
    }
}

/// Layers of another recipe get no pages that they cannot use, and memory that nothing lies in comes back.
#[test]
fn room_is_reserved_by_kind_and_given_back() {
    let recipe: ModelRecipe = "int8+layers=0,1:f16".parse().unwrap();
    let layers: Vec<_> = (0..4).map(|layer| (shape(), recipe.layer(layer, &shape()))).collect();
    let mut cache = ModelCache::new(&Cpu::new(), &layers, 2).unwrap();
    block_on(cache.reserve_kind(0, &[room(10, 1)])).unwrap();
    assert_eq!(cache.memory_of(3).unwrap().allocated_bytes(), 0);
    block_on(cache.reserve_kind(2, &[room(0, 0), room(10, 1)])).unwrap();
    let page = |layer: usize, store: usize| cache.memory_of(layer).unwrap().stores()[store].pages;
    assert_eq!([page(0, 0), page(1, 0), page(2, 0), page(2, 1), page(3, 1)], [10, 10, 0, 10, 10]);
    assert!(matches!(block_on(cache.reserve_kind(2, &[room(1, 1)])), Err(Error::Plan { .. })));
    assert!(matches!(block_on(cache.reserve_kind(9, &[room(1, 1)])), Err(Error::Plan { .. })));

    append(&mut cache, TokenRun::chunk(0, 200)).unwrap();
    block_on(cache.reserve(&[room(20, 1), room(20, 1)])).unwrap();
    let before = cache.memory().allocated_bytes();
    assert!(cache.begin_append(&[TokenRun::decode(1)]).is_ok() && cache.trim().is_err(), "a step is open");
    cache.abandon();
    let freed = cache.trim().unwrap();
    assert_eq!(cache.memory().allocated_bytes(), before - freed);
    assert_eq!(cache.memory_of(0).unwrap().f16().pages, 10, "the shard in use stays");
    append(&mut cache, TokenRun::chunk(0, 2000)).unwrap();
    cache.clear(0).unwrap();
    cache.trim().unwrap();
    assert_eq!(cache.memory().stores().iter().map(|store| store.pages).sum::<usize>(), 0);
    append(&mut cache, TokenRun::chunk(0, 200)).unwrap();
}

/// The layout of a step, which an engine keeps its bindings for.
fn layout(cache: &mut ModelCache<Cpu>) -> Result<Arc<WriteLayout>> {
    block_on(cache.reserve_for_append(&[TokenRun::decode(0)]))?;
    cache.begin_append(&[TokenRun::decode(0)])?;
    let layout = cache.open_steps()?[0].table.layout().clone();
    cache.abandon();
    Ok(layout)
}

/// A store that was given back and made again has other buffers of the same sizes, and so has one that grew half way
/// before an error: engines see another layout, and bind anew. They see the same as long as nothing changed.
#[test]
fn other_buffers_have_another_layout() {
    let page = SegmentFormat::F16.page_bytes(&shape()) as u64;
    let device = Cpu::new().with_memory_limit(9 * page);
    let growing = |growth| Budget::unlimited().growing(growth);
    let mut cache =
        ModelCache::new(&device, &vec![(shape(), Recipe::f16()); 3], 1).unwrap().with_budget(growing(Growth::Exact));
    let first = layout(&mut cache).unwrap();
    assert!(Arc::ptr_eq(&first, &layout(&mut cache).unwrap()));
    assert!(cache.trim().unwrap() > 0);
    let second = layout(&mut cache).unwrap();
    assert!(*first == *second && !Arc::ptr_eq(&first, &second), "the sizes are the same, the buffers are not");
    assert_eq!(cache.trim().and_then(|_| cache.trim()), Ok(0));
    let third = layout(&mut cache).unwrap();
    assert!(!Arc::ptr_eq(&second, &third));
    assert!(block_on(cache.reserve(&[room(4, 1)])).is_err(), "three layers have three pages each");
    assert!(*third == *layout(&mut cache).unwrap());
}

/// Sizes that no device has are refused before anything is allocated.
#[test]
fn absurd_sizes_are_refused_before_memory_is_taken() {
    const HUGE: [usize; 5] = [usize::MAX, usize::MAX / 128, 1 << 40, u32::MAX as usize, MOST_TOKENS + 1];
    let recipe = || Recipe::calibquant(Bits::Two).with_window(0);
    for tokens in HUGE {
        let mut cache = KvCache::new(Cpu::new(), shape(), 1, recipe()).unwrap();
        let rows = RowLayout { tokens, token_stride: 0, ..RowLayout::token_major(1, &shape()) };
        let row = CpuTensor::F32(vec![0.5; 2 * 64]);
        let range = TokenRange::new(0, MOST_TOKENS).unwrap();
        let refused = [
            block_on(cache.reserve(StoreId::F16, tokens)),
            block_on(cache.reserve(StoreId::PACKED, tokens)),
            block_on(cache.extend(0, rows, &row, &row)),
            block_on(cache.prefill(0, rows, &row, &row, &[PromptSpan::f16(range)])),
            block_on(cache.prefill(0, rows, &row, &row, &[PromptSpan::packed(range)])),
        ];
        for (call, refused) in refused.into_iter().enumerate() {
            assert!(
                matches!(refused, Err(Error::Limit { .. } | Error::OutOfMemory { .. } | Error::Plan { .. })),
                "call {call} of {tokens} tokens: {refused:?}"
            );
        }
        // A sequence may have so many tokens, and no machine so much memory.
        for store in [StoreId::F16, StoreId::PACKED] {
            let refused = block_on(cache.reserve(store, MOST_TOKENS));
            assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
        }
        assert_eq!(cache.memory().allocated_bytes(), 0);

        let mut cache = ModelCache::new(&Cpu::new(), &vec![(shape(), recipe()); 2], 200).unwrap();
        let runs: Vec<TokenRun> = (0..128).map(|sequence| TokenRun::chunk(sequence, tokens)).collect();
        let spans = vec![PromptSpan::f16(range); 128];
        let many = [room(tokens, 1), room(1, tokens), room(tokens, tokens)];
        for (call, refused) in [
            block_on(cache.reserve_for_append(&runs)),
            block_on(cache.reserve_for_prefill(&spans)),
            block_on(cache.reserve(&many)),
            cache.begin_append(&runs),
        ]
        .into_iter()
        .enumerate()
        {
            assert!(
                matches!(refused, Err(Error::Limit { .. } | Error::OutOfMemory { .. } | Error::NoRoom { .. })),
                "call {call} of {tokens} tokens: {refused:?}"
            );
        }
        assert_eq!(cache.memory().allocated_bytes(), 0);
    }
}

/// A device that fails half way gives back what it gave.
#[test]
fn what_fails_half_way_is_given_back() {
    let page = SegmentFormat::F16.page_bytes(&shape()) as u64;
    let limited = Cpu::new().with_max_shard_bytes(2 * page).with_memory_limit(100 * page);
    let taken = limited.create_store(shape(), SegmentFormat::F16).unwrap();
    let mut cache = ModelCache::new(&limited, &vec![(shape(), Recipe::f16()); 3], 1).unwrap();
    let refused = block_on(cache.reserve(&[room(40, 1)]));
    assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
    assert_eq!((cache.memory().allocated_bytes(), limited.store_bytes(&taken)), (0, 0));
    assert!(!limited.name().is_empty());
}

/// A device that makes a given number of shards and then fails, or that has no pages of one format.
#[derive(Clone)]
struct Short {
    cpu: Cpu,
    shards: Rc<Cell<usize>>,
    without: Option<SegmentFormat>,
}

impl Forward for Short {
    type Inner = Cpu;

    fn inner(&self) -> &Cpu {
        &self.cpu
    }

    fn max_shard_pages(&self, shape: &AttentionShape, format: &SegmentFormat) -> u32 {
        if self.without == Some(*format) { 0 } else { self.cpu.max_shard_pages(shape, format) }
    }

    async fn add_shard(&self, store: &mut CpuStore, pages: u32) -> Result<()> {
        let Some(left) = self.shards.get().checked_sub(1) else {
            return Err(Error::OutOfMemory { what: "a shard", bytes: 0, message: "a test".into() });
        };
        self.shards.set(left);
        self.cpu.add_shard(store, pages).await
    }
}

/// A device that holds a few ranges of spans.
#[derive(Clone)]
struct FewRanges(Cpu, usize);

impl Forward for FewRanges {
    type Inner = Cpu;

    fn inner(&self) -> &Cpu {
        &self.0
    }

    async fn reserve_ranges(&self, store: &mut CpuStore, slots: usize) -> Result<()> {
        if slots > self.1 {
            let (what, hint) = ("span ranges".into(), "use fewer spans per store");
            return Err(Error::Limit { what, needed: slots as u64, allowed: self.1 as u64, hint });
        }
        Storage::reserve_ranges(&self.0, store, slots).await
    }
}

/// Twice the room that there is may be more than the device has, where what a step needs is not.
#[test]
fn what_fits_is_reserved_where_twice_of_it_does_not() {
    let recipe = Recipe::pack_all(SegmentFormat::calibquant(Bits::Two));
    let mut cache = KvCache::new(Forwarding(FewRanges(Cpu::new(), 10)), shape(), 16, recipe).unwrap();
    let (rows, whole) = (RowLayout::token_major(4, &shape()), TokenRange::new(0, 4).unwrap());
    let token = CpuTensor::F32(vec![0.5; 4 * 2 * 64]);
    let spans = [PromptSpan::packed(whole)];
    for sequence in 0..10 {
        block_on(cache.prefill(sequence, rows, &token, &token, &spans)).unwrap();
    }
    let refused = block_on(cache.prefill(10, rows, &token, &token, &spans));
    assert!(matches!(refused, Err(Error::Limit { allowed: 10, .. })), "{refused:?}");
}

/// What a call allocated before it failed is given back, and what was there before stays, although nothing lies in it.
#[test]
fn a_failed_growth_leaves_the_shards_that_were_there() {
    let recipe = || Recipe::pack_all(SegmentFormat::saw_int4()).with_sink(1);
    let shards = Rc::new(Cell::new(100));
    let backend = |without| Forwarding(Short { cpu: Cpu::new(), shards: shards.clone(), without });
    let mut cache = ModelCache::new(&backend(None), &vec![(shape(), recipe()); 2], 1).unwrap();
    block_on(cache.reserve(&[room(1, 0), room(2, 0)])).unwrap();
    let before = cache.memory();
    for left in 0..4 {
        shards.set(left);
        let refused = block_on(cache.reserve(&[room(3, 0), room(5, 0)]));
        assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
        assert_eq!(cache.memory(), before, "after {left} shards");
    }
    shards.set(4);
    block_on(cache.reserve(&[room(3, 0), room(5, 0)])).unwrap();
    assert_eq!(cache.free_room(0).unwrap().iter().map(|room| room.pages).collect::<Vec<_>>(), [3, 5]);

    // A store that the device cannot hold is told before another one grows, and only where it is to grow.
    shards.set(100);
    let none = backend(Some(SegmentFormat::saw_int4()));
    let mut cache = ModelCache::new(&none, &vec![(shape(), recipe()); 2], 1).unwrap();
    let refused = block_on(cache.reserve(&[room(3, 0), room(5, 0)]));
    assert!(matches!(refused, Err(Error::Limit { allowed: 0, .. })), "{refused:?}");
    assert_eq!((cache.memory().allocated_bytes(), shards.get()), (0, 100));
    block_on(cache.reserve(&[room(3, 0), room(0, 0)])).unwrap();
}
