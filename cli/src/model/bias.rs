//! How much of a model's keys is a bias: what the keys of all tokens have in common.

use anyhow::Result;
use candle_core::{DType, Tensor};
use kvpack::AttentionShape;
use kvpack::cache::ModelRecipe;

use super::{Attention, Chunk, Config};

/// From here on keys are said to have a bias. Ranges and norms of single tokens are then four times as large as the
/// differences between tokens, which costs two bits. SmolLM2-135M reaches 4, and layer 0 of Qwen2.5-Coder-1.5B 4,600.
pub const LARGEST_BIAS: f64 = 16.0;

/// Attention that sums up the keys that it is given.
pub struct KeysWatched<'a> {
    attention: &'a mut dyn Attention,
    bias: KeyBias,
}

impl<'a> KeysWatched<'a> {
    /// The same attention, watched.
    pub fn new(attention: &'a mut dyn Attention, config: &Config) -> Self {
        Self { attention, bias: KeyBias::new(config.attention, config.layers) }
    }

    /// What its keys have in common.
    pub fn into_bias(self) -> KeyBias {
        self.bias
    }
}

impl Attention for KeysWatched<'_> {
    fn attend(&mut self, chunk: &Chunk) -> Result<Tensor> {
        let keys = chunk.keys.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        self.bias.add(chunk.layer, &keys);
        self.attention.attend(chunk)
    }
}

/// Sums over the keys of a prompt.
pub struct KeyBias {
    shape: AttentionShape,
    layers: Vec<Sums>,
}

#[derive(Clone)]
struct Sums {
    tokens: usize,
    /// `[kv_heads, head_dim]`.
    elements: Vec<f64>,
    /// `[kv_heads]`.
    squares: Vec<f64>,
}

impl KeyBias {
    /// Of no keys yet.
    pub fn new(shape: AttentionShape, layers: usize) -> Self {
        let (kv_heads, head_dim) = (shape.kv_heads(), shape.head_dim());
        let none = Sums { tokens: 0, elements: vec![0.0; kv_heads * head_dim], squares: vec![0.0; kv_heads] };
        Self { shape, layers: vec![none; layers] }
    }

    /// Takes keys of a layer in, `[tokens, kv_heads, head_dim]`.
    pub fn add(&mut self, layer: usize, keys: &[f32]) {
        let (head_dim, sums) = (self.shape.head_dim(), &mut self.layers[layer]);
        for token in keys.chunks_exact(sums.elements.len()) {
            sums.tokens += 1;
            for (i, x) in token.iter().map(|&x| f64::from(x)).enumerate() {
                sums.elements[i] += x;
                sums.squares[i / head_dim] += x * x;
            }
        }
    }

    /// The mean square of the keys of a layer over that of their distances from their mean: 1 where they have nothing
    /// in common. The largest of all KV heads, and 1 of fewer than two tokens.
    pub fn of_layer(&self, layer: usize) -> f64 {
        let sums = &self.layers[layer];
        let tokens = sums.tokens as f64;
        let heads = sums.squares.iter().zip(sums.elements.chunks_exact(self.shape.head_dim()));
        let of_head = |(&squares, elements): (&f64, &[f64])| {
            let of_mean = elements.iter().map(|sum| sum * sum).sum::<f64>() / tokens;
            // Keys that are all the same are told apart by nothing.
            squares / (squares - of_mean).max(squares * 1e-9)
        };
        let largest = heads.map(of_head).filter(|bias| bias.is_finite()).fold(1.0, f64::max);
        if sums.tokens < 2 { 1.0 } else { largest }
    }

    /// What to say of a recipe that stores these keys badly; nothing where it does not.
    pub fn warning(&self, recipe: &ModelRecipe) -> Option<String> {
        let breaks = |layer: &usize| {
            let stored = recipe.layer(*layer, &self.shape);
            let packed = stored.packed().format;
            let per_token = packed.key.takes_centre() && packed.key != kvpack::format::TensorFormat::F16;
            per_token && !stored.is_centred() && self.of_layer(*layer) >= LARGEST_BIAS
        };
        let layers: Vec<usize> = (0..self.layers.len()).filter(breaks).collect();
        let worst = layers.iter().copied().max_by(|&a, &b| self.of_layer(a).total_cmp(&self.of_layer(b)))?;
        let centred = format!("{recipe}+centre");
        let advice = match centred.parse::<ModelRecipe>() {
            Ok(_) => format!("take --recipe {centred}, which subtracts their mean from the keys"),
            Err(_) => "take a recipe with +centre, or one with ranges per channel".into(),
        };
        Some(format!(
            "warning: this model's keys have a bias that {recipe} is known not to survive, since it stores one range or norm per \
             token: in {} of {} layers, most of all in layer {worst}, where all keys are {:.0} times as large as what tells \
             them apart. The text below may be nonsense; {advice}",
            layers.len(),
            self.layers.len(),
            self.of_layer(worst).sqrt()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys of 40 tokens, 2 KV heads × 64, whose channels alternate between ±1, and one channel of the second
    /// head has a bias.
    fn measured(bias: f32) -> KeyBias {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let mut measured = KeyBias::new(shape, 2);
        let sign = |token: usize, i: usize| if (token >> (i % 5)) & 1 == 0 { 1.0 } else { -1.0 };
        for tokens in [0..8, 8..32] {
            let key = |token: usize| (0..128).map(move |i| sign(token, i) + if i == 100 { bias } else { 0.0 });
            let keys: Vec<f32> = tokens.flat_map(key).collect();
            measured.add(1, &keys);
        }
        measured
    }

    #[test]
    fn a_bias_is_what_tokens_have_in_common() {
        assert!((measured(0.0).of_layer(1) - 1.0).abs() < 1e-9);
        // 64 channels of variance 1, and the square of the bias.
        let expected = (64.0 + 300.0 * 300.0) / 64.0;
        assert!((measured(300.0).of_layer(1) - expected).abs() < 1e-6 * expected);
        assert_eq!(measured(300.0).of_layer(0), 1.0, "of no tokens");
        let mut same = KeyBias::new(AttentionShape::new(1, 1, 64).unwrap(), 1);
        same.add(0, &[2.0; 128]);
        assert!(same.of_layer(0) > LARGEST_BIAS);
    }

    #[test]
    fn recipes_that_lose_biased_keys_are_warned_of() {
        let warning = |bias: f32, recipe: &str| measured(bias).warning(&recipe.parse().unwrap());
        for recipe in ["int4", "int8", "saw-int4", "turboquant:4", "qjl", "h2o:0.5/int4"] {
            let said = warning(300.0, recipe).unwrap_or_else(|| panic!("{recipe}"));
            assert!(said.contains("in 1 of 2 layers, most of all in layer 1"), "{said}");
            assert!(said.contains(&format!("take --recipe {recipe}+centre")), "{said}");
            assert_eq!(warning(2.0, recipe), None, "{recipe}");
        }
        for recipe in ["f16", "int4+centre", "calibquant:4", "kivi:2", "int4+layers=1:f16", "h2o:0.5"] {
            assert_eq!(warning(300.0, recipe), None, "{recipe}");
        }
    }
}
