//! Teacher-forced reading: what a model with a packed cache predicts, against the f16 cache.

use anyhow::Result;
use candle_core::{D, Tensor};
use indicatif::ProgressBar;

use crate::model::{Attention, CHUNK_TOKENS, Model};

/// Reads tokens chunk by chunk and hands on the log-probabilities `[chunk, vocabulary]` that follow each token, with
/// the position of the chunk's first.
pub fn read(
    model: &Model,
    attention: &mut dyn Attention,
    tokens: &[u32],
    progress: &ProgressBar,
    mut each: impl FnMut(usize, Tensor) -> Result<()>,
) -> Result<()> {
    let mut position = 0;
    for chunk in tokens.chunks(CHUNK_TOKENS) {
        let stream = model.forward(chunk, position, attention)?;
        each(position, log_softmax(&model.logits(&stream)?)?)?;
        position += chunk.len();
        progress.inc(chunk.len() as u64);
    }
    Ok(())
}

/// Log-probabilities of logits.
pub fn log_softmax(logits: &Tensor) -> candle_core::Result<Tensor> {
    let shifted = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?;
    shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(D::Minus1)?.log()?)
}

/// Log-probability of each token given those before it: `tokens - 1` numbers.
pub fn log_probabilities_of(predicted: &Tensor, next: &[u32]) -> Result<Vec<f64>> {
    let next = Tensor::new(next, predicted.device())?.unsqueeze(1)?;
    let picked = predicted.narrow(0, 0, next.dim(0)?)?.contiguous()?.gather(&next, 1)?.squeeze(1)?;
    Ok(picked.to_vec1::<f32>()?.into_iter().map(f64::from).collect())
}

/// The log-probabilities of the f16 cache, chunk by chunk.
pub struct Reference {
    chunks: Vec<Tensor>,
}

impl Reference {
    /// Reads the tokens.
    pub fn read(model: &Model, attention: &mut dyn Attention, tokens: &[u32], progress: &ProgressBar) -> Result<Self> {
        let mut chunks = Vec::new();
        read(model, attention, tokens, progress, |_, predicted| {
            chunks.push(predicted);
            Ok(())
        })?;
        Ok(Self { chunks })
    }

    /// Error of the reference over `tokens` against other attention: the squared norm of the difference of the
    /// log-probabilities over that of the other's.
    pub fn nmse(
        &self,
        model: &Model,
        attention: &mut dyn Attention,
        tokens: &[u32],
        progress: &ProgressBar,
    ) -> Result<f64> {
        let (mut difference, mut norm) = (0.0, 0.0);
        let square = |tensor: &Tensor| -> Result<f64> { Ok(f64::from(tensor.sqr()?.mean_all()?.to_scalar::<f32>()?)) };
        read(model, attention, tokens, progress, |position, predicted| {
            let own = self.chunks[position / CHUNK_TOKENS].narrow(0, 0, predicted.dim(0)?)?;
            difference += square(&(own - &predicted)?)? * predicted.dim(0)? as f64;
            norm += square(&predicted)? * predicted.dim(0)? as f64;
            Ok(())
        })?;
        Ok(difference / norm)
    }
}

/// What was predicted, position by position.
pub struct Score {
    /// Log-probability of each token after the first.
    pub log_probabilities: Vec<f64>,
    /// KL divergence from the f16 cache of the prediction at each position, in nats.
    pub divergences: Vec<f64>,
    /// Positions whose likeliest token is that of the f16 cache.
    pub agreements: usize,
}

impl Score {
    /// Reads the tokens.
    pub fn read(
        model: &Model,
        attention: &mut dyn Attention,
        tokens: &[u32],
        reference: &Reference,
        progress: &ProgressBar,
    ) -> Result<Self> {
        let mut score = Self { log_probabilities: Vec::new(), divergences: Vec::new(), agreements: 0 };
        read(model, attention, tokens, progress, |position, predicted| {
            let next = &tokens[position + 1..tokens.len().min(position + 1 + predicted.dim(0)?)];
            if !next.is_empty() {
                score.log_probabilities.extend(log_probabilities_of(&predicted, next)?);
            }
            score.compare(&reference.chunks[position / CHUNK_TOKENS], &predicted)
        })?;
        Ok(score)
    }

    fn compare(&mut self, expected: &Tensor, predicted: &Tensor) -> Result<()> {
        let divergences = (expected.exp()? * (expected - predicted)?)?.sum(D::Minus1)?.to_vec1::<f32>()?;
        self.divergences.extend(divergences.into_iter().map(f64::from));
        let likeliest = |tensor: &Tensor| tensor.argmax(D::Minus1)?.to_vec1::<u32>();
        let pairs = likeliest(expected)?.into_iter().zip(likeliest(predicted)?);
        self.agreements += pairs.filter(|(expected, predicted)| expected == predicted).count();
        Ok(())
    }

    /// exp of the mean negative log-probability of the first `tokens` tokens.
    pub fn perplexity(&self, tokens: usize) -> f64 {
        (-mean(&self.log_probabilities[..tokens - 1])).exp()
    }
}

/// The mean of at least one number.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}
