//! The sweep over columns that GPTQ and GPTAQ share: each column is rounded, and what that changes is spread over the
//! columns that follow.

use rayon::prelude::*;

use super::gptq::OutOfRange;
use super::grid::{Grid, Levels, RangeRule};
use crate::algebra::{View, add_product};
use crate::shape::GroupSize;

/// Columns after which the published program updates the rest of a row.
const BLOCK: usize = 128;

/// How often a range is widened until its group fits.
const MOST_WIDENINGS: u32 = 60;

/// What a sweep follows, all in its order of columns.
pub(super) struct Sweep<'a> {
    pub grid: &'a Grid,
    pub out_of_range: OutOfRange,
    /// K.
    pub columns: usize,
    /// U `[K, K]`.
    pub upper: &'a [f64],
    /// GPTAQ's P `[K, K]`, strictly upper.
    pub asymmetry: Option<&'a [f64]>,
}

/// What a sweep made.
pub(super) struct Swept {
    /// `[N, K]`.
    pub codes: Vec<u8>,
    /// `[N, groups]`.
    pub levels: Vec<Levels>,
    /// Codes that were clamped to the grid.
    pub clamped: u64,
    /// The sum of ((w - q) / U_jj)².
    pub error: f64,
}

/// The part of a block that belongs to a row.
struct RowBlock<'a> {
    /// The row `[K]` as it was when the block began.
    weights: &'a [f64],
    codes: &'a mut [u8],
    levels: &'a mut [Levels],
    /// (w - q) / U_jj of the block's columns.
    errors: &'a mut [f64],
    /// w of the block's columns when they were rounded.
    rounded: &'a mut [f64],
}

impl Sweep<'_> {
    /// Inputs of a group.
    pub fn group(&self) -> usize {
        self.grid.group.inputs(self.columns)
    }

    /// Columns of a block. Where ranges are widened, groups must not reach beyond their block.
    fn block(&self) -> usize {
        match self.out_of_range {
            OutOfRange::Clamped => BLOCK,
            OutOfRange::Widened => self.group() * BLOCK.div_ceil(self.group()),
        }
    }

    /// Sweeps over weights `[N, K]`. Levels of whole rows are given; others are fitted when their group begins.
    pub fn run(&self, weights: &mut [f64], levels: Vec<Levels>) -> Swept {
        let (n, rows) = (self.columns, weights.len() / self.columns);
        let mut swept = Swept { codes: vec![0; weights.len()], levels, clamped: 0, error: 0.0 };
        let groups = n.div_ceil(self.group());
        for start in (0..n).step_by(self.block()) {
            let end = (start + self.block()).min(n);
            let width = end - start;
            let (mut errors, mut rounded) = (vec![0.0; rows * width], vec![0.0; rows * width]);
            let parts = weights.par_chunks_exact(n).zip(swept.codes.par_chunks_exact_mut(n));
            let parts = parts.zip(swept.levels.par_chunks_exact_mut(groups));
            let parts = parts.zip(errors.par_chunks_exact_mut(width)).zip(rounded.par_chunks_exact_mut(width));
            let clamped: Vec<u64> = parts
                .map(|((((weights, codes), levels), errors), rounded)| {
                    self.row(start, end, RowBlock { weights, codes, levels, errors, rounded })
                })
                .collect();
            swept.clamped += clamped.iter().sum::<u64>();
            swept.error += errors.iter().map(|error| error * error).sum::<f64>();
            if end < n {
                let after = View::new(&self.upper[start * n + end..], width, n - end, n);
                add_product(&mut weights[end..], n, -1.0, View::new(&errors, rows, width, width), after);
                if let Some(asymmetry) = self.asymmetry {
                    let after = View::new(&asymmetry[start * n + end..], width, n - end, n);
                    add_product(&mut weights[end..], n, 1.0, View::new(&rounded, rows, width, width), after);
                }
            }
        }
        swept
    }

    /// A row's columns `start..end`; returns how many codes were clamped.
    fn row(&self, start: usize, end: usize, mut row: RowBlock<'_>) -> u64 {
        let size = self.group();
        let mut current = row.weights[start..end].to_vec();
        let (mut clamped, mut from) = (0, start);
        while from < end {
            let group = from / size;
            let to = ((group + 1) * size).min(end);
            if from % size == 0 && self.grid.group != GroupSize::Row {
                let weights = &row.weights[from..((group + 1) * size).min(self.columns)];
                row.levels[group] = self.grid.fit(RangeRule::Gptq, weights.iter().copied());
            }
            clamped += match self.out_of_range {
                OutOfRange::Clamped => self.columns(start, from, to, &mut current, &mut row).clamped,
                OutOfRange::Widened => self.widened(start, from, to, &mut current, &mut row),
            };
            from = to;
        }
        clamped
    }

    /// A whole group, its range widened until no code lies beyond the grid; returns how many do at last.
    fn widened(&self, start: usize, from: usize, to: usize, current: &mut [f64], row: &mut RowBlock<'_>) -> u64 {
        let group = from / self.group();
        let (before, fitted) = (current.to_vec(), row.levels[group]);
        let mut pass = self.columns(start, from, to, current, row);
        let (mut low, mut high) = (pass.low, pass.high);
        for widening in 1..=MOST_WIDENINGS {
            if pass.clamped == 0 {
                return 0;
            }
            (low, high) = (low.min(pass.low), high.max(pass.high));
            let factor = 1.0 + 0.02 * f64::from(widening);
            row.levels[group] = self.grid.levels(RangeRule::Gptq, factor * low, factor * high);
            current.copy_from_slice(&before);
            pass = self.columns(start, from, to, current, row);
        }
        if pass.clamped > 0 {
            // Nothing fits: the range of the weights is as good as any.
            row.levels[group] = fitted;
            current.copy_from_slice(&before);
            pass = self.columns(start, from, to, current, row);
        }
        pass.clamped
    }

    /// Rounds the columns `from..to` of a block that begins at `start`.
    fn columns(&self, start: usize, from: usize, to: usize, current: &mut [f64], row: &mut RowBlock<'_>) -> Pass {
        let largest = f64::from(self.grid.bits.largest());
        let end = start + current.len();
        let mut pass = Pass { low: f64::INFINITY, high: f64::NEG_INFINITY, clamped: 0 };
        for column in from..to {
            let at = column - start;
            let weight = current[at];
            (pass.low, pass.high) = (pass.low.min(weight), pass.high.max(weight));
            let levels = row.levels[column / self.group()];
            let code = levels.code(weight);
            let on_grid = code.clamp(0.0, largest);
            pass.clamped += u64::from(code != on_grid);
            row.codes[column] = on_grid as u8;
            let upper = &self.upper[column * self.columns..][column..end];
            let error = (weight - levels.weight(on_grid)) / upper[0];
            (row.errors[at], row.rounded[at]) = (error, weight);
            current[at + 1..].iter_mut().zip(&upper[1..]).for_each(|(w, u)| *w -= error * u);
            if let Some(asymmetry) = self.asymmetry {
                let row = &asymmetry[column * self.columns..][column + 1..end];
                current[at + 1..].iter_mut().zip(row).for_each(|(w, p)| *w += weight * p);
            }
        }
        pass
    }
}

/// What rounding some columns of a row met.
struct Pass {
    low: f64,
    high: f64,
    clamped: u64,
}
