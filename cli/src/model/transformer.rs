//! The forward pass of transformers of the Llama, Qwen2 and Gemma 3 families.

use std::io::{BufReader, Read, Seek};
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::{D, DType, Device, Tensor};

use super::fused::Fused;
use super::layer::{Layer, columns};
use super::projections::Input;
use super::rotation::{Inputs, Rotation, Rotations};
use super::weights::{Linear, Product, RandomTensors, Tensors, Weights};
use super::{Attention, Chunk, Config, ModelError, Tokenizer, quantized};
use crate::files;
use crate::print::note;

/// A model, its weights in f32 on the CPU unless it [was moved](Model::moved).
pub struct Model {
    /// Its shape.
    pub config: Config,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// `[vocabulary, width]`.
    embedding: Tensor,
    layers: Vec<Layer>,
    output_norm: Tensor,
    output: Linear,
    /// Radians that each of the `head_dim / 2` pairs turns by from one position to the next.
    frequencies: Vec<f32>,
    /// Those of local layers.
    local_frequencies: Option<Vec<f32>>,
    /// Operations of the device, where it has them.
    fused: Option<Box<dyn Fused>>,
}

/// What calibration sees of a forward pass: inputs of projections, `[tokens, inputs]`.
pub type Watch<'a> = dyn FnMut(Input, &Tensor) -> Result<()> + 'a;
impl Model {
    /// Loads a GGUF file, or a folder that `kvpack quantize` wrote.
    ///
    /// # Errors
    /// [`ModelError`] says what is wrong with the file and what to do.
    pub fn load(path: &Path) -> Result<Self> {
        let gguf = |path: &Path| {
            Self::read(BufReader::new(files::open(path).map_err(|reason| ModelError::Unreadable { reason })?))
        };
        let model = || match path.is_dir() {
            true => {
                let mut model = gguf(&path.join(quantized::GGUF))?;
                quantized::replace_weights(&mut model, path)?;
                Ok(model)
            }
            false => gguf(path),
        };
        let model = model().with_context(|| format!("cannot load the model {}", path.display()))?;
        if let Some(assumption) = model.tokenizer.assumption() {
            note!("{assumption}");
        }
        Ok(model)
    }

    /// Reads the bytes of a GGUF file.
    ///
    /// # Errors
    /// Those of [`Model::load`].
    pub fn read(reader: impl Read + Seek) -> Result<Self> {
        let mut weights = Weights::open(reader)?;
        let config = Config::read(weights.metadata())?;
        let tokenizer = Tokenizer::read(weights.metadata())?;
        Self::of(config, tokenizer, &mut weights)
    }

    /// A model of random weights, for measurements. It knows `vocabulary` tokens and no text.
    ///
    /// # Errors
    /// Those of the device.
    pub fn random(config: Config, vocabulary: usize, device: &Device, dtype: DType) -> Result<Self> {
        let mut tensors = RandomTensors { device: device.clone(), dtype };
        Self::of(config, Tokenizer::without_text(vocabulary), &mut tensors)
    }

    fn of(config: Config, tokenizer: Tokenizer, weights: &mut impl Tensors) -> Result<Self> {
        let (width, vocabulary) = (config.width, tokenizer.vocabulary());
        let embedding = weights.tensor("token_embd.weight", &[vocabulary, width])?;
        let layers = (0..config.layers).map(|layer| Layer::load(weights, &config, layer)).collect::<Result<_, _>>()?;
        let output_norm = weights.tensor("output_norm.weight", &[width])?;
        // Small models use the embedding for the output as well.
        let output = match weights.has("output.weight") {
            true => weights.linear("output", width, vocabulary)?,
            false => Linear::new(embedding.clone(), None),
        };
        let local_frequencies = config.local.map(|local| turns(local.rope_base, config.attention.head_dim()));
        let frequencies = frequencies(weights, &config)?;
        Ok(Self {
            config,
            tokenizer,
            embedding,
            layers,
            output_norm,
            output,
            frequencies,
            local_frequencies,
            fused: None,
        })
    }

    /// The same with operations of its device. Weights of norms get the type of the others.
    ///
    /// # Errors
    /// Those of the device.
    pub fn with_fused(mut self, fused: Box<dyn Fused>) -> Result<Self> {
        let dtype = self.embedding.dtype();
        self.output_norm = self.output_norm.to_dtype(dtype)?;
        for layer in &mut self.layers {
            for norm in layer.norms() {
                *norm = norm.to_dtype(dtype)?;
            }
        }
        self.fused = Some(fused);
        Ok(self)
    }

    /// The same on another device and in another type of weights; those of norms stay in f32.
    ///
    /// # Errors
    /// Those of the device.
    pub fn moved(mut self, device: &Device, dtype: DType) -> Result<Self> {
        self.embedding = self.embedding.to_device(device)?.to_dtype(dtype)?;
        self.output_norm = self.output_norm.to_device(device)?;
        self.output = self.output.moved(device, dtype)?;
        let layers = self.layers.into_iter().map(|layer| layer.moved(device, dtype));
        self.layers = layers.collect::<candle_core::Result<_>>()?;
        Ok(self)
    }

    /// The same with projections that are multiplied by what `make` makes of them. The embedding and the output layer
    /// stay as they are.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn with_products(mut self, make: &mut dyn FnMut(&Linear) -> Result<Box<dyn Product>>) -> Result<Self> {
        for linear in self.layers.iter_mut().flat_map(Layer::products) {
            linear.set_product(make(linear)?);
        }
        Ok(self)
    }

    /// The same with one product where projections share their input: queries, keys and values, and gate and up.
    /// Weights with codes, and heads with norms of their own, stay apart. The parts give up their weights.
    ///
    /// # Errors
    /// Those of the device.
    pub fn joined(mut self) -> Result<Self> {
        self.layers.iter_mut().try_for_each(Layer::join)?;
        Ok(self)
    }

    /// Where its weights lie.
    pub fn device(&self) -> &Device {
        self.embedding.device()
    }

    /// The type of its weights.
    pub fn dtype(&self) -> DType {
        self.embedding.dtype()
    }

    /// Checks that this many tokens fit the context.
    ///
    /// # Errors
    /// [`ModelError::Context`].
    pub fn check_context(&self, tokens: usize) -> Result<(), ModelError> {
        let context = self.config.context;
        if tokens > context { Err(ModelError::Context { given: tokens, context }) } else { Ok(()) }
    }

    /// Runs the tokens at `position` and after it through all layers; `attention` remembers them.
    ///
    /// The output is the residual stream `[tokens, width]`, for [`Model::logits`].
    ///
    /// # Errors
    /// [`ModelError::Context`] beyond the context, and those of the attention.
    pub fn forward(&self, tokens: &[u32], position: usize, attention: &mut dyn Attention) -> Result<Tensor> {
        self.forward_at(tokens, &(position..position + tokens.len()).collect::<Vec<_>>(), attention)
    }

    /// The same for tokens at any positions, of any sequences: `attention` knows whose they are.
    ///
    /// # Errors
    /// [`ModelError::Context`] beyond the context, and those of the attention.
    pub fn forward_at(&self, tokens: &[u32], positions: &[usize], attention: &mut dyn Attention) -> Result<Tensor> {
        self.through_layers(&self.inputs(tokens, positions)?, attention)
    }

    /// What the layers take of these tokens.
    ///
    /// # Errors
    /// [`ModelError::Context`] beyond the context, and those of the device.
    pub fn inputs(&self, tokens: &[u32], positions: &[usize]) -> Result<Inputs> {
        self.inputs_of(&Tensor::new(tokens, self.embedding.device())?, positions)
    }

    /// The same for tokens that are on the device.
    ///
    /// # Errors
    /// Those of [`Model::inputs`].
    pub fn inputs_of(&self, tokens: &Tensor, positions: &[usize]) -> Result<Inputs> {
        self.check_context(positions.iter().max().map_or(0, |newest| newest + 1))?;
        Ok(Inputs { stream: self.rows_of(tokens)?, rotations: self.rotations_at(positions)? })
    }

    /// The residual stream `[tokens, width]` behind all layers. Nothing is copied from the host.
    ///
    /// # Errors
    /// What attention and the device say.
    pub fn through_layers(&self, inputs: &Inputs, attention: &mut dyn Attention) -> Result<Tensor> {
        let (mut stream, mut added) = (inputs.stream.clone(), None);
        for index in 0..self.layers.len() {
            let before = (&stream, added.as_ref());
            let (sum, fed) = self.block(index, before, &inputs.rotations, attention, &mut |_, _| Ok(()))?;
            (stream, added) = (sum, Some(fed));
        }
        Ok(added.map_or(Ok(stream.clone()), |added| stream + added)?)
    }

    /// The residual stream `[tokens, width]` before the first layer.
    pub fn embedded(&self, tokens: &[u32]) -> Result<Tensor> {
        self.rows_of(&Tensor::new(tokens, self.embedding.device())?)
    }

    fn rows_of(&self, tokens: &Tensor) -> Result<Tensor> {
        let (embedded, scale) = (self.embedding.index_select(tokens, 0)?, self.config.embedding_scale);
        Ok(if scale == 1.0 { embedded } else { (embedded * scale)? })
    }

    /// The rotations of the tokens at `position` and after it.
    pub fn rotations(&self, position: usize, tokens: usize) -> Result<Rotations> {
        self.rotations_at(&(position..position + tokens).collect::<Vec<_>>())
    }

    /// The rotations of tokens at these positions.
    fn rotations_at(&self, positions: &[usize]) -> Result<Rotations> {
        let rotation = |frequencies: &Vec<f32>| Rotation::new(frequencies, positions, &self.embedding);
        let local = self.local_frequencies.as_ref().map(rotation).transpose()?;
        Ok(Rotations { global: rotation(&self.frequencies)?, local })
    }

    /// The residual stream behind a layer; `watch` sees what the projections of the layer take.
    pub fn layer(
        &self,
        index: usize,
        stream: &Tensor,
        rotations: &Rotations,
        attention: &mut dyn Attention,
        watch: &mut Watch<'_>,
    ) -> Result<Tensor> {
        let (stream, fed) = self.block(index, (stream, None), rotations, attention, watch)?;
        Ok((stream + fed)?)
    }

    /// The same as two parts whose sum it is. `stream` may be two parts as well, so that a device adds and norms in one
    /// kernel.
    fn block(
        &self,
        index: usize,
        stream: (&Tensor, Option<&Tensor>),
        rotations: &Rotations,
        attention: &mut dyn Attention,
        watch: &mut Watch<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let layer = &self.layers[index];
        let is_local = self.config.layer_attention(index).window().is_some();
        let rotation = rotations.local.as_ref().filter(|_| is_local).unwrap_or(&rotations.global);
        let (stream, normed) = self.added(stream, &layer.attention_norm)?;
        watch(Input::Attention, &normed)?;
        let attended = attention.attend(&self.chunk(&normed, (index, layer), rotation)?)?;
        watch(Input::AttentionOutput, &attended)?;
        let attended = layer.attention_output.forward(&attended)?;
        let attended = self.normed(attended, &layer.attention_output_norm)?;
        let (stream, normed) = self.added((&stream, Some(&attended)), &layer.feed_forward_norm)?;
        watch(Input::FeedForward, &normed)?;
        let gated = layer.gated(&normed, self.config.activation, self.fused.as_deref())?;
        watch(Input::Down, &gated)?;
        let fed = layer.down.forward(&gated)?;
        Ok((stream, self.normed(fed, &layer.feed_forward_output_norm)?))
    }

    /// A layer whose weights are to be replaced.
    pub fn layer_mut(&mut self, index: usize) -> &mut Layer {
        &mut self.layers[index]
    }

    /// The logits `[tokens, vocabulary]` of the tokens that follow.
    pub fn logits(&self, stream: &Tensor) -> Result<Tensor> {
        Ok(self.output.forward(&self.norm(stream, &self.output_norm)?)?)
    }

    /// x / √(mean x² + ε) · weight, in f32.
    fn norm(&self, x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
        if let Some(fused) = &self.fused {
            return fused.norm(x, weight, self.config.norm_epsilon);
        }
        let (x, of) = (x.to_dtype(DType::F32)?, x.dtype());
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        let normed = x.broadcast_div(&(mean_square + self.config.norm_epsilon)?.sqrt()?)?;
        normed.broadcast_mul(weight)?.to_dtype(of)
    }

    /// The sum of the parts of the stream, and its norm.
    fn added(
        &self,
        (stream, added): (&Tensor, Option<&Tensor>),
        weight: &Tensor,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        match (added, &self.fused) {
            (Some(added), Some(fused)) => fused.add_and_norm(stream, added, weight, self.config.norm_epsilon),
            (Some(added), None) => {
                let sum = (stream + added)?;
                let normed = self.norm(&sum, weight)?;
                Ok((sum, normed))
            }
            (None, _) => Ok((stream.clone(), self.norm(stream, weight)?)),
        }
    }

    /// The norm where there is a weight.
    fn normed(&self, x: Tensor, weight: &Option<Tensor>) -> candle_core::Result<Tensor> {
        weight.as_ref().map_or(Ok(x.clone()), |weight| self.norm(&x, weight))
    }

    /// Queries, keys and values of `[tokens, width]` in a layer, the former two normed and rotated.
    fn chunk(&self, x: &Tensor, (index, layer): (usize, &Layer), rotation: &Rotation) -> candle_core::Result<Chunk> {
        let (shape, pairs) = (&self.config.attention, self.config.rope_pairs);
        let (tokens, count, kv_count) = (x.dim(0)?, shape.query_heads(), shape.kv_heads());
        let [queries, keys, values] = match (layer.joined_heads(), &self.fused) {
            (Some(joined), Some(fused)) => {
                let angles = (&rotation.cos, &rotation.sin);
                let [queries, keys, values] = fused.heads(&joined.forward(x)?, shape, angles, pairs)?;
                return Ok(Chunk { layer: index, queries, keys, values });
            }
            (Some(joined), None) => columns(&joined.forward(x)?, [count, kv_count, kv_count])?,
            (None, _) => [layer.query.forward(x)?, layer.key.forward(x)?, layer.value.forward(x)?],
        };
        let heads = |x: Tensor, count| x.reshape((tokens, count, shape.head_dim()));
        let queries = self.normed(heads(queries, count)?, &layer.query_norm)?;
        let keys = self.normed(heads(keys, kv_count)?, &layer.key_norm)?;
        let rotated = |x: &Tensor| match &self.fused {
            Some(fused) => fused.rotate(x, &rotation.cos, &rotation.sin, pairs),
            None => rotation.apply(x, pairs),
        };
        Ok(Chunk { layer: index, queries: rotated(&queries)?, keys: rotated(&keys)?, values: heads(values, kv_count)? })
    }
}

/// base^(-2i / head_dim), divided by the file's factors where it has some (Llama 3.1).
fn frequencies(weights: &mut impl Tensors, config: &Config) -> Result<Vec<f32>> {
    let half = config.attention.head_dim() / 2;
    let factors = match weights.has("rope_freqs.weight") {
        true => weights.tensor("rope_freqs.weight", &[half])?.to_vec1::<f32>()?,
        false => vec![1.0; half],
    };
    let turns = turns(config.rope_base, config.attention.head_dim());
    Ok(turns.into_iter().zip(factors).map(|(frequency, factor)| frequency / factor).collect())
}

/// base^(-2i / head_dim).
fn turns(base: f32, head_dim: usize) -> Vec<f32> {
    let half = head_dim / 2;
    (0..half).map(|i| base.powf(-(i as f32) / half as f32)).collect()
}
