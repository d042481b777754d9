//! A prompt that is read whole, layer by layer, and whose keys and values a policy observes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use candle_core::Tensor;
use kvpack::AttentionShape;
use kvpack::backend::TensorRows;
use kvpack::cache::{Budget, DenseLayer, Growth, MeasuredQueries, ModelCache, ObservedPrompt, Recipe, TokenRun};
use kvpack::plan::RowLayout;
use kvpack::policy::{Policy, Spans};
use kvpack_cli::{Attention, Chunk, Model};
use kvpack_serving::study::{ReadPrompt, prompt_text};
use pollster::block_on;

use crate::attention::Steps;
use crate::rig::Rig;

/// Attention of a prompt: a cache of one layer holds the layer that is being read.
struct Reader<'a, R: Rig> {
    layer: ModelCache<R::Backend>,
    steps: &'a mut R::Steps,
    observed: ObservedPrompt<R::Backend>,
    statistics: Duration,
}

impl<R: Rig> Reader<'_, R> {
    fn observe(&mut self, chunk: &Chunk) -> Result<()> {
        let (tokens, kv_heads, head_dim) = chunk.keys.dims3()?;
        let heads = chunk.queries.dim(1)?;
        let rows = RowLayout::token_major(tokens, &AttentionShape::new(heads, kv_heads, head_dim)?);
        let (keys, values) = (self.steps.tensor(&chunk.keys)?, self.steps.tensor(&chunk.values)?);
        let dense = DenseLayer { rows, keys, values };
        let measured = self.observed.query_rows().map(|rows| rows.positions().to_vec());
        let Some(measured) = measured else { return Ok(self.observed.observe(chunk.layer, dense, None)?) };
        let first = *measured.first().context("the policy measures no queries")?;
        let follow = measured.iter().zip(first..).all(|(&given, next)| given == next);
        let queries = match follow {
            true => chunk.queries.narrow(0, first as usize, measured.len())?,
            false => chunk.queries.index_select(&Tensor::new(measured.clone(), chunk.queries.device())?, 0)?,
        };
        let tensor = self.steps.tensor(&queries)?;
        let layout = RowLayout::token_major(measured.len(), &AttentionShape::new(heads, heads, head_dim)?);
        let queries = MeasuredQueries { queries: TensorRows { tensor: &tensor, layout }, known_lse: None };
        Ok(self.observed.observe(chunk.layer, dense, Some(queries))?)
    }
}

impl<R: Rig> Attention for Reader<'_, R> {
    fn attend(&mut self, chunk: &Chunk) -> Result<Tensor> {
        let run = [TokenRun::prompt(0, chunk.queries.dim(0)?)];
        self.layer.begin_append(&run)?;
        let [queries, keys, values] = [&chunk.queries, &chunk.keys, &chunk.values].map(Tensor::clone);
        let only = Chunk { layer: 0, queries, keys, values };
        let output = self.steps.open(&mut self.layer)?.attend(&only)?;
        self.layer.commit()?;
        self.layer.clear(0)?;
        self.steps.wait()?;
        let start = Instant::now();
        self.observe(chunk)?;
        self.steps.wait()?;
        self.statistics += start.elapsed();
        Ok(output)
    }
}

/// Reads a prompt whole for a cache. `steps` are those of one layer, with as many rows as the prompt has tokens.
///
/// # Errors
/// What the policy, the model or the device report.
pub fn read<R: Rig>(
    rig: &R,
    model: &Model,
    steps: &mut R::Steps,
    cache: &ModelCache<R::Backend>,
    (policy, spans): (Policy, Spans),
) -> Result<ReadPrompt<R::Backend>> {
    let tokens = spans.tokens();
    let layer = ModelCache::new(rig.backend(), &[(model.config.attention, Recipe::f16())], 1)?;
    let mut layer = layer.with_budget(Budget::unlimited().growing(Growth::Exact));
    block_on(layer.reserve_for_append(&[TokenRun::prompt(0, tokens)]))?;
    let observed = cache.observe(policy, spans)?;
    let mut reader: Reader<'_, R> = Reader { layer, steps, observed, statistics: Duration::ZERO };
    reader.steps.wait()?;
    let start = Instant::now();
    let inputs = model.inputs(&prompt_text(tokens), &(0..tokens).collect::<Vec<_>>())?;
    let stream = model.through_layers(&inputs, &mut reader)?;
    model.logits(&stream.narrow(0, tokens - 1, 1)?)?;
    reader.steps.wait()?;
    let Reader { observed, statistics, .. } = reader;
    Ok(ReadPrompt { observed, read: start.elapsed() - statistics, statistics })
}
