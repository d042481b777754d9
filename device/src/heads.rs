//! The heads that have kernels.

/// Head dimensions that have kernels on every backend.
pub const HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];

/// Maximum number of query heads, and therefore of KV heads: every GPU launches this many workgroups along an axis.
pub const MOST_HEADS: usize = 65_535;
