//! A wgpu device as a backend of conformance.

use kvpack_device::wgpu::{Kernels, Tensor};

use super::linear::Linear;
use crate::backend::{Backend, HostTensor, Product};
use crate::error::Result;
use crate::linear::QuantizedLinear;

/// A wgpu device. Products take the kernels with matrices where the device was opened with them.
#[derive(Clone, Copy, Debug)]
pub struct Wgpu<'a> {
    queue: &'a wgpu::Queue,
    kernels: &'a Kernels,
}

impl<'a> Wgpu<'a> {
    /// The device of these kernels, and its queue.
    pub const fn new(queue: &'a wgpu::Queue, kernels: &'a Kernels) -> Self {
        Self { queue, kernels }
    }

    async fn upload(&self, tensor: &HostTensor) -> Result<Tensor> {
        Ok(Tensor::upload(self.kernels.device(), self.queue, tensor.elements()).await?)
    }

    /// Runs what is encoded, and returns a tensor that it has written.
    async fn run(&self, tensor: &Tensor, encode: impl Fn(&mut wgpu::ComputePass<'_>)) -> Result<Vec<f32>> {
        let device = self.kernels.device();
        let mut encoder = device.create_command_encoder(&Default::default());
        encode(&mut encoder.begin_compute_pass(&Default::default()));
        self.queue.submit([encoder.finish()]);
        Ok(tensor.download(device, self.queue).await?)
    }
}

impl Backend for Wgpu<'_> {
    async fn product(&self, layer: &QuantizedLinear, x: &HostTensor, rows: usize, y: &HostTensor) -> Result<Product> {
        let (x, y) = (self.upload(x).await?, self.upload(y).await?);
        let bound = Linear::upload(self.kernels.device(), layer)?.bind(self.kernels, &x, rows, &y)?;
        let encode = |pass: &mut wgpu::ComputePass<'_>| bound.encode(pass);
        let runs = [self.run(&y, encode).await?, self.run(&y, encode).await?];
        Ok(Product { runs, path: Some(bound.path()) })
    }

    async fn dequantize(&self, layer: &QuantizedLinear, weights: &HostTensor) -> Result<Vec<f32>> {
        let weights = self.upload(weights).await?;
        let bound = Linear::upload(self.kernels.device(), layer)?.dequantize_weights(self.kernels, &weights)?;
        self.run(&weights, |pass| bound.encode(pass)).await
    }
}
