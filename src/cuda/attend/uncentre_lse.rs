//! Kernel `uncentre_lse`: log-sum-exps over centred keys become those over the keys.

use crate::cuda::sources::SOURCES;
use cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};

use crate::backend::RowCentres;
use crate::cuda::Cuda;
use crate::cuda::device::driver::driver_error;
use crate::cuda::device::memory::Memory;
use crate::cuda::device::program::Program;
use crate::cuda::device::store::Store;
use crate::cuda::device::tensor::Tensor;
use crate::plan::ElementType;
use crate::{Error, Result};

/// Threads of a block, a warp for every log-sum-exp.
const BLOCK: u32 = 256;

/// `UncentreCall` of `cuda/uncentre_lse.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct UncentreCall {
    queries: u64,
    centres: u64,
    slots: u64,
    lse: u64,
    query_type: u32,
    query_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    total: u32,
    scale: f32,
}

// SAFETY: a struct of C layout without padding, the same on both sides; addresses are plain integers.
unsafe impl DeviceRepr for UncentreCall {}

/// The program of the kernel.
pub(in crate::cuda) fn program() -> Program {
    Program { sources: &SOURCES, files: &["uncentre_lse.cu"], defines: Vec::new() }
}

/// Adds `scale · q·m` to log-sum-exps `[rows, query_heads]`; row `i` has its centre in slot `centres.slots[i]` of
/// the store.
pub(in crate::cuda) fn uncentre_lse(
    backend: &Cuda,
    store: &Store,
    queries: &Tensor,
    centres: RowCentres<'_>,
    lse: &Tensor,
) -> Result<()> {
    let RowCentres { slots, scale } = centres;
    let shape = store.shape();
    let (heads, head_dim) = (shape.query_heads(), shape.head_dim());
    if slots.is_empty() {
        return Err(Error::NoTokens { what: "uncentring", hint: "pass at least one query" });
    }
    for (what, tensor, elements) in [("queries", queries, heads * head_dim), ("log-sum-exps", lse, heads)] {
        let (given, expected) = (tensor.elements(), slots.len() * elements);
        if given != expected {
            let shape = format!("{} rows of {heads} query heads × {head_dim} channels", slots.len());
            return Err(Error::Elements { what, given, expected, shape });
        }
    }
    if lse.element_type() != ElementType::F32 {
        let reason = format!("are {:?}, log-sum-exps are f32", lse.element_type());
        return Err(Error::Buffer { what: "log-sum-exps", reason });
    }
    slots.iter().try_for_each(|&slot| store.check_centre("uncentring", Some(slot as usize)))?;
    let threads = lse.elements() as u64 * 32;
    let blocks = u32::try_from(threads.div_ceil(u64::from(BLOCK))).ok().filter(|_| threads <= u64::from(u32::MAX));
    let Some(blocks) = blocks else {
        let (needed, allowed) = (lse.elements() as u64, u64::from(u32::MAX) / 32);
        let hint = "uncentre fewer queries at once";
        return Err(Error::Limit { what: "rows of states".into(), needed, allowed, hint });
    };
    let slots_on_device = Memory::upload(backend.stream(), "slots of centres", bytemuck::cast_slice(slots))?;
    let call = UncentreCall {
        queries: queries.address(),
        centres: store.centre_address(0),
        slots: slots_on_device.address(),
        lse: lse.address(),
        query_type: queries.type_code(),
        query_heads: heads as u32,
        kv_heads: shape.kv_heads() as u32,
        head_dim: head_dim as u32,
        total: lse.elements() as u32,
        scale,
    };
    let function = backend.kernels().function(&program(), "uncentre_lse")?;
    let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (BLOCK, 1, 1), shared_mem_bytes: 0 };
    let mut launch = backend.stream().launch_builder(&function);
    launch.arg(&call);
    // SAFETY: the argument is the kernel's, and all arrays were checked to hold what it names. They live until the
    // stream has passed this launch, because they are freed in its order.
    unsafe { launch.launch(config) }.map(|_| ()).map_err(|error| driver_error("uncentre_lse", 0, error))
}
