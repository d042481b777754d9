//! The memory that a step of attention needs in addition to stores and tensors: scratch, and the tables of its
//! segments.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaStream;

use crate::Result;
use crate::cuda::device::memory::Memory;

/// Capacity for counts that grow from step to step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Sizing {
    /// The exact need of one step.
    Exact,
    /// Classes up to an eighth apart, exact below 16: bindings and captured graphs serve all steps of a class. Blocks
    /// without work cost little among that many, but would cost a lot in short waves.
    Classes,
}

impl Sizing {
    /// The capacity for `needed`.
    pub(in crate::cuda) const fn of(self, needed: usize) -> usize {
        match self {
            Self::Exact => needed,
            Self::Classes => {
                let step = needed.next_power_of_two() / 16;
                needed.next_multiple_of(if step == 0 { 1 } else { step })
            }
        }
    }
}

/// Bytes of a step's scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct ScratchSizes {
    pub states: usize,
    pub lse: usize,
    pub arrivals: usize,
    /// Unpacked tiles of a section of the KV heads.
    pub halves: usize,
}

impl ScratchSizes {
    /// Room for both.
    fn and(self, other: Option<Self>) -> Self {
        other.map_or(self, |other| Self {
            states: self.states.max(other.states),
            lse: self.lse.max(other.lse),
            arrivals: self.arrivals.max(other.arrivals),
            halves: self.halves.max(other.halves),
        })
    }
}

/// Scratch of a step. Steps that run in the order of a stream may share it.
#[derive(Clone, Debug)]
pub(in crate::cuda) struct AttendScratch {
    pub states: Arc<Memory>,
    pub lse: Arc<Memory>,
    /// Zeros between steps.
    pub arrivals: Arc<Memory>,
    pub halves: Arc<Memory>,
}

impl AttendScratch {
    pub fn new(stream: &Arc<CudaStream>, sizes: &ScratchSizes) -> Result<Self> {
        Ok(Self {
            states: Memory::unwritten(stream, "attention states", sizes.states)?,
            lse: Memory::unwritten(stream, "attention states", sizes.lse)?,
            arrivals: Memory::zeroed(stream, "arrivals", sizes.arrivals)?,
            halves: Memory::unwritten(stream, "unpacked tiles", sizes.halves)?,
        })
    }

    fn sizes(&self) -> ScratchSizes {
        let bytes = |memory: &Arc<Memory>| memory.bytes();
        ScratchSizes {
            states: bytes(&self.states),
            lse: bytes(&self.lse),
            arrivals: bytes(&self.arrivals),
            halves: bytes(&self.halves),
        }
    }

    /// True if a step of these sizes may use it.
    pub fn holds(&self, sizes: &ScratchSizes) -> bool {
        let has = self.sizes();
        has.states >= sizes.states
            && has.lse >= sizes.lse
            && has.arrivals >= sizes.arrivals
            && has.halves >= sizes.halves
    }

    pub fn memory(&self) -> Vec<Arc<Memory>> {
        vec![self.states.clone(), self.lse.clone(), self.arrivals.clone(), self.halves.clone()]
    }
}

/// Scratch that the calls of a backend share, which run in the order of its stream. It grows when a call needs more:
/// allocations of many megabytes take longer than many a call, since the driver gives memory back whenever something
/// waits for the stream.
#[derive(Debug, Default)]
pub(in crate::cuda) struct SharedScratch(Mutex<Option<AttendScratch>>);

impl SharedScratch {
    /// Scratch of at least these sizes.
    pub fn of_sizes(&self, stream: &Arc<CudaStream>, sizes: &ScratchSizes) -> Result<AttendScratch> {
        let mut kept = self.lock();
        match kept.as_ref().filter(|scratch| scratch.holds(sizes)) {
            Some(scratch) => Ok(scratch.clone()),
            None => {
                let before = kept.as_ref().map(AttendScratch::sizes);
                Ok(kept.insert(AttendScratch::new(stream, &sizes.and(before))?).clone())
            }
        }
    }

    /// Held while the launches of a step are queued: those of another call must not come between them.
    pub fn lock(&self) -> MutexGuard<'_, Option<AttendScratch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The addresses of the tables of a segment for one layer.
#[derive(Clone, Debug)]
pub(in crate::cuda) struct SegmentTables {
    /// Address of the page addresses, their number, and the address of the items.
    pub pages: u64,
    pub page_count: usize,
    pub items: u64,
    /// Items that are launched.
    pub item_count: usize,
    pub extremes: Option<Arc<Memory>>,
    /// Memory that must stay alive.
    pub memory: Vec<Arc<Memory>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_close_and_few() {
        assert!((0..=16).all(|needed| Sizing::Classes.of(needed) == needed));
        let mut classes = std::collections::BTreeSet::new();
        for needed in 1..20_000 {
            let room = Sizing::Classes.of(needed);
            assert!(room >= needed && room <= needed + needed / 8, "{needed}: {room}");
            classes.insert(room);
        }
        assert!(classes.len() < 120, "{}", classes.len());
    }
}
