//! Prompts of policies and mixtures, appended part by part in f16 while their attention is measured, against prompts
//! that are brought whole, and against attention in f64.

use kvpack::backend::{Backend, TensorRows};
use kvpack::cache::{
    ChunkStores, ModelCache, ModelRecipe, ObservedParts, PartQueries, PromptSpan, Recipe, StoreId, TokenRun,
};
use kvpack::cpu::{Cpu, DenseSegment, exact_attention, nmse};
use kvpack::plan::{ElementType, RowLayout, TokenRange};
use kvpack::policy::{HeadAggregation, Policy, ScoreRule};
use kvpack::{AttentionShape, Bits, Result, SegmentFormat};
use pollster::block_on;

use super::compressed::{Prompt, held, kept, policies};
use super::random_rows::Random;

pub const LAYERS: usize = 3;
/// Tokens of the prompt, and its parts: the rows that most policies measure lie in two of them.
pub const TOKENS: usize = 300;
pub const PARTS: [usize; 4] = [128, 100, 60, 12];
/// Rows of the largest step: a part, and a token of another sequence before it.
pub const ROWS: usize = 129;

pub fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

/// The layout of queries.
pub fn of_queries(rows: usize) -> RowLayout {
    RowLayout::token_major(rows, &AttentionShape::new(4, 4, 64).unwrap())
}

/// What becomes of the prompt once its step is committed.
pub enum Then<'a, I> {
    Nothing,
    Compress,
    Pack(&'a [PromptSpan<'a, I>]),
}

/// An open step, with what is observed of its part.
pub struct Work<'a, B: Backend> {
    pub rows: usize,
    /// Keys, values and queries of every layer.
    pub inputs: &'a [[Vec<f32>; 3]],
    pub prompt: Option<&'a mut ObservedParts<B>>,
    pub then: Then<'a, B::Indices>,
}

/// Runs and commits an open step: its outputs by layer.
pub trait Engine<B: Backend> {
    fn run(&mut self, cache: &mut ModelCache<B>, work: Work<'_, B>) -> Result<Vec<Vec<f32>>>;
}

/// The calls of a cache. With log-sum-exps, or without.
pub struct Calls {
    pub knows: bool,
}

impl<B: Backend + Clone> Engine<B> for Calls {
    fn run(&mut self, cache: &mut ModelCache<B>, mut work: Work<'_, B>) -> Result<Vec<Vec<f32>>> {
        let backend = cache.backend().clone();
        let (mut outputs, layout) = (Vec::new(), RowLayout::token_major(work.rows, &shape()));
        for (layer, inputs) in work.inputs.iter().enumerate() {
            let [keys, values, queries] =
                inputs.each_ref().map(|rows| block_on(backend.upload(rows.as_slice().into())).unwrap());
            block_on(cache.store(layer, layout, &keys, &values))?;
            let (output, lse) = match self.knows {
                true => {
                    let states = block_on(cache.attend_states(layer, &queries))?;
                    (states.outputs, Some(states.lse))
                }
                false => (block_on(cache.attend(layer, &queries, ElementType::F32))?, None),
            };
            if let Some(prompt) = work.prompt.as_deref_mut() {
                let queries = TensorRows { tensor: &queries, layout: of_queries(work.rows) };
                prompt.observe(cache, layer, PartQueries { queries, log_sum_exps: lse.as_ref() })?;
            }
            outputs.push(block_on(backend.download(&output))?);
        }
        cache.commit()?;
        match (work.then, work.prompt) {
            (Then::Compress, Some(prompt)) => cache.compress_parts(prompt)?,
            (Then::Pack(spans), _) => cache.pack_parts(0, spans)?,
            _ => {}
        }
        Ok(outputs)
    }
}

/// A prompt that f16 holds exactly.
pub fn prompt() -> Prompt {
    let mut prompt = Prompt::new(shape(), LAYERS, TOKENS, 11);
    let exact = |rows: &mut Vec<f32>| rows.iter_mut().for_each(|x| *x = half::f16::from_f32(*x).into());
    [&mut prompt.queries, &mut prompt.keys, &mut prompt.values].into_iter().flatten().for_each(exact);
    prompt
}

/// Rows of a step: a token of sequence 1, if it decodes, and a part of the prompt.
fn inputs(prompt: &Prompt, part: std::ops::Range<usize>, decoded: &[[Vec<f32>; 3]]) -> Vec<[Vec<f32>; 3]> {
    let of_layer = |layer: usize| {
        let rows = [(&prompt.keys, 2), (&prompt.values, 2), (&prompt.queries, 4)].into_iter().enumerate();
        let rows = rows.map(|(which, (all, heads))| {
            let part = &all[layer][part.start * heads * 64..part.end * heads * 64];
            [decoded.get(layer).map_or(&[][..], |of| &of[which]), part].concat()
        });
        rows.collect::<Vec<_>>().try_into().unwrap()
    };
    (0..LAYERS).map(of_layer).collect()
}

/// A token of another sequence.
fn token(random: &mut Random) -> Vec<[Vec<f32>; 3]> {
    let mut row =
        |heads: usize| (0..heads * 64).map(|_| half::f16::from_f32(random.normal()).into()).collect::<Vec<f32>>();
    (0..LAYERS).map(|_| [row(2), row(2), row(4)]).collect()
}

/// Attention of the query of a row to all rows of the prompt up to it, in f64.
fn exact(prompt: &Prompt, layer: usize, row: usize) -> Vec<f64> {
    let dense = |rows: &[f32]| {
        let head = |head: usize| (0..=row).flat_map(move |at| rows[(at * 2 + head) * 64..][..64].to_vec());
        (0..2).flat_map(head).collect::<Vec<f32>>()
    };
    let (keys, values) = (dense(&prompt.keys[layer]), dense(&prompt.values[layer]));
    let segment = DenseSegment { keys: &keys, values: &values, tokens: row + 1, calibration: None };
    exact_attention(&shape(), &[segment], &prompt.queries[layer][row * 256..][..256]).unwrap().outputs
}

/// Runs all parts beside a sequence that decodes. Every query sees the prompt so far in f16.
fn run_parts<B: Backend + Clone>(
    cache: &mut ModelCache<B>,
    engine: &mut impl Engine<B>,
    mut observed: Option<&mut ObservedParts<B>>,
    last: Then<'_, B::Indices>,
    limit: f64,
) {
    let (prompt, mut random, mut start) = (prompt(), Random::new(3), 0);
    let mut last = Some(last);
    for (number, &tokens) in PARTS.iter().enumerate() {
        let decoded = token(&mut random);
        let runs = [TokenRun::decode(1), TokenRun::unpacked(0, tokens)];
        block_on(cache.reserve_for_append(&runs)).unwrap();
        let needed = cache.room_for_append(0, &runs).unwrap();
        let free = cache.free_room(0).unwrap();
        cache.begin_append(&runs).unwrap();
        for ((free, needed), now) in free.iter().zip(&needed).zip(cache.free_room(0).unwrap()) {
            assert_eq!(now.pages + needed.pages, free.pages, "a step takes the room that it asked for");
        }
        let inputs = inputs(&prompt, start..start + tokens, &decoded);
        let then = if number + 1 == PARTS.len() { last.take() } else { None };
        let work = Work {
            rows: tokens + 1,
            inputs: &inputs,
            prompt: observed.as_deref_mut(),
            then: then.unwrap_or(Then::Nothing),
        };
        let outputs = engine.run(cache, work).unwrap();
        for (layer, output) in outputs.iter().enumerate() {
            for row in (0..tokens).filter(|row| row % 29 == 0 || row + 1 == tokens) {
                let expected = exact(&prompt, layer, start + row);
                let error = nmse(&output[(row + 1) * 256..][..256], &expected);
                assert!(error < limit, "layer {layer}, query {}: {error:.1e}", start + row);
            }
        }
        start += tokens;
    }
}

/// Errors of the keys and of the values of a span.
fn errors_of<S, P>(got: &(S, P, Vec<f32>, Vec<f32>), want: &(S, P, Vec<f32>, Vec<f32>)) -> [f64; 2] {
    [(&got.2, &want.2), (&got.3, &want.3)].map(|(got, want)| {
        let want: Vec<f64> = want.iter().map(|&x| x.into()).collect();
        nmse(got, &want)
    })
}

/// What sequence 0 holds, decoded, and decodes of it: attention in f64 over what it holds.
fn check_decoding<B: Backend + Clone>(cache: &mut ModelCache<B>, engine: &mut impl Engine<B>, limit: f64) {
    let mut random = Random::new(9);
    for _ in 0..2 {
        let inputs = token(&mut random);
        let runs = [TokenRun::decode(0)];
        block_on(cache.reserve_for_append(&runs)).unwrap();
        cache.begin_append(&runs).unwrap();
        let outputs = engine.run(cache, Work { rows: 1, inputs: &inputs, prompt: None, then: Then::Nothing }).unwrap();
        for (layer, output) in outputs.iter().enumerate() {
            let mut heads = [[Vec::new(), Vec::new()], [Vec::new(), Vec::new()]];
            let mut tokens = 0;
            for (_, _, keys, values) in held(cache, layer, 0) {
                let of_head = keys.len() / 2;
                tokens += of_head / 64;
                for (head, held) in heads.iter_mut().enumerate() {
                    held[0].extend_from_slice(&keys[head * of_head..][..of_head]);
                    held[1].extend_from_slice(&values[head * of_head..][..of_head]);
                }
            }
            let [first, second] = &heads;
            let (keys, values) = ([&first[0][..], &second[0]].concat(), [&first[1][..], &second[1]].concat());
            let segment = DenseSegment { keys: &keys, values: &values, tokens, calibration: None };
            let expected = exact_attention(&shape(), &[segment], &inputs[layer][2]).unwrap().outputs;
            let error = nmse(output, &expected);
            assert!(error < limit, "layer {layer}: {error:.1e}");
        }
    }
}

/// The recipes: tokens packed as they arrive, with and without a centre, and spans with ranges.
pub fn recipes() -> Vec<Recipe> {
    let saw_int4 = || Recipe::pack_all(SegmentFormat::saw_int4());
    vec![saw_int4(), Recipe::calibquant(Bits::Four), saw_int4().with_centre(), Recipe::f16()]
}

/// A policy keeps of a prompt in parts what it keeps of the whole prompt, and stores the same.
pub fn check_policy<B: Backend + Clone>(
    backend: &B,
    engine: &mut impl Engine<B>,
    (name, policy, recipe): (&str, &Policy, &Recipe),
    limit: f64,
) {
    let prompt = prompt();
    let mut cache = prompt.cache(backend, recipe);
    let mut observed = block_on(cache.observe_parts(0, policy.clone(), prompt.spans())).unwrap();
    let needs_counts = observed.needs_counts();
    if !needs_counts {
        block_on(cache.reserve_for_parts(&observed)).unwrap();
    }
    let then = if needs_counts { Then::Nothing } else { Then::Compress };
    run_parts(&mut cache, engine, Some(&mut observed), then, limit);
    if needs_counts {
        // Decoding goes on while the counts arrive.
        observed.begin_counts(&cache).unwrap();
        check_decoding(&mut cache, engine, limit);
        while !observed.counts_have_arrived().unwrap() {}
        block_on(observed.finish_counts()).unwrap();
        block_on(cache.reserve_for_parts(&observed)).unwrap();
        cache.compress_parts(&mut observed).unwrap();
    }
    let selection = block_on(observed.selection(&cache)).unwrap();
    let mut whole = prompt.cache(&Cpu::new(), recipe);
    let expected = block_on(whole.compress(0, &prompt.observe(&whole, policy.clone()))).unwrap();
    let mut twin = prompt.cache(backend, recipe);
    let dense = (0..LAYERS).map(|layer| prompt.dense(backend, layer)).collect();
    block_on(twin.keep(0, dense, &selection)).unwrap();
    let mut merged = 0;
    for layer in 0..LAYERS {
        let (kept, of_whole) = (kept(&selection, layer), kept(&expected, layer));
        let shared = kept.iter().filter(|token| of_whole.contains(token)).count();
        assert!(shared * 100 >= 98 * kept.len().max(of_whole.len()), "{name}, layer {layer}: {kept:?} {of_whole:?}");
        let [held, by_twin] = [held(&cache, layer, 0), held(&twin, layer, 0)];
        assert_eq!(held[0].1, by_twin[0].1, "{name}, layer {layer}: positions");
        match (policy.merging, recipe.is_centred()) {
            (None, false) => assert!(held[0] == by_twin[0], "{name}, layer {layer}: contents"),
            // f16 pages hold keys minus their centre, rounded.
            (None, true) => {
                let errors = errors_of(&held[0], &by_twin[0]);
                assert!(errors.iter().all(|&error| error < 1e-3), "{name}, layer {layer}: {errors:?}");
            }
            // What is merged was not kept by the twin, and depends on all that is kept.
            (Some(_), _) if kept == of_whole => {
                let errors = errors_of(&held[0], &super::compressed::held(&whole, layer, 0)[0]);
                assert!(errors.iter().all(|&error| error < 1e-2), "{name}, layer {layer}: {errors:?}");
                merged += 1;
            }
            (Some(_), _) => {}
        }
    }
    assert!(policy.merging.is_none() || merged > 0, "{name}: no layer kept the same tokens, and none was compared");
    check_decoding(&mut cache, engine, limit);
    (0..2).for_each(|sequence| cache.clear(sequence).unwrap());
    assert_eq!(cache.memory().in_use_bytes(), 0, "{name}: pages that nobody holds");
}

/// All policies with all recipes, or each with one, so that each recipe is met.
pub fn pairs(all: bool) -> Vec<(&'static str, Policy, Recipe)> {
    let (mut policies, recipes) = (policies(0.2), recipes());
    let h2o = Policy::h2o(0.2).unwrap();
    let largest = Policy { scores: ScoreRule { aggregation: HeadAggregation::Max, ..h2o.scores }, ..h2o };
    policies.push(("h2o by the largest of a group", largest));
    let pairs = policies.into_iter().enumerate().flat_map(|(turn, (name, policy))| {
        let taken = recipes.iter().enumerate().filter(move |(at, _)| all || *at == turn % 4);
        taken.map(move |(_, recipe)| (name, policy.clone(), recipe.clone())).collect::<Vec<_>>()
    });
    pairs.collect()
}

/// A mixture packs a prompt in parts as it packs the whole prompt.
pub fn check_mixture<B: Backend + Clone>(backend: &B, engine: &mut impl Engine<B>, recipe: &str, limit: f64) {
    let prompt = prompt();
    let of_layer = recipe.parse::<ModelRecipe>().unwrap().layer(0, &shape());
    let mut cache = prompt.cache(backend, &of_layer);
    // A context of 270 tokens, of which 256 are chunks.
    let stores = [0, 2, 1, 2, 0, 1, 2, 2].map(StoreId).to_vec();
    let chunks = ChunkStores::new(TokenRange::new(10, 280).unwrap(), 32, stores).unwrap();
    let spans = block_on(chunks.upload(backend, 2, TOKENS)).unwrap();
    block_on(cache.reserve_for_prefill(&spans.prompt())).unwrap();
    run_parts(&mut cache, engine, None, Then::Pack(&spans.prompt()), limit);
    let mut whole = prompt.cache(backend, &of_layer);
    block_on(whole.reserve_for_prefill(&spans.prompt())).unwrap();
    whole.begin_prefill(0, TOKENS, &spans.prompt()).unwrap();
    for layer in 0..LAYERS {
        let dense = prompt.dense(backend, layer);
        block_on(whole.store_prompt(layer, dense.rows, &dense.keys, &dense.values, &spans.prompt())).unwrap();
    }
    whole.commit().unwrap();
    for layer in 0..LAYERS {
        assert!(held(&cache, layer, 0) == held(&whole, layer, 0), "{recipe}, layer {layer}");
    }
    check_decoding(&mut cache, engine, limit);
    (0..2).for_each(|sequence| cache.clear(sequence).unwrap());
    assert_eq!(cache.memory().in_use_bytes(), 0, "{recipe}: pages that nobody holds");
}
