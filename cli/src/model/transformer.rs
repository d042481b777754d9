//! The forward pass of transformers of the Llama, Qwen2 and Gemma 3 families.

use std::io::{BufReader, Read, Seek};
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::{D, DType, Device, Tensor};

use super::config::{Activation, RopePairs};
use super::projections::{Input, Projection};
use super::weights::{Linear, Product, RandomTensors, Tensors, Weights};
use super::{Attention, Chunk, Config, ModelError, Tokenizer, quantized};
use crate::files;

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

/// Operations that a device has as one kernel each.
pub trait Fused {
    /// x / √(mean x² + ε) · weight of every row; the weight has the type of `x`.
    ///
    /// # Errors
    /// What the device says.
    fn norm(&self, x: &Tensor, weight: &Tensor, epsilon: f64) -> candle_core::Result<Tensor>;

    /// Rotary position encoding of `[tokens, heads, head_dim]`; cosines and sines are `[tokens, 1, head_dim / 2]`.
    ///
    /// # Errors
    /// What the device says.
    fn rotate(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, pairs: RopePairs) -> candle_core::Result<Tensor>;
}

/// What the layers take of a step.
#[derive(Clone)]
pub struct Inputs {
    /// `[tokens, width]`.
    stream: Tensor,
    rotations: Rotations,
}

/// Rotations of the positions of a chunk in all layers.
#[derive(Clone)]
pub struct Rotations {
    global: Rotation,
    /// Those of local layers.
    local: Option<Rotation>,
}

/// Cosine and sine of the positions of a chunk, `[tokens, 1, head_dim / 2]`.
#[derive(Clone)]
struct Rotation {
    cos: Tensor,
    sin: Tensor,
}

/// What calibration sees of a forward pass: inputs of projections, `[tokens, inputs]`.
pub type Watch<'a> = dyn FnMut(Input, &Tensor) -> Result<()> + 'a;

/// A transformer block.
pub struct Layer {
    attention_norm: Tensor,
    query: Linear,
    key: Linear,
    value: Linear,
    /// Norms of the rows of queries and of keys, before they are rotated.
    query_norm: Option<Tensor>,
    key_norm: Option<Tensor>,
    attention_output: Linear,
    /// Norms of what attention and feed-forward add to the stream.
    attention_output_norm: Option<Tensor>,
    feed_forward_norm: Tensor,
    feed_forward_output_norm: Option<Tensor>,
    gate: Linear,
    up: Linear,
    down: Linear,
}

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
        model().with_context(|| format!("cannot load the model {}", path.display()))
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
    /// What the device says.
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
    /// What the device says.
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
    /// What the device says.
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
    /// What `make` says.
    pub fn with_products(mut self, make: &mut dyn FnMut(&Linear) -> Result<Box<dyn Product>>) -> Result<Self> {
        for linear in self.layers.iter_mut().flat_map(Layer::projections) {
            linear.set_product(make(linear)?);
        }
        Ok(self)
    }

    /// The type of its weights.
    pub fn dtype(&self) -> DType {
        self.embedding.dtype()
    }

    /// Checks that so many tokens fit the context.
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
    /// [`ModelError::Context`] beyond the context, and what attention says.
    pub fn forward(&self, tokens: &[u32], position: usize, attention: &mut dyn Attention) -> Result<Tensor> {
        self.forward_at(tokens, &(position..position + tokens.len()).collect::<Vec<_>>(), attention)
    }

    /// The same for tokens at any positions, of any sequences: `attention` knows whose they are.
    ///
    /// # Errors
    /// [`ModelError::Context`] beyond the context, and what attention says.
    pub fn forward_at(&self, tokens: &[u32], positions: &[usize], attention: &mut dyn Attention) -> Result<Tensor> {
        self.through_layers(&self.inputs(tokens, positions)?, attention)
    }

    /// What the layers take of these tokens.
    ///
    /// # Errors
    /// [`ModelError::Context`] beyond the context, and what the device says.
    pub fn inputs(&self, tokens: &[u32], positions: &[usize]) -> Result<Inputs> {
        self.check_context(positions.iter().max().map_or(0, |newest| newest + 1))?;
        Ok(Inputs { stream: self.embedded(tokens)?, rotations: self.rotations_at(positions)? })
    }

    /// The residual stream `[tokens, width]` behind all layers. Nothing is copied from the host.
    ///
    /// # Errors
    /// What attention and the device say.
    pub fn through_layers(&self, inputs: &Inputs, attention: &mut dyn Attention) -> Result<Tensor> {
        let mut stream = inputs.stream.clone();
        for index in 0..self.layers.len() {
            stream = self.layer(index, &stream, &inputs.rotations, attention, &mut |_, _| Ok(()))?;
        }
        Ok(stream)
    }

    /// The residual stream `[tokens, width]` before the first layer.
    pub fn embedded(&self, tokens: &[u32]) -> Result<Tensor> {
        let embedded = self.embedding.index_select(&Tensor::new(tokens, self.embedding.device())?, 0)?;
        Ok((embedded * self.config.embedding_scale)?)
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
        let layer = &self.layers[index];
        let is_local = self.config.layer_attention(index).window().is_some();
        let rotation = rotations.local.as_ref().filter(|_| is_local).unwrap_or(&rotations.global);
        let normed = self.norm(stream, &layer.attention_norm)?;
        watch(Input::Attention, &normed)?;
        let attended = attention.attend(&self.chunk(&normed, (index, layer), rotation)?)?;
        watch(Input::AttentionOutput, &attended)?;
        let attended = layer.attention_output.forward(&attended)?;
        let stream = (stream + self.normed(attended, &layer.attention_output_norm)?)?;
        let normed = self.norm(&stream, &layer.feed_forward_norm)?;
        watch(Input::FeedForward, &normed)?;
        let gated = layer.gated(&normed, self.config.activation)?;
        watch(Input::Down, &gated)?;
        let fed = layer.down.forward(&gated)?;
        Ok((stream + self.normed(fed, &layer.feed_forward_output_norm)?)?)
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

    /// The same where there is a weight.
    fn normed(&self, x: Tensor, weight: &Option<Tensor>) -> candle_core::Result<Tensor> {
        weight.as_ref().map_or(Ok(x.clone()), |weight| self.norm(&x, weight))
    }

    /// Queries, keys and values of `[tokens, width]` in a layer, the former two normed and rotated.
    fn chunk(&self, x: &Tensor, (index, layer): (usize, &Layer), rotation: &Rotation) -> candle_core::Result<Chunk> {
        let (shape, pairs) = (&self.config.attention, self.config.rope_pairs);
        let tokens = x.dim(0)?;
        let heads = |linear: &Linear, count| linear.forward(x)?.reshape((tokens, count, shape.head_dim()));
        let queries = self.normed(heads(&layer.query, shape.query_heads())?, &layer.query_norm)?;
        let keys = self.normed(heads(&layer.key, shape.kv_heads())?, &layer.key_norm)?;
        let rotated = |x: &Tensor| match &self.fused {
            Some(fused) => fused.rotate(x, &rotation.cos, &rotation.sin, pairs),
            None => rotation.apply(x, pairs),
        };
        Ok(Chunk {
            layer: index,
            queries: rotated(&queries)?,
            keys: rotated(&keys)?,
            values: heads(&layer.value, shape.kv_heads())?,
        })
    }
}

impl Inputs {
    /// Rows of the step.
    pub fn rows(&self) -> usize {
        self.stream.dims().first().copied().unwrap_or(0)
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let rotations = [Some(&self.rotations.global), self.rotations.local.as_ref()].into_iter().flatten();
        std::iter::once(&self.stream).chain(rotations.flat_map(|rotation| [&rotation.cos, &rotation.sin]))
    }

    /// The same in memory of its own, which [`Inputs::set`] writes.
    ///
    /// # Errors
    /// What the device says.
    pub fn copied(&self) -> candle_core::Result<Self> {
        let rotation = |of: &Rotation| -> candle_core::Result<Rotation> {
            Ok(Rotation { cos: of.cos.copy()?, sin: of.sin.copy()? })
        };
        let local = self.rotations.local.as_ref().map(rotation).transpose()?;
        let rotations = Rotations { global: rotation(&self.rotations.global)?, local };
        Ok(Self { stream: self.stream.copy()?, rotations })
    }

    /// Takes the elements of others of the same shapes.
    ///
    /// # Errors
    /// When the shapes differ, and what the device says.
    pub fn set(&self, others: &Self) -> candle_core::Result<()> {
        self.tensors().zip(others.tensors()).try_for_each(|(to, from)| to.slice_set(&from.contiguous()?, 0, 0))
    }
}

impl Rotation {
    /// The rotation of tokens at these positions, on the device and in the type of a tensor.
    fn new(frequencies: &[f32], positions: &[usize], of: &Tensor) -> candle_core::Result<Self> {
        let angles =
            positions.iter().flat_map(|&position| frequencies.iter().map(move |frequency| position as f32 * frequency));
        let angles = Tensor::from_vec(angles.collect(), (positions.len(), 1, frequencies.len()), of.device())?;
        Ok(Self { cos: angles.cos()?.to_dtype(of.dtype())?, sin: angles.sin()?.to_dtype(of.dtype())? })
    }

    /// Rotary position encoding of `[tokens, heads, head_dim]`.
    fn apply(&self, x: &Tensor, pairs: RopePairs) -> candle_core::Result<Tensor> {
        let (tokens, heads, head_dim) = x.dims3()?;
        let half = head_dim / 2;
        let (pairs, axis) = match pairs {
            RopePairs::Neighbours => (x.reshape((tokens, heads, half, 2))?, 3),
            RopePairs::Halves => (x.reshape((tokens, heads, 2, half))?, 2),
        };
        let (a, b) = (pairs.narrow(axis, 0, 1)?.squeeze(axis)?, pairs.narrow(axis, 1, 1)?.squeeze(axis)?);
        let turned_a = (a.broadcast_mul(&self.cos)? - b.broadcast_mul(&self.sin)?)?;
        let turned_b = (a.broadcast_mul(&self.sin)? + b.broadcast_mul(&self.cos)?)?;
        Tensor::stack(&[turned_a, turned_b], axis)?.reshape((tokens, heads, head_dim))
    }
}

impl Layer {
    fn load(weights: &mut impl Tensors, config: &Config, layer: usize) -> Result<Self, ModelError> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let (width, shape) = (config.width, &config.attention);
        let queries = shape.query_heads() * shape.head_dim();
        let keys = shape.kv_heads() * shape.head_dim();
        let inner = config.feed_forward;
        let mut norm = |part: &str, channels: usize| {
            let name = name(&format!("{part}.weight"));
            if weights.has(&name) { weights.tensor(&name, &[channels]).map(Some) } else { Ok(None) }
        };
        let [query_norm, key_norm] = [norm("attn_q_norm", shape.head_dim())?, norm("attn_k_norm", shape.head_dim())?];
        let [after_attention, after_feed_forward] =
            [norm("post_attention_norm", width)?, norm("post_ffw_norm", width)?];
        Ok(Self {
            query_norm,
            key_norm,
            attention_output_norm: after_attention,
            feed_forward_output_norm: after_feed_forward,
            attention_norm: weights.tensor(&name("attn_norm.weight"), &[width])?,
            query: weights.linear(&name("attn_q"), width, queries)?,
            key: weights.linear(&name("attn_k"), width, keys)?,
            value: weights.linear(&name("attn_v"), width, keys)?,
            attention_output: weights.linear(&name("attn_output"), queries, width)?,
            feed_forward_norm: weights.tensor(&name("ffn_norm.weight"), &[width])?,
            gate: weights.linear(&name("ffn_gate"), width, inner)?,
            up: weights.linear(&name("ffn_up"), width, inner)?,
            down: weights.linear(&name("ffn_down"), inner, width)?,
        })
    }

    fn moved(self, device: &Device, dtype: DType) -> candle_core::Result<Self> {
        let norm = |norm: Tensor| norm.to_device(device);
        let some_norm = |weight: Option<Tensor>| weight.map(norm).transpose();
        let linear = |linear: Linear| linear.moved(device, dtype);
        Ok(Self {
            attention_norm: norm(self.attention_norm)?,
            query: linear(self.query)?,
            key: linear(self.key)?,
            value: linear(self.value)?,
            query_norm: some_norm(self.query_norm)?,
            key_norm: some_norm(self.key_norm)?,
            attention_output: linear(self.attention_output)?,
            attention_output_norm: some_norm(self.attention_output_norm)?,
            feed_forward_norm: norm(self.feed_forward_norm)?,
            feed_forward_output_norm: some_norm(self.feed_forward_output_norm)?,
            gate: linear(self.gate)?,
            up: linear(self.up)?,
            down: linear(self.down)?,
        })
    }

    /// A projection.
    pub fn projection(&mut self, projection: Projection) -> &mut Linear {
        match projection {
            Projection::Query => &mut self.query,
            Projection::Key => &mut self.key,
            Projection::Value => &mut self.value,
            Projection::AttentionOutput => &mut self.attention_output,
            Projection::Gate => &mut self.gate,
            Projection::Up => &mut self.up,
            Projection::Down => &mut self.down,
        }
    }

    fn projections(&mut self) -> [&mut Linear; 7] {
        let Self { query, key, value, attention_output, gate, up, down, .. } = self;
        [query, key, value, attention_output, gate, up, down]
    }

    fn norms(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let Self { query_norm, key_norm, attention_output_norm, feed_forward_output_norm, .. } = self;
        let some = [query_norm, key_norm, attention_output_norm, feed_forward_output_norm];
        [&mut self.attention_norm, &mut self.feed_forward_norm]
            .into_iter()
            .chain(some.into_iter().filter_map(Option::as_mut))
    }

    /// The weights of the norm that makes an input, where one does.
    pub fn norm_before(&mut self, input: Input) -> Option<&mut Tensor> {
        match input {
            Input::Attention => Some(&mut self.attention_norm),
            Input::FeedForward => Some(&mut self.feed_forward_norm),
            Input::AttentionOutput | Input::Down => None,
        }
    }

    /// activation(gate x) · up x.
    fn gated(&self, x: &Tensor, activation: Activation) -> candle_core::Result<Tensor> {
        let gate = self.gate.forward(x)?;
        let gate = match activation {
            Activation::Silu => gate.silu()?,
            Activation::Gelu => gate.gelu()?,
        };
        gate * self.up.forward(x)?
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Each pair turns by position · frequency, whichever elements form it.
    #[test]
    fn pairs_turn_by_their_position() {
        let angles = Tensor::new(&[[[0.5f32, 2.0]]], &Device::Cpu).unwrap();
        let rotation = Rotation { cos: angles.cos().unwrap(), sin: angles.sin().unwrap() };
        let x = Tensor::new(&[[[1.0f32, 2.0, 3.0, 4.0]]], &Device::Cpu).unwrap();
        let turn = |a: f32, b: f32, angle: f32| {
            let (sin, cos) = angle.sin_cos();
            (a * cos - b * sin, a * sin + b * cos)
        };
        let apply = |pairs| rotation.apply(&x, pairs).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let ((a, b), (c, d)) = (turn(1.0, 2.0, 0.5), turn(3.0, 4.0, 2.0));
        let near = |given: Vec<f32>, expected: [f32; 4]| given.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-6);
        assert!(near(apply(RopePairs::Neighbours), [a, b, c, d]));
        let ((a, c), (b, d)) = (turn(1.0, 3.0, 0.5), turn(2.0, 4.0, 2.0));
        assert!(near(apply(RopePairs::Halves), [a, b, c, d]));
    }
}
