//! Policies over layers with a scoring or a window of their own.

use kvpack::backend::TensorRows;
use kvpack::cache::{MeasuredQueries, ModelCache, Recipe};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{LayerAttention, Scoring};
use kvpack::policy::Policy;
use kvpack::{Error, Result};
use pollster::block_on;

use any_backend::compressed::growing::{append, compress_again, spans};
use any_backend::compressed::{Prompt, state};
use any_backend::kept_together::{TOKENS, dense, selection};
use any_backend::model_steps::{LAYERS, shape};
use any_backend::scored_policies;

fn cache(attention: LayerAttention) -> ModelCache<Cpu> {
    // One layer of them is enough.
    let mut recipes = vec![(shape(), Recipe::f16()); LAYERS];
    recipes[1].1 = Recipe::f16().with_attention(attention);
    ModelCache::new(&Cpu::new(), &recipes, 2).unwrap()
}

fn refused<T: std::fmt::Debug>(call: Result<T>, what: &str) {
    match call {
        Err(Error::Unsupported { what: told, .. }) => {
            assert!(told.contains(what) && told.contains("layer 1"), "{told}");
        }
        other => panic!("{what}: {other:?}"),
    }
}

#[test]
fn attention_is_measured_with_the_scale_of_the_layer() {
    scored_policies::check(&Cpu::new());
}

/// Statistics apply no cap, and know of sinks by log-sum-exps alone. A policy that measures nothing needs neither.
#[test]
fn scorings_that_statistics_lack_are_refused() {
    let scoring = || Scoring::of(&shape());
    let capped = LayerAttention::default().with_scoring(scoring().with_soft_cap(30.0).unwrap());
    let sinks = LayerAttention::default().with_scoring(scoring().with_sinks(&[0.5; 4]).unwrap());
    for (attention, what) in [(capped, "a soft cap of 30"), (sinks, "sinks")] {
        let mut cache = cache(attention);
        let prompt = Prompt::new(shape(), LAYERS, TOKENS, 3);
        let mut observed = cache.observe(Policy::h2o(0.3).unwrap(), prompt.spans()).unwrap();
        prompt.observe_layer(&mut observed, &Cpu::new(), 0).unwrap();
        refused(prompt.observe_layer(&mut observed, &Cpu::new(), 1), what);
        let (queries, layout) = prompt.measured(observed.query_rows(), &Cpu::new(), 1).unwrap();
        let lse = CpuTensor::F32(vec![5.0; layout.tokens * shape().query_heads()]);
        let known = MeasuredQueries { queries: TensorRows { tensor: &queries, layout }, known_lse: Some(&lse) };
        let with_lse = observed.observe(1, prompt.dense(&Cpu::new(), 1), Some(known));
        if what == "sinks" {
            with_lse.unwrap();
        } else {
            refused(with_lse, what);
        }

        let chosen = cache.observe(Policy::streaming(4, 60), prompt.spans()).unwrap();
        assert!(chosen.query_rows().is_none());
        block_on(cache.compress(0, &prompt.observe(&cache, Policy::streaming(4, 60)))).unwrap();
        let more = Prompt::new(shape(), LAYERS, 40, 4);
        append(&mut cache, 0, &more);
        let before = state(&cache);
        refused(compress_again(&mut cache, 0, &Policy::h2o(0.3).unwrap(), (&more, 20)), what);
        assert!(state(&cache) == before);
    }
}

/// A sequence that holds gathered tokens in a layer with a window could not be attended to.
#[test]
fn nothing_is_gathered_behind_a_window() {
    let mut cache = cache(LayerAttention::default().with_window(40));
    let prompt = Prompt::new(shape(), LAYERS, TOKENS, 3);
    append(&mut cache, 0, &prompt);
    let (policy, before) = (Policy::h2o(0.3).unwrap(), state(&cache));
    let what = "a sliding window of 40";
    refused(cache.observe(policy.clone(), prompt.spans()).map(drop), what);
    let mut other = prompt.cache(&Cpu::new(), &Recipe::f16());
    let observed = prompt.observe(&other, policy.clone());
    refused(block_on(cache.compress(1, &observed)), what);
    refused(block_on(cache.keep(1, dense(&prompt, &Cpu::new()), &selection(|_| 50))), what);
    refused(block_on(cache.compress_again(0, &policy, &spans(TOKENS), &[])), what);
    refused(block_on(cache.observe_parts(1, policy, prompt.spans())).map(drop), what);
    assert!(state(&cache) == before);
    block_on(other.compress(1, &observed)).unwrap();
}
