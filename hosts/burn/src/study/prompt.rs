//! A prompt that is read whole, layer by layer, and whose keys and values a policy observes.

use std::time::{Duration, Instant};

use burn::tensor::{Int, Tensor, TensorData};
use kvpack::AttentionShape;
use kvpack::backend::{Device as _, TensorRows};
use kvpack::cache::{Budget, DenseLayer, Growth, MeasuredQueries, ModelCache, ObservedPrompt, Recipe, TokenRun};
use kvpack::plan::{ElementType, Elements, RowLayout};
use kvpack::policy::{Policy, Spans};
use kvpack::wgpu::{LayerTensors, ModelStep, Tensor as KvTensor, Wgpu};
use kvpack_serving::study::{ReadPrompt, prompt_text};
use pollster::block_on;

use crate::decoder::Decoder;
use crate::{Result, attention};

/// Reads prompts. A cache of one layer holds the layer that is being read.
pub struct Reader {
    backend: Wgpu,
    step: ModelStep,
    /// Its download waits for all that was submitted before.
    mark: KvTensor,
}

impl Reader {
    /// For prompts of up to `tokens` tokens.
    pub fn new(backend: &Wgpu, decoder: &Decoder, tokens: usize) -> Result<Self> {
        let shape = decoder.config.attention;
        let tensors = LayerTensors::zeroed(backend.device(), &shape, tokens, ElementType::F32)?;
        let step = ModelStep::new(backend, RowLayout::token_major(tokens, &shape), vec![tensors])?;
        Ok(Self { backend: backend.clone(), step, mark: block_on(backend.upload(Elements::F32(&[0.0])))? })
    }

    /// Waits until the device is done.
    pub fn wait(&self) -> Result<()> {
        block_on(self.backend.download(&self.mark))?;
        Ok(())
    }

    /// Reads a prompt whole for a cache.
    pub fn read(
        &mut self,
        decoder: &Decoder,
        cache: &ModelCache<Wgpu>,
        (policy, spans): (Policy, Spans),
    ) -> Result<ReadPrompt<Wgpu>> {
        let tokens = spans.tokens();
        let run = [TokenRun::prompt(0, tokens)];
        let layer = ModelCache::new(&self.backend, &[(decoder.config.attention, Recipe::f16())], 1)?;
        let mut layer = layer.with_budget(Budget::unlimited().growing(Growth::Exact));
        block_on(layer.reserve_for_append(&run))?;
        let mut observed = cache.observe(policy, spans)?;
        let mut statistics = Duration::ZERO;
        let positions: Vec<usize> = (0..tokens).collect();
        self.wait()?;
        let start = Instant::now();
        let stream = decoder.forward(&prompt_text(tokens), &positions, &mut |index, rows| {
            layer.begin_append(&run)?;
            let output = attention::attend(&self.step.write(&layer.open_steps()?)?, 0, rows)?;
            layer.commit()?;
            layer.clear(0)?;
            self.wait()?;
            let start = Instant::now();
            observe(&mut observed, (index, &decoder.config.attention), rows)?;
            self.wait()?;
            statistics += start.elapsed();
            Ok(output)
        })?;
        decoder.logits(stream, &[tokens - 1])?;
        Ok(ReadPrompt { observed, read: start.elapsed() - statistics, statistics })
    }
}

/// Shows a layer's keys and values to the policy, and the queries that it measures.
fn observe(
    observed: &mut ObservedPrompt<Wgpu>,
    (layer, shape): (usize, &AttentionShape),
    [queries, keys, values]: [&Tensor<2>; 3],
) -> Result<()> {
    let rows = RowLayout::token_major(keys.dims()[0], shape);
    let dense = DenseLayer { rows, keys: attention::lend(keys)?, values: attention::lend(values)? };
    let measured = observed.query_rows().map(|rows| rows.positions().to_vec());
    let Some(measured) = measured else { return Ok(observed.observe(layer, dense, None)?) };
    let indices: Vec<i32> = measured.iter().map(|&row| row as i32).collect();
    let indices: Tensor<1, Int> = Tensor::from_data(TensorData::new(indices, [measured.len()]), &queries.device());
    let tensor = attention::lend(&queries.clone().select(0, indices))?;
    let heads = shape.query_heads();
    let layout = RowLayout::token_major(measured.len(), &AttentionShape::new(heads, heads, shape.head_dim())?);
    let queries = MeasuredQueries { queries: TensorRows { tensor: &tensor, layout }, known_lse: None };
    Ok(observed.observe(layer, dense, Some(queries))?)
}
