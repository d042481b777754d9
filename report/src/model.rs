//! What recipes do to a model that reads a text.

use serde::{Deserialize, Serialize};

use crate::Run;

/// Everything about one model and one text.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename = "model")]
pub struct ModelReport {
    /// The run.
    pub run: Option<Run>,
    /// The model.
    pub model: String,
    /// The text.
    pub text: String,
    /// The model whose predictions with an f16 cache are the mark of divergences and agreements; none for the model
    /// itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against: Option<String>,
    /// Where attention ran.
    pub backend: String,
    /// Lengths at which perplexity was taken, in tokens.
    pub lengths: Vec<usize>,
    /// Tokens over which the f16 cache was compared with candle's full-precision attention.
    pub compared_tokens: usize,
    /// NMSE of its log-probabilities there.
    #[serde(deserialize_with = "crate::not_a_number::number")]
    pub f16_nmse: f64,
    /// Tokens of the texts with pass keys.
    pub passkey_tokens: usize,
    /// One row for each recipe.
    pub rows: Vec<RecipeRow>,
}

/// One recipe.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RecipeRow {
    /// The recipe.
    pub recipe: String,
    /// Perplexity at each length.
    #[serde(deserialize_with = "crate::not_a_number::numbers")]
    pub perplexities: Vec<f64>,
    /// Mean KL divergence from the f16 cache, or from another model's, in nats.
    #[serde(deserialize_with = "crate::not_a_number::number")]
    pub divergence: f64,
    /// The same for each chunk of 128 tokens.
    #[serde(deserialize_with = "crate::not_a_number::numbers")]
    pub divergence_by_chunk: Vec<f64>,
    /// Share of positions whose likeliest token is that of the same.
    #[serde(deserialize_with = "crate::not_a_number::number")]
    pub agreement: f64,
    /// Pass keys.
    pub passkeys: Vec<PasskeyRow>,
    /// Bytes of the cache at the end of the text.
    pub bytes: u64,
    /// The same in bits per element of keys and values, the f16 window and all ranges included.
    pub bits_per_element: f64,
    /// Seconds in the cache's attention, while the text was read.
    pub attention_seconds: f64,
    /// Seconds in everything else.
    pub model_seconds: f64,
}

/// How well a pass key was found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PasskeyRow {
    /// Where it was hidden: 0 at the beginning of the text, 1 at its end.
    pub depth: f64,
    /// Mean log-probability of its digits, in nats; the f16 cache's is the mark.
    #[serde(deserialize_with = "crate::not_a_number::number")]
    pub log_probability: f64,
    /// True if every digit was the likeliest token.
    pub found: bool,
}

impl RecipeRow {
    /// Mean log-probability of the pass keys' digits, and how many keys were found.
    pub fn passkeys_found(&self) -> Option<(f64, usize)> {
        let found = self.passkeys.iter().filter(|row| row.found).count();
        let sum: f64 = self.passkeys.iter().map(|row| row.log_probability).sum();
        (!self.passkeys.is_empty()).then(|| (sum / self.passkeys.len() as f64, found))
    }

    /// The row in one line, for those who watch.
    pub fn line(&self) -> String {
        let perplexity = self.perplexities.last().copied().unwrap_or(f64::NAN);
        format!(
            "{}: perplexity {perplexity:.3}, KL {:.5}, {:.3} bits per element",
            self.recipe, self.divergence, self.bits_per_element
        )
    }
}
