//! Round to nearest: the baseline.

use rayon::prelude::*;

use super::grid::{Grid, Levels, RangeRule};
use super::matrix::Matrix;
use crate::codes::PackedCodes;
use crate::error::Result;
use crate::linear::QuantizedLinear;
use crate::shape::Groups;

/// Rounds each weight to the nearest level of its group. Ranges include 0, as GPTQ's do.
///
/// # Errors
/// None for a [`Matrix`]; the result is checked like any other.
pub fn round_to_nearest(weights: Matrix<'_>, grid: &Grid) -> Result<QuantizedLinear> {
    round_groups(weights, grid, RangeRule::Gptq, |_, _, _| f64::INFINITY)
}

/// Rounds each weight to the nearest level of its group, after it is clamped to plus or minus `limit(output, group,
/// weights)`.
pub(super) fn round_groups(
    weights: Matrix<'_>,
    grid: &Grid,
    rule: RangeRule,
    limit: impl Fn(usize, usize, &[f32]) -> f64 + Sync,
) -> Result<QuantizedLinear> {
    let shape = weights.shape();
    let groups = Groups::in_order(shape, grid.group);
    let mut codes = vec![0; shape.weights()];
    let mut levels = vec![Levels { scale: 1.0, zero: 0 }; shape.outputs() * groups.count()];
    let rows = codes.par_chunks_exact_mut(shape.inputs()).zip(levels.par_chunks_exact_mut(groups.count()));
    let rows = rows.zip(weights.values().par_chunks_exact(shape.inputs())).enumerate();
    rows.for_each(|(output, ((codes, levels), weights))| {
        let of_groups = codes.chunks_mut(groups.size()).zip(levels).zip(weights.chunks(groups.size())).enumerate();
        for (group, ((codes, levels), weights)) in of_groups {
            let limit = limit(output, group, weights);
            let clamped = |&weight: &f32| f64::from(weight).clamp(-limit, limit);
            *levels = grid.fit(rule, weights.iter().map(clamped));
            for (code, weight) in codes.iter_mut().zip(weights) {
                *code = levels.code(clamped(weight)).clamp(0.0, f64::from(grid.bits.largest())) as u8;
            }
        }
    });
    assembled(grid, groups, &codes, &levels, shape)
}

/// A layer of codes and levels.
pub(super) fn assembled(
    grid: &Grid,
    groups: Groups,
    codes: &[u8],
    levels: &[Levels],
    shape: crate::shape::LinearShape,
) -> Result<QuantizedLinear> {
    let codes = PackedCodes::pack(grid.bits, shape, codes)?;
    let scales = levels.iter().map(|levels| levels.scale).collect();
    QuantizedLinear::new(codes, groups, scales, levels.iter().map(|levels| levels.zero).collect())
}
