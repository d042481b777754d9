//! The buffers of a step of attention, by role, and what is bound to the roles.

use super::scratch::{Scratch, ScratchSection};
use crate::format::{AttentionShape, KeyOrValue};
use crate::plan::{Dispatch, QueryLayout, Work};
use crate::wgpu::device::StoreBuffer;
use crate::wgpu::device::{Store, Tensor, Variant};
use crate::{Error, Result};

/// The tensors of a step. See [`AttendStep::with_query_layout`](super::AttendStep::with_query_layout) for other rows;
/// log-sum-exps are for plans of [`AttendStep::states`](super::AttendStep::states).
pub type AttendTensors<'a> = crate::backend::AttendTensors<'a, Tensor>;

/// One dispatch and the buffers that it binds.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PlannedLaunch {
    pub variant: Variant,
    pub grid: Grid,
    pub buffers: Buffers,
}

/// The workgroups of a launch: what is counted in the work of a step, and as many for each as the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grid {
    /// The items of a dispatch of a segment.
    Items { segment: usize, dispatch: usize, each: u32 },
    /// The queries that are prepared for a segment.
    Prepared { segment: usize, each: u32 },
    /// The rows of queries.
    Rows { each: u32 },
}

impl Grid {
    /// In a step whose work has the segments and dispatches that it names.
    pub fn workgroups(self, work: &Work) -> [u32; 3] {
        let of = |segment: usize| &work.segments()[segment];
        match self {
            Self::Items { segment, dispatch, each } => {
                let Dispatch { items, workgroups, .. } = of(segment).dispatches()[dispatch];
                match workgroups {
                    None => [each, items as u32, 1],
                    // What reads the same tokens starts together.
                    Some(of_item) => [each, of_item as u32, items as u32],
                }
            }
            Self::Prepared { segment, each } => [of(segment).queries().len() as u32, each, 1],
            Self::Rows { each } => [work.rows().len() as u32, each, 1],
        }
    }
}

/// A buffer of a launch, by role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    Tables(ScratchSection),
    Queries(ScratchSection),
    Scores(ScratchSection),
    /// The states of a step in one of their buffers.
    States {
        buffer: usize,
        section: ScratchSection,
    },
    Arrived(ScratchSection),
    Shard {
        store: usize,
        shard: u32,
        part: StoreBuffer,
    },
    SpanRanges {
        store: usize,
        which: KeyOrValue,
    },
    Input,
    Output,
    Lse,
}

/// The buffers of a launch, by their names in the shader.
pub(super) type Buffers = Vec<(&'static str, Slot)>;

/// The constants that tell a launch that rows are not contiguous.
pub(super) struct Strided {
    tensor: Slot,
    slot: &'static str,
    file: &'static str,
    /// The offset of the first row, the length of a row, and the distance between rows.
    constants: [&'static str; 3],
}

pub(super) const STRIDED_QUERIES: Strided = Strided {
    tensor: Slot::Input,
    slot: "input_rows",
    file: "attend/input_rows.wgsl#strided",
    constants: ["INPUT_FIRST", "INPUT_ROW", "INPUT_STRIDE"],
};

pub(super) const STRIDED_OUTPUTS: Strided = Strided {
    tensor: Slot::Output,
    slot: "output_rows",
    file: "attend/output_rows.wgsl#strided",
    constants: ["OUTPUT_FIRST", "OUTPUT_ROW", "OUTPUT_STRIDE"],
};

impl PlannedLaunch {
    /// The same launch. If it binds the tensor, the tensor's rows have the layout `rows`.
    pub fn with_rows(&self, strided: &Strided, rows: QueryLayout, shape: &AttentionShape) -> Self {
        if self.buffers.iter().all(|(_, bound)| *bound != strided.tensor) {
            return self.clone();
        }
        let sizes = [rows.first, QueryLayout::dense(shape).stride, rows.stride].map(|elements| elements / 4);
        let variant = self.variant.clone().import(strided.slot, strided.file);
        let set = |variant: Variant, (name, size)| variant.constant(name, size);
        Self { variant: strided.constants.into_iter().zip(sizes).fold(variant, set), ..self.clone() }
    }
}

/// The buffers behind the roles.
pub(super) struct BoundBuffers<'a> {
    pub stores: &'a [&'a Store],
    pub scratch: &'a Scratch,
    /// Where the tables of the step begin in theirs, in bytes.
    pub tables_at: u64,
    pub tensors: AttendTensors<'a>,
}

impl BoundBuffers<'_> {
    pub fn binding(&self, slot: Slot) -> Result<wgpu::BufferBinding<'_>> {
        let section = |buffer, section: ScratchSection| {
            Ok(wgpu::BufferBinding { buffer, offset: section.offset, size: std::num::NonZeroU64::new(section.bytes) })
        };
        match slot {
            Slot::Tables(at) => {
                section(&self.scratch.tables, ScratchSection { offset: self.tables_at + at.offset, ..at })
            }
            Slot::Queries(at) => section(&self.scratch.queries, at),
            Slot::Scores(at) => section(&self.scratch.scores, at),
            Slot::States { buffer, section: at } => section(&self.scratch.states[buffer], at),
            Slot::Arrived(at) => section(&self.scratch.arrived, at),
            Slot::Shard { store, shard, part } => self.stores[store].shard_binding(shard, part),
            Slot::SpanRanges { store, which } => self.stores[store].span_ranges_binding(which),
            Slot::Input => Ok(self.tensors.queries.binding()),
            Slot::Output => Ok(self.tensors.output.binding()),
            Slot::Lse => self
                .tensors
                .lse
                .map(|lse| lse.binding())
                .ok_or_else(|| Error::Buffer { what: "log-sum-exps", reason: "is missing".into() }),
        }
    }
}
