//! What the transports between GPUs have in common: who the rank is, whether the transport is lost, waits with a
//! deadline, checks of arguments.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;

use super::attend::merge_parts::check_f32;
use super::device::driver::{driver_error, is_capturing};
use super::device::tensor::Tensor;
use crate::{Error, Result};

/// The deadline that suits steps of one model on one host. An engine whose ranks may be further apart gives a longer
/// one.
pub const DEADLINE: Duration = Duration::from_secs(3);

/// How long a wait looks again and again before it sleeps between looks.
const SPINS: Duration = Duration::from_micros(200);

/// How long it then sleeps.
const NAP: Duration = Duration::from_micros(50);

/// A rank of a transport.
#[derive(Debug)]
pub(super) struct RankEnd {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) deadline: Duration,
    lost: Option<Error>,
}

impl RankEnd {
    /// # Errors
    /// [`Error::Plan`] when there is no such rank.
    pub(super) fn new(rank: usize, ranks: usize, deadline: Duration) -> Result<Self> {
        if rank >= ranks {
            let reason = format!("rank {rank} of {ranks} ranks; ranks count from 0");
            return Err(Error::Plan { what: "transport between ranks", reason });
        }
        Ok(Self { rank, ranks, deadline, lost: None })
    }

    /// # Errors
    /// The first failure of the transport.
    pub(super) fn check(&self) -> Result<()> {
        self.lost.clone().map_or(Ok(()), Err)
    }

    /// Notes a failure. Every later call returns it.
    pub(super) fn lose(&mut self, operation: &'static str, failed: Vec<usize>, reason: String) -> Error {
        let error = Error::Transport { operation, rank: self.rank, ranks: self.ranks, failed, reason };
        self.lost.get_or_insert(error).clone()
    }

    /// Notes an error of the driver, which leaves the others without this rank.
    pub(super) fn lose_by(&mut self, operation: &'static str, error: &Error) -> Error {
        self.lose(operation, vec![self.rank], error.to_string())
    }
}

/// Waits up to `longest` for all work that is queued on a stream. Returns whether it is done.
///
/// # Errors
/// [`Error::Plan`] while the stream is being captured; errors of the driver, also those of earlier work.
pub(super) fn wait_for(stream: &Arc<CudaStream>, longest: Duration) -> Result<bool> {
    let failed = |error| driver_error("waiting for ranks", 0, error);
    let begin = Instant::now();
    stream.context().bind_to_thread().map_err(failed)?;
    check_not_capturing(stream)?;
    let event = stream.context().new_event(None).map_err(failed)?;
    event.record(stream).map_err(failed)?;
    loop {
        if event.try_is_complete().map_err(failed)? {
            return Ok(true);
        }
        if begin.elapsed() > longest {
            return Ok(false);
        }
        pause(begin);
    }
}

/// Between two looks of a wait that began at `begin`.
pub(super) fn pause(begin: Instant) {
    if begin.elapsed() < SPINS { thread::yield_now() } else { thread::sleep(NAP) }
}

fn check_not_capturing(stream: &CudaStream) -> Result<()> {
    match is_capturing(stream)? {
        false => Ok(()),
        true => Err(Error::Plan {
            what: "waiting for ranks",
            reason: "the stream is being captured; wait after the graph was launched".into(),
        }),
    }
}

/// Checks the tensors of an all-gather.
///
/// # Errors
/// [`Error::Elements`], [`Error::Buffer`], [`Error::Plan`].
pub(super) fn check_gather(
    ranks: usize,
    stream: &CudaStream,
    (part, elements): (&Tensor, usize),
    all: &Tensor,
) -> Result<()> {
    check_elements("the part of a rank", stream, part, elements)?;
    check_elements("the parts of all ranks", stream, all, elements.saturating_mul(ranks))?;
    if part.element_type() != all.element_type() {
        let reason = format!("{:?} elements are gathered into {:?}", part.element_type(), all.element_type());
        return Err(Error::Buffer { what: "the parts of all ranks", reason });
    }
    check_apart("the parts of all ranks", all, ("the part of this rank", part))
}

/// Checks that what is written shares no memory with what other threads of the kernel read.
///
/// # Errors
/// [`Error::Buffer`].
pub(super) fn check_apart(what: &'static str, written: &Tensor, (read_as, read): (&str, &Tensor)) -> Result<()> {
    let end = |tensor: &Tensor| tensor.address() + (tensor.elements() * tensor.element_type().bytes()) as u64;
    if read.address() < end(written) && written.address() < end(read) {
        return Err(Error::Buffer { what, reason: format!("they share memory with {read_as}") });
    }
    Ok(())
}

/// Checks the tensor of a broadcast.
///
/// # Errors
/// As [`check_gather`].
pub(super) fn check_broadcast(
    ranks: usize,
    stream: &CudaStream,
    (tensor, elements): (&Tensor, usize),
    root: usize,
) -> Result<()> {
    if root >= ranks {
        let reason = format!("root {root} of {ranks} ranks");
        return Err(Error::Plan { what: "broadcast", reason });
    }
    check_elements("what is broadcast", stream, tensor, elements)
}

/// Checks the tensor of an all-reduce.
///
/// # Errors
/// As [`check_gather`].
pub(super) fn check_reduce(stream: &CudaStream, tensor: &Tensor, elements: usize) -> Result<()> {
    check_f32("elements to reduce", tensor)?;
    check_elements("elements to reduce", stream, tensor, elements)
}

fn check_elements(what: &'static str, stream: &CudaStream, tensor: &Tensor, expected: usize) -> Result<()> {
    tensor.memory().check_stream(what, stream)?;
    let given = tensor.elements();
    if given < expected {
        return Err(Error::Elements { what, given, expected, shape: "the operation".into() });
    }
    Ok(())
}
