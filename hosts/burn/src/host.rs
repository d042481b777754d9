//! A decoder on burn as a model of the scheduler.

#[cfg(feature = "studies")]
mod timed;

use std::error::Error;

use burn::tensor::Tensor;
use kvpack::cache::ModelCache;
use kvpack::plan::{ElementType, RowLayout};
use kvpack::wgpu::{LayerTensors, ModelStep, Wgpu};
use kvpack_serving::{Batch, Model};

use crate::decoder::Decoder;
use crate::{Result, attention};

/// A decoder, and kvpack's steps for it.
pub struct Host {
    decoder: Decoder,
    steps: ModelStep,
    end: Option<u32>,
}

impl Host {
    /// A decoder for steps of up to `rows` tokens. `end` ends texts.
    pub fn new(backend: &Wgpu, decoder: Decoder, rows: usize, end: Option<u32>) -> Result<Self> {
        let shape = decoder.config.attention;
        // Layers run one after the other, and so they share the tensors that kvpack's kernels read and write.
        let shared = LayerTensors::zeroed(backend.device(), &shape, rows, ElementType::F32)?;
        let tensors = vec![shared; decoder.config.layers];
        let steps = ModelStep::new(backend, RowLayout::token_major(rows, &shape), tensors)?;
        Ok(Self { decoder, steps, end })
    }

    // --- step
    /// The residual stream of a batch whose step is open.
    pub fn stream(&mut self, cache: &ModelCache<Wgpu>, batch: &Batch) -> Result<Tensor<2>> {
        let open = cache.open_steps()?;
        let step = self.steps.write(&open)?;
        let (tokens, positions) = (batch.tokens(), batch.positions());
        self.decoder.forward(&tokens, &positions, &mut |layer, rows| attention::attend(&step, layer, rows))
    }
    // --- end

    /// The logits of every run that answers.
    pub fn logits(&mut self, cache: &ModelCache<Wgpu>, batch: &Batch) -> Result<Vec<Vec<f32>>> {
        let stream = self.stream(cache, batch)?;
        self.decoder.logits(stream, &batch.answering_rows())
    }
}

impl Model<Wgpu> for Host {
    fn forward(
        &mut self,
        cache: &mut ModelCache<Wgpu>,
        batch: &Batch,
    ) -> std::result::Result<Vec<u32>, Box<dyn Error + Send + Sync>> {
        if batch.answering_rows().is_empty() {
            self.stream(cache, batch)?;
            return Ok(Vec::new());
        }
        let largest = |logits: &Vec<f32>| {
            if logits.iter().any(|logit| !logit.is_finite()) {
                return Err("the model's logits are not finite".into());
            }
            let first = (0u32, f32::NEG_INFINITY);
            let better = |best: (u32, f32), of: (u32, f32)| if of.1 > best.1 { of } else { best };
            Ok((0u32..).zip(logits.iter().copied()).fold(first, better).0)
        };
        Ok(self.logits(cache, batch)?.iter().map(largest).collect::<Result<_>>()?)
    }

    fn end(&self) -> Option<u32> {
        self.end
    }
}
