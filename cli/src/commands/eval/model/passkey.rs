//! A pass key hidden in a text: does the packed cache still find it?

use anyhow::{Result, bail};
use indicatif::ProgressBar;
use kvpack_report::PasskeyRow;

use super::score::{log_probabilities_of, mean, read};
use crate::model::{Attention, Model};

/// Where the key is hidden, as a fraction of the text, and what it is.
const HIDDEN: [(f64, &str); 4] = [(0.1, "58213"), (0.4, "90746"), (0.7, "31895"), (0.9, "67204")];

/// A text with a pass key in it and the question for it at its end.
pub struct Passkey {
    depth: f64,
    /// The text, the question, and the digits.
    pub tokens: Vec<u32>,
    /// Tokens of the digits.
    answer: usize,
}

/// Hides pass keys in the first tokens of a text, so that everything together is `length` tokens long.
pub fn hide(model: &Model, text: &[u32], length: usize) -> Result<Vec<Passkey>> {
    if length == 0 {
        return Ok(Vec::new());
    }
    model.check_context(length)?;
    HIDDEN.iter().map(|&(depth, key)| Passkey::hide(model, text, length, depth, key)).collect()
}

impl Passkey {
    fn hide(model: &Model, text: &[u32], length: usize, depth: f64, key: &str) -> Result<Self> {
        let encode = |text: &str| model.tokenizer.encode(text);
        let needle = encode(&format!("\n\nThe pass key is {key}. Remember it: {key} is the pass key.\n\n"))?;
        let question = encode("\n\nWhat is the pass key? The pass key is ")?;
        let answer = encode(key)?;
        let hay = length.saturating_sub(needle.len() + question.len() + answer.len());
        if hay < 16 || hay > text.len() {
            bail!("--passkey-tokens {length}: a text of {hay} tokens around the pass key, of {} there are", text.len());
        }
        let before = (hay as f64 * depth) as usize;
        let parts = [&text[..before], &needle, &text[before..hay], &question, &answer];
        Ok(Self { depth, tokens: parts.concat(), answer: answer.len() })
    }

    /// Reads the text and looks at what is predicted for the digits.
    pub fn score(&self, model: &Model, attention: &mut dyn Attention, progress: &ProgressBar) -> Result<PasskeyRow> {
        let first = self.tokens.len() - self.answer;
        let (mut log_probabilities, mut found) = (Vec::new(), true);
        read(model, attention, &self.tokens, progress, |position, predicted| {
            // The prediction for token t is that of position t - 1.
            let rows = predicted.dim(0)?;
            let from = (first - 1).clamp(position, position + rows);
            let to = (self.tokens.len() - 1).clamp(position, position + rows);
            if from < to {
                let next = &self.tokens[from + 1..to + 1];
                let rows = predicted.narrow(0, from - position, to - from)?;
                log_probabilities.extend(log_probabilities_of(&rows, next)?);
                found &= rows.argmax(candle_core::D::Minus1)?.to_vec1::<u32>()? == next;
            }
            Ok(())
        })?;
        Ok(PasskeyRow { depth: self.depth, log_probability: mean(&log_probabilities), found })
    }
}
