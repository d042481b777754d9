//! An NVIDIA GPU as a backend of conformance.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use kvpack_device::cuda::{Kernels, Tensor};

use super::linear::Linear;
use crate::backend::{Backend, HostTensor, Product};
use crate::error::Result;
use crate::linear::QuantizedLinear;

/// A stream of an NVIDIA GPU.
#[derive(Clone, Copy, Debug)]
pub struct Cuda<'a> {
    stream: &'a Arc<CudaStream>,
    kernels: &'a Kernels,
}

impl<'a> Cuda<'a> {
    /// A stream, and the kernels of its device.
    pub const fn new(stream: &'a Arc<CudaStream>, kernels: &'a Kernels) -> Self {
        Self { stream, kernels }
    }
}

impl Backend for Cuda<'_> {
    async fn product(&self, layer: &QuantizedLinear, x: &HostTensor, rows: usize, y: &HostTensor) -> Result<Product> {
        let x = Tensor::upload(self.stream, x.elements())?;
        let y = Tensor::upload(self.stream, y.elements())?;
        let bound = Linear::upload(self.stream, layer)?.bind(self.kernels, &x, rows, &y)?;
        let run = || -> Result<Vec<f32>> {
            bound.launch(self.stream)?;
            Ok(y.download(self.stream)?)
        };
        Ok(Product { runs: [run()?, run()?], path: Some(bound.path()) })
    }

    async fn dequantize(&self, layer: &QuantizedLinear, weights: &HostTensor) -> Result<Vec<f32>> {
        let weights = Tensor::upload(self.stream, weights.elements())?;
        Linear::upload(self.stream, layer)?.dequantize_weights(self.kernels, &weights)?.launch(self.stream)?;
        Ok(weights.download(self.stream)?)
    }
}
