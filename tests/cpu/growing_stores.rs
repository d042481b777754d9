//! Stores that grow by larger shards in place of their newest: what they hold, and where that is not possible.

use std::cell::Cell;
use std::rc::Rc;

use kvpack::backend::{Forward, Forwarding, Storage};
use kvpack::cache::{Budget, Growth, ModelCache, Recipe, StoreRoom, TokenRun};
use kvpack::cpu::{Cpu, CpuStore};
use kvpack::{AttentionShape, Bits, Error, Result, SegmentFormat};
use pollster::block_on;

use any_backend::cache_model::dropped::{Waiting, polled};
use any_backend::compressed::growing::append;
use any_backend::compressed::{Prompt, held};
use any_backend::growing_stores::{self, shards};
use any_backend::model_steps::shape;

const LAYERS: usize = 2;

fn room(pages: usize) -> StoreRoom {
    StoreRoom { pages, spans: 0 }
}

/// A cache of f16 and 4 bits whose stores have four shards of one page each.
fn of_four<B: kvpack::Backend + Clone>(backend: &B) -> ModelCache<B> {
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4()).with_sink(1);
    let mut cache = ModelCache::new(backend, &vec![(shape(), recipe); LAYERS], 2).unwrap();
    for pages in 1..=4 {
        block_on(cache.reserve(&[room(pages); 2])).unwrap();
    }
    cache
}

#[test]
fn what_grows_by_little_is_what_was_reserved() {
    growing_stores::check(&Cpu::new());
}

/// The old shards exist next to the larger ones for a while: where the budget has no room for both, shards are added.
#[test]
fn a_budget_counts_the_shards_that_are_replaced() {
    let pages = |pages: u64| {
        let of = [SegmentFormat::F16, SegmentFormat::saw_int4()].map(|format| format.page_bytes(&shape()) as u64);
        pages * LAYERS as u64 * of.iter().sum::<u64>()
    };
    for (budget, expected) in [(pages(6), 4), (pages(6) - 1, 5), (pages(5), 5)] {
        let mut cache = of_four(&Cpu::new()).with_budget(Budget::of_bytes(budget).growing(Growth::Exact));
        block_on(cache.reserve(&[room(5); 2])).unwrap();
        assert_eq!(shards(&mut cache), [expected; 2], "{budget} bytes");
        assert_eq!(cache.memory().allocated_bytes(), pages(5));
    }
    // So does the device.
    for (limit, expected) in [(pages(6), 4), (pages(6) - 1, 5)] {
        let mut cache = of_four(&Cpu::new().with_memory_limit(limit));
        block_on(cache.reserve(&[room(5); 2])).unwrap();
        assert_eq!(shards(&mut cache), [expected; 2], "{limit} bytes");
    }
}

/// A device that makes some larger shards and some shards, and then fails.
#[derive(Clone)]
struct Short {
    cpu: Cpu,
    larger: Rc<Cell<usize>>,
    added: Rc<Cell<usize>>,
}

fn take(from: &Cell<usize>) -> Result<()> {
    let refused = Error::OutOfMemory { what: "a shard", bytes: 0, message: "a test".into() };
    from.set(from.get().checked_sub(1).ok_or(refused)?);
    Ok(())
}

impl Forward for Short {
    type Inner = Cpu;

    fn inner(&self) -> &Cpu {
        &self.cpu
    }

    async fn add_shard(&self, store: &mut CpuStore, pages: u32) -> Result<()> {
        take(&self.added)?;
        self.cpu.add_shard(store, pages).await
    }

    async fn larger_shard(&self, store: &CpuStore, pages: u32) -> Result<<Cpu as Storage>::Shard> {
        take(&self.larger)?;
        Storage::larger_shard(&self.cpu, store, pages).await
    }
}

/// Whatever fails half way: all stores grow in all layers, or none does.
#[test]
fn all_layers_get_larger_shards_or_none() {
    for (larger, added, expected) in
        [(0, 4, Some([5, 5])), (3, 4, Some([5, 5])), (3, 3, None), (4, 0, Some([4, 4])), (0, 0, None)]
    {
        let plenty = || Rc::new(Cell::new(100));
        let device = Short { cpu: Cpu::new(), larger: plenty(), added: plenty() };
        let mut cache = of_four(&Forwarding(device.clone()));
        append(&mut cache, 0, &Prompt::new(shape(), LAYERS, 300, 3));
        let (before, tokens) = (cache.memory(), held(&cache, 1, 0));
        device.larger.set(larger);
        device.added.set(added);
        let grown = block_on(cache.reserve(&[room(5); 2]));
        match expected {
            Some(expected) => {
                grown.unwrap();
                assert_eq!(shards(&mut cache), expected, "{larger} larger shards and {added} more");
            }
            None => {
                assert!(matches!(grown, Err(Error::OutOfMemory { .. })), "{grown:?}");
                assert_eq!(cache.memory(), before, "{larger} larger shards and {added} more");
            }
        }
        assert!(held(&cache, 1, 0) == tokens, "{larger} larger shards and {added} more");
    }
    // The f16 store gets larger shards, the packed one cannot: a shard holds four pages of it. They go where it gets none.
    let page = SegmentFormat::F16.page_bytes(&shape()) as u64 / 2;
    let device = Short {
        cpu: Cpu::new().with_max_shard_bytes(4 * page),
        larger: Rc::new(Cell::new(100)),
        added: Rc::new(Cell::new(100)),
    };
    let most = device.cpu.max_shard_pages(&shape(), &SegmentFormat::saw_int4()) as usize;
    let mut cache = of_four(&Forwarding(device.clone()));
    let before = cache.memory();
    device.larger.set(LAYERS);
    device.added.set(0);
    let refused = block_on(cache.reserve(&[room(5), room(4 + most)]));
    assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
    assert_eq!((device.larger.get(), cache.memory(), shards(&mut cache)), (0, before, vec![4, 4]));
}

/// A future that is dropped at any point changes nothing, and the next call ends.
#[test]
fn dropped_growth_changes_nothing() {
    let mut polls = 0;
    loop {
        let mut cache = of_four(&Forwarding(Waiting(Cpu::new())));
        append(&mut cache, 0, &Prompt::new(shape(), LAYERS, 300, 3));
        let (before, tokens) = (cache.memory(), held(&cache, 1, 0));
        let ended = polled(cache.reserve(&[room(5); 2]), polls).is_some();
        if !ended {
            assert_eq!(cache.memory(), before, "after {polls} polls");
            block_on(cache.reserve(&[room(5); 2])).unwrap();
        }
        assert_eq!(shards(&mut cache), [4, 4]);
        assert!(held(&cache, 1, 0) == tokens, "after {polls} polls");
        if ended {
            break;
        }
        polls += 1;
    }
    assert!(polls > 2 * LAYERS, "{polls} polls: every larger shard waits");
}

/// A shard takes the place of a smaller one of a store of its shape and format, and of no other.
#[test]
fn shards_of_other_stores_are_refused() {
    let of = |shape, format, pages| {
        let mut store = CpuStore::new(shape, format).unwrap();
        store.add_shard(pages).unwrap();
        store
    };
    let (shape, other) = (AttentionShape::new(4, 2, 64).unwrap(), AttentionShape::new(4, 1, 64).unwrap());
    let larger = |pages| of(shape, SegmentFormat::F16, 2).larger_shard(pages).unwrap();
    for mut store in [
        of(other, SegmentFormat::F16, 2),
        of(shape, SegmentFormat::saw_int4(), 2),
        of(shape, SegmentFormat::calibquant(Bits::One), 2),
        of(shape, SegmentFormat::F16, 4),
        CpuStore::new(shape, SegmentFormat::F16).unwrap(),
    ] {
        let bytes = store.bytes();
        let refused = store.replace_shard(larger(3));
        assert!(matches!(refused, Err(Error::Plan { .. })), "{refused:?}");
        assert_eq!(store.bytes(), bytes);
    }
    let mut store = of(shape, SegmentFormat::F16, 2);
    store.replace_shard(larger(3)).unwrap();
    assert_eq!((store.shards(), store.step_capacity(0, 0).shard_pages), (1, vec![3]));
    for pages in [0, 2, 3] {
        assert!(matches!(store.larger_shard(pages), Err(Error::Plan { .. })), "{pages}");
    }
}

/// Shards that an open step writes stay what they are: the tables of the step name them.
#[test]
fn nothing_is_reserved_within_a_step() {
    let mut cache = of_four(&Cpu::new());
    cache.begin_append(&[TokenRun::decode(0)]).unwrap();
    let refused = |result: Result<()>| assert!(matches!(result, Err(Error::Plan { .. })), "{result:?}");
    refused(block_on(cache.reserve(&[room(5); 2])));
    refused(block_on(cache.reserve_kind(0, &[room(5); 2])));
    refused(block_on(cache.reserve_for_append(&[TokenRun::decode(1)])));
    refused(block_on(cache.reserve_for_prefill(&[])));
    cache.abandon();
    block_on(cache.reserve(&[room(5); 2])).unwrap();
}
