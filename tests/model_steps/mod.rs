//! Steps of a whole model, and the same on the CPU: sequences join and leave, chunks run beside single tokens, windows fill.
#![allow(dead_code, reason = "every test takes what it needs")]

use kvpack::AttentionShape;
use kvpack::backend::Backend;
use kvpack::cache::{ModelCache, ModelRecipe, Recipe, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor, nmse};
use kvpack::plan::{ElementType, RowLayout};
use pollster::block_on;

use crate::random_rows::Random;

pub const LAYERS: usize = 3;
pub const SEQUENCES: usize = 3;
/// Rows of the engine's tensors.
pub const ROWS: usize = 12;
/// Steps of a test.
pub const STEPS: usize = 160;

/// Tokens that stay, that are packed as they arrive, and that are packed by windows, with calibrated scores and with a sink.
pub const RECIPES: [&str; 4] = ["f16", "saw-int4", "calibquant:2+window=1", "kivi:2+window=0+sink=128"];

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
    [2, 2, 4, 4].map(|heads| ROWS * heads * 64)
}

/// From this step on all sequences decode, and none joins or leaves.
pub const STEADY: usize = 100;

/// What step `step` appends.
pub fn runs(step: usize) -> Vec<TokenRun> {
    let decodes = |s: &usize| step >= STEADY || (step + s) % 4 != 3;
    let mut runs: Vec<TokenRun> = (0..SEQUENCES).filter(decodes).map(TokenRun::decode).collect();
    if let (10, true, Some(last)) = (step % 50, step < STEADY, runs.last_mut()) {
        *last = TokenRun::chunk(last.sequence(), 9);
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

/// Keys, values and queries of every layer.
pub type Inputs = Vec<[Vec<f32>; 3]>;

pub fn inputs(random: &mut Random) -> Inputs {
    let [keys, values, queries, _] = tensor_elements();
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
