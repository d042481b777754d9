//! Kernel `reduce_parts`: the reduction of what was gathered, in the order of the ranks.

use cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};

use crate::cuda::Cuda;
use crate::cuda::device::driver::driver_error;
use crate::cuda::device::program::Program;
use crate::cuda::device::tensor::Tensor;
use crate::cuda::sources::SOURCES;
use crate::ranks::Reduction;
use crate::{Error, Result};

/// `ReduceCall` of `cuda/reduce_parts.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct ReduceCall {
    parts: u64,
    reduced: u64,
    count: u32,
    elements: u32,
    takes_largest: u32,
    unused: u32,
}

// SAFETY: A struct of C layout without padding, the same on both sides. Addresses are plain integers.
unsafe impl DeviceRepr for ReduceCall {}

const THREADS: usize = 256;

/// Reduces `count` parts of `elements` f32 each into the first elements of `reduced`. The caller has checked the types
/// and the stream of both.
///
/// # Errors
/// [`Error::Limit`] for more elements than 32 bits count; errors of the driver.
pub(super) fn reduce_parts(
    backend: &Cuda,
    (parts, count): (&Tensor, usize),
    (reduced, elements): (&Tensor, usize),
    reduction: Reduction,
) -> Result<()> {
    let Some(in_32_bits) = u32::try_from(elements).ok().filter(|&elements| elements <= i32::MAX as u32) else {
        let (needed, allowed) = (elements as u64, i32::MAX as u64);
        let hint = "reduce fewer elements at once";
        return Err(Error::Limit { what: "elements of an all-reduce".into(), needed, allowed, hint });
    };
    let call = ReduceCall {
        parts: parts.address(),
        reduced: reduced.address(),
        count: count as u32,
        elements: in_32_bits,
        takes_largest: u32::from(reduction == Reduction::Max),
        unused: 0,
    };
    let program = Program { sources: &SOURCES, files: &["reduce_parts.cu"], defines: Vec::new() };
    let function = backend.kernels().function(&program, "reduce_parts")?;
    let blocks = elements.div_ceil(THREADS).clamp(1, 4 * backend.kernels().facts().multiprocessors);
    let config =
        LaunchConfig { grid_dim: (blocks as u32, 1, 1), block_dim: (THREADS as u32, 1, 1), shared_mem_bytes: 0 };
    let mut launch = backend.stream().launch_builder(&function);
    launch.arg(&call);
    // SAFETY: The argument matches the kernel, and both tensors hold the elements. They are freed in the order of the
    // stream.
    unsafe { launch.launch(config) }.map(|_| ()).map_err(|error| driver_error("reduce_parts", 0, error))
}
