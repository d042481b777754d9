//! The CPU reference as a backend.

use crate::backend::{Backend, HostTensor, Product};
use crate::error::Result;
use crate::linear::QuantizedLinear;

/// The CPU reference: products in f32, as [`QuantizedLinear::linear`] computes them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

impl Backend for Cpu {
    async fn product(&self, layer: &QuantizedLinear, x: &HostTensor, rows: usize, y: &HostTensor) -> Result<Product> {
        let x = x.numbers();
        let run = || -> Result<Vec<f32>> {
            let mut outputs = layer.linear(&x[..rows * layer.shape().inputs()])?;
            outputs.extend(&y.numbers()[outputs.len()..]);
            Ok(HostTensor::new(y.element_type(), &outputs).numbers())
        };
        Ok(Product { runs: [run()?, run()?], path: None })
    }

    async fn dequantize(&self, layer: &QuantizedLinear, weights: &HostTensor) -> Result<Vec<f32>> {
        let mut dequantized: Vec<f32> = layer.dequantize_f16().into_iter().map(f32::from).collect();
        dequantized.extend(&weights.numbers()[dequantized.len()..]);
        Ok(dequantized)
    }
}
