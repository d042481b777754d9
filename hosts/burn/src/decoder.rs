//! A decoder of the Llama, Qwen2 or Gemma 3 family with burn's tensors. Attention is what its caller makes of it.

use burn::tensor::activation::{gelu_approximate, silu};
use burn::tensor::{Device, Int, Tensor, TensorData};
use kvpack_serving::decoder::{Activation, Config, RopePairs, Tensors};

use crate::Result;

/// The weights of a model, in f32.
pub struct Decoder {
    pub config: Config,
    device: Device,
    embedding: Tensor<2>,
    layers: Vec<Layer>,
    output_norm: Tensor<2>,
    output: Linear,
    /// Radians by which each of the `head_dim / 2` pairs turns from one position to the next.
    frequencies: Vec<f32>,
    /// Those of local layers.
    local_frequencies: Vec<f32>,
}

struct Linear {
    /// `[inputs, outputs]`.
    weight: Tensor<2>,
    bias: Option<Tensor<2>>,
}

struct Layer {
    attention_norm: Tensor<2>,
    query: Linear,
    key: Linear,
    value: Linear,
    query_norm: Option<Tensor<2>>,
    key_norm: Option<Tensor<2>>,
    attention_output: Linear,
    attention_output_norm: Option<Tensor<2>>,
    feed_forward_norm: Tensor<2>,
    feed_forward_output_norm: Option<Tensor<2>>,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// Cosine and sine of the positions of a batch, `[rows, head_dim / 2]`.
struct Rotation {
    cos: Tensor<2>,
    sin: Tensor<2>,
}

/// Takes queries, keys and values of a layer, `[rows, heads · head_dim]`, and returns what attention makes of them.
pub type Attend<'a> = dyn FnMut(usize, [&Tensor<2>; 3]) -> Result<Tensor<2>> + 'a;

impl Decoder {
    pub fn load(device: &Device, config: Config, tensors: &mut impl Tensors) -> Result<Self> {
        let mut load = Load { device, tensors };
        let (width, half) = (config.width, config.attention.head_dim() / 2);
        let embedding = load.matrix("token_embd.weight", [config.vocabulary, width])?;
        let layers = (0..config.layers).map(|layer| load.layer(&config, layer)).collect::<Result<_>>()?;
        let output_norm = load.row("output_norm.weight", width)?;
        // Small models use the embedding for the output as well.
        let output = match load.tensors.has("output.weight") {
            true => load.linear("output", width, config.vocabulary)?,
            false => Linear { weight: embedding.clone().transpose(), bias: None },
        };
        let factors = match load.tensors.has("rope_freqs.weight") {
            true => load.tensors.tensor("rope_freqs.weight", &[half])?,
            false => vec![1.0; half],
        };
        let turns = |base: f32| (0..half).map(move |i| base.powf(-(i as f32) / half as f32));
        let frequencies = turns(config.rope_base).zip(factors).map(|(turn, factor)| turn / factor).collect();
        let local_frequencies = config.local.map_or_else(Vec::new, |local| turns(local.rope_base).collect());
        let device = device.clone();
        Ok(Self { config, device, embedding, layers, output_norm, output, frequencies, local_frequencies })
    }

    /// The residual stream `[rows, width]` of tokens at any positions, of any sequences.
    pub fn forward(&self, tokens: &[u32], positions: &[usize], attend: &mut Attend<'_>) -> Result<Tensor<2>> {
        let global = self.rotation(&self.frequencies, positions);
        let local = self.rotation(&self.local_frequencies, positions);
        let mut stream = self.embedding.clone().select(0, self.indices(tokens)) * self.config.embedding_scale;
        for (index, layer) in self.layers.iter().enumerate() {
            let rotation = if self.config.is_local(index) { &local } else { &global };
            let normed = self.norm(stream.clone(), &layer.attention_norm);
            let queries = self.rotated(layer.query.forward(&normed), &layer.query_norm, rotation);
            let keys = self.rotated(layer.key.forward(&normed), &layer.key_norm, rotation);
            let attended = attend(index, [&queries, &keys, &layer.value.forward(&normed)])?;
            let attended = layer.attention_output.forward(&attended);
            stream = stream + self.normed(attended, &layer.attention_output_norm);
            let normed = self.norm(stream.clone(), &layer.feed_forward_norm);
            let gate = layer.gate.forward(&normed);
            let gate = match self.config.activation {
                Activation::Silu => silu(gate),
                Activation::Gelu => gelu_approximate(gate),
            };
            let fed = layer.down.forward(&(gate * layer.up.forward(&normed)));
            stream = stream + self.normed(fed, &layer.feed_forward_output_norm);
        }
        Ok(stream)
    }

    /// The logits of some rows of the stream, row by row.
    pub fn logits(&self, stream: Tensor<2>, rows: &[usize]) -> Result<Vec<Vec<f32>>> {
        let rows: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
        let normed = self.norm(stream.select(0, self.indices(&rows)), &self.output_norm);
        let logits = self.output.forward(&normed).into_data();
        let logits = logits.try_to_vec::<f32>().map_err(|error| format!("{error:?}"))?;
        Ok(logits.chunks(self.config.vocabulary).map(<[f32]>::to_vec).collect())
    }

    /// The token with the largest logit behind every row of the stream. The device chooses it.
    #[cfg(feature = "studies")]
    pub fn largest(&self, stream: Tensor<2>) -> Result<Vec<u32>> {
        let logits = self.output.forward(&self.norm(stream, &self.output_norm));
        Ok(logits.argmax(1).into_data().iter::<i64>().map(|token| token as u32).collect())
    }

    fn indices(&self, of: &[u32]) -> Tensor<1, Int> {
        let of: Vec<i32> = of.iter().map(|&index| index as i32).collect();
        Tensor::from_data(TensorData::new(of.clone(), [of.len()]), &self.device)
    }

    /// x / √(mean x² + ε) · weight.
    fn norm(&self, x: Tensor<2>, weight: &Tensor<2>) -> Tensor<2> {
        let mean_square = x.clone().square().mean_dim(1);
        x / (mean_square + self.config.norm_epsilon).sqrt() * weight.clone()
    }

    /// The same where there is a weight.
    fn normed(&self, x: Tensor<2>, weight: &Option<Tensor<2>>) -> Tensor<2> {
        match weight {
            Some(weight) => self.norm(x, weight),
            None => x,
        }
    }

    fn rotation(&self, frequencies: &[f32], positions: &[usize]) -> Rotation {
        let half = frequencies.len().max(1);
        let angles = |position: &usize| {
            let position = *position as f32;
            (0..half).map(move |i| frequencies.get(i).map_or(0.0, |frequency| position * frequency))
        };
        let angles: Vec<f32> = positions.iter().flat_map(angles).collect();
        // Of large angles a GPU's own cosine is not exact enough.
        let of = |function: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|&angle| function(angle)).collect();
            Tensor::from_data(TensorData::new(values, [positions.len(), half]), &self.device)
        };
        Rotation { cos: of(f32::cos), sin: of(f32::sin) }
    }

    /// Rows `[rows, heads · head_dim]` whose heads are normed and rotated.
    fn rotated(&self, x: Tensor<2>, norm: &Option<Tensor<2>>, rotation: &Rotation) -> Tensor<2> {
        let [rows, width] = x.dims();
        let head_dim = self.config.attention.head_dim();
        let (heads, half) = (width / head_dim, head_dim / 2);
        let x = self.normed(x.reshape([rows * heads, head_dim]), norm);
        let (shape, axis) = match self.config.rope_pairs {
            RopePairs::Neighbours => ([rows, heads, half, 2], 3),
            RopePairs::Halves => ([rows, heads, 2, half], 2),
        };
        let flat = if axis == 3 { [rows, 1, half, 1] } else { [rows, 1, 1, half] };
        let (cos, sin): (Tensor<4>, Tensor<4>) =
            (rotation.cos.clone().reshape(flat), rotation.sin.clone().reshape(flat));
        let pairs = x.reshape(shape);
        let (a, b) = (pairs.clone().narrow(axis, 0, 1), pairs.narrow(axis, 1, 1));
        let turned_a = a.clone() * cos.clone() - b.clone() * sin.clone();
        let turned_b = a * sin + b * cos;
        Tensor::cat(vec![turned_a, turned_b], axis).reshape([rows, width])
    }
}

impl Linear {
    /// `[rows, inputs]` to `[rows, outputs]`.
    fn forward(&self, x: &Tensor<2>) -> Tensor<2> {
        let product = x.clone().matmul(self.weight.clone());
        match &self.bias {
            Some(bias) => product + bias.clone(),
            None => product,
        }
    }
}

/// Takes tensors to the device.
struct Load<'a, T> {
    device: &'a Device,
    tensors: &'a mut T,
}

impl<T: Tensors> Load<'_, T> {
    fn matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<Tensor<2>> {
        Ok(Tensor::from_data(TensorData::new(self.tensors.tensor(name, &shape)?, shape), self.device))
    }

    /// `[1, channels]`.
    fn row(&mut self, name: &str, channels: usize) -> Result<Tensor<2>> {
        Ok(Tensor::from_data(TensorData::new(self.tensors.tensor(name, &[channels])?, [1, channels]), self.device))
    }

    fn some_row(&mut self, name: &str, channels: usize) -> Result<Option<Tensor<2>>> {
        if self.tensors.has(name) { self.row(name, channels).map(Some) } else { Ok(None) }
    }

    fn linear(&mut self, name: &str, inputs: usize, outputs: usize) -> Result<Linear> {
        let weight = self.matrix(&format!("{name}.weight"), [outputs, inputs])?.transpose();
        Ok(Linear { weight, bias: self.some_row(&format!("{name}.bias"), outputs)? })
    }

    fn layer(&mut self, config: &Config, layer: usize) -> Result<Layer> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let (width, inner, shape) = (config.width, config.feed_forward, &config.attention);
        let (queries, keys) = (shape.query_heads() * shape.head_dim(), shape.kv_heads() * shape.head_dim());
        Ok(Layer {
            attention_norm: self.row(&name("attn_norm.weight"), width)?,
            query: self.linear(&name("attn_q"), width, queries)?,
            key: self.linear(&name("attn_k"), width, keys)?,
            value: self.linear(&name("attn_v"), width, keys)?,
            query_norm: self.some_row(&name("attn_q_norm.weight"), shape.head_dim())?,
            key_norm: self.some_row(&name("attn_k_norm.weight"), shape.head_dim())?,
            attention_output: self.linear(&name("attn_output"), queries, width)?,
            attention_output_norm: self.some_row(&name("post_attention_norm.weight"), width)?,
            feed_forward_norm: self.row(&name("ffn_norm.weight"), width)?,
            feed_forward_output_norm: self.some_row(&name("post_ffw_norm.weight"), width)?,
            gate: self.linear(&name("ffn_gate"), width, inner)?,
            up: self.linear(&name("ffn_up"), width, inner)?,
            down: self.linear(&name("ffn_down"), inner, width)?,
        })
    }
}
