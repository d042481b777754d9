//! Steps of decoding over contexts of random keys and values, and what they take.

use std::time::Instant;

use kvpack::backend::Device as _;
use kvpack::cache::{ChunkStores, ModelCache, ModelRecipe};
use kvpack::plan::Elements;
use kvpack::wgpu::Wgpu;
use kvpack_serving::study::{FURTHER_TOKENS, StepTime, first_tokens, median};
use kvpack_serving::{Batch, Contexts, tiny};
use pollster::block_on;

use crate::Result;
use crate::host::Host;

/// Steps before those that are timed. In them burn tries its kernels, and kvpack's are compiled.
pub const FIRST: usize = 6;

// A step more is opened to time attention alone.
const _: () = assert!(FIRST < FURTHER_TOKENS);

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
    let (layers, shape) = (host.config().cache_layers(recipe), host.config().attention);
    let mut seed = 11;
    let mut random = || {
        let elements = tiny::random(&mut seed, of.tokens * shape.kv_heads() * shape.head_dim(), 1.7);
        block_on(backend.upload(Elements::F32(&elements)))
    };
    let (keys, values) = (random()?, random()?);
    Ok(of.cache(backend, (&layers, &shape), [&keys, &values], chunks)?)
}

/// Times steps for all sequences of a cache, which has room for [`FURTHER_TOKENS`] more than are timed.
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
    Ok(StepTime { attention_ms: Some(attention?), ..times.median()? })
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
        Self {
            tokens: first_tokens(batch),
            begun: Instant::now(),
            submitted: 0.0,
            steps: Vec::new(),
            submissions: Vec::new(),
        }
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
    pub fn median(&self) -> Result<StepTime> {
        let of = |times: &[f64]| median(times.get(FIRST..).unwrap_or_default()).ok_or("no step was timed");
        Ok(StepTime { submitted_ms: Some(of(&self.submissions)?), ..StepTime::of_step(of(&self.steps)?) })
    }
}
