//! The shape of a decoder and its tensors by name, for hosts without a GGUF reader of their own.
//!
//! The command has [`RopePairs`], [`Activation`] and [`LocalLayers`] of its own. Its package is published, so that it can
//! depend on published packages alone, and this one is not. In the library, which both depend on, they would be items
//! that no kernel and no cache reads.

use kvpack::AttentionShape;
use kvpack::cache::{ModelRecipe, Recipe};
use kvpack::plan::LayerAttention;

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

/// The shape of a decoder of the Llama, Qwen2 or Gemma 3 family.
#[derive(Clone, Debug)]
pub struct Config {
    /// Layers.
    pub layers: usize,
    /// Channels of the residual stream.
    pub width: usize,
    /// Channels inside a feed-forward layer.
    pub feed_forward: usize,
    /// Heads and head dimension.
    pub attention: AttentionShape,
    /// Tokens that exist.
    pub vocabulary: usize,
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
    /// Whether a layer has a sliding window.
    pub fn is_local(&self, layer: usize) -> bool {
        self.local.is_some_and(|local| !(layer + 1).is_multiple_of(local.every))
    }

    /// What a layer sees.
    pub fn layer_attention(&self, layer: usize) -> LayerAttention {
        match self.local.filter(|_| self.is_local(layer)) {
            Some(local) => LayerAttention::default().with_window(local.left),
            None => LayerAttention::default(),
        }
    }

    /// The layers of a cache for this model.
    pub fn cache_layers(&self, recipe: &ModelRecipe) -> Vec<(AttentionShape, Recipe)> {
        let of_layer = |layer| recipe.layer(layer, &self.attention).with_attention(self.layer_attention(layer));
        (0..self.layers).map(|layer| (self.attention, of_layer(layer))).collect()
    }
}

/// Tensors by the names that they have in GGUF files.
pub trait Tensors {
    /// Whether there is such a tensor.
    fn has(&self, name: &str) -> bool;

    /// The elements of a tensor, which must have this shape, in row-major order.
    ///
    /// # Errors
    /// That there is none, or that it has another shape.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String>;
}
