//! The heads that there are kernels for.

/// Head dimensions that have kernels on every backend.
pub const HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];

/// Most query heads, and so most KV heads: as many workgroups as every GPU launches along an axis.
pub const MOST_HEADS: usize = 65_535;
