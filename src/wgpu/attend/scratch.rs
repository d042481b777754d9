//! The scratch memory of a decode step and how a step divides it.

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
    /// Attention states.
    pub states: u64,
    /// Counters of workgroups; only steps whose states are merged without a launch of its own need them.
    pub arrived: u64,
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
    /// At least [`ScratchBytes::states`].
    pub states: wgpu::Buffer,
    /// At least [`ScratchBytes::arrived`], zeroed before the first step, as new buffers are, and for nothing else. Every
    /// step leaves zeros.
    pub arrived: wgpu::Buffer,
}

impl Scratch {
    /// Scratch of at least `bytes`, for a caller that keeps none of its own.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::DeviceLost`](crate::Error::DeviceLost).
    pub async fn new(device: &wgpu::Device, bytes: ScratchBytes) -> Result<Self> {
        let storage = wgpu::BufferUsages::STORAGE;
        // A binding of no bytes is not allowed, so a buffer that the step does not use still has a word.
        let create = |what, bytes: u64, usage| buffers::create(device, what, bytes.next_multiple_of(4).max(4), usage);
        Ok(Self {
            tables: create("tables of a decode step", bytes.tables, storage | wgpu::BufferUsages::COPY_DST).await?,
            queries: create("prepared queries", bytes.queries, storage).await?,
            scores: create("scores", bytes.scores, storage).await?,
            states: create("attention states", bytes.states, storage).await?,
            arrived: create("counters of workgroups", bytes.arrived, storage).await?,
        })
    }

    /// True if a step that needs `bytes` may use this scratch.
    pub fn holds(&self, bytes: ScratchBytes) -> bool {
        self.tables.size() >= bytes.tables
            && self.queries.size() >= bytes.queries
            && self.scores.size() >= bytes.scores
            && self.states.size() >= bytes.states
            && self.arrived.size() >= bytes.arrived
    }
}

/// A run of bytes of a scratch buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Section {
    pub offset: u64,
    pub bytes: u64,
}

/// Where sections of the scratch buffers begin.
pub(super) struct Layout {
    alignment: u64,
    pub tables: Vec<u8>,
    pub scratch: ScratchBytes,
}

impl Layout {
    pub fn new(capabilities: &Capabilities) -> Self {
        Self { alignment: capabilities.limits.binding_alignment, tables: Vec::new(), scratch: ScratchBytes::default() }
    }

    pub fn table<T: bytemuck::NoUninit>(&mut self, rows: &[T]) -> Section {
        self.tables.resize(self.tables.len().next_multiple_of(self.alignment as usize), 0);
        let offset = self.tables.len() as u64;
        self.tables.extend_from_slice(bytemuck::cast_slice(rows));
        self.scratch.tables = self.tables.len() as u64;
        Section { offset, bytes: self.scratch.tables - offset }
    }

    fn section(&self, end: &mut u64, bytes: u64) -> Section {
        let offset = end.next_multiple_of(self.alignment);
        *end = offset + bytes;
        Section { offset, bytes }
    }

    pub fn queries(&mut self, bytes: u64) -> Section {
        let mut end = self.scratch.queries;
        let section = self.section(&mut end, bytes);
        self.scratch.queries = end;
        section
    }

    pub fn scores(&mut self, bytes: u64) -> Section {
        let mut end = self.scratch.scores;
        let section = self.section(&mut end, bytes);
        self.scratch.scores = end;
        section
    }
}
