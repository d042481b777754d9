//! Sequences that were swapped out, from bytes, and what a cache does with them.

use kvpack::AttentionShape;
use kvpack::cache::{Budget, Growth, ModelCache, ModelRecipe, TokenRun, write_checksum};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, QueryRun, RowLayout};
use pollster::block_on;

/// Recipes of the caches: tokens that are packed as they arrive, tiles behind a sink, centred keys.
pub const RECIPES: [&str; 3] = ["saw-int4", "kivi:2+window=0+sink=128", "saw-int4+centre"];

/// What the stores of a cache may hold.
const MOST_BYTES: u64 = 1 << 21;

const LAYERS: usize = 2;

fn cache(recipe: usize) -> ModelCache<Cpu> {
    let shape = AttentionShape::new(2, 1, 64).expect("a shape with kernels");
    let recipe: ModelRecipe = RECIPES[recipe % RECIPES.len()].parse().expect("a recipe");
    let layers = vec![(shape, recipe.layer(0, &shape)); LAYERS];
    let backend = Cpu::new().with_memory_limit(MOST_BYTES);
    let cache = ModelCache::new(&backend, &layers, 2).expect("a recipe for the shape");
    cache.with_budget(Budget::of_bytes(MOST_BYTES).growing(Growth::Exact))
}

fn append(cache: &mut ModelCache<Cpu>, run: TokenRun) -> kvpack::Result<()> {
    let rows: Vec<f32> = (0..run.tokens() * 64).map(|at| (at as f32 * 0.37).sin()).collect();
    let (rows, layout) = (CpuTensor::F32(rows), RowLayout::token_major(run.tokens(), cache.shape(0)?));
    block_on(cache.reserve_for_append(&[run]))?;
    cache.begin_append(&[run])?;
    for layer in 0..LAYERS {
        block_on(cache.store(layer, layout, &rows, &rows))?;
    }
    cache.commit()
}

/// A sound input: the number of a recipe, and the bytes of a sequence.
///
/// # Panics
/// When a cache refuses what it should not.
pub fn sound(recipe: usize) -> Vec<u8> {
    let mut cache = cache(recipe);
    append(&mut cache, TokenRun::chunk(0, 140)).expect("there is room");
    let swapped = block_on(cache.swap_out(0)).expect("a sequence of the cache");
    let bytes = block_on(cache.swapped_to_bytes(&swapped)).expect("host memory");
    [vec![recipe as u8], bytes].concat()
}

/// Reads a sequence, the checksum mended, and uses it. Says whether it was one.
///
/// # Panics
/// When a sequence that was taken in cannot be read or removed.
pub fn enters(bytes: &[u8]) -> bool {
    let Some((&recipe, bytes)) = bytes.split_first() else { return false };
    let (mut cache, mut bytes) = (cache(usize::from(recipe)), bytes.to_vec());
    write_checksum(&mut bytes);
    let Ok(swapped) = block_on(cache.swapped_from_bytes(&bytes)) else { return false };
    if block_on(cache.swap_in(0, &swapped)).is_err() {
        return false;
    }
    // It may be as long as a sequence may be, or fill the memory.
    if append(&mut cache, TokenRun::decode(0)).is_err() {
        cache.abandon();
    }
    let _ = block_on(cache.pack_windows(0));
    if cache.begin_attend(&[QueryRun::decode(0)]).is_ok() {
        let queries = CpuTensor::F32(vec![0.5; 2 * 64]);
        let _ = block_on(cache.attend(LAYERS - 1, &queries, ElementType::F32));
        cache.abandon();
    }
    for layer in 0..LAYERS {
        cache.dequantize(layer, 0).expect("a sequence of the cache");
    }
    let length = cache.length(0).expect("a sequence of the cache");
    let _ = cache.truncate(0, length / 2);
    cache.clear(0).expect("a sequence of the cache");
    assert_eq!(cache.memory().in_use_bytes(), 0, "a sequence that is gone holds pages");
    true
}
