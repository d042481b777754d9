//! GPTQ: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv
//! 2210.17323, Algorithm 1, as IST-DASLab/gptq computes it, in f64.

use rayon::prelude::*;

use super::grid::{Grid, Levels, RangeRule};
use super::hessian::Hessian;
use super::matrix::Matrix;
use super::rounding::assembled;
use super::sweep::{Sweep, Swept};
use crate::algebra::inverse_factor;
use crate::error::{Error, Result, check_elements};
use crate::linear::QuantizedLinear;
use crate::shape::{GroupSize, Groups, LinearShape};

/// The largest damping that is tried.
const MOST_DAMPING: f64 = 1.0;

/// How GPTQ runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptqOptions {
    /// The levels.
    pub grid: Grid,
    /// In which order columns are rounded.
    pub order: ColumnOrder,
    /// What is added to the diagonal of H, as a fraction of its mean over the inputs that were not always 0. It is
    /// multiplied by 10, up to 1, while H has no Cholesky factor.
    pub damping: f64,
    /// What happens to weights that have moved out of their group's range.
    pub out_of_range: OutOfRange,
    /// What is left of moments between different inputs.
    pub shrinkage: Shrinkage,
}

/// What is left of moments between different inputs, before damping.
///
/// T tokens give a Hessian of at most rank T. With fewer tokens than inputs, most of what two inputs seem to share is
/// chance, and GPTQ moves weights by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shrinkage {
    /// All, as in the published program.
    Never,
    /// 1 - λ of them. λ is the expected square of what is chance over the square of what was seen, summed over all
    /// pairs of inputs that were not always 0 (Schäfer and Strimmer 2005), for tokens of a normal distribution:
    /// `λ = Σ (1 + r²) / (T · Σ r²)` with the correlations r of the T tokens. It tends to 0 with many tokens.
    ByTokens,
}

/// In which order columns are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnOrder {
    /// As they are.
    Natural,
    /// Act-order: inputs of large second moments first. Groups follow that order, so a checkpoint needs `g_idx`.
    Activations,
}

/// What happens to weights that updates have moved out of the range that was fitted to their group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutOfRange {
    /// Their codes are clamped, as in the published program.
    Clamped,
    /// The group is rounded again with a wider range, until no code is clamped.
    ///
    /// GPTQ is Babai's nearest-plane algorithm, whose bound holds without clipping (Chen et al., arXiv 2507.18553):
    /// `e H eᵀ ≤ Σ_j (s_j / 2)² / U_jj²` for the error e of a row, its scales s and the damped H. Coarser levels are
    /// the price.
    Widened,
}

/// A quantised layer, and how it came out.
#[derive(Clone, Debug)]
pub struct Gptq {
    /// The layer.
    pub linear: QuantizedLinear,
    /// How it came out.
    pub report: GptqReport,
}

/// How GPTQ came out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptqReport {
    /// The damping that gave a Cholesky factor.
    pub damping: f64,
    /// Inputs that were always 0. Their weights became 0.
    pub dead_inputs: usize,
    /// Codes that were clamped to the grid.
    pub clamped: u64,
    /// Σ over rows of `e H eᵀ` for the error e of a row and the damped `H = XᵀX`. With GPTAQ the error is against the
    /// weights that asymmetry has moved.
    pub error: f64,
}

impl GptqOptions {
    /// The published defaults: columns in their order, a damping of 0.01, codes clamped, nothing shrunk.
    pub fn new(grid: Grid) -> Self {
        Self {
            grid,
            order: ColumnOrder::Natural,
            damping: 0.01,
            out_of_range: OutOfRange::Clamped,
            shrinkage: Shrinkage::Never,
        }
    }
}

/// Quantises a layer `[N, K]` for inputs with these second moments.
///
/// # Errors
/// [`Error::Elements`] for a Hessian of other inputs, [`Error::Value`] for a damping outside 0 to 1 and a Hessian of no
/// tokens, [`Error::NotPositiveDefinite`].
pub fn gptq(weights: Matrix<'_>, hessian: &Hessian, options: &GptqOptions) -> Result<Gptq> {
    let prepared = Prepared::new(weights.shape(), hessian, options)?;
    prepared.quantized(weights, options, None)
}

/// What follows from the Hessian alone.
pub(super) struct Prepared {
    /// The column that comes j-th.
    pub order: Vec<u32>,
    /// Inputs that are always 0.
    pub dead: Vec<bool>,
    /// U `[K, K]` in that order.
    pub upper: Vec<f64>,
    pub damping: f64,
}

impl Prepared {
    pub fn new(shape: LinearShape, hessian: &Hessian, options: &GptqOptions) -> Result<Self> {
        let n = shape.inputs();
        check_elements("the Hessian's side", hessian.inputs(), n, || shape.to_string())?;
        if hessian.tokens() == 0 {
            let (given, allowed) = ("0".into(), "1 and more; add activations first".into());
            return Err(Error::Value { what: "the number of tokens of the Hessian", index: 0, given, allowed });
        }
        if !(options.damping > 0.0 && options.damping <= MOST_DAMPING) {
            let (given, allowed) = (options.damping.to_string(), "above 0 up to 1, usually 0.01".into());
            return Err(Error::Value { what: "damping", index: 0, given, allowed });
        }
        let mut diagonal: Vec<f64> = (0..n).map(|i| hessian.at(i, i)).collect();
        if let Some(index) = diagonal.iter().position(|x| !x.is_finite()) {
            return Err(Error::NonFinite { what: "the Hessian's diagonal", index, given: diagonal[index] });
        }
        let dead: Vec<bool> = diagonal.iter().map(|&x| x == 0.0).collect();
        let mut order: Vec<u32> = (0..n as u32).collect();
        if options.order == ColumnOrder::Activations {
            order.sort_by(|&a, &b| diagonal[b as usize].total_cmp(&diagonal[a as usize]));
        }
        // Dead inputs have no part in what the others get, so that a factor of H changes nothing.
        let live = dead.iter().filter(|&&dead| !dead).count();
        let mean = if live == 0 { 1.0 } else { diagonal.iter().sum::<f64>() / live as f64 };
        diagonal.iter_mut().filter(|x| **x == 0.0).for_each(|x| *x = mean);
        let kept = match options.shrinkage {
            Shrinkage::Never => 1.0,
            Shrinkage::ByTokens => 1.0 - hessian.chance(&diagonal, live),
        };
        let mut damping = options.damping;
        loop {
            let mut matrix = vec![0.0; n * n];
            matrix.par_chunks_exact_mut(n).zip(&order).enumerate().for_each(|(i, (row, &of_row))| {
                for (value, &of_column) in row.iter_mut().zip(&order[..i]) {
                    *value = kept * hessian.at(of_row as usize, of_column as usize);
                }
                row[i] = diagonal[of_row as usize] + damping * mean;
            });
            if let Some(upper) = inverse_factor(&matrix, n) {
                return Ok(Self { order, dead, upper, damping });
            }
            if damping >= MOST_DAMPING {
                return Err(Error::NotPositiveDefinite { damping });
            }
            damping = (10.0 * damping).min(MOST_DAMPING);
        }
    }

    /// Sweeps over the weights and puts the columns back.
    pub fn quantized(self, weights: Matrix<'_>, options: &GptqOptions, asymmetry: Option<&[f64]>) -> Result<Gptq> {
        let (shape, grid) = (weights.shape(), &options.grid);
        let n = shape.inputs();
        let sweep = Sweep { grid, out_of_range: options.out_of_range, columns: n, upper: &self.upper, asymmetry };
        let size = sweep.group();
        let rows = weights.values().chunks_exact(n);
        let levels = match grid.group {
            // Before dead columns become 0, as in the published program.
            GroupSize::Row => rows.map(|row| grid.fit(RangeRule::Gptq, row.iter().map(|&w| w.into()))).collect(),
            GroupSize::Inputs(_) => vec![Levels { scale: 1.0, zero: 0 }; shape.outputs() * n.div_ceil(size)],
        };
        let column = |row: &[f32], input: u32| if self.dead[input as usize] { 0.0 } else { row[input as usize].into() };
        let mut swept_weights = vec![0.0; shape.weights()];
        swept_weights.par_chunks_exact_mut(n).zip(weights.values().par_chunks_exact(n)).for_each(|(swept, row)| {
            swept.iter_mut().zip(&self.order).for_each(|(weight, &input)| *weight = column(row, input));
        });
        let Swept { codes: by_order, levels, clamped, error } = sweep.run(&mut swept_weights, levels);
        let mut codes = vec![0; shape.weights()];
        codes.par_chunks_exact_mut(n).zip(by_order.par_chunks_exact(n)).for_each(|(codes, by_order)| {
            self.order.iter().zip(by_order).for_each(|(&input, &code)| codes[input as usize] = code);
        });
        let mut index = vec![0; n];
        self.order.iter().enumerate().for_each(|(at, &input)| index[input as usize] = (at / size) as u32);
        let groups = Groups::indexed(shape, grid.group, index)?;
        let dead_inputs = self.dead.iter().filter(|&&dead| dead).count();
        let report = GptqReport { damping: self.damping, dead_inputs, clamped, error };
        Ok(Gptq { linear: assembled(grid, groups, &codes, &levels, shape)?, report })
    }
}
