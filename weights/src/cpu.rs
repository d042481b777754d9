//! The CPU reference as a backend.

use crate::backend::{Backend, HostTensor, Product};
use crate::error::{Error, Result};
use crate::linear::QuantizedLinear;

/// The CPU reference: products in f32, as [`QuantizedLinear::linear`] computes them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

impl Backend for Cpu {
    async fn product(&self, layer: &QuantizedLinear, x: &HostTensor, rows: usize, y: &HostTensor) -> Result<Product> {
        let (x, before) = (x.numbers(), y.numbers());
        let (outputs, inputs) = (layer.shape().outputs(), layer.shape().inputs());
        let x = begin("the activations", &x, rows, inputs)?;
        begin("the outputs", &before, rows, outputs)?;
        let run = || -> Result<Vec<f32>> {
            let mut after = layer.linear(x)?;
            after.extend(&before[after.len()..]);
            Ok(HostTensor::new(y.element_type(), &after).numbers())
        };
        Ok(Product { runs: [run()?, run()?], path: None })
    }

    async fn dequantize(&self, layer: &QuantizedLinear, weights: &HostTensor) -> Result<Vec<f32>> {
        let before = weights.numbers();
        begin("the weights", &before, layer.shape().outputs(), layer.shape().inputs())?;
        let mut after: Vec<f32> = layer.dequantize_f16().into_iter().map(f32::from).collect();
        after.extend(&before[after.len()..]);
        Ok(after)
    }
}

/// The first `rows` rows of `width` elements.
fn begin<'a>(what: &'static str, elements: &'a [f32], rows: usize, width: usize) -> Result<&'a [f32]> {
    let needed = rows.saturating_mul(width);
    elements.get(..needed).ok_or_else(|| Error::Elements {
        what,
        given: elements.len(),
        needed,
        of: format!("{rows} rows of {width}"),
    })
}
