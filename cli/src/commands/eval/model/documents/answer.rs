//! Answers read token by token over what a cache keeps of a prompt, against full precision.

use anyhow::{Result, bail};
use candle_core::{D, Tensor};
use kvpack::Backend;
use kvpack::policy::{QueryPositions, Selection};
use kvpack_report::AnswerRow;

use super::super::score::{log_probabilities_of, log_softmax, mean};
use super::attended::Attended;
use super::questions::Question;
use crate::model::{Attention, DensePrompt, Model, PackedAttention};

/// A prompt of a document and a question, and its answer in full precision.
///
/// Engines take the first token of an answer from their own reading of the prompt. So it is given here, and the tokens
/// after it are predicted over what the cache keeps.
pub struct Asked {
    /// What was read.
    pub prompt: DensePrompt,
    /// The tokens of the answer but the last.
    input: Vec<u32>,
    /// The tokens after each.
    answer: Vec<u32>,
    /// `[answer, vocabulary]`, in full precision.
    expected: Tensor,
    /// What the answer attends to.
    attended: Attended,
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
        let layers = observer.column_sums(&read_on, &QueryPositions::last(input.len(), read_on.tokens())?)?;
        let kv_heads = model.config.attention.kv_heads();
        let attended = Attended { layers, kv_heads, document: document.tokens(), prompt: prompt.tokens() };
        Ok(Self { prompt, input: input.to_vec(), answer: answer.to_vec(), expected, attended })
    }

    /// The answer in full precision.
    pub fn reference(&self) -> Result<AnswerRow> {
        Ok(AnswerRow { contribution: Some(self.attended.contribution()), ..self.row(&self.expected, None)? })
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
            hit_rate: selection.map(|selection| self.attended.hit_rate(selection)).transpose()?,
            contribution: None,
            coverage: selection.map(|selection| self.attended.coverage(selection)),
        })
    }
}
