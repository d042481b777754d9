//! The levels of codebooks as constants of shaders.

use super::Variant;
use crate::format::CodebookFormat;
use crate::format::codebook::upper_levels;

/// Makes the fields of tiles those of a codebook, with their levels and boundaries.
pub(super) fn with_codebook_fields(variant: Variant, format: &CodebookFormat, head_dim: usize) -> Variant {
    // No store is made of a format without levels.
    let upper = upper_levels(format.bits, head_dim).unwrap_or_default();
    let boundaries: Vec<f32> = upper.windows(2).map(|pair| (pair[0] + pair[1]) * 0.5).collect();
    let ([low, high], [near, far]) = (fours(&upper), fours(&boundaries));
    variant
        .import("field", "common/field_codebook.wgsl")
        .constant("LEVELS", upper.len())
        .vector("LEVELS_LOW", low)
        .vector("LEVELS_HIGH", high)
        .vector("BOUNDARIES_LOW", near)
        .vector("BOUNDARIES_HIGH", far)
}

/// Up to eight numbers as two vectors, zeros after the last.
fn fours(numbers: &[f32]) -> [[f32; 4]; 2] {
    let at = |i: usize| numbers.get(i).copied().unwrap_or(0.0);
    [[at(0), at(1), at(2), at(3)], [at(4), at(5), at(6), at(7)]]
}
