//! The baseline of the CPU benchmarks: multi-threaded f32 attention over plain f32 rows, without packing.

use rayon::prelude::*;

use super::simd::{Kernel, dispatch, multiply_add};
use super::softmax::{OnlineSoftmax, larger};
use super::states::States;
use crate::format::AttentionShape;
use crate::plan::Scoring;
use crate::{Error, Result};

/// Tokens whose scores are held at a time.
const BLOCK: usize = 128;

/// Minimum number of parts into which the tokens of all KV heads are cut, if they have that many blocks. It is a
/// constant, so that the sums and their rounding do not depend on the number of threads.
const PARTS: usize = 256;

/// Floats that are summed in parallel in a product.
const LANES: usize = 16;

/// Attention of one sequence's query over plain f32 rows: one row of states.
///
/// `keys` and `values` are `[kv_heads, tokens, head_dim]`, `query` is `[query_heads, head_dim]`. This is what an engine
/// without kvpack would run on the CPU: each KV head's rows are read once for all query heads of the group, threads
/// share the parts of the tokens, and the parts are merged. It uses the same loops as the packed kernels, so that a
/// comparison shows only the effect of packing.
///
/// # Errors
/// [`Error::Elements`] when a slice has the wrong length, [`Error::NoTokens`] when `tokens` is 0.
pub fn plain_attention(
    shape: &AttentionShape,
    keys: &[f32],
    values: &[f32],
    tokens: usize,
    query: &[f32],
) -> Result<States> {
    check(shape, keys, values, tokens, query)?;
    let (kv_heads, head_dim, group) = (shape.kv_heads(), shape.head_dim(), shape.group());
    let softmax_scale = Scoring::of(shape).scale();
    let query: Vec<f32> = query.iter().map(|q| q * softmax_scale).collect();

    let parts = PARTS.div_ceil(kv_heads).min(tokens.div_ceil(BLOCK));
    let part_tokens = tokens.div_ceil(parts).next_multiple_of(BLOCK);
    let partial: Vec<Vec<HeadState>> = (0..kv_heads * parts)
        .into_par_iter()
        .map(|i| {
            let (head, part) = (i / parts, i % parts);
            let (start, end) = ((part * part_tokens).min(tokens), ((part + 1) * part_tokens).min(tokens));
            let rows = (head * tokens + start) * head_dim..(head * tokens + end) * head_dim;
            let query = &query[head * group * head_dim..][..group * head_dim];
            attend_part(&keys[rows.clone()], &values[rows], query, head_dim)
        })
        .collect();

    let mut states = States::new(1, shape)?;
    for (kv_head, (outputs, lse)) in states.chunks_mut(group).enumerate() {
        for (i, (output, lse)) in outputs.chunks_exact_mut(head_dim).zip(lse).enumerate() {
            *lse = merge_parts(partial[kv_head * parts..][..parts].iter().map(|part| &part[i]), output);
        }
    }
    Ok(states)
}

struct HeadState {
    softmax: OnlineSoftmax,
    /// Weighted sum of values, not normalised.
    sum: Vec<f32>,
}

fn attend_part(keys: &[f32], values: &[f32], query: &[f32], head_dim: usize) -> Vec<HeadState> {
    let new = |_| HeadState { softmax: OnlineSoftmax::EMPTY, sum: vec![0.0; head_dim] };
    let mut states: Vec<HeadState> = (0..query.len() / head_dim).map(new).collect();
    for (keys, values) in keys.chunks(BLOCK * head_dim).zip(values.chunks(BLOCK * head_dim)) {
        for (state, query) in states.iter_mut().zip(query.chunks_exact(head_dim)) {
            let mut weights = [0.0; BLOCK];
            let weights = &mut weights[..keys.len() / head_dim];
            dispatch(RowScores { keys, query, scores: weights });
            let factor = state.softmax.weigh(weights) as f32;
            dispatch(WeightedRows { values, weights, factor, sum: &mut state.sum });
        }
    }
    states
}

fn merge_parts<'a>(parts: impl Iterator<Item = &'a HeadState> + Clone, output: &mut [f32]) -> f32 {
    let with_tokens = parts.filter(|part| part.softmax.sum() != 0.0);
    let largest = with_tokens.clone().map(|part| part.softmax.log_sum_exp()).fold(f32::NEG_INFINITY, larger);
    let mut weight_sum = 0.0;
    for part in with_tokens {
        let weight = f64::from(part.softmax.log_sum_exp() - largest).exp();
        weight_sum += weight;
        let factor = (weight / part.softmax.sum()) as f32;
        output.iter_mut().zip(&part.sum).for_each(|(output, sum)| *output += factor * sum);
    }
    output.iter_mut().for_each(|x| *x = (f64::from(*x) / weight_sum) as f32);
    (f64::from(largest) + weight_sum.ln()) as f32
}

struct RowScores<'a> {
    keys: &'a [f32],
    query: &'a [f32],
    scores: &'a mut [f32],
}

impl Kernel for RowScores<'_> {
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (row, score) in self.keys.chunks_exact(self.query.len()).zip(self.scores) {
            let mut partial = [0f32; LANES];
            for (row, query) in row.as_chunks::<LANES>().0.iter().zip(self.query.as_chunks::<LANES>().0) {
                for lane in 0..LANES {
                    partial[lane] = multiply_add::<FMA>(row[lane], query[lane], partial[lane]);
                }
            }
            *score = partial.iter().sum();
        }
    }
}

struct WeightedRows<'a> {
    values: &'a [f32],
    weights: &'a [f32],
    factor: f32,
    sum: &'a mut [f32],
}

impl Kernel for WeightedRows<'_> {
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let head_dim = self.sum.len();
        self.sum.iter_mut().for_each(|sum| *sum *= self.factor);
        // Blocks of channels stay in registers over all tokens.
        for (i, sum) in self.sum.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let mut total = *sum;
            for (row, &weight) in self.values.chunks_exact(head_dim).zip(self.weights) {
                let row = &row[i * LANES..][..LANES];
                for lane in 0..LANES {
                    total[lane] = multiply_add::<FMA>(row[lane], weight, total[lane]);
                }
            }
            *sum = total;
        }
    }
}

fn check(shape: &AttentionShape, keys: &[f32], values: &[f32], tokens: usize, query: &[f32]) -> Result<()> {
    if tokens == 0 {
        return Err(Error::NoTokens { what: "plain attention", hint: "pass at least one token" });
    }
    // If it saturates, it exceeds the length of any slice.
    let rows = tokens.saturating_mul(shape.kv_heads() * shape.head_dim());
    let queries = shape.query_heads() * shape.head_dim();
    for (what, given, expected) in
        [("keys", keys.len(), rows), ("values", values.len(), rows), ("query", query.len(), queries)]
    {
        if given != expected {
            return Err(Error::Elements { what, given, expected, shape: format!("{tokens} tokens of {shape:?}") });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{DenseSegment, exact_attention, nmse};

    #[test]
    fn agrees_with_the_oracle() {
        for (query_heads, kv_heads, tokens) in [(1, 1, 1), (6, 2, 300), (4, 4, 128)] {
            let shape = AttentionShape::new(query_heads, kv_heads, 80).unwrap();
            let wave = |n: usize, step: f32| (0..n).map(|i| (i as f32 * step).sin()).collect::<Vec<f32>>();
            let rows = kv_heads * tokens * 80;
            let (keys, values, query) = (wave(rows, 0.37), wave(rows, 0.11), wave(query_heads * 80, 0.73));
            let got = plain_attention(&shape, &keys, &values, tokens, &query).unwrap();
            let segment = DenseSegment { keys: &keys, values: &values, tokens, calibration: None };
            let exact = exact_attention(&shape, &[segment], &query).unwrap();
            assert!(nmse(got.outputs(), &exact.outputs) < 1e-10);
            assert!(nmse(got.lse(), &exact.lse) < 1e-10);
        }
    }
}
