//! Caches that each store a share of every sequence, without ranks: their states merge to attention over all.

use kvpack::backend::Backend;
use kvpack::cache::{ModelCache, Recipe, TokenRun};
use kvpack::cpu::nmse;
use kvpack::plan::{ElementType, LayerAttention, Placement, QueryRun, RowLayout, Visible};
use pollster::block_on;

use crate::model_steps::{recipe, shape};
use crate::random_rows::Random;

/// A step: what is appended, or what queries see of what is there.
enum Step {
    Append(Vec<TokenRun>),
    Attend(Vec<QueryRun>),
}

/// Prompts, drafts and decoded tokens over several turns of two shares, and a sequence that one of them never stores.
fn steps() -> Vec<Step> {
    let decode = || Step::Append((0..2).map(TokenRun::decode).collect());
    let mut steps = vec![
        decode(), // of which the second share stores nothing
        Step::Append(vec![TokenRun::prompt(0, 300), TokenRun::decode(1)]),
        Step::Append(vec![TokenRun::prompt(0, 290), TokenRun::decode(1)]),
    ];
    steps.extend((0..3).map(|_| decode()));
    steps.push(Step::Append(vec![TokenRun::chunk(0, 60), TokenRun::decode(1)]));
    let spans = Visible::spans(&[100..360, 370..390]);
    steps.push(Step::Attend(vec![QueryRun { end: Some(390), ..QueryRun::new(0, 40, spans) }, QueryRun::decode(1)]));
    steps.push(decode());
    steps
}

/// Appends and attends with one cache and with two that share the sequences.
///
/// # Panics
/// When the merged outputs differ from those of the one cache by more than `limit` (NMSE).
pub fn check<B: Backend + Clone>(backend: &B, limit: f64) {
    let windowed = recipe("f16").with_attention(LayerAttention::default().with_window(200));
    let recipes = ["f16", "saw-int4+sink=40", "kivi:2+window=128", "int8+centre"].map(|text| (text, recipe(text)));
    for (name, recipe) in recipes.into_iter().chain([("a window", windowed)]) {
        check_recipe(backend, name, &recipe, limit);
    }
}

fn check_recipe<B: Backend + Clone>(backend: &B, name: &str, recipe: &Recipe, limit: f64) {
    let placement = Placement::new(2).unwrap();
    let new = || ModelCache::new(backend, &[(shape(), recipe.clone())], 2).unwrap();
    let shares = (0..2).map(|rank| new().with_share(placement.share(rank).unwrap()).unwrap());
    let mut caches: Vec<ModelCache<B>> = [new()].into_iter().chain(shares).collect();
    let mut random = Random::new(11);
    for (number, step) in steps().into_iter().enumerate() {
        let is_masked = recipe.attention().window().is_some();
        let (rows, appends) = match &step {
            Step::Append(runs) => (runs.iter().map(TokenRun::tokens).sum(), true),
            Step::Attend(_) if is_masked => continue, // what lies behind the window was given back
            Step::Attend(queries) => (queries.iter().map(|run| run.queries).sum::<usize>(), false),
        };
        let mut tensor = |heads: usize| {
            let x: Vec<f32> = (0..rows * heads * 64).map(|_| random.normal()).collect();
            block_on(backend.upload(x[..].into())).unwrap()
        };
        let [keys, values, queries] = [2, 2, 4].map(&mut tensor);
        for cache in &mut caches {
            match &step {
                Step::Append(runs) => {
                    block_on(cache.reserve_for_append(runs)).unwrap();
                    cache.begin_append(runs).unwrap();
                }
                Step::Attend(queries) => cache.begin_attend(queries).unwrap(),
            }
            if appends {
                block_on(cache.store(0, RowLayout::token_major(rows, &shape()), &keys, &values)).unwrap();
            }
        }
        let expected = block_on(caches[0].attend(0, &queries, ElementType::F32)).unwrap();
        let expected: Vec<f64> = block_on(backend.download(&expected)).unwrap().into_iter().map(f64::from).collect();
        let states = [1, 2].map(|share| block_on(caches[share].attend_states(0, &queries)).unwrap());
        let merged = block_on(backend.merge(&shape(), &states[0], &states[1])).unwrap();
        let error = nmse(&block_on(backend.download(&merged.outputs)).unwrap(), &expected);
        assert!(error <= limit, "{name}, step {number}: {error:.1e}");
        for cache in &mut caches {
            cache.commit().unwrap();
            // Decoded tokens pack a window at a time, and a share has fewer windows that wait.
            (0..2).for_each(|sequence| block_on(cache.pack_windows(sequence)).unwrap());
        }
    }
    for sequence in 0..2 {
        let tokens: Vec<usize> = caches.iter().map(|cache| cache.tokens(0, sequence).unwrap()).collect();
        assert_eq!(tokens[0], tokens[1] + tokens[2], "{name}");
    }
}
