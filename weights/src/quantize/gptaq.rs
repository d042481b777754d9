//! GPTAQ: Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration", arXiv 2504.02692.
//!
//! GPTQ matches the output of the layer for the inputs X that it meets behind quantised layers. GPTAQ matches what the
//! full-precision model computes from its own inputs X̃. When column j is rounded, the columns behind it also take up
//! `w_j · (X̃_j - X_j)`: they move by `w_j · P_j` with `P = α · (strictly upper part of C · Uᵀ) · U` and
//! `C = (X̃ - X)ᵀ · X`. The published formula has α = 1, the published program 0.25.
//!
//! The published program takes the rounded weight for w_j beyond the current block of columns. Here it is the weight
//! before rounding everywhere, as in the paper.

use super::gptq::{Gptq, GptqOptions, Prepared};
use super::hessian::PairedHessian;
use super::matrix::Matrix;
use crate::algebra::{View, add_product};
use crate::error::{Error, Result};

/// Rows and columns of products of triangles that are computed at once.
const BLOCK: usize = 512;

/// How GPTAQ runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptaqOptions {
    /// What it shares with GPTQ.
    pub gptq: GptqOptions,
    /// How much of the asymmetry is made up for, 0 to 1. At 0 it is GPTQ.
    pub alpha: f64,
}

impl GptaqOptions {
    /// The defaults of the published program: α = 0.25.
    pub fn new(gptq: GptqOptions) -> Self {
        Self { gptq, alpha: 0.25 }
    }
}

/// Quantises a layer `[N, K]` for inputs with these second moments.
///
/// # Errors
/// Those of [`gptq`](super::gptq()), and [`Error::Value`] for an α outside 0 to 1.
pub fn gptaq(weights: Matrix<'_>, moments: &PairedHessian, options: &GptaqOptions) -> Result<Gptq> {
    if !(0.0..=1.0).contains(&options.alpha) {
        let (given, allowed) = (options.alpha.to_string(), "0 to 1".into());
        return Err(Error::Value { what: "alpha", index: 0, given, allowed });
    }
    let prepared = Prepared::new(weights.shape(), moments.hessian(), &options.gptq)?;
    let asymmetry = asymmetry(&prepared, moments.cross(), options.alpha);
    prepared.quantized(weights, &options.gptq, Some(&asymmetry))
}

/// P `[K, K]`.
fn asymmetry(prepared: &Prepared, cross: &[f64], alpha: f64) -> Vec<f64> {
    let n = prepared.order.len();
    let mut ordered = Vec::with_capacity(n * n);
    for &row in &prepared.order {
        let row = &cross[row as usize * n..][..n];
        let at = |&column: &u32| if prepared.dead[column as usize] { 0.0 } else { row[column as usize] };
        ordered.extend(prepared.order.iter().map(at));
    }
    // U is upper triangular, and so is all that is wanted. What is 0 or not wanted is left out, block by block.
    let (upper, blocks) = (&prepared.upper, || (0..n).step_by(BLOCK).map(|from| (from, (from + BLOCK).min(n))));
    let mut strict = vec![0.0; n * n];
    for (from, to) in blocks() {
        let left = View::new(&ordered[from..], to, n - from, n);
        let right = View::new(&upper[from * n + from..], to - from, n - from, n).transposed();
        add_product(&mut strict[from..], n, alpha, left, right);
    }
    drop(ordered);
    strict.chunks_exact_mut(n).enumerate().for_each(|(row, values)| values[..=row].fill(0.0));
    let mut asymmetry = vec![0.0; n * n];
    for (top, bottom) in blocks() {
        for (from, to) in blocks().filter(|&(from, _)| from >= top) {
            let left = View::new(&strict[top * n + top..], bottom - top, to - top, n);
            let right = View::new(&upper[top * n + from..], to - top, to - from, n);
            add_product(&mut asymmetry[top * n + from..], n, 1.0, left, right);
        }
    }
    asymmetry
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Products by blocks are those of whole matrices.
    #[test]
    fn blocks_leave_nothing_out() {
        let n = 2 * BLOCK + 77;
        let mut random = fastrand::Rng::with_seed(5);
        let mut values = || (0..n * n).map(|_| random.f64() - 0.5).collect::<Vec<f64>>();
        let (cross, mut upper) = (values(), values());
        let clear = |upper: &mut [f64], first: usize| {
            upper.chunks_exact_mut(n).enumerate().for_each(|(row, values)| values[..row + first].fill(0.0));
        };
        clear(&mut upper, 0);
        let mut order: Vec<u32> = (0..n as u32).collect();
        random.shuffle(&mut order);
        let prepared = Prepared { order, dead: vec![false; n], upper, damping: 0.01 };
        let ordered: Vec<f64> = (prepared.order.iter())
            .flat_map(|&row| prepared.order.iter().map(move |&column| (row as usize, column as usize)))
            .map(|(row, column)| cross[row * n + column])
            .collect();
        let whole = View::new(&prepared.upper, n, n, n);
        let (mut strict, mut expected) = (vec![0.0; n * n], vec![0.0; n * n]);
        add_product(&mut strict, n, 0.25, View::new(&ordered, n, n, n), whole.transposed());
        clear(&mut strict, 1);
        add_product(&mut expected, n, 1.0, View::new(&strict, n, n, n), whole);
        let given = asymmetry(&prepared, &cross, 0.25);
        let largest = expected.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
        assert!(given.iter().zip(&expected).all(|(given, expected)| (given - expected).abs() < 1e-12 * largest));
    }
}
