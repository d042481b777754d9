//! Kernel `merge_pair`: merges the states of the same queries over two sets of tokens.

use crate::cuda::sources::SOURCES;
use cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};

use crate::backend::AttentionStates;
use crate::cuda::Cuda;
use crate::cuda::device::driver::driver_error;
use crate::cuda::device::program::Program;
use crate::cuda::device::tensor::Tensor;
use crate::format::AttentionShape;
use crate::plan::ElementType;
use crate::{Error, Result};

/// `MergeCall` of `cuda/merge_pair.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct MergeCall {
    first_outputs: u64,
    first_lse: u64,
    second_outputs: u64,
    second_lse: u64,
    outputs: u64,
    lse: u64,
    head_dim: u32,
    unused: u32,
}

// SAFETY: A struct of C layout without padding, the same on both sides. Addresses are plain integers.
unsafe impl DeviceRepr for MergeCall {}

/// The program of the kernel.
pub(in crate::cuda) fn program() -> Program {
    Program { sources: &SOURCES, files: &["merge_pair.cu"], defines: Vec::new() }
}

/// Merges two parts of `rows` rows of states each into `joined`, which is other memory.
pub(in crate::cuda) fn merge_pair(
    backend: &Cuda,
    shape: &AttentionShape,
    [first, second, joined]: [&AttentionStates<Tensor>; 3],
) -> Result<()> {
    let heads = joined.lse.elements();
    for (what, states) in [("the first states", first), ("the second states", second), ("the joined states", joined)] {
        for (tensor, channels) in [(&states.outputs, shape.head_dim()), (&states.lse, 1)] {
            tensor.memory().check_stream(what, backend.stream())?;
            let (given, expected) = (tensor.elements(), heads * channels);
            if given != expected || heads % shape.query_heads() != 0 {
                let shape = format!("{heads} rows of query heads × {channels} channels");
                return Err(Error::Elements { what, given, expected, shape });
            }
            if tensor.element_type() != ElementType::F32 {
                let reason = format!("are {:?}, but states are f32", tensor.element_type());
                return Err(Error::Buffer { what, reason });
            }
        }
    }
    let call = MergeCall {
        first_outputs: first.outputs.address(),
        first_lse: first.lse.address(),
        second_outputs: second.outputs.address(),
        second_lse: second.lse.address(),
        outputs: joined.outputs.address(),
        lse: joined.lse.address(),
        head_dim: shape.head_dim() as u32,
        unused: 0,
    };
    let Some(blocks) = u32::try_from(heads).ok().filter(|&blocks| blocks <= i32::MAX as u32) else {
        let hint = "merge fewer queries at once";
        return Err(Error::Limit {
            what: "rows of states".into(),
            needed: heads as u64,
            allowed: i32::MAX as u64,
            hint,
        });
    };
    let function = backend.kernels().function(&program(), "merge_pair")?;
    let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (128, 1, 1), shared_mem_bytes: 0 };
    let mut launch = backend.stream().launch_builder(&function);
    launch.arg(&call);
    // SAFETY: The argument matches the kernel, and all six arrays were checked to hold the rows of the grid. They live
    // until the stream has passed this launch, because they are freed in its order.
    unsafe { launch.launch(config) }.map(|_| ()).map_err(|error| driver_error("merge_pair", 0, error))
}
