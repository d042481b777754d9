//! The levels of codebooks as constants of shaders.

use crate::format::CodebookFormat;
use crate::format::codebook::upper_levels;
use crate::wgpu::device::Variant;

/// Sets the fields of tiles to those of a codebook, with its levels and boundaries.
pub(super) fn with_codebook_fields(variant: Variant, format: &CodebookFormat, head_dim: usize) -> Variant {
    with_level_fields(variant.import("field", "pack/field.wgsl#codebook"), format, head_dim)
}

/// Sets the levels of a codebook with their boundaries, or none for a sketch alone.
pub(super) fn with_level_fields(variant: Variant, format: &CodebookFormat, head_dim: usize) -> Variant {
    let Some(bits) = format.level_bits() else {
        return variant.import("level_fields", "pack/level_fields.wgsl");
    };
    // A format without levels is refused when a store is created.
    let upper = upper_levels(bits, head_dim).unwrap_or_default();
    let boundaries: Vec<f32> = upper.windows(2).map(|pair| (pair[0] + pair[1]) * 0.5).collect();
    let ([low, high], [near, far]) = (fours(&upper), fours(&boundaries));
    variant
        .constant("LEVELS", upper.len())
        .constant("LEVEL_BITS", bits.count() as usize)
        .vector("LEVELS_LOW", low)
        .vector("LEVELS_HIGH", high)
        .vector("BOUNDARIES_LOW", near)
        .vector("BOUNDARIES_HIGH", far)
}

/// Up to eight numbers as two vectors, padded with zeros.
fn fours(numbers: &[f32]) -> [[f32; 4]; 2] {
    let at = |i: usize| numbers.get(i).copied().unwrap_or(0.0);
    [[at(0), at(1), at(2), at(3)], [at(4), at(5), at(6), at(7)]]
}
