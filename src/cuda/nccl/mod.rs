//! Ranks that exchange through NCCL: any devices that NCCL connects, also on several hosts.
//!
//! The library is loaded at run time. Calls return at once, and every wait has a deadline of its own: after it the
//! communicator is aborted, because within a host NCCL may never notice that a rank died.
//!
//! ```no_run
//! use kvpack::cuda::nccl::{Nccl, NcclId};
//! use kvpack::cuda::{Cuda, DEADLINE};
//! # fn from_rank_0(bytes: Option<[u8; 128]>) -> [u8; 128] { bytes.unwrap_or([0; 128]) }
//! # fn example(backend: &Cuda, rank: usize, ranks: usize) -> kvpack::Result<Nccl> {
//! let id = if rank == 0 { Some(NcclId::new()?.to_bytes()) } else { None };
//! // The engine's own way between its processes.
//! let id = NcclId::from_bytes(from_rank_0(id));
//! Nccl::connect(backend, &id, (rank, ranks), DEADLINE)
//! # }
//! ```

mod library;
mod reduce;

use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::result::memcpy_dtod_async;

use super::attend::merge_parts::{PartsAt, check_f32, merge_parts_at};
use super::backend::Cuda;
use super::device::driver::{driver_error, is_capturing};
use super::device::tensor::Tensor;
use super::rank_end::{RankEnd, check_broadcast, check_gather, check_reduce, pause, wait_for};
use crate::backend::AttentionStates;
use crate::format::AttentionShape;
use crate::plan::ElementType;
use crate::ranks::{Reduction, StateExchange, Transport};
use crate::{Error, Result};
use library::{Communicator, Config, Functions, IN_PROGRESS, SUCCESS, UniqueId, functions};
use reduce::reduce_parts;

/// How long connecting may take: the ranks start, and load the library.
const CONNECTING: Duration = Duration::from_secs(60);

/// What a merge of states is called in errors.
const EXCHANGE: &str = "exchange of states";

/// What names a group of ranks. One rank makes it, and the caller carries it to all.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NcclId([u8; 128]);

impl fmt::Debug for NcclId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NcclId")
    }
}

impl NcclId {
    /// A name for a new group.
    ///
    /// # Errors
    /// [`Error::Adapter`] when NCCL is missing or too old, [`Error::Gpu`] when it makes none.
    pub fn new() -> Result<Self> {
        let nccl = functions()?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: NCCL writes 128 bytes.
        match unsafe { (nccl.get_unique_id)(&mut id) } {
            SUCCESS => Ok(Self(id.0)),
            result => {
                Err(Error::Gpu { message: format!("ncclGetUniqueId: {}", nccl.message(std::ptr::null_mut(), result)) })
            }
        }
    }

    /// Its bytes.
    pub const fn to_bytes(&self) -> [u8; 128] {
        self.0
    }

    /// The name with these bytes.
    pub const fn from_bytes(bytes: [u8; 128]) -> Self {
        Self(bytes)
    }
}

/// A rank of a group of NCCL: see [`Transport`] and the module.
///
/// An all-reduce gathers, and reduces in the order of the ranks: NCCL's own drops NaN from a maximum.
#[derive(Debug)]
pub struct Nccl {
    backend: Cuda,
    nccl: &'static Functions,
    communicator: Handle,
    end: RankEnd,
    rooms: Vec<ReduceRoom>,
}

/// Room for the elements of all ranks, which an all-reduce gathers before it reduces them.
#[derive(Debug)]
struct ReduceRoom {
    tensor: Tensor,
    /// Whether a graph may write to it.
    is_captured: bool,
}

/// A communicator of NCCL.
#[derive(Debug)]
struct Handle {
    raw: Communicator,
    is_owned: bool,
}

// SAFETY: NCCL's communicators may be used by any thread, one at a time; `Nccl` uses its own through `&mut self`.
unsafe impl Send for Handle {}

impl Nccl {
    /// Joins a group as `(rank, ranks)`. Every rank has a GPU of its own, that of its backend. `deadline` bounds every
    /// later wait.
    ///
    /// # Errors
    /// [`Error::Adapter`] when NCCL is missing or older than 2.14, [`Error::Plan`] when there is no such rank,
    /// [`Error::Transport`] when the ranks do not meet within a minute, or NCCL refuses them (two on one GPU).
    pub fn connect(backend: &Cuda, id: &NcclId, (rank, ranks): (usize, usize), deadline: Duration) -> Result<Self> {
        let nccl = functions()?;
        let end = RankEnd::new(rank, ranks, deadline)?;
        let bound = backend.stream().context().bind_to_thread();
        bound.map_err(|error| driver_error("connecting ranks", 0, error))?;
        let (mut raw, mut config) = (std::ptr::null_mut(), Config::NOT_BLOCKING);
        // SAFETY: The pointers are to values of NCCL's types that outlive the call, which copies them. The device's
        // primary context is current.
        let result = unsafe { (nccl.init_rank)(&mut raw, ranks as c_int, UniqueId(id.0), rank as c_int, &mut config) };
        let communicator = Handle { raw, is_owned: true };
        let mut joined = Self { backend: backend.clone(), nccl, communicator, end, rooms: Vec::new() };
        joined.finish("connecting ranks", result, CONNECTING)?;
        Ok(joined)
    }

    /// A transport over an engine's communicator (`ncclComm_t`), which stays the engine's: this type neither aborts nor
    /// destroys it. When a wait ends without its operation, the engine aborts it.
    ///
    /// # Safety
    /// The communicator is valid as long as the transport lives, is of the backend's device, and nothing else uses it
    /// during a call of the transport.
    ///
    /// # Errors
    /// [`Error::Adapter`] when NCCL is missing or older than 2.14, [`Error::Transport`] when NCCL refuses it.
    pub unsafe fn from_raw(backend: &Cuda, communicator: *mut c_void, deadline: Duration) -> Result<Self> {
        let nccl = functions()?;
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: The caller's communicator is valid; NCCL writes an integer each.
        let results = unsafe { [(nccl.user_rank)(communicator, &mut rank), (nccl.count)(communicator, &mut ranks)] };
        let end = RankEnd::new(rank.max(0) as usize, ranks.max(1) as usize, deadline)?;
        let communicator = Handle { raw: communicator, is_owned: false };
        let mut given = Self { backend: backend.clone(), nccl, communicator, end, rooms: Vec::new() };
        results.into_iter().try_for_each(|result| given.finish("a communicator", result, deadline))?;
        Ok(given)
    }

    /// Waits until NCCL has queued the operation of a call.
    fn finish(&mut self, operation: &'static str, result: c_int, longest: Duration) -> Result<()> {
        let begin = Instant::now();
        let mut state = result;
        while state == IN_PROGRESS {
            if begin.elapsed() > longest {
                return Err(self.give_up(operation, format!("NCCL did not go on within {longest:?}")));
            }
            pause(begin);
            // SAFETY: The communicator is valid, and NCCL writes one integer.
            let asked = unsafe { (self.nccl.async_error)(self.communicator.raw, &mut state) };
            if asked != SUCCESS {
                state = asked;
            }
        }
        match state {
            SUCCESS => Ok(()),
            error => {
                let message = self.nccl.message(self.communicator.raw, error);
                Err(self.give_up(operation, format!("NCCL: {message}")))
            }
        }
    }

    /// Loses the transport, and ends its kernels.
    fn give_up(&mut self, operation: &'static str, reason: String) -> Error {
        let (raw, is_owned) = (self.communicator.raw, self.communicator.is_owned);
        if is_owned && !raw.is_null() && self.end.check().is_ok() {
            self.communicator.raw = std::ptr::null_mut();
            // SAFETY: The communicator is this value's own, and is not used after this.
            unsafe { (self.nccl.abort)(raw) };
        }
        self.end.lose(operation, Vec::new(), reason)
    }

    /// Queues an operation.
    fn queue(
        &mut self,
        operation: &'static str,
        call: impl FnOnce(&Functions, Communicator, *mut c_void) -> c_int,
    ) -> Result<()> {
        self.end.check()?;
        let stream = self.backend.stream().clone();
        if let Err(error) = stream.context().bind_to_thread() {
            return Err(self.end.lose_by(operation, &driver_error(operation, 0, error)));
        }
        let result = call(self.nccl, self.communicator.raw, stream.cu_stream().cast());
        self.finish(operation, result, self.end.deadline)
    }

    fn gather(&mut self, part: &Tensor, elements: usize, all: &Tensor) -> Result<()> {
        let (from, to, kind) = (part.address(), all.address(), kind(part.element_type()));
        // SAFETY: Both tensors were checked to hold the elements of a rank and of all, and are freed in the order of the
        // stream.
        self.queue("all-gather", |nccl, communicator, stream| unsafe {
            (nccl.all_gather)(from as *const c_void, to as *mut c_void, elements, kind, communicator, stream)
        })
    }
}

/// NCCL's number of an element type.
const fn kind(element_type: ElementType) -> c_int {
    match element_type {
        ElementType::F16 => 6,
        ElementType::F32 => 7,
        ElementType::Bf16 => 9,
    }
}

impl Transport for Nccl {
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
        self.gather(part, elements, all)
    }

    fn broadcast(&mut self, tensor: &mut Tensor, elements: usize, root: usize) -> Result<()> {
        check_broadcast(self.end.ranks, self.backend.stream(), (tensor, elements), root)?;
        let (at, kind) = (tensor.address(), kind(tensor.element_type()));
        // SAFETY: The tensor was checked to hold the elements, and is freed in the order of the stream. NCCL broadcasts
        // in place.
        self.queue("broadcast", |nccl, communicator, stream| unsafe {
            (nccl.broadcast)(
                at as *const c_void,
                at as *mut c_void,
                elements,
                kind,
                root as c_int,
                communicator,
                stream,
            )
        })
    }

    fn all_reduce(&mut self, tensor: &mut Tensor, elements: usize, reduction: Reduction) -> Result<()> {
        check_reduce(self.backend.stream(), tensor, elements)?;
        self.end.check()?;
        let gathered = self.reduce_room(elements.saturating_mul(self.end.ranks))?;
        self.gather(tensor, elements, &gathered)?;
        reduce_parts(&self.backend, (&gathered, self.end.ranks), (tensor, elements), reduction)
    }

    fn wait(&mut self) -> Result<()> {
        const OPERATION: &str = "waiting for the ranks";
        self.end.check()?;
        match wait_for(self.backend.stream(), self.end.deadline) {
            Ok(true) => {
                let mut state = SUCCESS;
                // SAFETY: The communicator is valid, and NCCL writes one integer.
                let asked = unsafe { (self.nccl.async_error)(self.communicator.raw, &mut state) };
                self.finish(OPERATION, if asked == SUCCESS { state } else { asked }, self.end.deadline)
            }
            Ok(false) => {
                let reason = format!("a rank died, hangs or is late: nothing within {:?}", self.end.deadline);
                Err(self.give_up(OPERATION, reason))
            }
            Err(error @ Error::Plan { .. }) => Err(error),
            Err(error) => Err(self.end.lose_by(OPERATION, &error)),
        }
    }

    /// Outputs and log-sum-exps of a rank after each other: what one all-gather brings is merged where it lies. There
    /// is one part more than ranks, for states that do not lie so.
    async fn room_for_states(&self, shape: &AttentionShape, rows: usize) -> Result<AttentionStates<Tensor>> {
        let heads = rows.saturating_mul(shape.query_heads());
        let both = heads.saturating_mul(shape.head_dim().saturating_add(1));
        let zeroed = |elements| Tensor::zeroed(self.backend.stream(), elements, ElementType::F32);
        Ok(AttentionStates { outputs: zeroed(both.saturating_mul(self.end.ranks.saturating_add(1)))?, lse: zeroed(1)? })
    }

    /// One all-gather of the same size on all ranks, however their states lie in memory. States whose log-sum-exps
    /// follow their outputs, as attention returns them, are sent from there; others are copied first.
    fn merge_states(
        &mut self,
        exchange: StateExchange<'_, Tensor>,
        output: &mut Tensor,
        lse: Option<&mut Tensor>,
    ) -> Result<()> {
        exchange.check(&self.backend, output, lse.as_deref())?;
        let StateExchange { shape, rows, states, gathered } = exchange;
        let (ranks, room) = (self.end.ranks, &gathered.outputs);
        let heads = rows.saturating_mul(shape.query_heads());
        let elements = heads.saturating_mul(shape.head_dim());
        let both = elements.saturating_add(heads);
        for (what, tensor, count) in
            [("outputs of a rank", &states.outputs, elements), ("log-sum-exps of a rank", &states.lse, heads)]
        {
            check_f32(what, tensor)?;
            check_gather(ranks, self.backend.stream(), (tensor, count), room)?;
        }
        let needed = both.saturating_mul(ranks.saturating_add(1));
        if room.elements() < needed {
            let shape = format!("{ranks} ranks and one part more; take the room from room_for_states of {rows} rows");
            let (what, given) = ("room for the states of all ranks", room.elements());
            return Err(Error::Elements { what, given, expected: needed, shape });
        }
        let to = room.address();
        let from = self.states_together(states, (elements, heads), to + 4 * (both * ranks) as u64)?;
        // SAFETY: There are outputs and log-sum-exps, and the room was checked to have as many of every rank. All is
        // freed in the order of the stream.
        self.queue(EXCHANGE, |nccl, communicator, stream| unsafe {
            let kind = kind(ElementType::F32);
            (nccl.all_gather)(from as *const c_void, to as *mut c_void, both, kind, communicator, stream)
        })?;
        let at = PartsAt { outputs: to, lse: to + 4 * elements as u64, output_stride: both, lse_stride: both };
        // SAFETY: The all-gather before it on the stream puts the parts there.
        unsafe { merge_parts_at(&self.backend, (&shape, rows), (at, ranks), output, lse.as_deref()) }
    }
}

impl Nccl {
    /// The address of this rank's log-sum-exps behind its outputs: where they are, or `copy`, which has room for both.
    fn states_together(
        &mut self,
        states: &AttentionStates<Tensor>,
        (elements, heads): (usize, usize),
        copy: u64,
    ) -> Result<u64> {
        let (outputs, lse) = (states.outputs.address(), states.lse.address());
        if lse == outputs + 4 * elements as u64 && Arc::ptr_eq(states.lse.memory(), states.outputs.memory()) {
            return Ok(outputs);
        }
        self.end.check()?;
        let stream = self.backend.stream();
        let copied = stream.context().bind_to_thread().and_then(|()| {
            // SAFETY: Both tensors were checked to hold the elements, and the caller checked the room for the copy. All
            // is freed in the order of the stream.
            unsafe {
                memcpy_dtod_async(copy, outputs, 4 * elements, stream.cu_stream())?;
                memcpy_dtod_async(copy + 4 * elements as u64, lse, 4 * heads, stream.cu_stream())
            }
        });
        copied.map_err(|error| self.end.lose_by(EXCHANGE, &driver_error(EXCHANGE, 0, error)))?;
        Ok(copy)
    }

    /// Room for what an all-reduce gathers. A graph that captured it writes to it whenever it is replayed: such room
    /// stays as long as the transport.
    fn reduce_room(&mut self, needed: usize) -> Result<Tensor> {
        let is_captured = is_capturing(self.backend.stream())?;
        if let Some(room) = self.rooms.iter_mut().find(|room| room.tensor.elements() >= needed) {
            room.is_captured |= is_captured;
            return Ok(room.tensor.clone());
        }
        if is_captured {
            let reason = format!(
                "the stream is being captured, and there is no room for {needed} elements of all ranks; run it once \
                 with as many elements before the capture"
            );
            return Err(Error::Plan { what: "all-reduce", reason });
        }
        let tensor = Tensor::zeroed(self.backend.stream(), needed, ElementType::F32)?;
        self.rooms.retain(|room| room.is_captured);
        self.rooms.push(ReduceRoom { tensor: tensor.clone(), is_captured });
        Ok(tensor)
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let raw = self.communicator.raw;
        if !self.communicator.is_owned || raw.is_null() || self.end.check().is_err() {
            return;
        }
        let stream = self.backend.stream();
        // A stream that is being captured has nothing of it that runs.
        let is_done = is_capturing(stream).is_ok_and(|capturing| !capturing)
            && wait_for(stream, self.end.deadline).unwrap_or(false);
        // SAFETY: The communicator is this value's own, nothing of it runs, and it is not used after this.
        let finalized = is_done.then(|| unsafe { (self.nccl.finalize)(raw) });
        let ended = finalized.is_some_and(|result| self.finish("leaving the ranks", result, self.end.deadline).is_ok());
        if !self.communicator.raw.is_null() {
            // SAFETY: As above. A communicator that was not finalized is aborted.
            unsafe { if ended { (self.nccl.destroy)(raw) } else { (self.nccl.abort)(raw) } };
        }
    }
}
