//! The configuration of a model in a GGUF file.

use std::collections::HashMap;

use candle_core::quantized::gguf_file::Value;
use kvpack::AttentionShape;
use kvpack::cache::{ModelRecipe, Recipe};
use kvpack::plan::LayerAttention;

use super::ModelError;

/// The metadata of a GGUF file.
pub type Metadata = HashMap<String, Value>;

/// Which elements of a head rotary position encoding turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Elements 2i and 2i + 1, as llama's weights are ordered in GGUF.
    Neighbours,
    /// Elements i and i + head_dim / 2.
    Halves,
}

/// The function of a feed-forward layer's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x / (1 + e^-x), of Llama and Qwen.
    Silu,
    /// x · Φ(x), by its approximation with a tanh, of Gemma.
    Gelu,
}

/// Layers with a sliding window, among others that see all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalLayers {
    /// Positions before a query's own that it sees.
    pub left: usize,
    /// The period of the layers: the last layer of each period sees all positions.
    pub every: usize,
    /// Base of the rotation frequencies in local layers.
    pub rope_base: f32,
}

/// The shape of a model.
#[derive(Clone, Debug)]
pub struct Config {
    /// The model's name, where the file says one.
    pub name: String,
    /// Layers.
    pub layers: usize,
    /// Channels of the residual stream.
    pub width: usize,
    /// Channels inside a feed-forward layer.
    pub feed_forward: usize,
    /// Heads and head dimension.
    pub attention: AttentionShape,
    /// Tokens of the longest context.
    pub context: usize,
    /// Added to the mean square before its root is taken.
    pub norm_epsilon: f64,
    /// Base of the rotation frequencies.
    pub rope_base: f32,
    /// Which elements rotate together.
    pub rope_pairs: RopePairs,
    /// The function of the gates.
    pub activation: Activation,
    /// What embeddings are multiplied with.
    pub embedding_scale: f64,
    /// Layers with a sliding window, if the model has any.
    pub local: Option<LocalLayers>,
}

impl Config {
    /// Reads the metadata.
    ///
    /// # Errors
    /// [`ModelError::Architecture`], [`ModelError::Variant`] and [`ModelError::Metadata`].
    pub fn read(metadata: &Metadata) -> Result<Self, ModelError> {
        let architecture = string(metadata, "general.architecture")?;
        let rope_pairs = match architecture {
            "llama" => RopePairs::Neighbours,
            "qwen2" | GEMMA => RopePairs::Halves,
            other => return Err(ModelError::Architecture { given: other.into() }),
        };
        let key = |name: &str| format!("{architecture}.{name}");
        let number = |name: &str| number(metadata, &key(name));
        let or =
            |name: &str, default: usize| if metadata.contains_key(&key(name)) { number(name) } else { Ok(default) };

        let (width, query_heads) = (number("embedding_length")?, number("attention.head_count")?);
        let kv_heads = or("attention.head_count_kv", query_heads)?;
        let head_dim = or("attention.key_length", width / query_heads.max(1))?;
        let attention = AttentionShape::new(query_heads, kv_heads, head_dim)
            .map_err(|reason| ModelError::Variant { what: format!("attention heads without a kernel ({reason})") })?;
        let rotated = or("rope.dimension_count", head_dim)?;
        if rotated != head_dim {
            let what = format!("position encoding of {rotated} of {head_dim} channels");
            return Err(ModelError::Variant { what });
        }
        check_rope_scaling(metadata, architecture)?;
        if or("expert_count", 0)? > 0 {
            return Err(ModelError::Variant { what: "a mixture of experts".into() });
        }
        let at_least_one = |name: &str| match number(name)? {
            0 => Err(wrong(&key(name), &"it is 0, a model has at least one")),
            number => Ok(number),
        };
        let is_gemma = architecture == GEMMA;
        let local = match or("attention.sliding_window", 0)? {
            seen if seen > 1 && is_gemma => Some(LocalLayers { left: seen - 1, every: 6, rope_base: 10_000.0 }),
            0 => None,
            _ => {
                return Err(ModelError::Variant { what: format!("sliding windows in a model of kind {architecture}") });
            }
        };
        Ok(Self {
            activation: if is_gemma { Activation::Gelu } else { Activation::Silu },
            embedding_scale: if is_gemma { (width as f64).sqrt() } else { 1.0 },
            local,
            name: string(metadata, "general.name").unwrap_or("unnamed").into(),
            layers: at_least_one("block_count")?,
            width: at_least_one("embedding_length")?,
            feed_forward: at_least_one("feed_forward_length")?,
            attention,
            context: number("context_length")?,
            norm_epsilon: float(metadata, &key("attention.layer_norm_rms_epsilon"))?.into(),
            rope_base: if metadata.contains_key(&key("rope.freq_base")) {
                float(metadata, &key("rope.freq_base"))?
            } else {
                10_000.0
            },
            rope_pairs,
        })
    }
}

/// The Gemma 3 family: norms behind attention and feed-forward, of queries and of keys, and five local layers before
/// each that sees all.
const GEMMA: &str = "gemma3";

impl Config {
    /// What a layer sees.
    pub fn layer_attention(&self, layer: usize) -> LayerAttention {
        match self.local.filter(|local| !(layer + 1).is_multiple_of(local.every)) {
            Some(local) => LayerAttention::default().with_window(local.left),
            None => LayerAttention::default(),
        }
    }

    /// The first of some layers whose queries see fewer than `tokens` tokens, with the positions before their own that
    /// they see.
    pub fn first_local(&self, layers: impl IntoIterator<Item = usize>, tokens: usize) -> Option<(usize, usize)> {
        let of = |layer| Some((layer, self.layer_attention(layer).window()?));
        layers.into_iter().filter_map(of).find(|&(_, left)| left + 1 < tokens)
    }

    /// The layers of a cache for the model.
    ///
    /// # Errors
    /// [`ModelError::Layer`] when the recipe names a layer that the model does not have.
    pub fn cache_layers(&self, recipe: &ModelRecipe) -> Result<Vec<(AttentionShape, Recipe)>, ModelError> {
        if let Some(layer) = recipe.highest_layer().filter(|&layer| layer >= self.layers) {
            return Err(ModelError::Layer { recipe: recipe.to_string(), layer, layers: self.layers });
        }
        let of_layer = |layer| recipe.layer(layer, &self.attention).with_attention(self.layer_attention(layer));
        Ok((0..self.layers).map(|layer| (self.attention, of_layer(layer))).collect())
    }
}

/// Refuses a position encoding that is scaled. As in llama.cpp, scaling is linear where no type is given, an older key
/// also names its factor, and 0 is no factor.
fn check_rope_scaling(metadata: &Metadata, architecture: &str) -> Result<(), ModelError> {
    let find = |name: &str| Some(format!("{architecture}.rope.{name}")).filter(|key| metadata.contains_key(key));
    let scaling = find("scaling.type").map_or(Ok("linear"), |key| string(metadata, &key))?;
    let factor = find("scaling.factor").or_else(|| find("scale_linear"));
    let factor = factor.map_or(Ok(0.0), |key| float(metadata, &key))?;
    match scaling {
        "none" => Ok(()),
        "linear" if factor == 0.0 || factor == 1.0 => Ok(()),
        "linear" => Err(ModelError::Variant { what: format!("position encoding with 'linear' scaling by {factor}") }),
        other => Err(ModelError::Variant { what: format!("position encoding with '{other}' scaling") }),
    }
}

/// A string of the metadata.
pub fn string<'a>(metadata: &'a Metadata, key: &str) -> Result<&'a str, ModelError> {
    let value = entry(metadata, key)?;
    value.to_string().map(String::as_str).map_err(|reason| wrong(key, &reason))
}

/// A count of the metadata, whatever integer type it has.
pub fn number(metadata: &Metadata, key: &str) -> Result<usize, ModelError> {
    let value = entry(metadata, key)?;
    let number = match value {
        Value::I32(number) => u64::try_from(*number).ok(),
        Value::I64(number) => u64::try_from(*number).ok(),
        other => other.to_u64().ok(),
    };
    number.and_then(|number| usize::try_from(number).ok()).ok_or_else(|| wrong(key, &format!("{value:?} is no count")))
}

/// An array of the metadata.
pub fn array<'a>(metadata: &'a Metadata, key: &str) -> Result<&'a [Value], ModelError> {
    let value = entry(metadata, key)?;
    value.to_vec().map(Vec::as_slice).map_err(|reason| wrong(key, &reason))
}

/// Whether something is so, if the metadata say it.
pub fn flag(metadata: &Metadata, key: &str) -> Result<Option<bool>, ModelError> {
    metadata.get(key).map(|value| value.to_bool().map_err(|reason| wrong(key, &reason))).transpose()
}

fn float(metadata: &Metadata, key: &str) -> Result<f32, ModelError> {
    entry(metadata, key)?.to_f32().map_err(|reason| wrong(key, &reason))
}

fn entry<'a>(metadata: &'a Metadata, key: &str) -> Result<&'a Value, ModelError> {
    metadata.get(key).ok_or_else(|| wrong(key, &"there is none"))
}

fn wrong(key: &str, reason: &dyn std::fmt::Display) -> ModelError {
    ModelError::Metadata { key: key.into(), reason: reason.to_string() }
}
