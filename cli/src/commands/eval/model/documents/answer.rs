//! Answers read token by token over what a cache keeps of a prompt, against full precision.

use anyhow::{Result, bail};
use candle_core::{D, Tensor};
use kvpack::Backend;
use kvpack::policy::{QueryRows, Selection, top_k};
use kvpack_report::AnswerRow;

use super::super::score::{log_probabilities_of, log_softmax, mean};
use super::questions::Question;
use crate::model::{Attention, DensePrompt, Model, PackedAttention};

/// A prompt of a document and a question, and its answer in full precision.
///
/// Engines take the first token of an answer from their own reading of the prompt. So it is given here, and the tokens after
/// it are predicted over what the cache keeps.
pub struct Asked {
    /// What was read.
    pub prompt: DensePrompt,
    /// The tokens of the answer but the last.
    input: Vec<u32>,
    /// The tokens after each.
    answer: Vec<u32>,
    /// `[answer, vocabulary]`, in full precision.
    expected: Tensor,
    /// What the answer attends to in each layer, `[kv_heads, tokens]`.
    attended: Vec<Vec<f32>>,
}

impl Asked {
    /// Reads a question after its document, and the answer in full precision.
    pub fn new<B: Backend + Clone>(
        model: &Model,
        document: &DensePrompt,
        question: &Question,
        observer: &PackedAttention<B>,
    ) -> Result<Self> {
        let mut prompt = document.clone();
        prompt.read(model, &question.tokens)?;
        let (Some((_, input)), Some((_, answer))) = (question.answer.split_last(), question.answer.split_first())
        else {
            bail!("an answer without tokens");
        };
        let mut read_on = prompt.clone();
        let stream = read_on.read(model, input)?;
        let expected = log_softmax(&model.logits(&stream)?)?;
        let attended = observer.column_sums(&read_on, &QueryRows::last(input.len(), read_on.tokens())?)?;
        Ok(Self { prompt, input: input.to_vec(), answer: answer.to_vec(), expected, attended })
    }

    /// The answer in full precision.
    pub fn reference(&self) -> Result<AnswerRow> {
        self.row(&self.expected, None)
    }

    /// The answer over what `attention` holds of the prompt.
    pub fn score(
        &self,
        model: &Model,
        attention: &mut dyn Attention,
        selection: Option<&Selection>,
    ) -> Result<AnswerRow> {
        let stream = model.forward(&self.input, self.prompt.tokens(), attention)?;
        self.row(&log_softmax(&model.logits(&stream)?)?, selection)
    }

    fn row(&self, predicted: &Tensor, selection: Option<&Selection>) -> Result<AnswerRow> {
        let divergences = (self.expected.exp()? * (&self.expected - predicted)?)?.sum(D::Minus1)?.to_vec1::<f32>()?;
        let divergences: Vec<f64> = divergences.into_iter().map(f64::from).collect();
        let likeliest = predicted.argmax(D::Minus1)?.to_vec1::<u32>()?;
        let found = likeliest.iter().zip(&self.answer).filter(|(likeliest, token)| likeliest == token).count();
        Ok(AnswerRow {
            log_probability: mean(&log_probabilities_of(predicted, &self.answer)?),
            divergence: mean(&divergences),
            found: found as f64 / self.answer.len() as f64,
            hit_rate: selection.map(|selection| self.hit_rate(selection)).transpose()?,
        })
    }

    /// Of the kept tokens of every layer and KV head the share that is among as many tokens of the prompt to which the answer
    /// attends most, their mean.
    fn hit_rate(&self, selection: &Selection) -> Result<f64> {
        let mut rates = Vec::new();
        for (layer, attended) in selection.layers().iter().zip(&self.attended) {
            for (head, attended) in attended.chunks_exact(attended.len() / layer.kv_heads()).enumerate() {
                let kept = layer.kept(head);
                if kept.is_empty() {
                    continue;
                }
                let best = top_k(&attended[..layer.tokens()], kept.len())?;
                let hits = best.iter().filter(|token| kept.binary_search(token).is_ok()).count();
                rates.push(hits as f64 / kept.len() as f64);
            }
        }
        Ok(if rates.is_empty() { 0.0 } else { mean(&rates) })
    }
}
