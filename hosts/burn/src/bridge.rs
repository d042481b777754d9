//! A check of the bridge between burn and kvpack. A decode loop of burn attends with kvpack on the same wgpu device. Its
//! outputs are compared with burn's own attention.
//!
//! Two sequences get prompts of their own, then a token each in every step, through layers that follow on each other.
//! The program fails where an output is too far from burn's attention in f32, over the keys and values as they were
//! and over what the cache holds of them, where kvpack takes more than one submission for a layer, or where it waits
//! for the device.

use burn::tensor::{DType, Device, Tensor, TensorData};
use kvpack::AttentionShape;
use kvpack::backend::Device as _;
use kvpack::cache::{ModelCache, ModelRecipe, PromptSpan, Recipe, TokenRun};
use kvpack::plan::{ElementType, RowLayout, TokenRange};
use kvpack::wgpu::{LayerTensors, ModelStep, Wgpu};
use pollster::block_on;

use crate::projections::{HIDDEN, History, Layer, nmse, normal};
use crate::trace::Calls;
use crate::{Result, attention, trace};

const LAYERS: usize = 3;
const PROMPTS: [usize; 2] = [200, 77];
/// Steps of the loop. Both sequences fill a tile of 128 tokens in them, which recipes with a residual window then pack.
const STEPS: usize = 60;
/// Steps from one comparison of outputs to the next.
const CHECKED: usize = 15;
/// Whether burn times its kernels, which submits each candidate alone. Then nobody counts what cubecl submits.
const TUNES: bool = cfg!(feature = "studies");

/// A recipe, and the largest errors: against attention over keys and values as they were, and over what the cache
/// holds. On data without structure, the first is about that of the format; the second is that of queries of one byte
/// where there are such.
struct Case {
    recipe: &'static str,
    of: DType,
    exact: f64,
    stored: f64,
}

const CASES: [Case; 4] = [
    Case { recipe: "f16", of: DType::F32, exact: 5e-7, stored: 2e-7 },
    Case { recipe: "f16", of: DType::F16, exact: 5e-7, stored: 5e-7 },
    Case { recipe: "saw-int4", of: DType::F32, exact: 0.03, stored: 1e-4 },
    Case { recipe: "kivi:4+window=0", of: DType::F32, exact: 0.02, stored: 1e-4 },
];

/// A model whose attention is kvpack's.
struct Hosted<'a> {
    shape: AttentionShape,
    layers: &'a [Layer],
    cache: ModelCache<Wgpu>,
    steps: ModelStep,
    /// What burn itself would keep, by layer and sequence.
    dense: Vec<Vec<History>>,
}

/// What came of a step.
struct Stepped {
    outputs: Vec<Tensor<2>>,
    /// The queries of every layer.
    queries: Vec<Tensor<2>>,
}

impl<'a> Hosted<'a> {
    fn new(backend: &Wgpu, shape: AttentionShape, recipe: Recipe, of: DType, layers: &'a [Layer]) -> Result<Self> {
        let cache = ModelCache::new(backend, &vec![(shape, recipe.clone()); LAYERS], PROMPTS.len())?;
        // Layers run one after the other, and so they share the tensors that kvpack's kernels read and write.
        let of = if of == DType::F16 { ElementType::F16 } else { ElementType::F32 };
        let tensors = vec![LayerTensors::zeroed(backend.device(), &shape, PROMPTS.len(), of)?; LAYERS];
        let steps = ModelStep::new(backend, RowLayout::token_major(PROMPTS.len(), &shape), tensors)?;
        Ok(Self { shape, layers, cache, steps, dense: Vec::new() })
    }

    /// The prompts of all sequences, as rows of hidden channels that every layer gets.
    fn prefill(&mut self, prompts: &[Tensor<2>]) -> Result<()> {
        self.dense = self.layers.iter().map(|_| Vec::new()).collect();
        for (sequence, hidden) in prompts.iter().enumerate() {
            let tokens = hidden.dims()[0];
            let spans = [PromptSpan::packed(TokenRange::new(0, tokens)?)];
            block_on(self.cache.reserve_for_prefill(&spans))?;
            self.cache.begin_prefill(sequence, tokens, &spans)?;
            for (number, (layer, dense)) in self.layers.iter().zip(&mut self.dense).enumerate() {
                let [_, keys, values] = layer.project(hidden);
                let (k, v) = (attention::lend(&keys)?, attention::lend(&values)?);
                let rows = RowLayout::token_major(tokens, &self.shape);
                block_on(self.cache.store_prompt(number, rows, &k, &v, &spans))?;
                let mut history = History::default();
                history.append(keys, values);
                dense.push(history);
            }
            self.cache.commit()?;
        }
        Ok(())
    }

    /// A token of every sequence.
    fn step(&mut self, mut hidden: Tensor<2>) -> Result<Stepped> {
        let runs: Vec<TokenRun> = (0..PROMPTS.len()).map(TokenRun::decode).collect();
        block_on(self.cache.reserve_for_append(&runs))?;
        self.cache.begin_append(&runs)?;
        let open = self.cache.open_steps()?;
        let step = self.steps.write(&open)?;
        let (mut outputs, mut projected) = (Vec::new(), Vec::new());
        for (number, layer) in self.layers.iter().enumerate() {
            let [queries, keys, values] = layer.project(&hidden);
            let output = attention::attend(&step, number, [&queries, &keys, &values])?;
            hidden = layer.after(hidden, output.clone());
            outputs.push(output);
            projected.push([queries, keys, values]);
        }
        drop(open);
        self.cache.commit()?;
        let mut queries = Vec::new();
        for (dense, [q, keys, values]) in self.dense.iter_mut().zip(projected) {
            for (sequence, history) in dense.iter_mut().enumerate() {
                history.append(row(&keys, sequence), row(&values, sequence));
            }
            queries.push(q);
        }
        Ok(Stepped { outputs, queries })
    }

    /// The largest error of a layer against burn's attention over keys and values as they were.
    fn exact_error(&self, step: &Stepped) -> Result<f64> {
        self.largest_error(step, |layer, sequence| {
            Ok(self.dense[layer][sequence].attend(&self.shape, row(&step.queries[layer], sequence)))
        })
    }

    /// The same over what the cache holds.
    fn stored_error(&self, step: &Stepped) -> Result<f64> {
        self.largest_error(step, |layer, sequence| {
            let queries = row(&step.queries[layer], sequence);
            Ok(self.stored(layer, sequence, &queries.device())?.attend(&self.shape, queries))
        })
    }

    fn largest_error(&self, step: &Stepped, expected: impl Fn(usize, usize) -> Result<Tensor<2>>) -> Result<f64> {
        let mut largest = 0f64;
        for (layer, output) in step.outputs.iter().enumerate() {
            let rows = (0..PROMPTS.len()).map(|sequence| expected(layer, sequence)).collect::<Result<Vec<_>>>()?;
            let error = nmse(output, &Tensor::cat(rows, 0))?;
            largest = larger(largest, error);
        }
        Ok(largest)
    }

    /// What the cache holds of a sequence, as burn would.
    fn stored(&self, layer: usize, sequence: usize, device: &Device) -> Result<History> {
        let mut history = History::default();
        for span in self.cache.dequantize(layer, sequence)? {
            let rows = |tensor| -> Result<Tensor<2>> {
                let rows = block_on(self.cache.backend().download(tensor))?;
                let (heads, head_dim) = (self.shape.kv_heads(), self.shape.head_dim());
                let rows = Tensor::<3>::from_data(TensorData::new(rows, [heads, span.tokens, head_dim]), device);
                Ok(rows.swap_dims(0, 1).reshape([span.tokens, heads * head_dim]))
            };
            history.append(rows(&span.keys)?, rows(&span.values)?);
        }
        Ok(history)
    }
}

/// The larger of two errors: NaN if one of them is, which `f64::max` would drop.
const fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

const _: () = assert!(larger(larger(0.0, f64::NAN), 1.0).is_nan() && larger(larger(0.0, 2.0), 1.0) == 2.0);

fn row(rows: &Tensor<2>, at: usize) -> Tensor<2> {
    rows.clone().slice([at..at + 1])
}

/// Runs a case and tells what came of it. False where it failed.
fn run(device: &Device, backend: &Wgpu, case: &Case) -> Result<bool> {
    let shape = AttentionShape::new(8, 2, 64)?;
    let recipe = case.recipe.parse::<ModelRecipe>()?.layer(0, &shape);
    device.seed(7);
    let layers: Vec<Layer> = (0..LAYERS).map(|_| Layer::new(device, case.of, &shape)).collect();
    let mut hosted = Hosted::new(backend, shape, recipe, case.of, &layers)?;
    let hidden = |rows| normal(device, case.of, [rows, HIDDEN], 1.0);
    hosted.prefill(&PROMPTS.map(hidden))?;

    let (mut exact, mut cubecl_waits) = (0f64, 0);
    let mut last = None;
    for step in 0..STEPS {
        let hidden = hidden(PROMPTS.len());
        let (stepped, counted) = trace::counted(|| hosted.step(hidden));
        let stepped = stepped?;
        let one_a_layer = Calls { submissions: LAYERS, waits: 0 };
        if counted.of_kvpack != one_a_layer || !TUNES && counted.of_cubecl.submissions > LAYERS {
            return Err(format!("step {step}: one submission a layer was expected, and no wait: {counted:?}").into());
        }
        cubecl_waits += counted.of_cubecl.waits;
        if (step + 1) % CHECKED == 0 {
            let error = hosted.exact_error(&stepped)?;
            exact = larger(exact, error);
        }
        last = Some(stepped);
    }
    let stored = last.map_or(Ok(f64::NAN), |last| hosted.stored_error(&last))?;
    let passed = exact <= case.exact && stored <= case.stored;
    println!(
        "{} of {:?}: NMSE {exact:.1e} against burn's attention (at most {:.0e}), {stored:.1e} over the stored data (at most {:.0e}): {}; \
         kvpack submits {LAYERS} times a step and never waits; {}",
        case.recipe,
        case.of,
        case.exact,
        case.stored,
        if passed { "ok" } else { "FAILED" },
        match TUNES {
            true => "cubecl's submissions are not counted, as it times its kernels".to_owned(),
            false => format!("cubecl submits as often, and waited {cubecl_waits} times in {STEPS} steps"),
        },
    );
    Ok(passed)
}

/// Runs all cases. False where one failed.
pub fn check(device: &Device, backend: &Wgpu) -> Result<bool> {
    let lines = attention::lines();
    println!("{lines} lines of integration");
    let mut passed = lines <= 32;
    for case in &CASES {
        passed &= run(device, backend, case)?;
    }
    Ok(passed)
}
