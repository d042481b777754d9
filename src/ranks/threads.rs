//! Ranks that are threads of one process, on CPU backends.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{MOST_RANKS, Reduction, Transport};
use crate::backend::Device;
use crate::cpu::{Cpu, CpuTensor, ElementsMut};
use crate::plan::{ElementType, Elements};
use crate::{Error, Result};

/// Longest deadline of a call.
const LONGEST: Duration = Duration::from_secs(3600);

/// The transport between threads of one process, each with a CPU backend: for tests, and for engines that try out how
/// they would split a sequence. A call waits for the other ranks, so that each needs a thread of its own.
///
/// ```
/// use std::time::Duration;
/// use kvpack::cpu::{Cpu, CpuTensor};
/// use kvpack::ranks::{Reduction, ThreadTransport, Transport};
///
/// let ranks = ThreadTransport::connect(vec![Cpu::new(); 3], Duration::from_secs(5))?;
/// let threads: Vec<_> = ranks.into_iter().map(|mut transport| std::thread::spawn(move || {
///     let mut tensor = CpuTensor::F32(vec![transport.rank() as f32]);
///     transport.all_reduce(&mut tensor, 1, Reduction::Sum).map(|()| tensor.to_f32())
/// })).collect();
/// for thread in threads {
///     assert_eq!(thread.join().expect("a rank")?, [0.0 + 1.0 + 2.0]);
/// }
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Debug)]
pub struct ThreadTransport {
    backend: Cpu,
    rank: usize,
    meeting: Arc<Meeting>,
    deadline: Duration,
}

/// Where the ranks meet for every call.
#[derive(Debug)]
struct Meeting {
    ranks: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Of the present call, what every rank brought.
    brought: Vec<Option<(Call, CpuTensor)>>,
    /// What all brought, once they have, and the ranks that have yet to take it.
    complete: Option<(Arc<Vec<CpuTensor>>, Vec<bool>)>,
    alive: Vec<bool>,
    /// The ranks that failed and what happened, once something has.
    lost: Option<(Vec<usize>, String)>,
}

/// What a rank calls. It has to be the same on all.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Call {
    operation: &'static str,
    elements: usize,
    of: ElementType,
    root: usize,
    reduction: Option<Reduction>,
}

impl ThreadTransport {
    /// One transport for each backend, in the order of the ranks. No call waits longer than `deadline`, up to an hour.
    ///
    /// # Errors
    /// [`Error::Limit`] unless there are 1 to [`MOST_RANKS`] ranks, and for longer deadlines.
    pub fn connect(backends: Vec<Cpu>, deadline: Duration) -> Result<Vec<Self>> {
        let ranks = backends.len();
        if ranks == 0 || ranks > MOST_RANKS {
            let hint = "use at least one rank, and no more than may share a sequence";
            let (needed, allowed) = (ranks as u64, MOST_RANKS as u64);
            return Err(Error::Limit { what: "ranks".into(), needed, allowed, hint });
        }
        if deadline > LONGEST {
            let (needed, allowed) = (deadline.as_secs(), LONGEST.as_secs());
            let hint = "no call may wait forever";
            return Err(Error::Limit { what: "seconds of a deadline".into(), needed, allowed, hint });
        }
        let state = State { brought: vec![None; ranks], complete: None, alive: vec![true; ranks], lost: None };
        let meeting = Arc::new(Meeting { ranks, state: Mutex::new(state), changed: Condvar::new() });
        let of = |(rank, backend)| Self { backend, rank, meeting: meeting.clone(), deadline };
        Ok(backends.into_iter().enumerate().map(of).collect())
    }

    fn error(&self, operation: &'static str, failed: &[usize], reason: &str) -> Error {
        let (rank, ranks) = (self.rank, self.meeting.ranks);
        Error::Transport { operation, rank, ranks, failed: failed.to_vec(), reason: reason.into() }
    }

    /// Brings the elements of this rank, and returns those of all, once all have called the same.
    fn exchange(&self, call: Call, elements: CpuTensor) -> Result<Arc<Vec<CpuTensor>>> {
        let until = Instant::now() + self.deadline;
        let mut state = self.meeting.lock();
        // The results of the call before may not have been taken by all.
        while state.lost.is_none() && state.complete.is_some() {
            state = self.sleep(state, until, call.operation)?;
        }
        if state.lost.is_none() {
            state.brought[self.rank] = Some((call, elements));
            if state.brought.iter().all(Option::is_some) {
                state.complete();
                self.meeting.changed.notify_all();
            }
        }
        loop {
            if let Some((failed, reason)) = &state.lost {
                return Err(self.error(call.operation, failed, reason));
            }
            if let Some((all, left)) = &mut state.complete {
                left[self.rank] = false;
                let (all, is_last) = (all.clone(), !left.contains(&true));
                if is_last {
                    state.complete = None;
                    self.meeting.changed.notify_all();
                }
                return Ok(all);
            }
            state = self.sleep(state, until, call.operation)?;
        }
    }

    /// Sleeps until something changes. At the deadline, and where a rank is gone that has yet to come, all is lost.
    fn sleep<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        until: Instant,
        operation: &'static str,
    ) -> Result<MutexGuard<'a, State>> {
        let gone = state.missing(|state, rank| !state.alive[rank]);
        let left = until.saturating_duration_since(Instant::now());
        if gone.is_empty() && !left.is_zero() {
            let slept = self.meeting.changed.wait_timeout(state, left);
            return Ok(slept.unwrap_or_else(PoisonError::into_inner).0);
        }
        let (failed, reason) = match gone.is_empty() {
            false => {
                let reason = format!("ranks {gone:?} are gone");
                (gone, reason)
            }
            true => {
                let late = state.missing(|_, _| true);
                let reason = format!("ranks {late:?} did not call within {:?}", self.deadline);
                (late, reason)
            }
        };
        let error = self.error(operation, &failed, &reason);
        state.lost = Some((failed, reason));
        self.meeting.changed.notify_all();
        Err(error)
    }
}

impl Meeting {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The ranks that the present call waits for, of those that a condition names.
    fn missing(&self, of: impl Fn(&Self, usize) -> bool) -> Vec<usize> {
        let waits_for = |rank: &usize| match &self.complete {
            Some((_, left)) => left[*rank],
            None => self.brought[*rank].is_none(),
        };
        (0..self.alive.len()).filter(waits_for).filter(|&rank| of(self, rank)).collect()
    }

    /// Ends a call that all ranks came to.
    fn complete(&mut self) {
        let brought: Vec<(Call, CpuTensor)> = self.brought.iter_mut().filter_map(Option::take).collect();
        let differ = |rank: &usize| brought[*rank].0 != brought[0].0;
        let different: Vec<usize> = (0..brought.len()).filter(differ).collect();
        if let Some(&first) = different.first() {
            let reason = format!("rank 0 calls {:?}, rank {first} {:?}", brought[0].0, brought[first].0);
            self.lost = Some((different, reason));
            return;
        }
        let elements = brought.into_iter().map(|(_, elements)| elements).collect();
        self.complete = Some((Arc::new(elements), vec![true; self.alive.len()]));
    }
}

impl Drop for ThreadTransport {
    fn drop(&mut self) {
        self.meeting.lock().alive[self.rank] = false;
        self.meeting.changed.notify_all();
    }
}

impl Transport for ThreadTransport {
    type Backend = Cpu;

    fn backend(&self) -> &Cpu {
        &self.backend
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.meeting.ranks
    }

    fn all_gather(&mut self, part: &CpuTensor, elements: usize, all: &mut CpuTensor) -> Result<()> {
        self.check("the part of a rank", part, elements)?;
        self.check("the parts of all ranks", all, elements.saturating_mul(self.ranks()))?;
        let of = part.elements().element_type();
        if all.elements().element_type() != of {
            let reason = format!("{:?}, and the parts are {of:?}", all.elements().element_type());
            return Err(Error::Buffer { what: "the parts of all ranks", reason });
        }
        if elements == 0 {
            return Ok(());
        }
        let call = Call { operation: "all-gather", elements, of, root: 0, reduction: None };
        let parts = self.exchange(call, first(part, elements))?;
        parts.iter().enumerate().for_each(|(rank, part)| put(all, rank * elements, part));
        Ok(())
    }

    fn broadcast(&mut self, tensor: &mut CpuTensor, elements: usize, root: usize) -> Result<()> {
        self.check("a tensor to broadcast", tensor, elements)?;
        if root >= self.ranks() {
            let reason = format!("from rank {root} of {}", self.ranks());
            return Err(Error::Plan { what: "broadcast", reason });
        }
        if elements == 0 {
            return Ok(());
        }
        let of = tensor.elements().element_type();
        let call = Call { operation: "broadcast", elements, of, root, reduction: None };
        let brought = if root == self.rank { first(tensor, elements) } else { first(tensor, 0) };
        put(tensor, 0, &self.exchange(call, brought)?[root]);
        Ok(())
    }

    fn all_reduce(&mut self, tensor: &mut CpuTensor, elements: usize, reduction: Reduction) -> Result<()> {
        self.check("a tensor to reduce", tensor, elements)?;
        let of = tensor.elements().element_type();
        let ElementsMut::F32(reduced) = tensor.elements_mut() else {
            return Err(Error::Buffer { what: "a tensor to reduce", reason: format!("is {of:?}, not f32") });
        };
        if elements == 0 {
            return Ok(());
        }
        let call = Call { operation: "all-reduce", elements, of, root: 0, reduction: Some(reduction) };
        let parts = self.exchange(call, CpuTensor::F32(reduced[..elements].to_vec()))?;
        for (i, x) in reduced[..elements].iter_mut().enumerate() {
            // In the order of the ranks, so that all get the same bits.
            let of_ranks = parts.iter().filter_map(|part| if let CpuTensor::F32(x) = part { Some(x[i]) } else { None });
            *x = match reduction {
                Reduction::Sum => of_ranks.sum(),
                Reduction::Max => of_ranks.fold(f32::NEG_INFINITY, larger),
            };
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        match &self.meeting.lock().lost {
            None => Ok(()),
            Some((failed, reason)) => Err(self.error("wait", failed, reason)),
        }
    }
}

impl ThreadTransport {
    fn check(&self, what: &'static str, tensor: &CpuTensor, expected: usize) -> Result<()> {
        let given = self.backend.elements(tensor);
        if given >= expected {
            return Ok(());
        }
        Err(Error::Elements { what, given, expected, shape: format!("an exchange between {} ranks", self.ranks()) })
    }
}

/// The first elements of a tensor.
fn first(tensor: &CpuTensor, elements: usize) -> CpuTensor {
    CpuTensor::new(match tensor.elements() {
        Elements::F32(x) => Elements::F32(&x[..elements]),
        Elements::F16(x) => Elements::F16(&x[..elements]),
        Elements::Bf16(x) => Elements::Bf16(&x[..elements]),
    })
}

/// Writes elements of the same type from a place on.
fn put(to: &mut CpuTensor, at: usize, from: &CpuTensor) {
    match (to.elements_mut(), from.elements()) {
        (ElementsMut::F32(to), Elements::F32(from)) => to[at..at + from.len()].copy_from_slice(from),
        (ElementsMut::F16(to), Elements::F16(from)) => to[at..at + from.len()].copy_from_slice(from),
        (ElementsMut::Bf16(to), Elements::Bf16(from)) => to[at..at + from.len()].copy_from_slice(from),
        _ => {} // the calls of all ranks have the same type
    }
}

/// The larger of two numbers; NaN if one is NaN.
fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}
