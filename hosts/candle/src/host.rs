//! The command's decoder as a model of the scheduler.

use anyhow::Result;
use candle_core::Tensor;
use kvpack::backend::Backend;
use kvpack::cache::{ModelCache, TokenRun};
use kvpack_cli::{Attention, Inputs, Model};
use kvpack_serving::Batch;

use crate::attention::{Layers, Steps};
use crate::own::largest;

/// A model, and what opens kvpack's steps.
pub struct Host<S> {
    model: Model,
    steps: S,
    stops: bool,
    records: bool,
}

impl<S> Host<S> {
    /// A model whose attention are these steps. It ends texts at the model's end token.
    pub const fn new(model: Model, steps: S) -> Self {
        Self { model, steps, stops: true, records: true }
    }

    /// The same, which goes on until all tokens asked for are generated.
    #[must_use]
    pub fn without_end(self) -> Self {
        Self { stops: false, ..self }
    }

    /// The same, which launches every step kernel by kernel.
    #[must_use]
    pub fn without_records(self) -> Self {
        Self { records: false, ..self }
    }

    /// The model.
    pub const fn model(&self) -> &Model {
        &self.model
    }

    /// What opens kvpack's steps.
    pub const fn steps(&mut self) -> &mut S {
        &mut self.steps
    }

    /// The same with what becomes of its model.
    ///
    /// # Errors
    /// Those of the change.
    pub fn changed(self, change: impl FnOnce(Model) -> Result<Model>) -> Result<Self> {
        Ok(Self { model: change(self.model)?, ..self })
    }

    /// Whether steps of decoding may be recorded and replayed.
    pub const fn records(&self) -> bool {
        self.records
    }

    /// The residual stream of a batch whose step is open; the logits `[answering runs, vocabulary]` if any run answers.
    ///
    /// # Errors
    /// What the model, the cache or the device report.
    pub fn logits<B: Backend>(&mut self, cache: &mut ModelCache<B>, batch: &Batch) -> Result<Tensor>
    where
        S: Steps<B>,
    {
        let inputs = self.model.inputs(&batch.tokens(), &batch.positions())?;
        self.logits_of(cache, batch, &inputs)
    }

    /// The same for inputs that are on the device; the batch says whose they are.
    ///
    /// # Errors
    /// Those of [`Host::logits`].
    pub fn logits_of<B: Backend>(&mut self, cache: &mut ModelCache<B>, batch: &Batch, inputs: &Inputs) -> Result<Tensor>
    where
        S: Steps<B>,
    {
        let Self { model, steps, records, .. } = self;
        let rows: Vec<u32> = batch.answering_rows().into_iter().map(|row| row as u32).collect();
        if rows.len() == inputs.rows() && batch.runs().iter().all(|of| of.run == TokenRun::decode(of.run.sequence())) {
            // A step of decoding alone: the next one is like it.
            let layers = |inputs: &Inputs, attention: &mut dyn Attention| {
                model.logits(&model.through_layers(inputs, attention)?)
            };
            let layers: &Layers<'_> = &layers;
            return match records {
                true => steps.run_again(cache, inputs, layers),
                false => layers(inputs, &mut *steps.open(cache)?),
            };
        }
        let stream = model.through_layers(inputs, &mut *steps.open(cache)?)?;
        if rows.is_empty() {
            return Ok(stream);
        }
        let rows = Tensor::new(rows, stream.device())?;
        model.logits(&stream.index_select(&rows, 0)?)
    }
}

impl<B: Backend, S: Steps<B>> kvpack_serving::Model<B> for Host<S> {
    fn forward(
        &mut self,
        cache: &mut ModelCache<B>,
        batch: &Batch,
    ) -> Result<Vec<u32>, Box<dyn std::error::Error + Send + Sync>> {
        let logits = self.logits(cache, batch)?;
        if batch.answering_rows().is_empty() {
            return Ok(Vec::new());
        }
        Ok(largest(&logits)?)
    }

    fn end(&self) -> Option<u32> {
        self.model.tokenizer.end().filter(|_| self.stops)
    }
}
