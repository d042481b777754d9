//! Caches that hold contexts of random keys and values, and what a step of decoding takes over them.

use std::time::Instant;

use anyhow::{Context, Result};
use candle_core::Tensor;
use kvpack::backend::Backend;
use kvpack::cache::{ChunkStores, ModelCache, ModelRecipe};
use kvpack_serving::study::{StepTime, first_tokens, median};
use kvpack_serving::{Batch, Contexts};
use pollster::block_on;

use crate::attention::Steps;
use crate::host::Host;
use crate::own::largest_on_device;
use crate::rig::{Arriving, Rig};

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
    let (layers, shape) = (host.model().config.cache_layers(recipe)?, host.model().config.attention);
    let row = (of.tokens, shape.kv_heads(), shape.head_dim());
    let random = || -> Result<Tensor> { Ok(Tensor::randn(0f32, 1.0, row, rig.device())?.to_dtype(rig.dtype())?) };
    let (keys, values) = (random()?, random()?);
    let (keys, values) = (host.steps().tensor(&keys)?, host.steps().tensor(&values)?);
    Ok(of.cache(rig.backend(), (&layers, &shape), [&keys, &values], chunks)?)
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
        let tokens = Tensor::new(first_tokens(sequences), rig.device())?;
        Ok(Self { rig, tokens, arriving: None, last: Instant::now() })
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
        step_ms: median(&walls).context("no step was timed")?,
        device_ms: median(&devices),
        submitted_ms: None,
        attention_ms: attention?,
    })
}
