//! Prompts whose layers attend differently, compressed on a backend, and what a cache says of them.

pub mod growing;

use kvpack::backend::{Backend, TensorRows};
use kvpack::cache::{
    DenseLayer, KvCache, MeasuredQueries, ModelCache, ObservedPrompt, PromptSpan, Recipe, SpanPositions, StoreId,
};
use kvpack::cpu::{Cpu, CpuIndices};
use kvpack::plan::{RowLayout, TokenRange};
use kvpack::policy::{Policy, QueryPositions, Selection, Spans};
use kvpack::{AttentionShape, Bits, SegmentFormat};
use pollster::block_on;

use crate::random_rows::Random;

/// A prompt of all layers, dense: 30 tokens of text, an image, 20 tokens of text.
pub struct Prompt {
    pub shape: AttentionShape,
    pub tokens: usize,
    /// `[tokens, query_heads, head_dim]` of each layer.
    pub queries: Vec<Vec<f32>>,
    /// `[tokens, kv_heads, head_dim]` of each layer.
    pub keys: Vec<Vec<f32>>,
    pub values: Vec<Vec<f32>>,
}

impl Prompt {
    /// Layers that attend the more sharply the higher they are, so that they differ in sparsity.
    pub fn new(shape: AttentionShape, layers: usize, tokens: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut rows = |heads: usize, scale: f32| -> Vec<f32> {
            (0..tokens * heads * shape.head_dim()).map(|_| random.normal() * scale).collect()
        };
        let queries = (0..layers).map(|layer| rows(shape.query_heads(), 0.5 + layer as f32)).collect();
        let keys = (0..layers).map(|_| rows(shape.kv_heads(), 1.0)).collect();
        let values = (0..layers).map(|_| rows(shape.kv_heads(), 1.0)).collect();
        Self { shape, tokens, queries, keys, values }
    }

    pub fn layers(&self) -> usize {
        self.keys.len()
    }

    pub fn spans(&self) -> Spans {
        Spans::new(self.tokens, &[TokenRange::new(30, self.tokens - 20).unwrap()]).unwrap()
    }

    pub fn cache<B: Backend + Clone>(&self, backend: &B, recipe: &Recipe) -> ModelCache<B> {
        ModelCache::new(backend, &vec![(self.shape, recipe.clone()); self.layers()], 2).unwrap()
    }

    /// Keys and values of a layer.
    pub fn dense<B: Backend>(&self, backend: &B, layer: usize) -> DenseLayer<B::Tensor> {
        let upload = |rows: &[f32]| block_on(backend.upload(rows.into())).unwrap();
        let rows = RowLayout::token_major(self.tokens, &self.shape);
        DenseLayer { rows, keys: upload(&self.keys[layer]), values: upload(&self.values[layer]) }
    }

    /// The query rows of a layer that are measured, and their layout.
    pub fn measured<B: Backend>(
        &self,
        rows: Option<&QueryPositions>,
        backend: &B,
        layer: usize,
    ) -> Option<(B::Tensor, RowLayout)> {
        let positions = rows?.positions();
        let row = self.shape.query_heads() * self.shape.head_dim();
        let rows: Vec<f32> =
            positions.iter().flat_map(|&at| self.queries[layer][at as usize * row..][..row].to_vec()).collect();
        let query_shape =
            AttentionShape::new(self.shape.query_heads(), self.shape.query_heads(), self.shape.head_dim());
        let layout = RowLayout::token_major(positions.len(), &query_shape.unwrap());
        Some((block_on(backend.upload(rows.as_slice().into())).unwrap(), layout))
    }

    /// Every layer, observed.
    pub fn observe<B: Backend + Clone>(&self, cache: &ModelCache<B>, policy: Policy) -> ObservedPrompt<B> {
        let mut prompt = cache.observe(policy, self.spans()).unwrap();
        for layer in 0..self.layers() {
            self.observe_layer(&mut prompt, cache.backend(), layer).unwrap();
        }
        prompt
    }

    pub fn observe_layer<B: Backend>(
        &self,
        prompt: &mut ObservedPrompt<B>,
        backend: &B,
        layer: usize,
    ) -> kvpack::Result<()> {
        let measured = self.measured(prompt.query_rows(), backend, layer);
        let queries = measured.as_ref().map(|(tensor, layout)| TensorRows { tensor, layout: *layout });
        let queries = queries.map(|queries| MeasuredQueries { queries, known_lse: None });
        prompt.observe(layer, self.dense(backend, layer), queries)
    }
}

/// What a layer holds of a sequence: store, positions, keys and values of each span.
pub type Held = Vec<(StoreId, SpanPositions, Vec<f32>, Vec<f32>)>;

pub fn held<B: Backend + Clone>(cache: &ModelCache<B>, layer: usize, sequence: usize) -> Held {
    let download = |tensor: &B::Tensor| block_on(cache.backend().download(tensor)).unwrap();
    let spans = cache.dequantize(layer, sequence).unwrap();
    let positions = block_on(cache.positions(layer, sequence)).unwrap();
    assert_eq!(spans.len(), positions.len());
    let of = |(span, positions): (&kvpack::cache::StoredSpan<B::Tensor>, SpanPositions)| {
        (span.store, positions, download(&span.keys), download(&span.values))
    };
    spans.iter().zip(positions).map(of).collect()
}

/// Everything that a cache holds of both sequences.
pub fn state<B: Backend + Clone>(cache: &ModelCache<B>) -> (Vec<Held>, Vec<usize>, u64) {
    let layers = (0..cache.layers()).flat_map(|layer| [held(cache, layer, 0), held(cache, layer, 1)]);
    let lengths = (0..2).map(|sequence| cache.length(sequence).unwrap());
    (layers.collect(), lengths.collect(), cache.memory().in_use_bytes())
}

/// The presets at a share of the tokens.
pub fn policies(ratio: f64) -> Vec<(&'static str, Policy)> {
    vec![
        ("vlcache", Policy::vlcache(ratio).unwrap()),
        ("lookm", Policy::lookm(ratio).unwrap()),
        ("h2o", Policy::h2o(ratio).unwrap()),
        ("snapkv", Policy::snapkv(ratio).unwrap()),
        ("pyramidkv", Policy::pyramidkv(ratio).unwrap()),
        ("random", Policy::random(ratio, 7).unwrap()),
        ("streaming", Policy::streaming(4, 60)),
    ]
}

/// Every policy with every recipe, and whether that pair is one for devices: a policy with one of the recipes, so that
/// each recipe is met. What merges has two, the first, which keeps f16, and a packed one. The CPU takes all pairs.
pub fn pairs<'a>(
    policies: &'a [(&'static str, Policy)],
    recipes: &'a [Recipe],
) -> impl Iterator<Item = (&'static str, &'a Policy, &'a Recipe, bool)> {
    policies.iter().enumerate().flat_map(move |(turn, (name, policy))| {
        let is_for_devices = move |at: usize| {
            let merged_in_f16 = at == 0 && policy.merging.is_some();
            merged_in_f16 || at == (turn + 1) % recipes.len()
        };
        recipes.iter().enumerate().map(move |(at, recipe)| (*name, policy, recipe, is_for_devices(at)))
    })
}

/// Positions that a selection keeps in a layer, as a cache says them.
pub fn kept(selection: &Selection, layer: usize) -> Vec<usize> {
    selection.layers()[layer].indices().into_iter().map(|token| token as usize).collect()
}

/// A device keeps what the CPU keeps, but for scores that rounding ranks otherwise; it packs of what it keeps what the
/// CPU packs. Two runs give the same bits. Each policy packs with one recipe or two ([`pairs`]): what the CPU packs is
/// tested with all of them.
///
/// # Panics
/// When it does not.
pub fn check_against_cpu<B: Backend + Clone>(device: &B) {
    let prompt = Prompt::new(AttentionShape::new(4, 2, 64).unwrap(), 3, 300, 11);
    let saw_int4 = || Recipe::pack_all(SegmentFormat::saw_int4());
    let recipes = [Recipe::f16(), saw_int4(), saw_int4().with_centre(), Recipe::calibquant(Bits::Four)];
    let policies = policies(0.2);
    for (name, policy, recipe, _) in pairs(&policies, &recipes).filter(|&(.., is_for_devices)| is_for_devices) {
        let mut on_cpu = prompt.cache(&Cpu::new(), recipe);
        let expected = block_on(on_cpu.compress(0, &prompt.observe(&on_cpu, policy.clone()))).unwrap();
        let run = || {
            let mut cache = prompt.cache(device, recipe);
            let selection = block_on(cache.compress(0, &prompt.observe(&cache, policy.clone()))).unwrap();
            (selection, state(&cache))
        };
        let (selection, (held_by, lengths, bytes)) = run();
        assert!(run() == (selection.clone(), (held_by.clone(), lengths.clone(), bytes)), "{name}: two runs differ");
        assert_eq!(lengths, [300, 0]);
        let mut merged = 0;
        for layer in 0..prompt.layers() {
            let (kept, by_cpu) = (kept(&selection, layer), kept(&expected, layer));
            let shared = kept.iter().filter(|token| by_cpu.contains(token)).count();
            assert!(shared * 100 >= 98 * kept.len().max(by_cpu.len()), "{name}, layer {layer}: {kept:?} {by_cpu:?}");
            let Some((store, positions, keys, values)) = held_by[2 * layer].first() else {
                panic!("{name}: nothing held")
            };
            assert_eq!(positions, &SpanPositions::PerHead(kept.clone()));
            match policy.merging {
                // Sums in f32 may round otherwise; what is merged depends on all that is kept.
                Some(_) if kept == by_cpu => {
                    let (_, _, cpu_keys, cpu_values) = held(&on_cpu, layer, 0).remove(0);
                    compare_merged(keys, &cpu_keys, recipe.packs());
                    compare_merged(values, &cpu_values, recipe.packs());
                    merged += 1;
                }
                Some(_) => {}
                None => {
                    let (cpu_keys, cpu_values) = gathered_on_cpu(&prompt, recipe, layer, &kept, *store);
                    assert!(keys == &cpu_keys && values == &cpu_values, "{name}, layer {layer}");
                }
            }
        }
        assert!(policy.merging.is_none() || merged > 0, "{name}: no layer kept the same tokens, and none was compared");
    }
}

/// What the CPU stores of these tokens.
fn gathered_on_cpu(
    prompt: &Prompt,
    recipe: &Recipe,
    layer: usize,
    kept: &[usize],
    store: StoreId,
) -> (Vec<f32>, Vec<f32>) {
    let mut cache = KvCache::new(Cpu::new(), prompt.shape, 1, recipe.clone()).unwrap();
    let tokens: Vec<u32> = kept.iter().map(|&token| token as u32).collect();
    let indices = CpuIndices::new(&tokens, prompt.shape.kv_heads(), prompt.tokens as u32).unwrap();
    let DenseLayer { rows, keys, values } = prompt.dense(cache.backend(), layer);
    block_on(cache.prefill(0, rows, &keys, &values, &[PromptSpan::gather(&indices, store)])).unwrap();
    let span = cache.dequantize(0).unwrap().remove(0);
    (span.keys.to_f32(), span.values.to_f32())
}

/// A code may fall to the other side where sums round otherwise: few do, and by one step.
fn compare_merged(device: &[f32], cpu: &[f32], packed: bool) {
    let differ = |limit: f32| device.iter().zip(cpu).filter(|(x, y)| (*x - *y).abs() > limit).count();
    assert_eq!(device.len(), cpu.len());
    assert_eq!(differ(if packed { 0.5 } else { 2e-3 }), 0);
    assert!(differ(2e-3) <= device.len() / 100, "{} of {} elements differ", differ(2e-3), device.len());
}
