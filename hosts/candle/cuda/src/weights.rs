//! Products with projections in codes, by the kernels of kvpack-weights on candle's tensors.

use anyhow::Result;
use candle_core::{DType, Tensor};
use kvpack::cuda::Cuda;
use kvpack_cli::Product;
use kvpack_weights::QuantizedLinear;
use kvpack_weights::cuda::Linear;

use crate::attention::lend;
use crate::scratch::Scratch;

/// The most rows of a product with codes. The weights of a longer part of a prompt are dequantised for it once.
const MOST_ROWS: usize = 256;

/// A projection in codes on the stream of candle.
pub struct CudaProduct {
    backend: Cuda,
    scratch: Scratch,
    linear: Linear,
}

impl CudaProduct {
    /// Stores a projection.
    pub fn new(backend: &Cuda, scratch: &Scratch, linear: &QuantizedLinear) -> Result<Self> {
        let linear = Linear::upload(backend.stream(), linear)?;
        Ok(Self { backend: backend.clone(), scratch: scratch.clone(), linear })
    }

    /// A tensor for what a kernel writes.
    fn output(&self, of: &Tensor, shape: (usize, usize)) -> Result<Tensor> {
        Ok(self.scratch.tensor(shape, of.dtype(), of.device())?)
    }

    // candle frees what is dropped here in the order of its one stream, which is that of the kernels.
    fn multiply(&self, x: &Tensor) -> Result<Tensor> {
        let (kernels, stream) = (self.backend.kernels(), self.backend.stream());
        let (x, rows, shape) = (x.contiguous()?, x.dim(0)?, self.linear.shape());
        if rows > MOST_ROWS && x.dtype() == DType::F16 {
            let weights = self.output(&x, (shape.outputs(), shape.inputs()))?;
            self.linear.dequantize_weights(kernels, &lend(&weights)?)?.launch(stream)?;
            return Ok(x.matmul(&weights.t()?)?);
        }
        let output = self.output(&x, (rows, shape.outputs()))?;
        for first in (0..rows).step_by(MOST_ROWS) {
            let rows = MOST_ROWS.min(rows - first);
            let part = |of: &Tensor| lend(&of.narrow(0, first, rows)?);
            self.linear.bind(kernels, &part(&x)?, rows, &part(&output)?)?.launch(stream)?;
        }
        Ok(output)
    }
}

impl Product for CudaProduct {
    fn product(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.multiply(x).map_err(|error| candle_core::Error::msg(format!("{error:#}")))
    }
}
