//! The text that a model writes after a prompt, and whether it is the expected one.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use candle_core::Tensor;

use crate::model::{Attention, CHUNK_TOKENS, Model};
use crate::outcome::Outcome;
use crate::print::say;

/// What was written, and how long it took.
pub struct Written {
    pub tokens: Vec<u32>,
    /// By how much the logit of each token was above the next best.
    pub margins: Vec<f32>,
    pub prompt_tokens: usize,
    pub prompt_time: Duration,
    pub decode_time: Duration,
}

/// A prompt that was read.
pub struct Prompt {
    pub tokens: usize,
    pub time: Duration,
    /// The residual stream of its last chunk.
    pub stream: Option<Tensor>,
}

/// Reads a prompt and returns the residual stream of its last chunk.
pub fn read(model: &Model, attention: &mut dyn Attention, prompt: &[u32]) -> Result<Option<Tensor>> {
    let mut position = 0;
    let mut stream = None;
    for chunk in prompt.chunks(CHUNK_TOKENS) {
        stream = Some(model.forward(chunk, position, attention)?);
        position += chunk.len();
    }
    Ok(stream)
}

/// Where a text ends.
#[derive(Clone, Copy)]
pub struct Limits<'a> {
    /// At this many tokens.
    pub tokens: usize,
    /// Before any of these.
    pub ends: &'a [u32],
}

/// Writes what follows a prompt.
pub fn write(
    model: &Model,
    attention: &mut dyn Attention,
    prompt: Prompt,
    limits: Limits<'_>,
    mut each: impl FnMut(u32) -> Result<()>,
) -> Result<Written> {
    let Prompt { tokens: mut position, mut stream, .. } = prompt;
    let start = Instant::now();
    let (mut tokens, mut margins) = (Vec::new(), Vec::new());
    while let Some(last) = stream.take() {
        let (token, margin) = likeliest(&model.logits(&last.narrow(0, last.dim(0)? - 1, 1)?)?)?;
        if tokens.len() == limits.tokens || limits.ends.contains(&token) {
            break;
        }
        tokens.push(token);
        margins.push(margin);
        each(token)?;
        if tokens.len() < limits.tokens {
            stream = Some(model.forward(&[token], position, attention)?);
            position += 1;
        }
    }
    let (prompt_tokens, prompt_time) = (prompt.tokens, prompt.time);
    Ok(Written { tokens, margins, prompt_tokens, prompt_time, decode_time: start.elapsed() })
}

/// The token with the largest logit, the lowest of several, and its lead over the next.
fn likeliest(logits: &Tensor) -> Result<(u32, f32)> {
    let (mut best, mut first, mut second) = (0, f32::NEG_INFINITY, f32::NEG_INFINITY);
    let logits = logits.flatten_all()?.to_vec1::<f32>()?;
    let has_nan = logits.iter().any(|logit| logit.is_nan());
    for (token, logit) in (0..).zip(logits) {
        if logit > first {
            (best, first, second) = (token, logit, first);
        } else {
            second = second.max(logit);
        }
    }
    if has_nan || !first.is_finite() {
        bail!(
            "the model predicts no token: its logits hold NaN, or the largest of them is infinite. Fetch its file again \
             in case it is damaged, or try --recipe f16 and --backend cpu"
        );
    }
    Ok((best, first - second))
}

/// Says whether a text is the expected one, token by token.
pub fn compare(written: &Written, expected: &Written) -> Result<Outcome> {
    if expected.tokens.is_empty() {
        say!(
            "FAILED   nothing to verify: with candle's attention the text ends at once; use another prompt, --chat, or \
             more --tokens"
        )?;
        return Ok(Outcome::Failed);
    }
    let same = written.tokens.iter().zip(&expected.tokens).take_while(|(a, b)| a == b).count();
    if written.tokens == expected.tokens {
        let closest = expected.margins.iter().copied().fold(f32::INFINITY, f32::min);
        say!("verified {same} tokens; candle's full-precision attention chooses the same (closest call {closest:.4})")?;
        return Ok(Outcome::Passed);
    }
    say!("FAILED   token {same} of {} is another one with candle's full-precision attention", expected.tokens.len())?;
    if let Some(margin) = expected.margins.get(same) {
        say!("         whose logit was {margin:.4} above the next best")?;
    }
    Ok(Outcome::Failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ExactAttention, tiny};

    #[test]
    fn a_text_ends_where_it_is_told_to() {
        let (_file, model) = tiny::model("generate-ends");
        let written = |ends: &[u32]| {
            let mut attention = ExactAttention::new(&model.config);
            let stream = read(&model, &mut attention, &[1, 2, 3]).unwrap();
            let prompt = Prompt { tokens: 3, time: Duration::ZERO, stream };
            write(&model, &mut attention, prompt, Limits { tokens: 6, ends }, |_| Ok(())).unwrap().tokens
        };
        let all = written(&[]);
        assert_eq!(all.len(), 6);
        for end in &all {
            let before = all.iter().take_while(|token| *token != end).count();
            assert_eq!(written(&[255, *end]), all[..before]);
        }
    }

    #[test]
    fn logits_that_are_not_finite_predict_nothing() {
        let of = |logits: &[f32]| likeliest(&Tensor::new(logits, &candle_core::Device::Cpu).unwrap());
        assert_eq!(of(&[1.0, 3.0, f32::NEG_INFINITY, 3.0]).unwrap(), (1, 0.0));
        for logits in [[f32::NAN; 2], [f32::NAN, 1.0], [1.0, f32::NAN], [f32::NEG_INFINITY; 2], [f32::INFINITY, 1.0]] {
            assert!(of(&logits).unwrap_err().to_string().contains("logits"), "{logits:?}");
        }
    }
}
