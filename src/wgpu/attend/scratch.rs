//! The scratch memory of a decode step and how a step divides it.

use super::state_buffers::STATE_BUFFERS;
use crate::Result;
use crate::wgpu::device::{Capabilities, buffers};

/// Bytes of scratch that a step needs. The buffers are separate because a kernel reads some while it writes
/// others. All need [`wgpu::BufferUsages::STORAGE`], `tables` also [`wgpu::BufferUsages::COPY_DST`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ScratchBytes {
    /// Work items, page tables and spans.
    pub tables: u64,
    /// Prepared queries.
    pub queries: u64,
    /// Scores and their extremes; only calibrated segments need them.
    pub scores: u64,
    /// Attention states, by buffer. Only steps of several launches need more than the first.
    pub states: [u64; STATE_BUFFERS],
    /// Counters of workgroups; only steps whose states are merged without a launch of its own need them.
    pub arrived: u64,
}

impl ScratchBytes {
    /// The larger of both: those of scratch that serves either.
    pub(in crate::wgpu) fn or(self, other: Self) -> Self {
        Self {
            tables: self.tables.max(other.tables),
            queries: self.queries.max(other.queries),
            scores: self.scores.max(other.scores),
            states: std::array::from_fn(|at| self.states[at].max(other.states[at])),
            arrived: self.arrived.max(other.arrived),
        }
    }
}

/// The scratch of one step, owned by the caller. It may be used again as soon as the step's commands are submitted.
#[derive(Clone, Debug)]
pub struct Scratch {
    /// At least [`ScratchBytes::tables`].
    pub tables: wgpu::Buffer,
    /// At least [`ScratchBytes::queries`].
    pub queries: wgpu::Buffer,
    /// At least [`ScratchBytes::scores`].
    pub scores: wgpu::Buffer,
    /// At least [`ScratchBytes::states`] each.
    pub states: [wgpu::Buffer; STATE_BUFFERS],
    /// At least [`ScratchBytes::arrived`]. It must be zeroed before the first step, as new buffers are, and must not be
    /// used for anything else. Every step leaves zeros.
    pub arrived: wgpu::Buffer,
}

impl Scratch {
    /// Scratch of at least `bytes`, for a caller without scratch of its own.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::DeviceLost`](crate::Error::DeviceLost).
    pub async fn new(device: &wgpu::Device, bytes: ScratchBytes) -> Result<Self> {
        let create = |(what, bytes, usage)| buffers::create(device, what, bytes, usage);
        let [tables, queries, scores, arrived, a, b, c, d] = Self::buffers(bytes);
        Ok(Self {
            tables: create(tables).await?,
            queries: create(queries).await?,
            scores: create(scores).await?,
            states: [create(a).await?, create(b).await?, create(c).await?, create(d).await?],
            arrived: create(arrived).await?,
        })
    }

    /// [`Scratch::new`] for a caller that cannot wait. In a browser, the next call that waits returns the error.
    pub(in crate::wgpu) fn new_now(device: &wgpu::Device, bytes: ScratchBytes) -> Result<Self> {
        let create = |(what, bytes, usage)| buffers::create_now(device, what, bytes, usage);
        let [tables, queries, scores, arrived, a, b, c, d] = Self::buffers(bytes).map(create);
        let states = [a?, b?, c?, d?];
        Ok(Self { tables: tables?, queries: queries?, scores: scores?, states, arrived: arrived? })
    }

    /// Name, bytes and usage of every buffer, in the order of the fields, those of states at the end.
    fn buffers(bytes: ScratchBytes) -> [(&'static str, u64, wgpu::BufferUsages); 4 + STATE_BUFFERS] {
        let storage = wgpu::BufferUsages::STORAGE;
        let [a, b, c, d] = bytes.states.map(|bytes| ("attention states", bytes, storage));
        [
            ("tables of a decode step", bytes.tables, storage | wgpu::BufferUsages::COPY_DST),
            ("prepared queries", bytes.queries, storage),
            ("scores", bytes.scores, storage),
            ("counters of workgroups", bytes.arrived, storage),
            a,
            b,
            c,
            d,
        ]
        // A binding must not be empty, so a buffer that the step does not use still has a word.
        .map(|(what, bytes, usage)| (what, bytes.next_multiple_of(4).max(4), usage))
    }

    /// Its bytes.
    pub(in crate::wgpu) fn bytes(&self) -> ScratchBytes {
        ScratchBytes {
            tables: self.tables.size(),
            queries: self.queries.size(),
            scores: self.scores.size(),
            states: self.states.each_ref().map(wgpu::Buffer::size),
            arrived: self.arrived.size(),
        }
    }

    /// True if a step that needs `bytes` may use this scratch.
    pub fn holds(&self, bytes: ScratchBytes) -> bool {
        self.tables.size() >= bytes.tables
            && self.queries.size() >= bytes.queries
            && self.scores.size() >= bytes.scores
            && self.states.iter().zip(bytes.states).all(|(states, bytes)| states.size() >= bytes)
            && self.arrived.size() >= bytes.arrived
    }
}

/// A range of bytes of a scratch buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScratchSection {
    pub offset: u64,
    pub bytes: u64,
}

/// How sections are sized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::wgpu) enum Sizing {
    /// As large as the step needs.
    Exact,
    /// Up to a quarter larger, in classes that many lengths of sequences share, for a step of this number of parts.
    Classes {
        /// Parts, at least 1.
        parts: usize,
    },
}

/// The smallest distance between classes, in bytes.
const LEAST_CLASS: u64 = 1 << 12;
/// The same for tables of which every part of a step has its own, and there are many.
const LEAST_CLASS_OF_PARTS: u64 = 1 << 8;

impl Sizing {
    /// Bytes of a section that needs `needed` bytes, of memory that all parts of a step share.
    pub(in crate::wgpu) fn bytes(self, needed: u64) -> u64 {
        match self {
            Self::Exact => needed,
            Self::Classes { .. } => class(needed, LEAST_CLASS),
        }
    }

    /// The same for a table: a step of more parts has smaller classes of them, since it has more tables.
    pub(in crate::wgpu) fn table_bytes(self, needed: u64) -> u64 {
        match self {
            Self::Exact => needed,
            Self::Classes { parts } => {
                let least = LEAST_CLASS / parts.next_power_of_two() as u64;
                class(needed, least.max(LEAST_CLASS_OF_PARTS))
            }
        }
    }
}

/// The class of a number of bytes, where classes are `least` or an eighth to a quarter apart.
fn class(needed: u64, least: u64) -> u64 {
    needed.next_multiple_of((needed.next_power_of_two() / 8).max(least))
}

/// The offsets of the sections in the scratch buffers.
pub(super) struct Layout {
    alignment: u64,
    pub room: Sizing,
    pub tables: Vec<u8>,
    pub scratch: ScratchBytes,
}

impl Layout {
    /// Without sections. Those of tables are expected to take `tables` bytes: of a long prompt they are large, and moving
    /// them while they grow would take longer than filling them.
    pub fn new(capabilities: &Capabilities, room: Sizing, tables: usize) -> Self {
        let alignment = capabilities.limits.binding_alignment;
        Self { alignment, room, tables: Vec::with_capacity(tables), scratch: ScratchBytes::default() }
    }

    pub fn table<T: bytemuck::NoUninit>(&mut self, rows: &[T]) -> ScratchSection {
        self.tables.resize(self.tables.len().next_multiple_of(self.alignment as usize), 0);
        let offset = self.tables.len() as u64;
        let rows = bytemuck::cast_slice::<T, u8>(rows);
        self.tables.extend_from_slice(rows);
        self.scratch.tables = offset + self.room.table_bytes(rows.len() as u64);
        self.tables.resize(self.scratch.tables as usize, 0);
        ScratchSection { offset, bytes: self.scratch.tables - offset }
    }

    fn section(&self, end: &mut u64, bytes: u64) -> ScratchSection {
        let (offset, bytes) = (end.next_multiple_of(self.alignment), self.room.bytes(bytes));
        *end = offset + bytes;
        ScratchSection { offset, bytes }
    }

    pub fn queries(&mut self, bytes: u64) -> ScratchSection {
        let mut end = self.scratch.queries;
        let section = self.section(&mut end, bytes);
        self.scratch.queries = end;
        section
    }

    pub fn scores(&mut self, bytes: u64) -> ScratchSection {
        let mut end = self.scratch.scores;
        let section = self.section(&mut end, bytes);
        self.scratch.scores = end;
        section
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// There are few classes, none is much too large, and 0 stays 0.
    #[test]
    fn classes_hold_what_is_needed() {
        assert_eq!(Sizing::Classes { parts: 1 }.bytes(0), 0);
        assert_eq!(Sizing::Classes { parts: 32 }.table_bytes(0), 0);
        for (parts, least, most) in [(1, LEAST_CLASS, 40), (3, LEAST_CLASS / 4, 50), (32, LEAST_CLASS_OF_PARTS, 60)] {
            let mut classes = std::collections::BTreeSet::new();
            let room = Sizing::Classes { parts };
            for needed in (1..4u64 << 20).step_by(997) {
                let bytes = room.table_bytes(needed);
                assert!(bytes >= needed && bytes <= needed + (needed / 4).max(least), "{needed}: {bytes}");
                assert!(parts > 1 || room.bytes(needed) == bytes);
                classes.insert(bytes);
            }
            assert!(classes.len() < most, "{parts} parts: {classes:?}");
        }
        assert_eq!([Sizing::Exact.bytes(5), Sizing::Exact.table_bytes(5)], [5, 5]);
    }
}
