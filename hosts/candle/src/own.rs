//! candle's own attention over a cache of its tensors: what kvpack is compared with.

use anyhow::{Context, Result, ensure};
use candle_core::{D, DType, Tensor};
use kvpack_cli::{Attention, Chunk, Config, Model};
use kvpack_serving::study::median;

use crate::filled::UnderWay;
use crate::rig::Rig;

/// Keys and values of sequences that are equally long, in tensors with room for more.
pub struct OwnAttention<'a, R> {
    rig: &'a R,
    /// `[sequences, kv_heads, room, head_dim]` of every layer.
    layers: Vec<(Tensor, Tensor)>,
    /// Positions before its own that a query of each layer sees; none: all of them.
    windows: Vec<Option<usize>>,
    length: usize,
}

impl<'a, R: Rig> OwnAttention<'a, R> {
    /// Random contexts of `length` tokens, with room for more.
    ///
    /// # Errors
    /// What the device reports.
    pub fn new(
        rig: &'a R,
        (config, dtype): (&Config, DType),
        sequences: usize,
        (length, more): (usize, usize),
    ) -> Result<Self> {
        let shape = (sequences, config.attention.kv_heads(), length + more, config.attention.head_dim());
        let random = || Tensor::randn(0f32, 1.0, shape, rig.device())?.to_dtype(dtype);
        let layers = (0..config.layers).map(|_| Ok((random()?, random()?))).collect::<Result<_>>()?;
        let windows = (0..config.layers).map(|layer| config.layer_attention(layer).window()).collect();
        Ok(Self { rig, layers, windows, length })
    }

    /// The logits of the next tokens of all sequences.
    fn logits(&mut self, model: &Model, tokens: &Tensor) -> Result<Tensor> {
        let inputs = model.inputs_of(tokens, &vec![self.length; tokens.elem_count()])?;
        let stream = model.through_layers(&inputs, self)?;
        self.length += 1;
        model.logits(&stream)
    }
}

impl<R: Rig> Attention for OwnAttention<'_, R> {
    fn attend(&mut self, chunk: &Chunk) -> Result<Tensor> {
        let (keys, values) = &self.layers[chunk.layer];
        let (sequences, heads, head_dim) = chunk.queries.dims3()?;
        let kv_heads = keys.dim(1)?;
        let one = |x: &Tensor| x.contiguous()?.reshape((sequences, kv_heads, 1, head_dim));
        keys.slice_set(&one(&chunk.keys)?, 2, self.length)?;
        values.slice_set(&one(&chunk.values)?, 2, self.length)?;
        let first = self.windows[chunk.layer].map_or(0, |left| self.length.saturating_sub(left));
        let seen = |x: &Tensor| x.narrow(2, first, self.length + 1 - first);
        let (keys, values) = (seen(keys)?, seen(values)?);
        let queries = (&chunk.queries / (head_dim as f64).sqrt())?;
        let queries = queries.reshape((sequences, kv_heads, heads / kv_heads, head_dim))?;
        let weights = self.rig.softmax(&queries.matmul(&keys.t()?)?)?.to_dtype(values.dtype())?;
        Ok(weights.matmul(&values)?.reshape((sequences, heads * head_dim))?)
    }
}

/// Milliseconds of a step of decoding with candle's own attention: the middle of `steps`.
///
/// # Errors
/// What the device reports.
pub fn decode<R: Rig>(rig: &R, model: &Model, (sequences, tokens): (usize, usize), steps: usize) -> Result<f64> {
    const FIRST: usize = 4;
    let mut attention = OwnAttention::new(rig, (&model.config, model.dtype()), sequences, (tokens, FIRST + steps))?;
    let (mut under_way, mut times) = (UnderWay::new(rig, sequences)?, Vec::new());
    for _ in 0..FIRST + steps {
        let logits = attention.logits(model, under_way.tokens())?;
        times.extend(under_way.choose(&logits)?);
    }
    times.extend(under_way.end()?);
    times.drain(..FIRST);
    median(&times).context("no step was timed")
}

/// The greedy text of a prompt, token by token, with candle's own attention.
///
/// # Errors
/// What the device reports.
pub fn greedy<R: Rig>(rig: &R, model: &Model, prompt: &[u32], output: usize) -> Result<Vec<u32>> {
    let mut attention = OwnAttention::new(rig, (&model.config, model.dtype()), 1, (0, prompt.len() + output))?;
    let mut text = prompt.to_vec();
    for at in 0..prompt.len() + output - 1 {
        let next = largest(&attention.logits(model, &Tensor::new(&text[at..at + 1], rig.device())?)?)?;
        if at + 1 >= prompt.len() {
            text.extend(next);
        }
    }
    Ok(text.split_off(prompt.len()))
}

/// The logits behind the last token of a text, with candle's own attention in the type of the model.
///
/// # Errors
/// What the device reports.
pub fn logits<R: Rig>(rig: &R, model: &Model, text: &[u32]) -> Result<Vec<f32>> {
    let mut attention = OwnAttention::new(rig, (&model.config, model.dtype()), 1, (0, text.len()))?;
    let mut last = None;
    for token in text {
        last = Some(attention.logits(model, &Tensor::new(std::slice::from_ref(token), rig.device())?)?);
    }
    let last = last.context("there is no text")?;
    Ok(last.to_dtype(DType::F32)?.get(0)?.to_vec1()?)
}

/// The tokens with the largest logits.
///
/// # Errors
/// That logits are not finite, and what the device reports.
pub fn largest(logits: &Tensor) -> Result<Vec<u32>> {
    let logits = logits.to_dtype(DType::F32)?;
    // Both in one copy: f32 holds the numbers of tokens exactly.
    let tokens = largest_on_device(&logits)?.to_dtype(DType::F32)?;
    let both: Vec<Vec<f32>> = Tensor::stack(&[tokens, logits.sum(D::Minus1)?], 0)?.to_vec2()?;
    // Two texts of NaN would be equal, and one would be the text of no model.
    let finite = both[1].iter().all(|sum| sum.is_finite());
    ensure!(finite, "the model's logits are not finite; try another model file, or the program for the CPU");
    Ok(both[0].iter().map(|&token| token as u32).collect())
}

/// The same, on the device.
///
/// # Errors
/// What the device reports.
pub fn largest_on_device(logits: &Tensor) -> Result<Tensor> {
    Ok(logits.to_dtype(DType::F32)?.argmax(D::Minus1)?)
}

#[cfg(test)]
mod tests {
    use kvpack::cpu::nmse;
    use kvpack_cli::ExactAttention;
    use kvpack_serving::tiny;

    use super::*;
    use crate::attention::CpuRig;
    use crate::checks;

    /// Also in layers with a sliding window, whose reach the prompt exceeds.
    #[test]
    fn logits_are_those_of_exact_attention() {
        for family in tiny::FAMILIES {
            let (model, text) = (checks::model(family).unwrap(), tiny::prompt());
            let window = model.config.first_local(0..model.config.layers, text.len());
            assert_eq!(window.is_some(), family == "gemma3");
            let stream = model.forward(&text, 0, &mut ExactAttention::new(&model.config)).unwrap();
            let last = model.logits(&stream.narrow(0, text.len() - 1, 1).unwrap()).unwrap();
            let expected: Vec<f32> = last.flatten_all().unwrap().to_vec1().unwrap();
            let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
            let error = nmse(&logits(&CpuRig::default(), &model, &text).unwrap(), &expected);
            assert!(error <= 1e-6, "{family}: NMSE {error:.1e}");
        }
    }

    #[test]
    fn logits_that_are_not_finite_choose_nothing() {
        for hole in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let logits = Tensor::new(&[[1.0, hole, 2.0]], &candle_core::Device::Cpu).unwrap();
            assert!(largest(&logits).is_err(), "{hole}");
        }
    }
}
