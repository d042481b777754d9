//! Policies over layers with a scoring of their own: attention is measured with the scale of the layer. On any backend.

use kvpack::Result;
use kvpack::backend::{Backend, TensorRows};
use kvpack::cache::{ModelCache, PartQueries, Recipe, TokenRun};
use kvpack::plan::{LayerAttention, RowLayout, Scoring};
use kvpack::policy::{Policy, Selection, Spans};
use pollster::block_on;

use crate::compressed::Prompt;
use crate::compressed::growing::{append, compress_again};
use crate::model_steps::{LAYERS, shape};
use crate::unpacked_prompts::of_queries;

/// How much the queries of one cache are larger, and the scale of the other. A power of two changes no digit.
const LARGER: f32 = 4.0;

/// A recipe in f16 whose layers multiply the usual scale.
pub fn recipe(times: f32) -> Recipe {
    let scoring = Scoring::of(&shape());
    let scale = scoring.scale() * times;
    Recipe::f16().with_attention(LayerAttention::default().with_scoring(scoring.with_scale(scale).unwrap()))
}

/// A prompt with its queries multiplied by `times`.
fn prompt(times: f32, tokens: usize, seed: u64) -> Prompt {
    let mut prompt = Prompt::new(shape(), LAYERS, tokens, seed);
    prompt.queries.iter_mut().flatten().for_each(|element| *element *= times);
    prompt
}

/// What a policy keeps of a prompt, then of that and what was appended, and what it keeps of a prompt in parts.
fn kept<B: Backend + Clone>(backend: &B, scale: f32, queries: f32) -> [Selection; 3] {
    let policy = Policy::h2o(0.3).unwrap();
    let whole = prompt(queries, 200, 5);
    let mut cache = whole.cache(backend, &recipe(scale));
    let first = block_on(cache.compress(0, &whole.observe(&cache, policy.clone()))).unwrap();
    let more = prompt(queries, 40, 7);
    append(&mut cache, 0, &more);
    let again = compress_again(&mut cache, 0, &policy, (&more, 20)).unwrap();
    [first, again, block_on(of_parts(&mut whole.cache(backend, &recipe(scale)), &whole, policy)).unwrap()]
}

/// What a policy keeps of a prompt that is appended in one part.
async fn of_parts<B: Backend + Clone>(cache: &mut ModelCache<B>, of: &Prompt, policy: Policy) -> Result<Selection> {
    let mut observed = cache.observe_parts(1, policy, Spans::new(of.tokens, &[])?).await?;
    let runs = [TokenRun::unpacked(1, of.tokens)];
    cache.reserve_for_append(&runs).await?;
    cache.begin_append(&runs)?;
    for layer in 0..LAYERS {
        let dense = of.dense(cache.backend(), layer);
        cache.store(layer, RowLayout::token_major(of.tokens, &shape()), &dense.keys, &dense.values).await?;
        let queries = cache.backend().upload(of.queries[layer].as_slice().into()).await?;
        let queries = TensorRows { tensor: &queries, layout: of_queries(of.tokens) };
        observed.observe(cache, layer, PartQueries { queries, log_sum_exps: None })?;
    }
    cache.commit()?;
    cache.reserve_for_parts(&observed).await?;
    cache.compress_parts(&mut observed)?;
    observed.selection(cache).await
}

/// A layer with a larger scale keeps what one with larger queries keeps, and not what it keeps without either.
///
/// # Panics
/// When it does not.
pub fn check<B: Backend + Clone>(backend: &B) {
    let (scaled, larger) = (kept(backend, LARGER, 1.0), kept(backend, 1.0, LARGER));
    let plain = kept(backend, 1.0, 1.0);
    for (at, what) in ["a prompt", "a sequence that grew", "a prompt in parts"].into_iter().enumerate() {
        assert_eq!(scaled[at], larger[at], "{what}");
        assert_ne!(scaled[at], plain[at], "{what}: the scale makes no difference");
    }
}
