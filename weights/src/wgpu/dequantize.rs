//! The weights of a layer in f16, for an engine's own product.

use kvpack_device::wgpu::launch::flat_grid;
use kvpack_device::wgpu::{Kernels, Launch, Tensor};
use kvpack_device::{ElementType, Error as DeviceError};

use super::linear::{Linear, check};
use crate::error::Result;

/// A layer's weights that are joined with the tensor that takes them.
#[derive(Clone, Debug)]
pub struct BoundWeights(Launch);

impl Linear {
    /// Joins the weights `[N, K]` in f16, in the order of the inputs, with the tensor that takes them. They are those
    /// of [`QuantizedLinear::dequantize_f16`](crate::QuantizedLinear::dequantize_f16), where the device rounds to the
    /// nearest f16.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) for a tensor that is not f16, has fewer elements or does not begin at
    /// the alignment of the device, and for an odd number of weights.
    pub fn dequantize_weights(&self, kernels: &Kernels, weights: &Tensor) -> Result<BoundWeights> {
        let what = "the weights";
        let limits = kernels.device().limits();
        let (outputs, inputs) = (self.shape.outputs(), self.shape.inputs());
        check(what, weights, [outputs, inputs], &limits)?;
        let refuse = |reason| Err(DeviceError::Buffer { what, reason }.into());
        if weights.element_type() != ElementType::F16 {
            return refuse(format!("they are {:?}; weights are dequantised to f16", weights.element_type()));
        }
        if outputs * inputs % 2 == 1 {
            return refuse(format!("{outputs} × {inputs} numbers in 16 bits do not fill whole words; add an output"));
        }
        let codes = ("codes", self.codes.as_entire_buffer_binding());
        let scales = ("scales", self.scales.as_entire_buffer_binding());
        let taken = ("weights", weights.binding());
        let launch = match &self.order {
            None => {
                let grid = flat_grid((outputs * inputs / 8) as u64, &limits)?;
                let variant = self.by_lane(self.variant("dequantize_weights"));
                // SAFETY: docs/weights.md, "Why the kernels stay in bounds".
                unsafe { Launch::trusted(kernels, &variant, &[codes, scales, taken], grid) }?
            }
            Some(order) => {
                let grid = flat_grid((outputs * inputs / 2) as u64, &limits)?;
                let variant = self.by_lane(self.variant("dequantize_places")).constant("INPUTS", inputs);
                let homes = ("homes", order.homes.as_entire_buffer_binding());
                // SAFETY: As above.
                unsafe { Launch::trusted(kernels, &variant, &[codes, scales, homes, taken], grid) }?
            }
        };
        Ok(BoundWeights(launch))
    }
}

impl BoundWeights {
    /// Encodes the kernel into an open pass. Does not submit, wait or allocate.
    pub fn encode(&self, pass: &mut wgpu::ComputePass<'_>) {
        self.0.encode(pass);
    }
}
