//! Ranks that write to each other's memory, over NVLink or PCIe of one host.
//!
//! An exchange is one kernel: every rank writes its words into the slots of all others, each word together with the
//! number of the exchange, and takes theirs from its own slots as they come. Attention states are merged by the kernel
//! that receives them. Nothing is read over the link, and no library is needed.
//!
//! Ranks may be threads of one process or processes of one host. The caller carries a [`PeerHandle`] from every rank to
//! all others, by whatever means it has.
//!
//! ```no_run
//! use kvpack::cuda::peer::{Peer, PeerHandle, PeerSlots};
//! use kvpack::cuda::{Cuda, DEADLINE};
//! # fn all_gather_bytes(bytes: Vec<u8>) -> Vec<Vec<u8>> { vec![bytes] }
//! # fn example(backend: &Cuda, shape: &kvpack::AttentionShape, rank: usize, ranks: usize) -> kvpack::Result<Peer> {
//! // Room for the states of 64 rows of queries.
//! let slots = PeerSlots::new(backend, (rank, ranks), PeerSlots::words_of_states(shape, 64))?;
//! // The engine's own way between its processes.
//! let handles = all_gather_bytes(slots.handle().to_bytes());
//! let handles = handles.iter().map(|bytes| PeerHandle::from_bytes(bytes)).collect::<kvpack::Result<Vec<_>>>()?;
//! // SAFETY: the handles come from all ranks of this exchange, and all wait for their last operation before one ends.
//! unsafe { slots.connect(&handles, DEADLINE) }
//! # }
//! ```

mod handle;
mod launch;
mod memory;

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::cuMemsetD32Async;

use super::attend::merge_parts::check_f32;
use super::backend::Cuda;
use super::device::driver::{is_capturing, make_current};
use super::device::tensor::Tensor;
use super::rank_end::{RankEnd, check_apart, check_broadcast, check_gather, check_reduce, wait_for};
use crate::backend::AttentionStates;
use crate::format::AttentionShape;
use crate::plan::ElementType;
use crate::ranks::{Reduction, StateExchange, Transport};
use crate::{Error, Result};
pub use handle::PeerHandle;
use handle::this_process;
use launch::{Exchange, Operation, Programs};
use memory::{HostWord, Mapped, SlotMemory};

/// Most ranks of an exchange; `MOST_RANKS` in `cuda/common/exchange.cuh`.
pub const MOST_RANKS: usize = 16;

/// Most words of a slot: kernels count them by 32 bits.
const MOST_WORDS: usize = 1 << 28;

/// How much longer the host waits than kernels, which end by themselves.
const GRACE: Duration = Duration::from_secs(1);

/// The slots of a rank that is not connected yet.
#[derive(Debug)]
pub struct PeerSlots {
    backend: Cuda,
    rank: usize,
    ranks: usize,
    capacity: usize,
    memory: Arc<SlotMemory>,
}

/// A rank that exchanges through the memory of the others: see [`Transport`] and the module.
///
/// Waits in kernels end after the deadline. Work of an engine that takes longer between two ranks' same operations needs
/// a longer one.
#[derive(Debug)]
pub struct Peer {
    backend: Cuda,
    end: RankEnd,
    capacity: usize,
    exchange: Exchange,
    programs: Programs,
    /// The slots of all ranks, this one's too.
    mapped: Vec<Mapped>,
    report: HostWord,
}

impl PeerSlots {
    /// Slots for the rank `(rank, ranks)`, on the device of the backend. `words` is how many elements go in one launch:
    /// those of states in [`PeerSlots::words_of_states`], the same on all ranks. Longer all-gathers, broadcasts and
    /// all-reduces take several launches, longer states are refused. A rank has 16 bytes for each word of each rank.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such rank, [`Error::Limit`] for more than [`MOST_RANKS`] ranks or more words than
    /// kernels count, [`Error::OutOfMemory`].
    pub fn new(backend: &Cuda, (rank, ranks): (usize, usize), words: usize) -> Result<Self> {
        RankEnd::new(rank, ranks, Duration::ZERO)?;
        let limits = [("ranks of a peer exchange", ranks, MOST_RANKS), ("words of a slot", words, MOST_WORDS)];
        for (what, needed, allowed) in limits {
            if needed > allowed {
                let hint = "use cuda::nccl, or exchange fewer queries at once";
                return Err(Error::Limit { what: what.into(), needed: needed as u64, allowed: allowed as u64, hint });
            }
        }
        let capacity = words.max(2).next_multiple_of(2);
        let memory = SlotMemory::new(backend.stream(), 2 * ranks * capacity)?;
        Ok(Self { backend: backend.clone(), rank, ranks, capacity, memory })
    }

    /// Words of the states of `rows` rows of queries.
    pub fn words_of_states(shape: &AttentionShape, rows: usize) -> usize {
        rows.saturating_mul(shape.query_heads()).saturating_mul(shape.head_dim() + 1)
    }

    /// What the other ranks need to know.
    pub fn handle(&self) -> PeerHandle {
        PeerHandle {
            rank: self.rank as u32,
            ranks: self.ranks as u32,
            capacity: self.capacity as u32,
            process: this_process(),
            id: self.memory.id,
            ipc: self.memory.ipc(),
        }
    }

    /// Connects the rank to all others, whose handles are in the order of the ranks, its own among them. Compiles the
    /// kernels. `deadline` bounds every wait.
    ///
    /// # Safety
    /// The handles are those of the ranks of one exchange, each made for it alone. A rank in another process keeps its
    /// end until this one has waited for its last operation: when it drops its end earlier, or exits, it depends on the
    /// driver whether the memory that this rank still writes to is kept.
    ///
    /// # Errors
    /// [`Error::Plan`] for handles that do not fit each other, [`Error::Unsupported`] when a device cannot reach the
    /// memory of another, [`Error::OutOfMemory`]; errors from compiling kernels.
    pub unsafe fn connect(self, handles: &[PeerHandle], deadline: Duration) -> Result<Peer> {
        let end = RankEnd::new(self.rank, self.ranks, deadline)?;
        self.check(handles)?;
        let context = self.backend.stream().context();
        let mapped = handles.iter().enumerate().map(|(rank, handle)| {
            if rank == self.rank {
                return Ok(Mapped::Here(self.memory.clone()));
            }
            match (SlotMemory::of_process(handle.id), handle.ipc) {
                (Some(slots), _) if handle.process == this_process() => Mapped::here(context, slots),
                (_, Some(ipc)) if handle.process != this_process() => Mapped::open(context, ipc),
                (_, None) => Err(Error::Unsupported {
                    what: format!("memory of rank {rank} in another process"),
                    hint: "the driver gives it no handle; run the ranks as threads, or use cuda::nccl".into(),
                }),
                _ => Err(wrong_handles(format!("rank {rank} has dropped its slots"))),
            }
        });
        let mapped = mapped.collect::<Result<Vec<_>>>()?;
        let report = HostWord::new(context)?;
        let exchange = Exchange::new(&mapped, self.rank, self.capacity, &report, deadline);
        let programs = Programs::new(&self.backend, self.ranks, self.capacity)?;
        Ok(Peer { backend: self.backend, end, capacity: self.capacity, exchange, programs, mapped, report })
    }

    fn check(&self, handles: &[PeerHandle]) -> Result<()> {
        if handles.len() != self.ranks {
            return Err(wrong_handles(format!("{} handles for {} ranks", handles.len(), self.ranks)));
        }
        if handles[self.rank].id != self.memory.id || handles[self.rank].process != this_process() {
            return Err(wrong_handles(format!("handle {} is not that of this rank", self.rank)));
        }
        for (place, handle) in handles.iter().enumerate() {
            let given = (handle.rank as usize, handle.ranks as usize, handle.capacity as usize);
            if given != (place, self.ranks, self.capacity) {
                let (rank, ranks, words) = given;
                return Err(wrong_handles(format!(
                    "handle {place} is of rank {rank} of {ranks} with {words} words; this is an exchange of {} ranks with \
                     {} words",
                    self.ranks, self.capacity
                )));
            }
        }
        Ok(())
    }
}

fn wrong_handles(reason: String) -> Error {
    Error::Plan { what: "connecting ranks", reason }
}

impl Peer {
    /// Fails if the transport is lost, or kernels have reported a rank that did not come.
    fn check_open(&mut self, operation: &'static str) -> Result<()> {
        self.end.check()?;
        match self.report.read() {
            0 => Ok(()),
            word => {
                let missing = word as usize - 1;
                let reason = format!(
                    "rank {missing} sent nothing within {:?}, or left; it died, hangs or is late",
                    self.end.deadline
                );
                Err(self.end.lose(operation, vec![missing], reason))
            }
        }
    }

    /// Launches an operation on elements, in as many parts as slots demand.
    fn exchange(&mut self, operation: Operation, (from, to): (&Tensor, &Tensor), elements: usize) -> Result<()> {
        self.check_open(operation.name())?;
        let mut first = 0;
        while first < elements {
            let count = (elements - first).min(self.capacity);
            let launched = self.programs.launch_elements(
                &self.backend,
                &self.exchange,
                operation,
                (from, to),
                first..first + count,
                elements,
            );
            launched.map_err(|error| self.end.lose_by(operation.name(), &error))?;
            first += count;
        }
        Ok(())
    }

    /// Queues the word that this rank has left behind the exchanges, so that what they sent is there first. Without it
    /// the others wait for the deadline.
    fn tell_the_others(&self) {
        let stream = self.backend.stream();
        if make_current(stream.context()).is_err() {
            return;
        }
        for (rank, mapped) in self.mapped.iter().enumerate() {
            let [left, ..] = mapped.words();
            if rank != self.end.rank {
                // SAFETY: The word is in the header of mapped slots, and kernels load it as a whole.
                unsafe { cuMemsetD32Async(left, 1, 1, stream.cu_stream()) }.result().unwrap_or(());
            }
        }
    }
}

impl Transport for Peer {
    type Backend = Cuda;

    fn backend(&self) -> &Cuda {
        &self.backend
    }

    fn rank(&self) -> usize {
        self.end.rank
    }

    fn ranks(&self) -> usize {
        self.end.ranks
    }

    fn all_gather(&mut self, part: &Tensor, elements: usize, all: &mut Tensor) -> Result<()> {
        check_gather(self.end.ranks, self.backend.stream(), (part, elements), all)?;
        self.exchange(Operation::Gather, (part, all), elements)
    }

    fn broadcast(&mut self, tensor: &mut Tensor, elements: usize, root: usize) -> Result<()> {
        check_broadcast(self.end.ranks, self.backend.stream(), (tensor, elements), root)?;
        self.exchange(Operation::Take { root }, (tensor, tensor), elements)
    }

    fn all_reduce(&mut self, tensor: &mut Tensor, elements: usize, reduction: Reduction) -> Result<()> {
        check_reduce(self.backend.stream(), tensor, elements)?;
        self.exchange(Operation::Reduce(reduction), (tensor, tensor), elements)
    }

    fn wait(&mut self) -> Result<()> {
        const OPERATION: &str = "waiting for the ranks";
        self.end.check()?;
        match wait_for(self.backend.stream(), self.end.deadline + GRACE) {
            Ok(true) => self.check_open(OPERATION),
            Ok(false) => {
                let reason = format!("the stream was not done within {:?}", self.end.deadline + GRACE);
                Err(self.end.lose(OPERATION, Vec::new(), reason))
            }
            Err(error @ Error::Plan { .. }) => Err(error),
            Err(error) => Err(self.end.lose_by(OPERATION, &error)),
        }
    }

    /// None is needed: slots hold what arrives.
    async fn room_for_states(&self, _: &AttentionShape, _: usize) -> Result<AttentionStates<Tensor>> {
        let one = || Tensor::zeroed(self.backend.stream(), 1, ElementType::F32);
        Ok(AttentionStates { outputs: one()?, lse: one()? })
    }

    fn merge_states(
        &mut self,
        exchange: StateExchange<'_, Tensor>,
        output: &mut Tensor,
        lse: Option<&mut Tensor>,
    ) -> Result<()> {
        const OPERATION: &str = "exchange of states";
        let lse = lse.as_deref();
        exchange.check(&self.backend, output, lse)?;
        let StateExchange { shape, rows, states, .. } = exchange;
        let floats = [("outputs of a rank", &states.outputs), ("log-sum-exps of a rank", &states.lse)];
        for (what, tensor) in floats.into_iter().chain(lse.map(|lse| ("log-sum-exps of all ranks", lse))) {
            check_f32(what, tensor)?;
            tensor.memory().check_stream(what, self.backend.stream())?;
        }
        output.memory().check_stream("outputs of all ranks", self.backend.stream())?;
        let written = lse.map(|lse| ("log-sum-exps of all ranks", lse)).into_iter();
        for (what, tensor) in written.chain([("outputs of all ranks", &*output)]) {
            check_apart(what, tensor, ("the log-sum-exps of this rank", &states.lse))?;
        }
        let words = PeerSlots::words_of_states(&shape, rows);
        if words > self.capacity {
            let what = format!("the exchange of the states of {rows} rows, in words");
            let hint = "make the slots of all ranks for as many rows (PeerSlots::words_of_states)";
            return Err(Error::Limit { what, needed: words as u64, allowed: self.capacity as u64, hint });
        }
        self.check_open(OPERATION)?;
        let launched =
            self.programs.launch_states(&self.backend, &self.exchange, (&shape, rows), states, (output, lse));
        launched.map_err(|error| self.end.lose_by(OPERATION, &error))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let stream = self.backend.stream();
        // A graph that is being captured holds exchanges, and would tell the others at every replay that this rank has
        // left. They learn it by the deadline. A stream that cannot be asked counts as captured.
        let is_captured = is_capturing(stream).unwrap_or(true);
        if !is_captured {
            self.tell_the_others();
        }
        // Kernels that still run must find all memory. What cannot be waited for is kept until the process ends. The
        // first wait may only return an error that another call left in the context.
        let longest = self.end.deadline + GRACE;
        let is_done = || wait_for(stream, longest).or_else(|_| wait_for(stream, longest)).unwrap_or(true);
        if is_captured || !is_done() {
            mem::forget(mem::take(&mut self.mapped));
            self.report.keep();
        }
    }
}
