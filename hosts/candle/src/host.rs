//! The command's decoder as a model of the scheduler.

use anyhow::{Result, bail};
use candle_core::{D, DType, Tensor};
use kvpack::AttentionShape;
use kvpack::backend::Backend;
use kvpack::cache::{ModelCache, ModelRecipe, Recipe};
use kvpack_cli::{Config, Model};
use kvpack_serving::Batch;

use crate::attention::Steps;

/// A model, and what opens kvpack's steps.
pub struct Host<S> {
    model: Model,
    steps: S,
    stops: bool,
}

/// The layers of a cache for a model.
///
/// # Errors
/// When the recipe names a layer that the model does not have.
pub fn cache_layers(config: &Config, recipe: &ModelRecipe) -> Result<Vec<(AttentionShape, Recipe)>> {
    if let Some(layer) = recipe.highest_layer().filter(|&layer| layer >= config.layers) {
        bail!("recipe '{recipe}' names layer {layer}; the model has layers 0..{}", config.layers);
    }
    let of_layer = |layer| recipe.layer(layer, &config.attention).with_attention(config.layer_attention(layer));
    Ok((0..config.layers).map(|layer| (config.attention, of_layer(layer))).collect())
}

impl<S> Host<S> {
    /// A model whose attention are these steps. It ends texts at the model's end token.
    pub const fn new(model: Model, steps: S) -> Self {
        Self { model, steps, stops: true }
    }

    /// The same, which goes on until all tokens asked for are generated.
    #[must_use]
    pub fn without_end(self) -> Self {
        Self { stops: false, ..self }
    }

    /// The model.
    pub const fn model(&self) -> &Model {
        &self.model
    }

    /// The logits `[answering runs, vocabulary]` of a batch whose step is open.
    ///
    /// # Errors
    /// What the model, the cache or the device report.
    pub fn logits<B: Backend>(&mut self, cache: &mut ModelCache<B>, batch: &Batch) -> Result<Tensor>
    where
        S: Steps<B>,
    {
        let Self { model, steps, .. } = self;
        let (tokens, positions) = (batch.tokens(), batch.positions());
        let stream = steps.run(cache, |attention| model.forward_at(&tokens, &positions, attention))?;
        let rows: Vec<u32> = batch.answering_rows().into_iter().map(|row| row as u32).collect();
        let rows = Tensor::new(rows, stream.device())?;
        Ok(model.logits(&stream.index_select(&rows, 0)?)?.to_dtype(DType::F32)?)
    }
}

impl<B: Backend, S: Steps<B>> kvpack_serving::Model<B> for Host<S> {
    fn forward(
        &mut self,
        cache: &mut ModelCache<B>,
        batch: &Batch,
    ) -> Result<Vec<u32>, Box<dyn std::error::Error + Send + Sync>> {
        if batch.answering_rows().is_empty() {
            let (tokens, positions) = (batch.tokens(), batch.positions());
            let Self { model, steps, .. } = self;
            steps.run(cache, |attention| model.forward_at(&tokens, &positions, attention))?;
            return Ok(Vec::new());
        }
        Ok(self.logits(cache, batch)?.argmax(D::Minus1)?.to_vec1()?)
    }

    fn end(&self) -> Option<u32> {
        self.model.tokenizer.end().filter(|_| self.stops)
    }
}
