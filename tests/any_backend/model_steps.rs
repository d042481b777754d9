//! Steps of a whole model, and the same on the CPU: sequences join and leave, chunks run beside single
//! tokens, windows fill.

use kvpack::AttentionShape;
use kvpack::backend::{Backend, SpanBytes, SpanPlace};
use kvpack::cache::{ModelCache, ModelRecipe, Recipe, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor, nmse};
use kvpack::plan::{ElementType, Page, RowLayout};
use pollster::block_on;

use crate::random_rows::Random;

pub const LAYERS: usize = 3;
pub const SEQUENCES: usize = 3;
/// Rows of the engine's tensors.
pub const ROWS: usize = 12;
/// Steps of a test.
pub const STEPS: usize = 160;

/// Tokens that stay, that are packed as they arrive, and that are packed by windows, with calibrated scores
/// and with a sink.
pub const RECIPES: [&str; 8] = [
    "f16",
    "saw-int4",
    "calibquant:2",
    "calibquant:2+window=1",
    "kivi:2+window=0+sink=128",
    CENTRED[0],
    CENTRED[1],
    CENTRED[2],
];

/// The same where keys are stored less a centre, which sequences get within the step that they begin with.
pub const CENTRED: [&str; 3] = ["f16+centre", "saw-int4+centre", "saw-int4+window=1+centre"];

pub fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

pub fn recipe(text: &str) -> Recipe {
    text.parse::<ModelRecipe>().unwrap().layer(0, &shape())
}

/// An empty cache of the layers.
pub fn cache<B: Backend + Clone>(backend: &B, recipe: &Recipe) -> ModelCache<B> {
    ModelCache::new(backend, &vec![(shape(), recipe.clone()); LAYERS], SEQUENCES).unwrap()
}

/// Elements of keys, values, queries and output of the engine.
pub fn tensor_elements() -> [usize; 4] {
    elements_of(ROWS)
}

/// With so many rows.
pub fn elements_of(rows: usize) -> [usize; 4] {
    [2, 2, 4, 4].map(|heads| rows * heads * 64)
}

/// From this step on all sequences decode, and none joins or leaves.
pub const STEADY: usize = 100;

/// What step `step` appends.
pub fn runs(step: usize) -> Vec<TokenRun> {
    let decodes = |s: &usize| step >= STEADY || (step + s) % 4 != 3;
    let mut runs: Vec<TokenRun> = (0..SEQUENCES).filter(decodes).map(TokenRun::decode).collect();
    if let (10 | 30, true, Some(last)) = (step % 50, step < STEADY, runs.last_mut()) {
        let run = if step % 50 == 10 { TokenRun::chunk } else { TokenRun::prompt };
        *last = run(last.sequence(), 9);
    }
    // The one that left begins again.
    if let Some(again) = runs.iter_mut().find(|run| step == 91 && run.sequence() == 1) {
        *again = TokenRun::prompt(1, 9);
    }
    runs
}

/// The sequence that leaves before step `step`.
pub fn leaves(step: usize) -> Option<usize> {
    (step == 90).then_some(1)
}

/// Steps whose batches take turns: one sequence, two, and a chunk beside one.
pub const ALTERNATING: usize = 42;

pub fn alternating(step: usize) -> Vec<TokenRun> {
    match step % 3 {
        0 => vec![TokenRun::decode(0)],
        1 => vec![TokenRun::decode(0), TokenRun::decode(1)],
        _ => vec![TokenRun::decode(0), TokenRun::chunk(2, 3)],
    }
}

/// Steps in which sequences of a centred recipe begin beside others that decode: with a token, with several, and with
/// more than make a centre; and begin again, beside one that shares the centre and the open page of another.
pub fn beginning(step: usize) -> Vec<TokenRun> {
    match step {
        0 => vec![TokenRun::chunk(1, 5)],
        2 => vec![TokenRun::decode(1), TokenRun::decode(0), TokenRun::chunk(2, 100)],
        5 => vec![TokenRun::chunk(0, 70), TokenRun::chunk(2, 3), TokenRun::decode(1)],
        _ => (0..SEQUENCES).filter(|s| step > 1 || *s == 1).map(TokenRun::decode).collect(),
    }
}

/// How many steps that is, and what is done to a cache before one of them.
pub const BEGINNING: usize = 8;

pub fn before_beginning<B: Backend>(cache: &mut ModelCache<B>, step: usize) {
    if step == 5 {
        [0, 2].into_iter().for_each(|sequence| cache.clear(sequence).unwrap());
        cache.fork(1, 2).unwrap();
    }
}

/// Rows of tensors for these steps.
pub const BEGINNING_ROWS: usize = 102;

/// The step as an engine has it stored that submits it layer by layer.
pub fn submit<B: Backend>(cache: &mut ModelCache<B>, runs: &[TokenRun], inputs: &Inputs) {
    let tokens: usize = runs.iter().map(TokenRun::tokens).sum();
    block_on(cache.reserve_for_append(runs)).unwrap();
    cache.begin_append(runs).unwrap();
    for (layer, [keys, values, _]) in inputs.iter().enumerate() {
        let upload = |rows: &[f32]| block_on(cache.backend().upload(rows[..tokens * 2 * 64].into())).unwrap();
        let (keys, values) = (upload(keys), upload(values));
        block_on(cache.store(layer, RowLayout::token_major(tokens, &shape()), &keys, &values)).unwrap();
    }
    cache.commit().unwrap();
}

/// All pages and centres of all layers of a centred recipe, as the backend stores them.
pub fn held<B: Backend>(cache: &ModelCache<B>) -> Vec<SpanBytes> {
    let mut held = Vec::new();
    for layer in 0..LAYERS {
        let layout = cache.step_kind(layer).unwrap().layout.clone();
        for (store, of) in cache.stores(layer).unwrap().into_iter().zip(layout.stores()) {
            let read = |place| block_on(cache.backend().read_spans(&[(store, place)])).unwrap().remove(0);
            let shards = of.shard_pages.iter().enumerate();
            let pages: Vec<Page> = shards
                .flat_map(|(shard, &pages)| (0..pages).map(move |index| Page { shard: shard as u32, index }))
                .collect();
            held.push(read(SpanPlace { pages: &pages, ..SpanPlace::default() }));
        }
    }
    held.extend(centres(cache));
    held
}

/// All centres of all layers, in f32 on every backend.
pub fn centres<B: Backend>(cache: &ModelCache<B>) -> Vec<SpanBytes> {
    let mut centres = Vec::new();
    for layer in 0..LAYERS {
        for store in cache.stores(layer).unwrap() {
            for slot in 0..SEQUENCES {
                let place = SpanPlace { centre: Some(slot), ..SpanPlace::default() };
                centres.push(block_on(cache.backend().read_spans(&[(store, place)])).unwrap().remove(0));
            }
        }
    }
    centres
}

/// Keys, values and queries of every layer.
pub type Inputs = Vec<[Vec<f32>; 3]>;

pub fn inputs(random: &mut Random) -> Inputs {
    inputs_of(random, ROWS)
}

/// For so many rows.
pub fn inputs_of(random: &mut Random, rows: usize) -> Inputs {
    let [keys, values, queries, _] = elements_of(rows);
    (0..LAYERS)
        .map(|_| [keys, values, queries].map(|elements| (0..elements).map(|_| random.normal()).collect()))
        .collect()
}

/// The step on the CPU, against the outputs of the engine by layer.
pub fn compare(twin: &mut ModelCache<Cpu>, runs: &[TokenRun], inputs: &Inputs, outputs: &[Vec<f32>]) {
    let tokens: usize = runs.iter().map(TokenRun::tokens).sum();
    block_on(twin.reserve_for_append(runs)).unwrap();
    twin.begin_append(runs).unwrap();
    for (layer, ([keys, values, queries], output)) in inputs.iter().zip(outputs).enumerate() {
        let taken = |elements: &[f32], heads: usize| CpuTensor::F32(elements[..tokens * heads * 64].to_vec());
        let rows = RowLayout::token_major(tokens, &shape());
        block_on(twin.store(layer, rows, &taken(keys, 2), &taken(values, 2))).unwrap();
        let expected = block_on(twin.attend(layer, &taken(queries, 4), ElementType::F32)).unwrap();
        let expected: Vec<f64> = expected.to_f32().into_iter().map(f64::from).collect();
        let error = nmse(&output[..expected.len()], &expected);
        assert!(error < 1e-3, "layer {layer}, {runs:?}: {error:.1e}");
    }
    twin.commit().unwrap();
}
