//! Kernel `merge_parts`: merges the states of the same queries over several parts of their tokens.

use cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};

use crate::backend::StateParts;
use crate::cuda::Cuda;
use crate::cuda::device::driver::driver_error;
use crate::cuda::device::program::Program;
use crate::cuda::device::tensor::Tensor;
use crate::cuda::sources::SOURCES;
use crate::format::AttentionShape;
use crate::plan::ElementType;
use crate::{Error, Result};

/// `PartsCall` of `cuda/merge_parts.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct PartsCall {
    outputs: u64,
    lse: u64,
    merged: u64,
    merged_lse: u64,
    parts: u32,
    heads: u32,
    head_dim: u32,
    merged_type: u32,
}

// SAFETY: A struct of C layout without padding, the same on both sides. Addresses are plain integers.
unsafe impl DeviceRepr for PartsCall {}

/// Merges the parts into the first rows of `output` and of `lse`. The caller has checked the lengths.
///
/// # Errors
/// [`Error::Buffer`] for states or log-sum-exps that are not f32, [`Error::Plan`] for tensors of another stream,
/// [`Error::Limit`] for more rows than a launch has; errors of the driver.
pub(in crate::cuda) fn merge_parts(
    backend: &Cuda,
    shape: &AttentionShape,
    parts: StateParts<'_, Tensor>,
    output: &Tensor,
    lse: Option<&Tensor>,
) -> Result<()> {
    let StateParts { states, parts, rows } = parts;
    let floats = [("outputs of the parts", &states.outputs), ("log-sum-exps of the parts", &states.lse)];
    for (what, tensor) in floats.into_iter().chain(lse.map(|lse| ("merged log-sum-exps", lse))) {
        check_f32(what, tensor)?;
        tensor.memory().check_stream(what, backend.stream())?;
    }
    output.memory().check_stream("merged outputs", backend.stream())?;
    let heads = rows.saturating_mul(shape.query_heads());
    let (Some(blocks), Ok(parts)) = (u32::try_from(heads).ok().filter(|&n| n <= i32::MAX as u32), u32::try_from(parts))
    else {
        let hint = "merge fewer queries at once";
        let allowed = i32::MAX as u64;
        return Err(Error::Limit { what: "rows of states".into(), needed: heads as u64, allowed, hint });
    };
    let call = PartsCall {
        outputs: states.outputs.address(),
        lse: states.lse.address(),
        merged: output.address(),
        merged_lse: lse.map_or(0, Tensor::address),
        parts,
        heads: blocks,
        head_dim: shape.head_dim() as u32,
        merged_type: output.type_code(),
    };
    let program = Program { sources: &SOURCES, files: &["merge_parts.cu"], defines: Vec::new() };
    let function = backend.kernels().function(&program, "merge_parts")?;
    let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (128, 1, 1), shared_mem_bytes: 0 };
    let mut launch = backend.stream().launch_builder(&function);
    launch.arg(&call);
    // SAFETY: The argument matches the kernel, and all arrays were checked to hold the rows of the grid, in every part.
    // They live until the stream has passed this launch, because they are freed in its order.
    unsafe { launch.launch(config) }.map(|_| ()).map_err(|error| driver_error("merge_parts", 0, error))
}

/// Checks that a tensor is f32.
///
/// # Errors
/// [`Error::Buffer`].
pub(in crate::cuda) fn check_f32(what: &'static str, tensor: &Tensor) -> Result<()> {
    match tensor.element_type() {
        ElementType::F32 => Ok(()),
        other => Err(Error::Buffer { what, reason: format!("are {other:?}, but they must be f32") }),
    }
}
