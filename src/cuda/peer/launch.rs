//! Launches of `exchange_states` and `exchange_elements`.

use std::ops::Range;
use std::time::Duration;

use cudarc::driver::{DeviceRepr, LaunchConfig};

use super::MOST_RANKS;
use super::memory::{HostWord, MOST_BLOCKS, Mapped};
use crate::Result;
use crate::backend::AttentionStates;
use crate::cuda::Cuda;
use crate::cuda::device::launch::KernelLaunch;
use crate::cuda::device::program::Program;
use crate::cuda::device::tensor::Tensor;
use crate::cuda::sources::SOURCES;
use crate::format::AttentionShape;
use crate::ranks::Reduction;

/// Threads of a block, each with two words of states.
const THREADS: usize = 256;

/// `Exchange` of `cuda/common/exchange.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Exchange {
    slots: [u64; MOST_RANKS],
    steps: u64,
    failed: u64,
    left: u64,
    report: u64,
    deadline: u64,
    capacity: u32,
    rank: u32,
}

/// `StatesCall` of `cuda/exchange_states.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct StatesCall {
    exchange: Exchange,
    outputs: u64,
    lse: u64,
    merged: u64,
    merged_lse: u64,
    heads: u32,
    head_dim: u32,
    merged_type: u32,
    unused: u32,
}

/// `ElementsCall` of `cuda/exchange_elements.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct ElementsCall {
    exchange: Exchange,
    from: u64,
    to: u64,
    stride: u64,
    elements: u32,
    element_type: u32,
    operation: u32,
    root: u32,
}

// SAFETY: A struct of C layout without padding, the same on both sides. Addresses are plain integers.
unsafe impl DeviceRepr for StatesCall {}
// SAFETY: As above.
unsafe impl DeviceRepr for ElementsCall {}

/// What is done with the elements of all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    Gather,
    Take { root: usize },
    Reduce(Reduction),
}

impl Operation {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Gather => "all-gather",
            Self::Take { .. } => "broadcast",
            Self::Reduce(_) => "all-reduce",
        }
    }

    /// Its number in the kernel.
    const fn code(self) -> u32 {
        match self {
            Self::Gather => 0,
            Self::Take { .. } => 1,
            Self::Reduce(Reduction::Sum) => 2,
            Self::Reduce(Reduction::Max) => 3,
        }
    }
}

impl Exchange {
    pub(super) fn new(mapped: &[Mapped], rank: usize, capacity: usize, report: &HostWord, deadline: Duration) -> Self {
        let mut slots = [0; MOST_RANKS];
        slots.iter_mut().zip(mapped).for_each(|(slot, mapped)| *slot = mapped.slots());
        let [left, failed, steps] = mapped[rank].words();
        let deadline = u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX);
        let report = report.address();
        Self { slots, steps, failed, left, report, deadline, capacity: capacity as u32, rank: rank as u32 }
    }
}

/// The kernels for a number of ranks.
#[derive(Debug)]
pub(super) struct Programs {
    states: KernelLaunch,
    elements: KernelLaunch,
}

impl Programs {
    /// # Errors
    /// Errors from compiling.
    pub(super) fn new(backend: &Cuda, ranks: usize, capacity: usize) -> Result<Self> {
        let facts = backend.kernels().facts();
        // Every launch has this grid: each block counts its launches, and all have to agree.
        let blocks = capacity.div_ceil(2 * THREADS).clamp(1, facts.multiprocessors.min(MOST_BLOCKS));
        let config =
            LaunchConfig { grid_dim: (blocks as u32, 1, 1), block_dim: (THREADS as u32, 1, 1), shared_mem_bytes: 0 };
        let kernel = |files: &'static [&'static str], name: &'static str| {
            let program = Program { sources: &SOURCES, files, defines: vec![("RANKS", ranks)] };
            let function = backend.kernels().function(&program, name)?;
            Ok(KernelLaunch { name, function, config, cluster: 1, overlaps: facts.is_9_0_or_newer() })
        };
        Ok(Self {
            states: kernel(&["exchange_states.cu"], "exchange_states")?,
            elements: kernel(&["exchange_elements.cu"], "exchange_elements")?,
        })
    }

    /// Queues the exchange and the merge. The caller has checked the tensors against the rows, and those against the
    /// slots.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(super) fn launch_states(
        &self,
        backend: &Cuda,
        exchange: &Exchange,
        (shape, rows): (&AttentionShape, usize),
        states: &AttentionStates<Tensor>,
        (output, lse): (&Tensor, Option<&Tensor>),
    ) -> Result<()> {
        let call = StatesCall {
            exchange: *exchange,
            outputs: states.outputs.address(),
            lse: states.lse.address(),
            merged: output.address(),
            merged_lse: lse.map_or(0, Tensor::address),
            heads: (rows * shape.query_heads()) as u32,
            head_dim: shape.head_dim() as u32,
            merged_type: output.type_code(),
            unused: 0,
        };
        // SAFETY: The argument matches the kernel. The tensors were checked to hold the rows and are freed in the order
        // of the stream, the words fit the slots of all ranks, and the transport keeps those, its numbers and its word
        // of the host until its kernels are done.
        unsafe { self.states.run(backend.stream(), &call) }
    }

    /// Queues the exchange of the elements of a range, of `stride` in all. The caller has checked the tensors against
    /// all of them, and the range against the slots.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(super) fn launch_elements(
        &self,
        backend: &Cuda,
        exchange: &Exchange,
        operation: Operation,
        (from, to): (&Tensor, &Tensor),
        range: Range<usize>,
        stride: usize,
    ) -> Result<()> {
        let root = if let Operation::Take { root } = operation { root as u32 } else { 0 };
        let call = ElementsCall {
            exchange: *exchange,
            from: from.address_of(range.start),
            to: to.address_of(range.start),
            stride: stride as u64,
            elements: range.len() as u32,
            element_type: from.type_code(),
            operation: operation.code(),
            root,
        };
        // SAFETY: As `launch_states`, of elements.
        unsafe { self.elements.run(backend.stream(), &call) }
    }
}
