//! AWQ: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", arXiv 2306.00978,
//! as mit-han-lab/llm-awq searches.

use rayon::prelude::*;

use super::grid::{Grid, RangeRule};
use super::matrix::Matrix;
use super::rounding::round_groups;
use crate::algebra::{View, add_product};
use crate::error::{Error, Result, check_elements};
use crate::linear::QuantizedLinear;

/// Exponents that are tried: i / 20 for i from 0 to 19.
const EXPONENTS: u32 = 20;

/// Limits that are tried: the largest weight times 1 - i / 20 for i from 0 to 9.
const LIMITS: u32 = 10;

/// Tokens that the search for limits looks at.
const SAMPLED_TOKENS: usize = 512;

/// Outputs that are computed at once.
const PRODUCTS: usize = 1 << 22;

/// How AWQ runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AwqOptions {
    /// The levels. Ranges are those of the weights and 0, at least 1e-5 wide.
    pub grid: Grid,
    /// Whether large weights are clipped.
    pub clip: Clip,
}

/// Whether large weights are clipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clip {
    /// They are not. The published program does not clip the projections of queries and keys.
    Never,
    /// Each group is clamped to the limit that changes its part of the output least.
    Searched,
}

/// A layer that takes scaled inputs.
#[derive(Clone, Debug)]
pub struct Awq {
    /// The layer `W · diag(scales)`, quantised.
    pub linear: QuantizedLinear,
    /// How the scales were found.
    pub search: AwqScales,
}

/// Scales of inputs.
#[derive(Clone, Debug)]
pub struct AwqScales {
    /// What each input must be divided by, `[K]`: fold it into whatever computes the inputs, such as a norm.
    pub scales: Vec<f32>,
    /// Mean square differences of the outputs, by exponent.
    pub losses: Vec<f64>,
    /// The exponent taken, times 20.
    pub best: usize,
}

/// Quantises a layer `[N, K]` for activations `[tokens, K]`: [`awq_scales`], then [`awq_scaled`].
///
/// # Errors
/// Those of the two.
pub fn awq(weights: Matrix<'_>, activations: Matrix<'_>, options: &AwqOptions) -> Result<Awq> {
    let search = awq_scales(&[weights], activations, &options.grid)?;
    let linear = awq_scaled(weights, activations, &search.scales, options)?;
    Ok(Awq { linear, search })
}

/// Finds scales for layers `[N, K]` that share their inputs, such as the projections of queries, keys and values.
///
/// Scales are `a^r / √(max · min)` of these, with the mean magnitude a of an input, at least 1e-4, and the exponent r
/// that changes the outputs of all layers least.
///
/// # Errors
/// [`Error::Size`] for no layers, [`Error::Elements`] for activations of another number of inputs, [`Error::NonFinite`]
/// for scaled weights beyond f32.
pub fn awq_scales(layers: &[Matrix<'_>], activations: Matrix<'_>, grid: &Grid) -> Result<AwqScales> {
    if layers.is_empty() {
        return Err(Error::Size { what: "the number of layers that share their inputs", given: 0, most: u64::MAX });
    }
    for layer in layers {
        check_columns(*layer, activations)?;
    }
    let outputs: usize = layers.iter().map(Matrix::rows).sum();
    let magnitudes = magnitudes(activations);
    let mut losses = Vec::new();
    let mut best = (0, f64::INFINITY, Vec::new());
    for exponent in 0..EXPONENTS {
        let scales = scales(&magnitudes, f64::from(exponent) / f64::from(EXPONENTS));
        let changes = layers.iter().map(|layer| squares(*layer, activations, &scales, grid));
        let loss = changes.sum::<Result<f64>>()? / (activations.rows() * outputs) as f64;
        losses.push(loss);
        if loss < best.1 || exponent == 0 {
            best = (exponent as usize, loss, scales);
        }
    }
    let (best, _, scales) = best;
    Ok(AwqScales { scales, losses, best })
}

/// Quantises `W · diag(scales)` of a layer `[N, K]`, whose inputs `[tokens, K]` are then divided by the scales.
///
/// # Errors
/// [`Error::Elements`] for activations or scales of another number of inputs, [`Error::Value`] for scales that are not
/// finite and positive, [`Error::NonFinite`] for scaled weights beyond f32.
pub fn awq_scaled(
    weights: Matrix<'_>,
    activations: Matrix<'_>,
    scales: &[f32],
    options: &AwqOptions,
) -> Result<QuantizedLinear> {
    check_columns(weights, activations)?;
    check_elements("the list of scales", scales.len(), weights.columns(), || weights.shape().to_string())?;
    // Inputs are divided by them.
    if let Some(index) = scales.iter().position(|&scale| !(scale.is_finite() && scale > 0.0)) {
        let (given, allowed) = (scales[index].to_string(), "finite numbers above 0".into());
        return Err(Error::Value { what: "the scale of input", index, given, allowed });
    }
    let scaled = scaled(weights, scales);
    let scaled = Matrix::new(weights.rows(), weights.columns(), &scaled)?;
    match options.clip {
        Clip::Never => round_groups(scaled, &options.grid, RangeRule::Awq, |_, _, _| f64::INFINITY),
        Clip::Searched => {
            let moments = group_moments(activations, scales, &options.grid);
            let limit = |_, group: usize, weights: &[f32]| limit(weights, &moments[group], &options.grid);
            round_groups(scaled, &options.grid, RangeRule::Awq, limit)
        }
    }
}

fn check_columns(weights: Matrix<'_>, activations: Matrix<'_>) -> Result<()> {
    let of = || weights.shape().to_string();
    check_elements("a row of activations", activations.columns(), weights.columns(), of)
}

/// The mean magnitude of each input.
fn magnitudes(activations: Matrix<'_>) -> Vec<f64> {
    let mut sums = vec![0.0; activations.columns()];
    for row in activations.values().chunks_exact(activations.columns()) {
        sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x.abs()));
    }
    sums.iter().map(|sum| sum / activations.rows() as f64).collect()
}

fn scales(magnitudes: &[f64], exponent: f64) -> Vec<f32> {
    let powers: Vec<f64> = magnitudes.iter().map(|a| a.powf(exponent).max(1e-4)).collect();
    let (least, most) = powers.iter().fold((f64::INFINITY, 0.0f64), |(least, most), &x| (least.min(x), most.max(x)));
    powers.iter().map(|power| (power / (least * most).sqrt()) as f32).collect()
}

fn scaled(weights: Matrix<'_>, scales: &[f32]) -> Vec<f32> {
    let rows = weights.values().chunks_exact(weights.columns());
    rows.flat_map(|row| row.iter().zip(scales).map(|(w, s)| w * s)).collect()
}

/// The sum of squares of what rounding changes in the outputs.
fn squares(weights: Matrix<'_>, activations: Matrix<'_>, scales: &[f32], grid: &Grid) -> Result<f64> {
    let (outputs, inputs) = (weights.rows(), weights.columns());
    let scaled = scaled(weights, scales);
    let rounded = round_groups(Matrix::new(outputs, inputs, &scaled)?, grid, RangeRule::Awq, |_, _, _| f64::INFINITY)?;
    let mut change: Vec<f64> = rounded.dequantize();
    change.par_chunks_exact_mut(inputs).zip(weights.values().par_chunks_exact(inputs)).for_each(|(change, weights)| {
        let of_row = change.iter_mut().zip(weights).zip(scales);
        of_row.for_each(|((change, &w), &s)| *change = *change / f64::from(s) - f64::from(w));
    });
    let change = View::new(&change, outputs, inputs, inputs).transposed();
    let mut sum = 0.0;
    let at_once = (PRODUCTS / outputs).clamp(1, SAMPLED_TOKENS);
    for rows in activations.values().chunks(at_once * inputs) {
        let rows: Vec<f64> = rows.iter().map(|&x| x.into()).collect();
        let tokens = rows.len() / inputs;
        let mut products = vec![0.0; tokens * outputs];
        add_product(&mut products, outputs, 1.0, View::new(&rows, tokens, inputs, inputs), change);
        sum += products.iter().map(|x| x * x).sum::<f64>();
    }
    Ok(sum)
}

/// `XᵀX` of the scaled inputs of each group, over evenly spread tokens.
fn group_moments(activations: Matrix<'_>, scales: &[f32], grid: &Grid) -> Vec<Vec<f64>> {
    let inputs = activations.columns();
    let step = (activations.rows() / SAMPLED_TOKENS).max(1);
    let rows = activations.values().chunks_exact(inputs).step_by(step);
    let rows: Vec<f64> =
        rows.flat_map(|row| row.iter().zip(scales).map(|(&x, &s)| f64::from(x) / f64::from(s))).collect();
    let tokens = rows.len() / inputs;
    let size = grid.group.inputs(inputs);
    let of_group = |from: usize| {
        let width = size.min(inputs - from);
        let mut moments = vec![0.0; width * width];
        let part = View::new(&rows[from..], tokens, width, inputs);
        add_product(&mut moments, width, 1.0, part.transposed(), part);
        moments
    };
    (0..inputs).step_by(size).map(of_group).collect()
}

/// The limit for the weights of a group that changes its part of the outputs least.
fn limit(weights: &[f32], moments: &[f64], grid: &Grid) -> f64 {
    let width = weights.len();
    let largest = weights.iter().fold(0.0f64, |largest, &w| largest.max(w.abs().into()));
    let mut best = (largest, f64::INFINITY);
    for step in 0..LIMITS {
        let limit = largest * (1.0 - f64::from(step) / f64::from(EXPONENTS));
        let clamped = |&w: &f32| f64::from(w).clamp(-limit, limit);
        let levels = grid.fit(RangeRule::Awq, weights.iter().map(clamped));
        let rounded = |w: &f32| levels.weight(levels.code(clamped(w)).clamp(0.0, f64::from(grid.bits.largest())));
        let change: Vec<f64> = weights.iter().map(|w| rounded(w) - f64::from(*w)).collect();
        let error: f64 = change
            .iter()
            .zip(moments.chunks_exact(width))
            .map(|(x, row)| x * row.iter().zip(&change).map(|(m, y)| m * y).sum::<f64>())
            .sum();
        if error < best.1 {
            best = (limit, error);
        }
    }
    best.0
}
