//! candle's kernels for what the decoder does between its products.

use candle_core::{Result, Tensor};
use candle_nn::ops::rms_norm;
use candle_nn::rotary_emb::{rope, rope_i};
use kvpack_cli::{Fused, RopePairs};

/// One kernel each for norms and for rotations.
pub struct CandleKernels;

impl Fused for CandleKernels {
    fn norm(&self, x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
        rms_norm(&x.contiguous()?, weight, epsilon as f32)
    }

    fn rotate(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, pairs: RopePairs) -> Result<Tensor> {
        // Every row is a batch of one token, with a position of its own.
        let (tokens, heads, head_dim) = x.dims3()?;
        let x = x.contiguous()?.reshape((tokens, heads, 1, head_dim))?;
        let rotated = match pairs {
            RopePairs::Neighbours => rope_i(&x, cos, sin)?,
            RopePairs::Halves => rope(&x, cos, sin)?,
        };
        rotated.reshape((tokens, heads, head_dim))
    }
}
