//! What an evaluation found, as JSON and as a table.

use std::time::Duration;

use kvpack::Backend;
use kvpack::cache::ModelRecipe;
use serde::Serialize;

use super::Task;
use super::passkey::PasskeyRow;
use super::score::{Score, mean};
use crate::model::{CHUNK_TOKENS, PackedAttention};
use crate::print::{self, one_line, say};

/// Everything about one model and one text.
#[derive(Serialize)]
pub struct ModelReport {
    /// The model.
    pub model: String,
    /// The text.
    pub text: String,
    /// Where attention ran.
    pub backend: String,
    /// Lengths at which perplexity was taken, in tokens.
    pub lengths: Vec<usize>,
    /// Tokens over which the f16 cache was compared with candle's full-precision attention.
    pub compared_tokens: usize,
    /// NMSE of its log-probabilities there.
    pub f16_nmse: f64,
    /// Tokens of the texts with pass keys.
    pub passkey_tokens: usize,
    /// One row for each recipe.
    pub rows: Vec<RecipeRow>,
}

/// One recipe.
#[derive(Clone, Serialize)]
pub struct RecipeRow {
    /// The recipe.
    pub recipe: String,
    /// Perplexity at each length.
    pub perplexities: Vec<f64>,
    /// Mean KL divergence from the f16 cache, in nats.
    pub divergence: f64,
    /// The same for each chunk of 128 tokens.
    pub divergence_by_chunk: Vec<f64>,
    /// Share of positions whose likeliest token is that of the f16 cache.
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

impl ModelReport {
    pub fn new(task: &Task<'_>, backend: String, compared_tokens: usize, f16_nmse: f64) -> Self {
        Self {
            model: task.model.config.name.clone(),
            text: task.text.clone(),
            backend,
            lengths: task.lengths.clone(),
            compared_tokens,
            f16_nmse,
            passkey_tokens: task.passkeys.first().map_or(0, |passkey| passkey.tokens.len()),
            rows: Vec::new(),
        }
    }
}

impl RecipeRow {
    pub fn new<B: Backend>(
        task: &Task<'_>,
        recipe: &ModelRecipe,
        score: &Score,
        attention: &PackedAttention<B>,
        total: Duration,
    ) -> Self {
        let bytes: u64 = attention.memory().map(|memory| memory.in_use_bytes()).sum();
        let elements: u64 = attention.memory().map(|memory| memory.elements()).sum();
        Self {
            recipe: recipe.to_string(),
            perplexities: task.lengths.iter().map(|&length| score.perplexity(length)).collect(),
            divergence: mean(&score.divergences),
            divergence_by_chunk: score.divergences.chunks(CHUNK_TOKENS).map(mean).collect(),
            agreement: score.agreements as f64 / score.divergences.len() as f64,
            passkeys: Vec::new(),
            bytes,
            bits_per_element: bytes as f64 * 8.0 / elements.max(1) as f64,
            attention_seconds: attention.time().as_secs_f64(),
            model_seconds: total.saturating_sub(attention.time()).as_secs_f64(),
        }
    }

    /// Mean log-probability of the pass keys' digits, and how many keys were found.
    pub fn passkeys_found(&self) -> Option<(f64, usize)> {
        let found = self.passkeys.iter().filter(|row| row.found).count();
        let log_probabilities: Vec<f64> = self.passkeys.iter().map(|row| row.log_probability).collect();
        (!self.passkeys.is_empty()).then(|| (mean(&log_probabilities), found))
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

/// Prints the report as a table.
pub fn print(report: &ModelReport) -> anyhow::Result<()> {
    say!("{} reads {} on {}", one_line(&report.model), one_line(&report.text), report.backend)?;
    say!(
        "f16 cache against candle's full-precision attention: NMSE {:.1e} of the log-probabilities of {} tokens",
        report.f16_nmse,
        report.compared_tokens
    )?;
    let perplexities = report.lengths.iter().map(|length| format!("ppl {length}"));
    let header: Vec<String> = std::iter::once("recipe".to_owned())
        .chain(perplexities)
        .chain(["KL", "top-1", "pass key", "found", "bits", "bytes", "attention s", "model s"].map(str::to_owned))
        .collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut table = print::results(&header, 1);
    for row in &report.rows {
        let passkeys = row.passkeys_found();
        let mut cells = vec![row.recipe.clone()];
        cells.extend(row.perplexities.iter().map(|perplexity| format!("{perplexity:.3}")));
        cells.extend([
            format!("{:.5}", row.divergence),
            print::percent(row.agreement),
            passkeys.map_or("-".into(), |(log_probability, _)| format!("{log_probability:.3}")),
            passkeys.map_or("-".into(), |(_, found)| format!("{found} of {}", row.passkeys.len())),
            format!("{:.3}", row.bits_per_element),
            row.bytes.to_string(),
            format!("{:.1}", row.attention_seconds),
            format!("{:.1}", row.model_seconds),
        ]);
        table.add_row(cells);
    }
    say!("{table}")?;
    say!("\nppl N: perplexity of the first N tokens. KL: mean divergence from the f16 cache's predictions, in nats.")?;
    say!("top-1: positions whose likeliest token is the f16 cache's. pass key: mean log-probability of its digits.")?;
    say!("bits: per element of keys and values, with all ranges and what the recipe keeps in f16.")?;
    Ok(())
}
