//! Second moments of a layer's inputs.

use rayon::prelude::*;

use super::matrix::Matrix;
use crate::algebra::{View, add_product};
use crate::error::{Error, Result, check_elements};

/// The most inputs: a Hessian of 2^15 takes 8 GiB.
const MOST_INPUTS: usize = 1 << 15;

/// Tokens that are added at once: their copy in f64 is small.
const TOKENS: usize = 512;

/// Rows of H that are added at once.
const ROWS: usize = 512;

/// `H = Xᵀ · X` `[K, K]` in f64, over all tokens added so far. It takes 8·K² bytes, whatever the number of tokens.
///
/// GPTQ's H is 2·XᵀX over the number of tokens. The factor changes nothing: damping is relative to the mean diagonal of
/// the inputs that were not always 0.
#[derive(Clone, Debug)]
pub struct Hessian {
    inputs: usize,
    tokens: usize,
    /// The lower triangle; what lies above is not kept up.
    lower: Vec<f64>,
}

impl Hessian {
    /// A Hessian of no tokens.
    ///
    /// # Errors
    /// [`Error::Size`] for 0 inputs or more than 2^15.
    pub fn new(inputs: usize) -> Result<Self> {
        if inputs == 0 || inputs > MOST_INPUTS {
            let (given, most) = (inputs as u64, MOST_INPUTS as u64);
            return Err(Error::Size { what: "the number of inputs of a Hessian", given, most });
        }
        Ok(Self { inputs, tokens: 0, lower: vec![0.0; inputs * inputs] })
    }

    /// Adds activations `[tokens, K]`.
    ///
    /// # Errors
    /// [`Error::Elements`] for another number of inputs.
    pub fn add(&mut self, activations: Matrix<'_>) -> Result<()> {
        check_columns(activations, self.inputs)?;
        let n = self.inputs;
        for rows in activations.values().chunks(TOKENS * n) {
            let rows: Vec<f64> = rows.iter().map(|&x| x.into()).collect();
            self.add_rows(&rows);
        }
        Ok(())
    }

    fn add_rows(&mut self, rows: &[f64]) {
        let n = self.inputs;
        let tokens = rows.len() / n;
        for from in (0..n).step_by(ROWS) {
            let to = (from + ROWS).min(n);
            let left = View::new(&rows[from..], tokens, to - from, n).transposed();
            add_product(&mut self.lower[from * n..], n, 1.0, left, View::new(rows, tokens, to, n));
        }
        self.tokens += tokens;
    }

    /// K.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Tokens added so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Element (i, j).
    pub(super) fn at(&self, i: usize, j: usize) -> f64 {
        self.lower[i.max(j) * self.inputs + i.min(j)]
    }

    /// The part of the moments between different inputs that is chance, 0 to 1: see
    /// [`Shrinkage::ByTokens`](super::Shrinkage::ByTokens). `live` inputs were not always 0. The others may have any
    /// positive number in the diagonal.
    pub(super) fn chance(&self, diagonal: &[f64], live: usize) -> f64 {
        let n = self.inputs;
        let of_row = |(i, row): (usize, &[f64])| {
            let squares = row[..i].iter().zip(diagonal).map(|(x, of_column)| x * x / of_column);
            squares.sum::<f64>() / diagonal[i]
        };
        let squares: f64 = self.lower.par_chunks_exact(n).enumerate().map(of_row).collect::<Vec<_>>().iter().sum();
        let pairs = (live * live.saturating_sub(1) / 2) as f64;
        if squares == 0.0 { 1.0 } else { ((pairs + squares) / (self.tokens as f64 * squares)).min(1.0) }
    }
}

/// What GPTAQ needs: `H = Xᵀ · X` of the inputs X behind layers that are quantised, and `C = (X̃ - X)ᵀ · X` with the
/// inputs X̃ of the full-precision model, both `[K, K]` in f64.
#[derive(Clone, Debug)]
pub struct PairedHessian {
    hessian: Hessian,
    cross: Vec<f64>,
}

impl PairedHessian {
    /// A pair of no tokens.
    ///
    /// # Errors
    /// As [`Hessian::new`].
    pub fn new(inputs: usize) -> Result<Self> {
        Ok(Self { hessian: Hessian::new(inputs)?, cross: vec![0.0; inputs * inputs] })
    }

    /// Adds activations `[tokens, K]` of the same tokens: behind quantised layers, and in full precision.
    ///
    /// # Errors
    /// [`Error::Elements`] for another number of inputs, or different numbers of tokens.
    pub fn add(&mut self, quantized: Matrix<'_>, full: Matrix<'_>) -> Result<()> {
        let n = self.hessian.inputs;
        check_columns(quantized, n)?;
        check_columns(full, n)?;
        let of = || "the same tokens in both models".into();
        check_elements("the full-precision activations", full.rows(), quantized.rows(), of)?;
        for (rows, full) in quantized.values().chunks(TOKENS * n).zip(full.values().chunks(TOKENS * n)) {
            let difference: Vec<f64> =
                full.iter().zip(rows).map(|(&full, &x)| f64::from(full) - f64::from(x)).collect();
            let rows: Vec<f64> = rows.iter().map(|&x| x.into()).collect();
            let tokens = rows.len() / n;
            let left = View::new(&difference, tokens, n, n).transposed();
            add_product(&mut self.cross, n, 1.0, left, View::new(&rows, tokens, n, n));
            self.hessian.add_rows(&rows);
        }
        Ok(())
    }

    /// H.
    pub fn hessian(&self) -> &Hessian {
        &self.hessian
    }

    /// C, row-major.
    pub(super) fn cross(&self) -> &[f64] {
        &self.cross
    }
}

fn check_columns(activations: Matrix<'_>, inputs: usize) -> Result<()> {
    check_elements("a row of activations", activations.columns(), inputs, || format!("a Hessian of {inputs} inputs"))
}
