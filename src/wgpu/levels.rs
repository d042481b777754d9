//! The levels of codebooks as constants of shaders.

use super::Variant;
use crate::format::CodebookFormat;
use crate::format::codebook::upper_levels;

/// Names of the constants that hold the levels above 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LevelNames {
    low: &'static str,
    high: &'static str,
}

impl LevelNames {
    /// Of `common/key_field_codebook.wgsl`.
    pub const KEYS: Self = Self { low: "KEY_LEVELS_LOW", high: "KEY_LEVELS_HIGH" };
    /// Of `common/value_field_codebook.wgsl`.
    pub const VALUES: Self = Self { low: "VALUE_LEVELS_LOW", high: "VALUE_LEVELS_HIGH" };
    /// Of `common/field_codebook.wgsl`.
    const FIELDS: Self = Self { low: "LEVELS_LOW", high: "LEVELS_HIGH" };
}

/// Sets the levels of a codebook.
pub(super) fn with_levels(variant: Variant, names: LevelNames, format: &CodebookFormat, head_dim: usize) -> Variant {
    let [low, high] = fours(upper(format, head_dim));
    variant.vector(names.low, low).vector(names.high, high)
}

/// Makes the fields of tiles those of a codebook, with their levels and boundaries.
pub(super) fn with_codebook_fields(variant: Variant, format: &CodebookFormat, head_dim: usize) -> Variant {
    let upper = upper(format, head_dim);
    let boundaries: Vec<f32> = upper.windows(2).map(|pair| (pair[0] + pair[1]) * 0.5).collect();
    let [low, high] = fours(&boundaries);
    with_levels(variant.import("field", "common/field_codebook.wgsl"), LevelNames::FIELDS, format, head_dim)
        .constant("LEVELS", upper.len())
        .vector("BOUNDARIES_LOW", low)
        .vector("BOUNDARIES_HIGH", high)
}

/// The levels above 0; none for a format that no store is made of.
fn upper(format: &CodebookFormat, head_dim: usize) -> &'static [f32] {
    upper_levels(format.bits, head_dim).unwrap_or_default()
}

/// Up to eight numbers as two vectors, zeros after the last.
fn fours(numbers: &[f32]) -> [[f32; 4]; 2] {
    let at = |i: usize| numbers.get(i).copied().unwrap_or(0.0);
    [[at(0), at(1), at(2), at(3)], [at(4), at(5), at(6), at(7)]]
}
