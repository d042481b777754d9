//! Products with projections in codes, by the kernels of kvpack-weights on candle's tensors.

use anyhow::Result;
use candle_core::Tensor;
use kvpack::cuda::Cuda;
use kvpack_cli::Product;
use kvpack_weights::cuda::Linear;
use kvpack_weights::{MOST_ROWS, QuantizedLinear};

use crate::attention::lend;

/// A projection in codes on the stream of candle.
pub struct CudaProduct {
    backend: Cuda,
    linear: Linear,
}

impl CudaProduct {
    /// Stores a projection.
    pub fn new(backend: &Cuda, linear: &QuantizedLinear) -> Result<Self> {
        Ok(Self { backend: backend.clone(), linear: Linear::upload(backend.stream(), linear)? })
    }

    fn multiply(&self, x: &Tensor) -> Result<Tensor> {
        let (x, rows) = (x.contiguous()?, x.dim(0)?);
        // SAFETY: every element is written below: the parts have all rows.
        let output = unsafe { Tensor::empty((rows, self.linear.shape().outputs()), x.dtype(), x.device())? };
        for first in (0..rows).step_by(MOST_ROWS) {
            let part = |of: &Tensor| lend(&of.narrow(0, first, MOST_ROWS.min(rows - first))?);
            let (x, output) = (part(&x)?, part(&output)?);
            let bound = self.linear.bind(self.backend.kernels(), &x, MOST_ROWS.min(rows - first), &output)?;
            // candle frees the tensors in the order of this stream, behind the kernel.
            bound.launch(self.backend.stream())?;
        }
        Ok(output)
    }
}

impl Product for CudaProduct {
    fn product(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.multiply(x).map_err(|error| candle_core::Error::msg(format!("{error:#}")))
    }
}
