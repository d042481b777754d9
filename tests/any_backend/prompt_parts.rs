//! Parts of prompts: their queries see them in f16, and the step that stores them packs them; for any backend.

use kvpack::AttentionShape;
use kvpack::backend::Backend;
use kvpack::cache::{Appended, ModelCache, PromptSpan, Recipe, StoreId, StoreRoom, StoredSpan, TokenRun};
use kvpack::cpu::{DenseSegment, exact_attention, nmse};
use kvpack::plan::{ElementType, RowLayout, TokenRange};
use pollster::block_on;

use crate::model_steps;
use crate::random_rows::Random;

/// Rules for appended tokens, with sinks and centres.
pub const RECIPES: [&str; 8] = [
    "f16",
    "int8",
    "saw-int4+sink=40",
    "saw-int4+centre+sink=128",
    "kivi:2",
    "calibquant:2",
    "calibquant:1+sink=150",
    "calibquant:2+window=128",
];

/// Of these parts become spans of the first packed store.
pub const KEEPING: [&str; 2] = ["cocktail", "cocktail+sink=150"];

/// One of every rule.
pub const RULES: [&str; 4] = ["saw-int4+sink=40", "saw-int4+centre+sink=128", "kivi:2", "calibquant:1+sink=150"];

/// Parts of several prompts beside tokens that decode: of whole pages, across borders of pages and of the sink, of one
/// token.
fn steps() -> Vec<Vec<TokenRun>> {
    let (part, decode) = (TokenRun::prompt, TokenRun::decode);
    vec![
        vec![part(0, 200)],
        vec![part(0, 128), decode(1)],
        vec![decode(0), part(1, 300)],
        vec![part(0, 1), decode(1)],
        vec![part(1, 57), part(0, 70)],
        vec![decode(0), decode(1)],
    ]
}

const LAYERS: usize = 2;

fn tokens_of(runs: &[TokenRun]) -> usize {
    runs.iter().map(TokenRun::tokens).sum()
}

/// Keys, values and queries of a step, by layer.
struct Step {
    runs: Vec<TokenRun>,
    layers: Vec<[Vec<f32>; 3]>,
}

impl Step {
    fn new(runs: Vec<TokenRun>, shape: &AttentionShape, random: &mut Random) -> Self {
        let heads = [shape.kv_heads(), shape.kv_heads(), shape.query_heads()];
        let tokens = tokens_of(&runs);
        let mut rows = |heads: usize| (0..tokens * heads * shape.head_dim()).map(|_| random.normal()).collect();
        Self { layers: (0..LAYERS).map(|_| heads.map(&mut rows)).collect(), runs }
    }

    fn rows(&self, shape: &AttentionShape) -> RowLayout {
        RowLayout::token_major(tokens_of(&self.runs), shape)
    }
}

/// A cache and the same recipe filled in the ways that were there before parts of prompts.
struct Pair<B: Backend> {
    backend: B,
    recipe: Recipe,
    cache: ModelCache<B>,
    twin: ModelCache<B>,
}

/// Goes through all steps with one recipe. Outputs differ from f64 over what the step holds by no more than `limit`.
pub fn check<B: Backend + Clone>(backend: &B, recipe: &str, limit: f64) {
    check_recipe(backend, (recipe, &model_steps::recipe(recipe)), limit);
}

/// The same for a recipe and its name.
pub fn check_recipe<B: Backend + Clone>(backend: &B, (recipe, of): (&str, &Recipe), limit: f64) {
    let (shape, mut random) = (model_steps::shape(), Random::new(5));
    let cache = || ModelCache::new(backend, &vec![(shape, of.clone()); LAYERS], 2).unwrap();
    let mut pair = Pair { backend: backend.clone(), recipe: of.clone(), cache: cache(), twin: cache() };
    for runs in steps() {
        let step = Step::new(runs, &shape, &mut random);
        let before = (0..2).map(|sequence| held(&pair.cache, sequence)).collect::<Vec<_>>();
        let open = pair.store(&step);
        pair.check_outputs(&step, recipe, limit);
        pair.cache.abandon();
        assert_eq!(free(&pair.cache), open.free, "{recipe}: pages of an abandoned step");
        for (sequence, before) in before.iter().enumerate() {
            assert!(held(&pair.cache, sequence) == *before, "{recipe}: what sequence {sequence} held");
        }
        pair.store(&step);
        pair.cache.commit().unwrap();
        pair.append_to_twin(&step);
        for sequence in 0..2 {
            assert!(held(&pair.cache, sequence) == held(&pair.twin, sequence), "{recipe}: {:?}", step.runs);
        }
        // The part of a prompt that is of the sink continues the open page, and a span does not.
        if !pair.packs_spans() || of.sink() == 0 {
            assert_eq!(pages(&pair.cache), pages(&pair.twin), "{recipe}: {:?}", step.runs);
        }
    }
    (0..2).for_each(|sequence| pair.cache.clear(sequence).unwrap());
    assert!(pages(&pair.cache).iter().all(|pages| *pages == 0), "{recipe}: pages that nobody holds");
}

/// Room that was free before a step.
struct Open {
    free: Vec<StoreRoom>,
}

impl<B: Backend + Clone> Pair<B> {
    /// Whether parts become spans of the first packed store.
    fn packs_spans(&self) -> bool {
        self.recipe.packs() && self.recipe.appended() == Appended::Keep
    }

    /// Opens a step in exactly the room that it asks for, and stores its tokens in all layers.
    fn store(&mut self, step: &Step) -> Open {
        let shape = *self.cache.shape(0).unwrap();
        block_on(self.cache.reserve_for_append(&step.runs)).unwrap();
        let free_before = free(&self.cache);
        let needed = self.cache.room_for_append(0, &step.runs).unwrap();
        self.cache.begin_append(&step.runs).unwrap();
        for ((before, needed), now) in free_before.iter().zip(&needed).zip(free(&self.cache)) {
            assert_eq!(now.pages + needed.pages, before.pages, "a step takes the room that it asked for");
        }
        for (layer, [keys, values, _]) in step.layers.iter().enumerate() {
            let upload = |rows: &[f32]| block_on(self.backend.upload(rows.into())).unwrap();
            let (keys, values) = (upload(keys), upload(values));
            block_on(self.cache.store(layer, step.rows(&shape), &keys, &values)).unwrap();
        }
        Open { free: free_before }
    }

    /// Compares what the open step attends to with what it was given, and its outputs with f64.
    fn check_outputs(&self, step: &Step, recipe: &str, limit: f64) {
        let shape = *self.cache.shape(0).unwrap();
        let (row, query_row) = (shape.kv_heads() * shape.head_dim(), shape.query_heads() * shape.head_dim());
        for (layer, [keys, values, queries]) in step.layers.iter().enumerate() {
            let uploaded = block_on(self.backend.upload(queries.as_slice().into())).unwrap();
            let outputs = block_on(self.cache.attend(layer, &uploaded, ElementType::F32)).unwrap();
            let outputs = block_on(self.backend.download(&outputs)).unwrap();
            let mut first = 0;
            for run in &step.runs {
                let [held_keys, held_values] = held_in(&self.cache, layer, run.sequence());
                let tokens = held_keys.len() / row;
                let (last, new) = (first + run.tokens(), tokens - run.tokens());
                if *run == TokenRun::prompt(run.sequence(), run.tokens()) {
                    for (held, given) in [(&held_keys, keys), (&held_values, values)] {
                        let given: Vec<f64> = given[first * row..last * row].iter().map(|&x| x.into()).collect();
                        let error = nmse(&held[new * row..], &given);
                        assert!(error < 1e-6, "{recipe}: {run:?} is not seen in f16: {error:.1e}");
                    }
                }
                // Every 23rd query and the last.
                for query in (0..run.tokens()).filter(|query| query % 23 == 0 || query + 1 == run.tokens()) {
                    let seen = new + query + 1;
                    let [keys, values] = [&held_keys, &held_values].map(|held| head_major(&held[..seen * row], &shape));
                    let segment = DenseSegment { keys: &keys, values: &values, tokens: seen, calibration: None };
                    let at = (first + query) * query_row;
                    let exact = exact_attention(&shape, &[segment], &queries[at..at + query_row]).unwrap();
                    let error = nmse(&outputs[at..at + query_row], &exact.outputs);
                    assert!(error < limit, "{recipe}: query {query} of {run:?} in layer {layer}: {error:.1e}");
                }
                first = last;
            }
        }
    }

    /// The same tokens as chunks, whose windows were packed before, or as spans of a prompt.
    fn append_to_twin(&mut self, step: &Step) {
        let shape = *self.cache.shape(0).unwrap();
        let row = shape.kv_heads() * shape.head_dim();
        let mut first = 0;
        for run in &step.runs {
            let (tokens, sequence) = (run.tokens(), run.sequence());
            let is_part = *run == TokenRun::prompt(sequence, tokens);
            let rows = RowLayout::token_major(tokens, &shape);
            let length = self.twin.length(sequence).unwrap();
            let sink = self.recipe.sink().saturating_sub(length).min(tokens);
            let spans = [(0, sink, StoreId::F16), (sink, tokens, StoreId::PACKED)];
            let spans: Vec<PromptSpan<'_, B::Indices>> = spans
                .into_iter()
                .filter(|(start, end, _)| start < end)
                .map(|(start, end, store)| PromptSpan::run(TokenRange::new(start, end).unwrap(), store))
                .collect();
            let prefills = is_part && self.packs_spans();
            if is_part {
                block_on(self.twin.pack_windows(sequence)).unwrap();
            }
            if prefills {
                block_on(self.twin.reserve_for_prefill(&spans)).unwrap();
                self.twin.begin_prefill(sequence, tokens, &spans).unwrap();
            } else {
                let run = if is_part { TokenRun::chunk(sequence, tokens) } else { *run };
                block_on(self.twin.reserve_for_append(&[run])).unwrap();
                self.twin.begin_append(&[run]).unwrap();
            }
            for (layer, [keys, values, _]) in step.layers.iter().enumerate() {
                let of = |rows: &[f32]| {
                    let rows = rows[first * row..(first + tokens) * row].iter();
                    // Parts are packed from their form in f16.
                    let rows: Vec<f32> =
                        rows.map(|&x| if prefills { half::f16::from_f32(x).into() } else { x }).collect();
                    block_on(self.backend.upload(rows.as_slice().into())).unwrap()
                };
                let (keys, values) = (of(keys), of(values));
                if prefills {
                    block_on(self.twin.store_prompt(layer, rows, &keys, &values, &spans)).unwrap();
                } else {
                    block_on(self.twin.store(layer, rows, &keys, &values)).unwrap();
                }
            }
            self.twin.commit().unwrap();
            first += tokens;
        }
    }
}

fn free<B: Backend>(cache: &ModelCache<B>) -> Vec<StoreRoom> {
    cache.free_room(0).unwrap()
}

/// Pages in use, by store.
fn pages<B: Backend>(cache: &ModelCache<B>) -> Vec<usize> {
    cache.memory().stores().iter().map(|store| store.pages_in_use).collect()
}

/// What a sequence holds in all layers, token by token.
fn held<B: Backend>(cache: &ModelCache<B>, sequence: usize) -> Vec<[Vec<f32>; 2]> {
    (0..LAYERS).map(|layer| held_in(cache, layer, sequence)).collect()
}

/// Keys and values of a sequence in a layer, `[tokens, kv_heads, head_dim]`.
fn held_in<B: Backend>(cache: &ModelCache<B>, layer: usize, sequence: usize) -> [Vec<f32>; 2] {
    let shape = cache.shape(layer).unwrap();
    let mut held = [Vec::new(), Vec::new()];
    for StoredSpan { tokens, keys, values, .. } in cache.dequantize(layer, sequence).unwrap() {
        for (held, rows) in held.iter_mut().zip([keys, values]) {
            let rows = block_on(cache.backend().download(&rows)).unwrap();
            held.extend(swapped(&rows, shape.kv_heads(), tokens, shape.head_dim()));
        }
    }
    held
}

fn head_major(rows: &[f32], shape: &AttentionShape) -> Vec<f32> {
    let tokens = rows.len() / (shape.kv_heads() * shape.head_dim());
    swapped(rows, tokens, shape.kv_heads(), shape.head_dim())
}

/// `[a, b, width]` as `[b, a, width]`.
fn swapped(rows: &[f32], a: usize, b: usize, width: usize) -> Vec<f32> {
    let row = |i: usize, j: usize| &rows[(i * b + j) * width..][..width];
    (0..b).flat_map(|j| (0..a).flat_map(move |i| row(i, j).iter().copied())).collect()
}
