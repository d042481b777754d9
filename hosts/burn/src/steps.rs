//! Steps of decoding over contexts of random keys and values, and what they take.

use std::time::Instant;

use kvpack::backend::Device as _;
use kvpack::cache::{Budget, ChunkStores, Growth, ModelCache, ModelRecipe, PromptSpan};
use kvpack::plan::{Elements, RowLayout, TokenRange};
use kvpack::wgpu::Wgpu;
use kvpack_serving::{Batch, Contexts, tiny};
use pollster::block_on;
use serde::Serialize;

use crate::Result;
use crate::host::Host;

/// Steps before those that are timed. In them burn tries its kernels, and kvpack's are compiled.
pub const FIRST: usize = 6;

/// What a step takes, the middle of several.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepTime {
    /// By the clock of the host, from one token to the next.
    pub step_ms: f64,
    /// Of that, until all is submitted.
    pub submitted_ms: f64,
    /// Storing and attending in all layers, one submission a layer, without the rest of the model.
    pub attention_ms: Option<f64>,
}

/// Opens the step of a token for every sequence.
pub fn begun(cache: &mut ModelCache<Wgpu>, tokens: &[u32]) -> Result<Batch> {
    let batch = Batch::decoding(cache, tokens)?;
    block_on(cache.reserve_for_append(&batch.token_runs()))?;
    cache.begin_append(&batch.token_runs())?;
    Ok(batch)
}

/// A cache that holds contexts of random keys and values. `chunks` says how a context is stored in parts.
pub fn filled(
    backend: &Wgpu,
    host: &Host,
    recipe: &ModelRecipe,
    of: Contexts,
    chunks: Option<&ChunkStores>,
) -> Result<ModelCache<Wgpu>> {
    let shape = host.config().attention;
    let budget = Budget::unlimited().growing(Growth::Exact);
    let mut cache = ModelCache::new(backend, &host.config().cache_layers(recipe), of.sequences)?.with_budget(budget);
    let mut seed = 11;
    let mut random = || {
        let elements = tiny::random(&mut seed, of.tokens * shape.kv_heads() * shape.head_dim(), 1.7);
        block_on(backend.upload(Elements::F32(&elements)))
    };
    let (keys, values) = (random()?, random()?);
    let uploaded = chunks.map(|chunks| block_on(chunks.upload(backend, shape.kv_heads(), of.tokens))).transpose()?;
    let spans = match &uploaded {
        Some(chunks) => chunks.prompt(),
        None => vec![PromptSpan::packed(TokenRange::new(0, of.tokens)?)],
    };
    of.store(&mut cache, (RowLayout::token_major(of.tokens, &shape), &keys, &values), &spans)?;
    Ok(cache)
}

/// Times steps for all sequences of a cache, which has room for [`FIRST`] and one more than are timed.
pub fn decode(host: &mut Host, cache: &mut ModelCache<Wgpu>, steps: usize) -> Result<StepTime> {
    let mut times = Times::new(cache.sequences());
    for _ in 0..FIRST + steps {
        times.begin();
        let batch = begun(cache, times.tokens())?;
        let stream = host.stream(cache, &batch)?;
        times.submitted();
        let next = host.decoder().largest(stream)?;
        cache.commit()?;
        times.end(next);
    }
    begun(cache, times.tokens())?;
    let attention = host.attention_ms(cache);
    cache.abandon();
    Ok(StepTime { attention_ms: Some(attention?), ..times.middle() })
}

/// Times of steps, and the tokens of the next one.
pub struct Times {
    tokens: Vec<u32>,
    begun: Instant,
    submitted: f64,
    steps: Vec<f64>,
    submissions: Vec<f64>,
}

impl Times {
    pub fn new(batch: usize) -> Self {
        let tokens = (0..batch as u32).map(|sequence| 7 + 13 * sequence % 400).collect();
        Self { tokens, begun: Instant::now(), submitted: 0.0, steps: Vec::new(), submissions: Vec::new() }
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn begin(&mut self) {
        self.begun = Instant::now();
    }

    fn milliseconds(&self) -> f64 {
        self.begun.elapsed().as_secs_f64() * 1e3
    }

    pub fn submitted(&mut self) {
        self.submitted = self.milliseconds();
    }

    /// The tokens have arrived.
    pub fn end(&mut self, tokens: Vec<u32>) {
        self.steps.push(self.milliseconds());
        self.submissions.push(self.submitted);
        self.tokens = tokens;
    }

    /// What a step took.
    pub fn middle(&self) -> StepTime {
        let middle = |of: &[f64]| middle(of.get(FIRST..).unwrap_or_default());
        StepTime { step_ms: middle(&self.steps), submitted_ms: middle(&self.submissions), attention_ms: None }
    }
}

/// The middle of some times; not a number where there are none.
pub fn middle(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_unstable_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
