//! Kernel `merge_parts`: merges the states of the same queries over several parts of their tokens.

use cudarc::driver::{DeviceRepr, LaunchConfig};

use crate::backend::StateParts;
use crate::cuda::Cuda;
use crate::cuda::device::launch::KernelLaunch;
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
    output_stride: u64,
    lse_stride: u64,
    merged: u64,
    merged_lse: u64,
    parts: u32,
    heads: u32,
    head_dim: u32,
    merged_type: u32,
}

// SAFETY: A struct of C layout without padding, the same on both sides. Addresses are plain integers.
unsafe impl DeviceRepr for PartsCall {}

/// Where the parts are: the first, and elements from one to the next.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct PartsAt {
    pub(in crate::cuda) outputs: u64,
    pub(in crate::cuda) lse: u64,
    pub(in crate::cuda) output_stride: usize,
    pub(in crate::cuda) lse_stride: usize,
}

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
    for (what, tensor) in [("outputs of the parts", &states.outputs), ("log-sum-exps of the parts", &states.lse)] {
        check_f32(what, tensor)?;
        tensor.memory().check_stream(what, backend.stream())?;
    }
    let lse_stride = rows.saturating_mul(shape.query_heads());
    let at = PartsAt {
        outputs: states.outputs.address(),
        lse: states.lse.address(),
        output_stride: lse_stride.saturating_mul(shape.head_dim()),
        lse_stride,
    };
    // SAFETY: The caller has checked that the tensors hold the parts one after the other, and they are freed in the
    // order of the stream.
    unsafe { merge_parts_at(backend, (shape, rows), (at, parts), output, lse) }
}

/// [`merge_parts`] of parts anywhere.
///
/// # Errors
/// As [`merge_parts`].
///
/// # Safety
/// `parts` parts of the rows are where `at` says, in memory that is freed in the order of the backend's stream, and the
/// tensors for the result hold the rows.
pub(in crate::cuda) unsafe fn merge_parts_at(
    backend: &Cuda,
    (shape, rows): (&AttentionShape, usize),
    (at, parts): (PartsAt, usize),
    output: &Tensor,
    lse: Option<&Tensor>,
) -> Result<()> {
    output.memory().check_stream("merged outputs", backend.stream())?;
    if let Some(lse) = lse {
        check_f32("merged log-sum-exps", lse)?;
        lse.memory().check_stream("merged log-sum-exps", backend.stream())?;
    }
    let heads = rows.saturating_mul(shape.query_heads());
    let (Some(blocks), Ok(parts)) = (u32::try_from(heads).ok().filter(|&n| n <= i32::MAX as u32), u32::try_from(parts))
    else {
        let hint = "merge fewer queries at once";
        let allowed = i32::MAX as u64;
        return Err(Error::Limit { what: "rows of states".into(), needed: heads as u64, allowed, hint });
    };
    let call = PartsCall {
        outputs: at.outputs,
        lse: at.lse,
        output_stride: at.output_stride as u64,
        lse_stride: at.lse_stride as u64,
        merged: output.address(),
        merged_lse: lse.map_or(0, Tensor::address),
        parts,
        heads: blocks,
        head_dim: shape.head_dim() as u32,
        merged_type: output.type_code(),
    };
    let program = Program { sources: &SOURCES, files: &["merge_parts.cu"], defines: Vec::new() };
    let launch = KernelLaunch {
        name: "merge_parts",
        function: backend.kernels().function(&program, "merge_parts")?,
        config: LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (128, 1, 1), shared_mem_bytes: 0 },
        cluster: 1,
        overlaps: backend.kernels().facts().is_9_0_or_newer(),
    };
    // SAFETY: The argument matches the kernel. The caller guarantees that all arrays hold the rows of the grid, in every
    // part, until the stream has passed this launch.
    unsafe { launch.run(backend.stream(), &call) }
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
