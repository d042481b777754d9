//! Operations on a cache of the CPU backend, read from bytes, and what must hold after each.

use kvpack::backend::Device;
use kvpack::cache::{KvCache, ModelRecipe, PromptSpan};
use kvpack::cpu::{Cpu, CpuTensor, DenseSegment, exact_attention, nmse};
use kvpack::plan::{ElementType, RowLayout, TokenRange};
use kvpack::{AttentionShape, Error};
use pollster::block_on;

/// Sequences of the cache.
const SEQUENCES: usize = 3;
/// Most tokens that a sequence gets.
const MOST_TOKENS: usize = 700;
/// Most operations that are run.
const MOST_OPERATIONS: usize = 40;
/// What all stores may hold, so that calls fail for memory too.
const MEMORY_LIMIT: u64 = 1 << 20;
/// What attention over the stored tokens may be off by.
const MOST_NMSE: f64 = 1e-6;

/// Recipes whose windows and sinks no sequence fills.
const BOUNDLESS: [&str; 2] = ["kivi:2+window=18446744073709551615", "calibquant:2+window=0+sink=18446744073709551615"];

/// Runs operations: the first byte chooses the recipe, then three bytes each are an operation, a sequence and a number.
///
/// # Panics
/// When a call that failed changed a length, a length is not what it should be, or attention is not that over
/// the stored tokens.
pub fn cache(bytes: &[u8]) -> bool {
    let Some((&first, operations)) = bytes.split_first() else { return false };
    let shape = AttentionShape::new(4, 2, 64).expect("a shape with kernels");
    let mut recipes = ModelRecipe::all();
    recipes.extend(BOUNDLESS.map(|text| text.parse().expect("a recipe")));
    let recipe = recipes[usize::from(first) % recipes.len()].layer(0, &shape);
    let backend = Cpu::new().with_memory_limit(MEMORY_LIMIT).with_max_shard_bytes(1 << 16);
    let mut cache = KvCache::new(backend, shape, SEQUENCES, recipe).expect("every method fits head_dim 64");
    let mut lengths = [0; SEQUENCES];
    for operation in operations.as_chunks::<3>().0.iter().take(MOST_OPERATIONS) {
        let (sequence, number) = (usize::from(operation[1]) % (SEQUENCES + 1), usize::from(operation[2]));
        let mut wanted = lengths;
        let done = run(&mut cache, operation[0], sequence, number, &mut wanted);
        if let Ok(()) = done {
            lengths = wanted;
        }
        for (sequence, &length) in lengths.iter().enumerate() {
            assert_eq!(cache.tokens(sequence), Ok(length), "after {operation:?}: {done:?}");
        }
        let memory = cache.memory();
        assert!(memory.allocated_bytes() <= MEMORY_LIMIT && memory.in_use_bytes() <= memory.allocated_bytes());
    }
    (0..SEQUENCES).filter(|&sequence| lengths[sequence] > 0).for_each(|sequence| attend(&cache, sequence));
    true
}

/// Runs one operation; `lengths` become what they must be if it succeeds.
fn run(
    cache: &mut KvCache<Cpu>,
    operation: u8,
    sequence: usize,
    number: usize,
    lengths: &mut [usize; SEQUENCES],
) -> Result<(), Error> {
    let length = lengths.get(sequence).copied().unwrap_or(0);
    let other = number % SEQUENCES;
    match operation % 7 {
        0 => {
            let tokens = (3 * number).min(MOST_TOKENS - length);
            let (rows, keys, values) = rows(cache.shape(), tokens, operation);
            let middle = tokens / 2;
            let mut spans = Vec::new();
            if middle > 0 {
                spans.push(PromptSpan::packed(TokenRange::new(0, middle)?));
            }
            if tokens > middle {
                spans.push(PromptSpan::f16(TokenRange::new(middle, tokens)?));
            }
            block_on(cache.prefill(sequence, rows, &keys, &values, &spans))?;
            lengths[sequence] += tokens;
        }
        1 => {
            let tokens = number.min(MOST_TOKENS - length);
            let (rows, keys, values) = rows(cache.shape(), tokens, operation);
            block_on(cache.extend(sequence, rows, &keys, &values))?;
            lengths[sequence] += tokens;
            // It may fail for memory, and keeps its tokens then.
            let _ = block_on(cache.pack_windows(sequence));
        }
        2 => {
            let tokens = usize::from(length < MOST_TOKENS);
            let (rows, keys, values) = rows(cache.shape(), tokens, operation);
            block_on(cache.append_to(&[sequence], rows, &keys, &values))?;
            lengths[sequence] += tokens;
        }
        3 => {
            let tokens = if number.is_multiple_of(4) { number / 4 * 128 } else { length * number / 255 };
            cache.truncate(sequence, tokens)?;
            lengths[sequence] = tokens;
        }
        4 => {
            cache.fork(sequence, other)?;
            lengths[other] = length;
        }
        5 => {
            cache.clear(sequence)?;
            lengths[sequence] = 0;
        }
        _ => {
            if sequence < SEQUENCES && length > 0 {
                attend(cache, sequence);
            }
        }
    }
    Ok(())
}

/// Keys and values of this many tokens.
fn rows(shape: &AttentionShape, tokens: usize, seed: u8) -> (RowLayout, CpuTensor, CpuTensor) {
    let elements = tokens * shape.kv_heads() * shape.head_dim();
    let wave = |rate: f32| {
        (0..elements).map(|i| (i as f32 * rate + f32::from(seed)).sin() * (1.0 + (i % 7) as f32)).collect::<Vec<f32>>()
    };
    (RowLayout::token_major(tokens, shape), CpuTensor::F32(wave(0.37)), CpuTensor::F32(wave(0.53)))
}

/// Compares attention of a sequence that has tokens with exact attention over its stored keys and values.
fn attend(cache: &KvCache<Cpu>, sequence: usize) {
    let shape = *cache.shape();
    let query: Vec<f32> = (0..shape.query_heads() * shape.head_dim()).map(|i| (i as f32 * 0.71).cos()).collect();
    let output = block_on(cache.attend_to(&[sequence], &CpuTensor::F32(query.clone()), ElementType::F32));
    let output = block_on(cache.backend().download(&output.expect("a sequence with tokens"))).expect("host memory");
    let stored = cache.dequantize(sequence).expect("a sequence of the cache");
    let dense: Vec<_> = stored.iter().map(|span| (span.tokens, span.keys.to_f32(), span.values.to_f32())).collect();
    let segments: Vec<DenseSegment<'_>> = dense
        .iter()
        .map(|(tokens, keys, values)| DenseSegment { keys, values, tokens: *tokens, calibration: None })
        .collect();
    let exact = exact_attention(&shape, &segments, &query).expect("rows of the shape");
    let error = nmse(&output, &exact.outputs);
    assert!(error <= MOST_NMSE, "NMSE {error}");
}
