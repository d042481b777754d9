//! How a device multiplies.

use std::fmt;

/// The kernel that a product takes, as [`wgpu::BoundLinear`](crate::wgpu::BoundLinear) and
/// [`cuda::BoundLinear`](crate::cuda::BoundLinear) name it. Measurements chose those of CUDA: see
/// `docs/weights.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Path {
    /// One row of activations as integers, multiplied with bytes.
    OneRow,
    /// Every four rows read the weights, and multiply without matrices.
    FourRows,
    /// All rows read the weights once, and multiply by MMAs of a warp.
    Mma,
    /// The same over weights in strips, which a block copies ahead.
    Strips,
    /// All rows read the weights once, and multiply by cooperative matrices with weights in f16.
    MatrixRows,
    /// Tiles of rows and outputs. The weights of a tile are dequantised once for it, into memory that a workgroup
    /// shares.
    Tiles,
    /// The same with weights in f16, multiplied by matrices: cooperative ones on wgpu, those of warpgroups on CUDA.
    MatrixTiles,
}

impl Path {
    /// Whether each weight is rounded to f16, as
    /// [`QuantizedLinear::dequantize_f16`](crate::QuantizedLinear::dequantize_f16) rounds it. Elsewhere weights are
    /// exact.
    pub const fn rounds_weights(self) -> bool {
        matches!(self, Self::MatrixRows | Self::MatrixTiles)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OneRow => "one row",
            Self::FourRows => "four rows",
            Self::Mma => "mma",
            Self::Strips => "strips",
            Self::MatrixRows => "matrix rows",
            Self::Tiles => "tiles",
            Self::MatrixTiles => "matrix tiles",
        })
    }
}
