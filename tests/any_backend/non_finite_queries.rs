//! Queries that hold NaN or infinities: the outputs of their heads are NaN, those of other heads what they were.

use half::f16;
use kvpack::backend::{Backend, QueryPrecision, TensorRows};
use kvpack::cache::{DenseLayer, KvCache, MeasuredQueries, ModelRecipe, PromptSpan, Recipe};
use kvpack::plan::{ElementType, Elements, LayerAttention, QueryRun, RowLayout, Scoring, TokenRange};
use kvpack::policy::{HeadAggregation, Policy, ScoreRule};
use kvpack::{AttentionShape, Bits, Calibration, Error};
use pollster::block_on;

use crate::compressed::Prompt;

/// Two KV heads of four query heads each: some of a group are spoilt, others are not.
const HEADS: [usize; 2] = [8, 2];
const HEAD_DIM: usize = 64;
/// More than two tiles, the last one not full.
const TOKENS: usize = 300;
const FEW_TOKENS: usize = 70;
/// The spoilt heads, and what is in them.
const SPOILT: [(usize, f32); 3] = [(1, f32::NAN), (4, f32::INFINITY), (6, f32::NEG_INFINITY)];

/// Every method at every width, CalibQuant with calibrated scores, a query of 8 bits, and scores with a soft cap.
fn recipes(shape: &AttentionShape) -> Vec<(String, Recipe)> {
    let all = ModelRecipe::all().into_iter().map(|recipe| (recipe.to_string(), recipe.layer(0, shape)));
    let mut recipes: Vec<(String, Recipe)> = all.collect();
    let calibration = Calibration::new(1.0, 3.0).unwrap();
    let packing = |bits| Recipe::calibquant(bits).with_window(0);
    recipes.push(("calibrated".into(), packing(Bits::Two).with_calibration(calibration)));
    recipes.push(("8-bit query".into(), packing(Bits::Four).with_query(QueryPrecision::Int8)));
    let capped = LayerAttention::default().with_scoring(Scoring::of(shape).with_soft_cap(30.0).unwrap());
    recipes.push(("capped".into(), packing(Bits::Four).with_attention(capped.clone())));
    recipes.push(("capped f16".into(), Recipe::f16().with_attention(capped)));
    recipes
}

/// Checks recipes on a backend.
///
/// # Panics
/// When an output is not as it should be.
pub fn check<B: Backend + Clone>(backend: &B, wanted: impl Fn(&str) -> bool) {
    let shape = AttentionShape::new(HEADS[0], HEADS[1], HEAD_DIM).unwrap();
    let recipes: Vec<_> = recipes(&shape).into_iter().filter(|(name, _)| wanted(name)).collect();
    assert!(!recipes.is_empty());
    // Tokens and whether keys are one-sided. Of the few tokens each invocation has some that do not exist.
    let cases = [(TOKENS, false), (TOKENS, true), (FEW_TOKENS, false)];
    for ((name, recipe), (tokens, one_sided)) in recipes.into_iter().flat_map(|of| cases.map(|case| (of.clone(), case)))
    {
        let side = if one_sided { ", one-sided" } else { "" };
        let name = format!("{name}{side}, {tokens} tokens");
        let mut cache = KvCache::new(backend.clone(), shape, 1, recipe).unwrap();
        let rows = RowLayout::token_major(tokens, &shape);
        let wave = |rate: f32, count: usize| (0..count).map(|i| (i as f32 * rate).sin()).collect::<Vec<f32>>();
        let upload = |elements: &[f32]| block_on(backend.upload(elements.into())).unwrap();
        let elements = tokens * HEADS[1] * HEAD_DIM;
        let (mut keys, values) = (wave(0.37, elements), upload(&wave(0.53, elements)));
        if one_sided {
            for (head, value) in SPOILT {
                let kv_head = head / (HEADS[0] / HEADS[1]);
                for key in keys.chunks_exact_mut(HEADS[1] * HEAD_DIM) {
                    for channel in [7, 7 * head] {
                        let element = &mut key[kv_head * HEAD_DIM + channel];
                        *element = (0.1 + element.abs()).copysign(-value);
                    }
                }
            }
        }
        let keys = upload(&keys);
        if tokens == FEW_TOKENS && cache.recipe().stores().len() > 1 {
            let all = [PromptSpan::packed(TokenRange::new(0, tokens).unwrap())];
            block_on(cache.prefill(0, rows, &keys, &values, &all)).unwrap();
        } else {
            block_on(cache.extend(0, rows, &keys, &values)).unwrap();
            block_on(cache.pack_windows(0)).unwrap();
        }

        let sound = wave(0.71, HEADS[0] * HEAD_DIM);
        let mut spoilt = sound.clone();
        for (head, value) in SPOILT {
            spoilt[head * HEAD_DIM + 7 * head] = value;
        }
        let attend = |query: &[f32]| {
            let output = block_on(cache.attend(&upload(query), ElementType::F32)).unwrap();
            block_on(backend.download(&output)).unwrap()
        };
        let (expected, output) = (attend(&sound), attend(&spoilt));
        for head in 0..HEADS[0] {
            let of_head = |x: &[f32]| x[head * HEAD_DIM..][..HEAD_DIM].to_vec();
            let (expected, output) = (of_head(&expected), of_head(&output));
            assert!(expected.iter().all(|x| x.is_finite()), "{name}, head {head}: {expected:?}");
            match SPOILT.iter().find(|(spoilt, _)| *spoilt == head) {
                Some((_, value)) => {
                    assert!(output.iter().all(|x| x.is_nan()), "{name}, {value} in head {head}: {output:?}");
                }
                None => assert_eq!(output, expected, "{name}, head {head} beside spoilt ones"),
            }
        }
        if ["f16", "int8", "calibquant:4", "saw", "kivi:4", "turboquant:4"].iter().any(|of| name.starts_with(of)) {
            for queries in [8, 64.min(tokens)] {
                check_states(&cache, &format!("{name}, {queries} queries"), queries);
            }
        }
    }
}

/// One head of a group has a query row that is no number. No policy keeps tokens by what is left.
///
/// # Panics
/// When one does.
pub fn check_policies<B: Backend + Clone>(backend: &B) {
    let shape = AttentionShape::new(4, 2, HEAD_DIM).unwrap();
    for aggregation in [HeadAggregation::Sum, HeadAggregation::Mean, HeadAggregation::Max] {
        let mut prompt = Prompt::new(shape, 1, 150, 3);
        prompt.queries[0][(149 * 4 + 1) * HEAD_DIM] = f32::NAN;
        let mut cache = prompt.cache(backend, &Recipe::f16());
        let policy = Policy::h2o(0.3).unwrap();
        let policy = Policy { scores: ScoreRule { aggregation, ..policy.scores }, ..policy };
        let mut observed = prompt.observe(&cache, policy);
        let refused = block_on(cache.compress(0, &observed)).map(drop);
        assert!(matches!(refused, Err(Error::NotANumber { .. })), "{aggregation:?}: {refused:?}");
        // Keys in f16 have kernels of their own.
        let halves = |rows: &[f32]| {
            let rows: Vec<f16> = rows.iter().map(|&x| f16::from_f32(x)).collect();
            block_on(backend.upload(Elements::F16(&rows))).unwrap()
        };
        let [keys, values] = [&prompt.keys[0], &prompt.values[0]].map(|rows| halves(rows));
        let dense = DenseLayer { rows: RowLayout::token_major(150, &shape), keys, values };
        let (tensor, layout) = prompt.measured(observed.query_rows(), backend, 0).unwrap();
        let queries = MeasuredQueries { queries: TensorRows { tensor: &tensor, layout }, known_lse: None };
        observed.observe(0, dense, Some(queries)).unwrap();
        let refused = block_on(cache.compress(0, &observed)).map(drop);
        assert!(matches!(refused, Err(Error::NotANumber { .. })), "{aggregation:?}, keys in f16: {refused:?}");
    }
}

/// Queries of drafts and prompts, which have kernels of their own, and their states: those of spoilt heads weigh where
/// parts are merged.
fn check_states<B: Backend + Clone>(cache: &KvCache<B>, name: &str, rows: usize) {
    let (backend, shape) = (cache.backend(), cache.shape());
    let mut queries: Vec<f32> = (0..rows * HEADS[0] * HEAD_DIM).map(|i| (i as f32 * 0.71).sin()).collect();
    let spoilt = |row: usize, head: usize| row % 7 == 3 && SPOILT.iter().any(|(of, _)| *of == head);
    for (row, (head, value)) in (0..rows).flat_map(|row| SPOILT.map(|spoilt| (row, spoilt))) {
        if spoilt(row, head) {
            queries[(row * HEADS[0] + head) * HEAD_DIM + 7] = value;
        }
    }
    let queries = block_on(backend.upload(queries.as_slice().into())).unwrap();
    let states = block_on(cache.attend_states(&[QueryRun::causal(0, rows)], &queries)).unwrap();
    let merged = block_on(backend.merge(shape, &states, &states)).unwrap();
    for (states, what) in [(&states, "states"), (&merged, "merged states")] {
        let outputs = block_on(backend.download(&states.outputs)).unwrap();
        let lse = block_on(backend.download(&states.lse)).unwrap();
        for (at, (output, lse)) in outputs.chunks_exact(HEAD_DIM).zip(lse).enumerate() {
            let (row, head) = (at / HEADS[0], at % HEADS[0]);
            if !spoilt(row, head) {
                assert!(lse.is_finite() && output.iter().all(|x| x.is_finite()), "{name}, {what}, row {row}");
                continue;
            }
            assert!(output.iter().all(|x| x.is_nan()), "{name}, {what}, row {row}, head {head}: {output:?}");
            assert!(!lse.is_finite() && lse != f32::NEG_INFINITY, "{name}, {what}, row {row}, head {head}: {lse}");
        }
    }
}
