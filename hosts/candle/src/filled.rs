//! Caches that hold contexts of random keys and values, and what a step of decoding takes over them.

use std::time::Instant;

use anyhow::{Context, Result};
use candle_core::Tensor;
use kvpack::backend::Backend;
use kvpack::cache::{Budget, ChunkStores, Growth, ModelCache, ModelRecipe, PromptSpan};
use kvpack::plan::{RowLayout, TokenRange};
use kvpack_serving::{Batch, Contexts};
use pollster::block_on;
use serde::{Deserialize, Serialize};

use crate::attention::Steps;
use crate::host::Host;
use crate::own::largest_on_device;
use crate::rig::{Arriving, Rig};

/// What a step of decoding takes, the middle of several.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct StepTime {
    /// By the clock of the host, from one token to the next.
    pub step_ms: f64,
    /// Of that, the layers and the logits, by the clock of the device.
    pub device_ms: Option<f64>,
    /// Of that, what is stored and attended to, measured alone.
    pub attention_ms: Option<f64>,
}

impl StepTime {
    /// The rest of the model.
    pub fn rest_ms(&self) -> Option<f64> {
        Some(self.device_ms? - self.attention_ms?)
    }

    /// What the device waits for the host.
    pub fn host_ms(&self) -> Option<f64> {
        Some(self.step_ms - self.device_ms?)
    }
}

/// A cache that holds contexts of random keys and values. `chunks` says how a context is stored in parts.
///
/// # Errors
/// What is wrong with the recipe, and what the device reports.
pub fn filled<R: Rig>(
    rig: &R,
    host: &mut Host<R::Steps>,
    recipe: &ModelRecipe,
    of: Contexts,
    chunks: Option<&ChunkStores>,
) -> Result<ModelCache<R::Backend>> {
    let layers = host.model().config.cache_layers(recipe)?;
    let shape = host.model().config.attention;
    let mut cache =
        ModelCache::new(rig.backend(), &layers, of.sequences)?.with_budget(Budget::unlimited().growing(Growth::Exact));
    let row = (of.tokens, shape.kv_heads(), shape.head_dim());
    let random = || -> Result<Tensor> { Ok(Tensor::randn(0f32, 1.0, row, rig.device())?.to_dtype(rig.dtype())?) };
    let (keys, values) = (random()?, random()?);
    let (keys, values) = (host.steps().tensor(&keys)?, host.steps().tensor(&values)?);
    let rows = RowLayout::token_major(of.tokens, &shape);
    let of_chunks = chunks.map(|chunks| block_on(chunks.upload(rig.backend(), shape.kv_heads(), of.tokens)));
    let of_chunks = of_chunks.transpose()?;
    let spans = match &of_chunks {
        Some(chunks) => chunks.prompt(),
        None => vec![PromptSpan::packed(TokenRange::new(0, of.tokens)?)],
    };
    of.store(&mut cache, (rows, &keys, &values), &spans)?;
    Ok(cache)
}

/// A step of decoding: the logits of every sequence.
///
/// # Errors
/// What the model, the cache or the device report.
pub fn logits<B: Backend, S: Steps<B>>(
    host: &mut Host<S>,
    cache: &mut ModelCache<B>,
    tokens: &[u32],
) -> Result<Tensor> {
    let tokens = Tensor::new(tokens, host.model().device())?;
    logits_behind(host, cache, &tokens)
}

/// The same for tokens that are on the device.
fn logits_behind<B: Backend, S: Steps<B>>(
    host: &mut Host<S>,
    cache: &mut ModelCache<B>,
    tokens: &Tensor,
) -> Result<Tensor> {
    let batch = Batch::decoding(cache, &vec![0; cache.sequences()])?;
    block_on(cache.reserve_for_append(&batch.token_runs()))?;
    cache.begin_append(&batch.token_runs())?;
    let inputs = host.model().inputs_of(tokens, &batch.positions())?;
    let logits = host.logits_of(cache, &batch, &inputs)?;
    cache.commit()?;
    Ok(logits)
}

/// Steps of decoding one behind the other: a token is chosen on the device, and the host reads it when the next step is
/// launched.
pub struct UnderWay<'a, R> {
    rig: &'a R,
    tokens: Tensor,
    arriving: Option<Arriving>,
    last: Instant,
}

impl<'a, R: Rig> UnderWay<'a, R> {
    /// For this many sequences.
    ///
    /// # Errors
    /// What the device reports.
    pub fn new(rig: &'a R, sequences: usize) -> Result<Self> {
        let tokens: Vec<u32> = (0..sequences as u32).map(|sequence| 7 + 13 * sequence % 400).collect();
        Ok(Self { rig, tokens: Tensor::new(tokens, rig.device())?, arriving: None, last: Instant::now() })
    }

    /// The newest tokens, on the device.
    pub const fn tokens(&self) -> &Tensor {
        &self.tokens
    }

    /// Chooses the next tokens behind a step that was launched, and waits for those of the step before. Returns the
    /// milliseconds since the arrival of the tokens before them.
    ///
    /// # Errors
    /// What the device reports.
    pub fn choose(&mut self, logits: &Tensor) -> Result<Option<f64>> {
        self.tokens = largest_on_device(logits)?;
        let arriving = self.rig.bring(&self.tokens)?;
        let before = self.arriving.replace(arriving);
        self.arrived(before)
    }

    /// Waits for the tokens of the last step.
    ///
    /// # Errors
    /// What the device reports.
    pub fn end(&mut self) -> Result<Option<f64>> {
        let last = self.arriving.take();
        self.arrived(last)
    }

    fn arrived(&mut self, arriving: Option<Arriving>) -> Result<Option<f64>> {
        let Some(arriving) = arriving else { return Ok(None) };
        arriving()?;
        let now = Instant::now();
        let took = now - std::mem::replace(&mut self.last, now);
        Ok(Some(took.as_secs_f64() * 1e3))
    }
}

/// Times steps of decoding for all sequences of a cache, and forgets its graphs. The first steps, in which kernels are
/// compiled and graphs are captured, do not count.
///
/// # Errors
/// What the model, the cache or the device report.
pub fn decode<R: Rig>(
    rig: &R,
    host: &mut Host<R::Steps>,
    cache: &mut ModelCache<R::Backend>,
    steps: usize,
) -> Result<StepTime> {
    const FIRST: usize = 4;
    let (mut walls, mut devices) = (Vec::new(), Vec::new());
    let mut under_way = UnderWay::new(rig, cache.sequences())?;
    for at in 0..=FIRST + steps {
        let wall = match at < FIRST + steps {
            true => {
                let logits = logits_behind(host, cache, under_way.tokens())?;
                under_way.choose(&logits)?
            }
            false => under_way.end()?,
        };
        let Some(wall) = wall else { continue };
        let device = host.steps().replayed_ms();
        if at > FIRST {
            walls.push(wall);
            devices.extend(device);
        }
    }
    let batch = Batch::decoding(cache, &vec![0; cache.sequences()])?;
    block_on(cache.reserve_for_append(&batch.token_runs()))?;
    cache.begin_append(&batch.token_runs())?;
    let attention = host.steps().attention_ms(cache);
    cache.abandon();
    host.steps().forget()?;
    Ok(StepTime {
        step_ms: middle(&mut walls).context("no step was timed")?,
        device_ms: middle(&mut devices),
        attention_ms: attention?,
    })
}

/// The middle of some times.
pub fn middle(times: &mut [f64]) -> Option<f64> {
    times.sort_unstable_by(f64::total_cmp);
    times.get(times.len() / 2).copied()
}
