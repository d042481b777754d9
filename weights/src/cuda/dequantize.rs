//! The weights of a layer in f16, for an engine's own product.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr};
use kvpack_device::cuda::memory::same_stream;
use kvpack_device::cuda::{KernelLaunch, Kernels, Memory, Program, Tensor};
use kvpack_device::{ElementType, Error as DeviceError};

use super::linear::{Linear, check_aligned, launch_of};
use super::sources::SOURCES;
use crate::error::Result;

/// A layer's weights that are joined with the tensor that takes them.
#[derive(Debug)]
pub struct BoundWeights {
    stream: Arc<CudaStream>,
    launch: KernelLaunch,
    call: WeightsCall,
    /// What the arguments point at.
    _memory: Vec<Arc<Memory>>,
}

/// The argument of `dequantize_chunks` and `dequantize_places`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct WeightsCall {
    codes: u64,
    scales: u64,
    homes: u64,
    weights: u64,
}

// SAFETY: Plain integers in the order of the kernels' struct.
unsafe impl DeviceRepr for WeightsCall {}

impl Linear {
    /// Joins the weights `[N, K]` in f16, in the order of the inputs, with the tensor that takes them. They are those
    /// of [`QuantizedLinear::dequantize_f16`](crate::QuantizedLinear::dequantize_f16).
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) for a tensor that is not f16, has fewer elements, is of another stream
    /// or does not begin at a multiple of 16 bytes, and errors of the driver.
    pub fn dequantize_weights(&self, kernels: &Kernels, weights: &Tensor) -> Result<BoundWeights> {
        let what = "the weights";
        let (outputs, inputs) = (self.shape.outputs(), self.shape.inputs());
        self.check(what, weights, [outputs, inputs])?;
        if weights.element_type() != ElementType::F16 {
            let reason = format!("they are {:?}; weights are dequantised to f16", weights.element_type());
            return Err(DeviceError::Buffer { what, reason }.into());
        }
        check_aligned(what, weights)?;
        let mut defines = self.defines();
        defines.push(("INPUTS", inputs));
        let program = Program { sources: &SOURCES, files: &["dequantize_weights.cu"], defines };
        // A layer has at most 2^36 weights, and 2^24 outputs: the grid does not overflow.
        let launch = match &self.order {
            None => {
                let blocks = (outputs * self.chunks).div_ceil(128) as u32;
                launch_of(kernels, &program, "dequantize_chunks", (blocks, 1, 1), 128)?
            }
            Some(_) => {
                let blocks = (outputs * inputs.div_ceil(256)) as u32;
                launch_of(kernels, &program, "dequantize_places", (blocks, 1, 1), 256)?
            }
        };
        let homes = self.order.as_ref().map(|order| order.homes.clone());
        let call = WeightsCall {
            codes: self.codes.address(),
            scales: self.scales.address(),
            homes: homes.as_ref().map_or(0, |homes| homes.address()),
            weights: weights.address(),
        };
        let memory = [self.codes.clone(), self.scales.clone(), weights.memory().clone()];
        let memory = memory.into_iter().chain(homes).collect();
        Ok(BoundWeights { stream: self.stream.clone(), launch, call, _memory: memory })
    }
}

impl BoundWeights {
    /// Queues the kernel on the stream of the layer. Does not wait, allocate or copy. The memory must live until the
    /// stream has finished: keep this value until then.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) on another stream, and for errors of the driver.
    pub fn launch(&self, stream: &Arc<CudaStream>) -> Result<()> {
        check_stream(&self.stream, stream)?;
        // SAFETY: docs/weights.md, "Why the kernels stay in bounds". This value holds the memory.
        Ok(unsafe { self.launch.run(stream, &self.call) }?)
    }
}

/// Refuses another stream than that of the layer.
pub(super) fn check_stream(of_layer: &CudaStream, given: &CudaStream) -> Result<()> {
    if same_stream(of_layer, given) {
        return Ok(());
    }
    let reason = "the layer lies on another stream; launch it there".into();
    Err(DeviceError::Plan { what: "a product", reason }.into())
}
