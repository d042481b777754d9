//! The oracle: attention over dense rows in f64, written to be obviously right and to share nothing with the kernels.

use crate::format::{AttentionShape, Calibration};
use crate::plan::Scoring;
use crate::{Error, Result};

/// Tokens whose scores are calibrated together, as dense rows.
#[derive(Clone, Copy, Debug)]
pub struct DenseSegment<'a> {
    /// `[kv_heads, tokens, head_dim]`.
    pub keys: &'a [f32],
    /// `[kv_heads, tokens, head_dim]`.
    pub values: &'a [f32],
    /// Number of tokens; may be 0.
    pub tokens: usize,
    /// Calibration of the scores of this segment.
    pub calibration: Option<Calibration>,
}

/// Outputs and log-sum-exps in f64.
#[derive(Clone, Debug, PartialEq)]
pub struct ExactState {
    /// `[query_heads, head_dim]`.
    pub outputs: Vec<f64>,
    /// Natural log-sum-exp per query head, after calibration.
    pub lse: Vec<f64>,
}

/// Attention of one sequence's query `[query_heads, head_dim]` over all tokens of the segments: one softmax over all.
///
/// ```
/// use kvpack::AttentionShape;
/// use kvpack::cpu::{DenseSegment, exact_attention};
/// let shape = AttentionShape::new(1, 1, 64)?;
/// let (keys, values) = ([0.0; 2 * 64], [[1.0; 64], [3.0; 64]].concat());
/// let segment = DenseSegment { keys: &keys, values: &values, tokens: 2, calibration: None };
/// let state = exact_attention(&shape, &[segment], &[1.0; 64])?;
/// assert_eq!(state.outputs, [2.0; 64]);
/// assert_eq!(state.lse, [2f64.ln()]);
/// # Ok::<(), kvpack::Error>(())
/// ```
///
/// # Errors
/// [`Error::Elements`] when a slice has the wrong length, [`Error::NoTokens`] when no segment has tokens.
pub fn exact_attention(shape: &AttentionShape, segments: &[DenseSegment<'_>], query: &[f32]) -> Result<ExactState> {
    if segments.iter().all(|segment| segment.tokens == 0) {
        return Err(Error::NoTokens { what: "exact attention", hint: "pass a segment with tokens" });
    }
    exact_scored_attention(shape, &Scoring::of(shape), segments, query)
}

/// The same with the scoring of a layer: scores are scaled, capped and calibrated in this order, and a sink is one more
/// logit without a value. Without tokens and without a sink the output is 0 and the log-sum-exp −∞.
///
/// # Errors
/// [`Error::Elements`] when a slice or the sinks have the wrong length.
pub fn exact_scored_attention(
    shape: &AttentionShape,
    scoring: &Scoring,
    segments: &[DenseSegment<'_>],
    query: &[f32],
) -> Result<ExactState> {
    check(shape, scoring, segments, query)?;
    let head_dim = shape.head_dim();
    // The default is exact here, where an f32 is not.
    let is_default = scoring.scale() == Scoring::of(shape).scale();
    let scale = if is_default { 1.0 / (head_dim as f64).sqrt() } else { f64::from(scoring.scale()) };
    let score = |product: f64| match scoring.soft_cap().map(f64::from) {
        Some(cap) => cap * (product * scale / cap).tanh(),
        None => product * scale,
    };
    let mut state = ExactState { outputs: Vec::new(), lse: Vec::new() };
    for head in 0..shape.query_heads() {
        let query = &query[head * head_dim..][..head_dim];
        let kv_head = head / shape.group();
        let mut scores = Vec::new();
        let mut rows = Vec::new();
        for segment in segments {
            let row = |tensor: &'_ [f32], token| row_of(tensor, kv_head * segment.tokens + token, head_dim);
            let of_segment: Vec<f64> = (0..segment.tokens).map(|t| score(dot(query, &row(segment.keys, t)))).collect();
            scores.extend(calibrated(of_segment, segment.calibration));
            rows.extend((0..segment.tokens).map(|t| row(segment.values, t)));
        }

        let sink = scoring.sinks().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
        let largest = scores.iter().copied().fold(sink, f64::max);
        // Nothing at all; a score that is NaN is something.
        if sink == f64::NEG_INFINITY && scores.is_empty() {
            state.outputs.extend(std::iter::repeat_n(0.0, head_dim));
            state.lse.push(f64::NEG_INFINITY);
            continue;
        }
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let sum: f64 = weights.iter().sum::<f64>() + (sink - largest).exp();
        for channel in 0..head_dim {
            let weighted = weights.iter().zip(&rows).map(|(weight, row)| weight * f64::from(row[channel]));
            state.outputs.push(weighted.sum::<f64>() / sum);
        }
        state.lse.push(largest + sum.ln());
    }
    Ok(state)
}

/// Normalised mean squared error of `got` against the exact `want`: `Σ (got − want)² / Σ want²`.
pub fn nmse(got: &[f32], want: &[f64]) -> f64 {
    let error: f64 = got.iter().zip(want).map(|(&got, want)| (f64::from(got) - want).powi(2)).sum();
    let power: f64 = want.iter().map(|want| want * want).sum();
    if error == 0.0 { 0.0 } else { error / power }
}

/// Eq. 7 of CalibQuant, with the slope clamped at 0.
fn calibrated(scores: Vec<f64>, calibration: Option<Calibration>) -> Vec<f64> {
    let Some(calibration) = calibration else { return scores };
    let gamma = scores.iter().copied().fold(f64::INFINITY, f64::min);
    let delta = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let low = gamma - f64::from(calibration.tau1());
    let high = delta - f64::from(calibration.tau2());
    let slope = ((high - low) / (delta - gamma + 1e-8)).max(0.0);
    scores.into_iter().map(|score| (score - gamma) * slope + low).collect()
}

fn row_of(tensor: &[f32], row: usize, head_dim: usize) -> Vec<f32> {
    tensor[row * head_dim..(row + 1) * head_dim].to_vec()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

fn check(shape: &AttentionShape, scoring: &Scoring, segments: &[DenseSegment<'_>], query: &[f32]) -> Result<()> {
    let elements = |what, given: usize, expected: usize| {
        if given == expected {
            return Ok(());
        }
        Err(Error::Elements { what, given, expected, shape: format!("{shape:?}") })
    };
    elements("query", query.len(), shape.query_heads() * shape.head_dim())?;
    for segment in segments {
        // If it saturates, it exceeds the length of any slice.
        let expected = segment.tokens.saturating_mul(shape.kv_heads() * shape.head_dim());
        elements("keys", segment.keys.len(), expected)?;
        elements("values", segment.values.len(), expected)?;
    }
    match scoring.sinks() {
        Some(sinks) => elements("sinks", sinks.len(), shape.query_heads()),
        None => Ok(()),
    }
}
