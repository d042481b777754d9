//! A step of attention: plan, bind, encode.
//!
//! [`AttendStep::new`] is pure: it cuts an [`AttendPlan`] into work items, chooses the kernel variants, lays out the
//! tables in bytes and sizes the scratch. [`AttendStep::bind`] looks up the kernels and creates the bind groups.
//! [`Launches::encode`] only records dispatches into the caller's compute pass. It does not submit, wait, map or
//! allocate.
//!
//! The launches of a step, in order: `prepare_query` for every segment that is calibrated, has rotated keys, or has
//! items of `attend_run` that do not read queries as they were given (for others every workgroup of `attend` prepares
//! the query itself); `scores` for every shard of a calibrated segment; `attend` for every shard (or `weighted_values`
//! if calibrated, or `attend_run` for many queries together); and one `merge_states`, unless the last workgroup of
//! `attend` merges, or `attend_run` writes all outputs. A launch waits for those before it, which costs more than the
//! work of small ones. In a call that submits its own commands the launches of `attend` do not wait: each writes its
//! states to a buffer of its own (`state_buffers.rs`).

use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use std::sync::Arc;

use super::attend_buffers::{AttendTensors, BoundBuffers, STRIDED_OUTPUTS, STRIDED_QUERIES, Slot, Strided};
use super::attend_launches::{Builder, with_rows};
use super::block_queries::block_queries;
use super::decided_launches::DecidedLaunches;
use super::recipe::LseOutput;
use super::scratch::{Layout, Scratch, ScratchBytes, Sizing};
use super::shorter_items::split_of;
use crate::backend::AttendOptions;
use crate::format::AttentionShape;
use crate::plan::{AttendPlan, ElementType, GrowingWork, QueryLayout, StoreWork, Work};
use crate::wgpu::device::capabilities::Path;
use crate::wgpu::device::guard;
use crate::wgpu::device::{Capabilities, Kernels, Launches, Store, Tensor, Variant};
use crate::{Error, Result};

/// A step of attention for one device, fully decided.
#[derive(Clone, Debug)]
pub struct AttendStep {
    work: Work,
    /// What the work was cut from. None in a step that cannot grow.
    growing: Option<GrowingWork>,
    decided: Arc<DecidedLaunches>,
    /// Workgroups of the launches.
    grids: Vec<[u32; 3]>,
    tables: Vec<u8>,
    scratch: ScratchBytes,
}

/// What a step depends on besides its plan and its device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::wgpu) struct StepOptions {
    /// Type of the queries.
    pub input: ElementType,
    pub attend: AttendOptions,
    pub lse: LseOutput,
    pub room: Sizing,
    /// Layouts of queries and outputs that are not contiguous rows.
    pub rows: [Option<QueryLayout>; 2],
}

impl StepOptions {
    /// Those of a call that submits its own commands, over contiguous rows.
    pub const fn of_call(input: ElementType, attend: AttendOptions, lse: LseOutput) -> Self {
        Self { input, attend, lse, room: Sizing::Exact, rows: [None; 2] }
    }
}

/// How many rows tensors have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rows {
    /// Those of the plan.
    Exact,
    /// At least those.
    Room,
}

impl Rows {
    fn check(
        self,
        layout: &QueryLayout,
        what: &'static str,
        elements: usize,
        rows: usize,
        of: &AttentionShape,
    ) -> Result<()> {
        match self {
            Self::Exact => layout.check(what, elements, rows, of),
            Self::Room => layout.check_room(what, elements, rows, of),
        }
    }
}

/// Bytes of all tables of a step, and some for what lies between them.
fn table_bytes(work: &Work) -> usize {
    let of_segment = |segment: &StoreWork| {
        size_of_val(segment.queries()) + size_of_val(segment.page_table()) + size_of_val(segment.items())
    };
    let bytes = work.segments().iter().map(of_segment).sum::<usize>() + size_of_val(work.rows());
    bytes + bytes / 4 + 4096
}

impl AttendStep {
    /// Decides the kernels of `plan` on a device with `capabilities`, for queries of `input` elements.
    ///
    /// # Errors
    /// [`Error::Limit`] when a table, the scratch or the number of work items exceeds what the device can bind or
    /// dispatch.
    pub fn new(
        capabilities: &Capabilities,
        plan: &AttendPlan,
        input: ElementType,
        options: AttendOptions,
    ) -> Result<Self> {
        let options = StepOptions::of_call(input, options, LseOutput::None);
        Self::with_options(capabilities, plan, options, std::iter::empty())
    }

    /// [`AttendStep::new`] for a step that returns attention states: the output and the log-sum-exp of every query and
    /// head.
    ///
    /// # Errors
    /// As [`AttendStep::new`].
    pub fn states(
        capabilities: &Capabilities,
        plan: &AttendPlan,
        input: ElementType,
        options: AttendOptions,
    ) -> Result<Self> {
        let options = StepOptions::of_call(input, options, LseOutput::F32);
        Self::with_options(capabilities, plan, options, std::iter::empty())
    }

    /// [`AttendStep::new`] with all options. It takes the launches of `kept` that were decided alike, if there are any.
    ///
    /// # Errors
    /// As [`AttendStep::new`].
    pub(in crate::wgpu) fn with_options<'a>(
        capabilities: &Capabilities,
        plan: &AttendPlan,
        options: StepOptions,
        kept: impl Iterator<Item = &'a Arc<DecidedLaunches>>,
    ) -> Result<Self> {
        let StepOptions { input, attend, lse, room, .. } = options;
        let split = split_of(plan, attend.split, room);
        let work = Work::in_blocks(plan, split, block_queries(capabilities, plan, attend))?;
        let layout = Layout::new(capabilities, room, table_bytes(&work));
        let mut builder = Builder { capabilities, work: &work, input, options: attend, lse, layout };
        builder.check_tiles()?;
        let decisions = builder.decide();
        let decided = DecidedLaunches::like(kept, &builder, options, decisions);
        let Layout { tables, scratch, .. } = builder.layout;
        let grids = decided.launches.iter().map(|launch| launch.grid.workgroups(&work)).collect();
        let step = Self {
            work,
            growing: (room != Sizing::Exact).then(|| GrowingWork::new(plan)),
            decided,
            grids,
            tables,
            scratch,
        };
        step.check_limits(capabilities)?;
        Ok(step)
    }

    /// Makes this the step of another plan, if that differs from its own by a few tokens of sequences that decode,
    /// within their pages. Otherwise returns false, and only its launches are of use any more. Takes next to no memory.
    pub(in crate::wgpu) fn grow(&mut self, plan: &AttendPlan, options: StepOptions) -> bool {
        let Self { growing, work, decided, tables, .. } = self;
        let grows = |growing: &mut GrowingWork| decided.options == options && growing.grow(work, plan);
        if !growing.as_mut().is_some_and(grows) {
            *growing = None; // it may no longer be what the work was cut from
            return false;
        }
        decided.decisions.write_items(work, tables);
        true
    }

    /// The same step for queries with this layout, instead of contiguous rows. Every stride, and every offset of the
    /// first row, is a separate kernel variant. Use the offset of the tensor for anything that changes from step to
    /// step.
    #[must_use]
    pub fn with_query_layout(self, rows: QueryLayout) -> Self {
        self.with_layout(0, &STRIDED_QUERIES, rows)
    }

    /// The same step for outputs with this layout; see [`AttendStep::with_query_layout`].
    #[must_use]
    pub fn with_output_layout(self, rows: QueryLayout) -> Self {
        self.with_layout(1, &STRIDED_OUTPUTS, rows)
    }

    /// The same step where a tensor, of which options have the layout at `index`, has this one.
    fn with_layout(mut self, index: usize, tensor: &Strided, rows: QueryLayout) -> Self {
        let decided = Arc::make_mut(&mut self.decided);
        decided.launches = with_rows(&decided.launches, tensor, rows, self.work.shape());
        decided.options.rows[index] = Some(rows);
        self
    }

    /// The layouts of queries and outputs.
    fn layouts(&self) -> [QueryLayout; 2] {
        self.decided.options.rows.map(|rows| rows.unwrap_or_else(|| QueryLayout::dense(self.work.shape())))
    }

    /// The work items of the step.
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// The path of its device: kernels take no higher one.
    pub fn path(&self) -> Path {
        self.decided.capabilities.path()
    }

    /// Sizes of the scratch that the step needs.
    pub fn scratch(&self) -> ScratchBytes {
        self.scratch
    }

    /// The tables. Write them to the start of [`Scratch::tables`] before the step runs.
    pub fn tables(&self) -> &[u8] {
        &self.tables
    }

    /// Its launches, and what they were decided from.
    pub(in crate::wgpu) const fn decided(&self) -> &Arc<DecidedLaunches> {
        &self.decided
    }

    /// The kernel variants of the step, for [`Kernels::prepare`].
    pub fn variants(&self) -> Vec<Variant> {
        self.decided.launches.iter().map(|launch| launch.variant.clone()).collect()
    }

    /// Labels of the launches, in order.
    pub fn launch_labels(&self) -> Vec<String> {
        self.decided.launches.iter().map(|launch| launch.variant.label()).collect()
    }

    /// Looks up the kernels (compiling those that [`Kernels::prepare`] has not) and creates the bind groups.
    ///
    /// # Errors
    /// [`Error::Elements`] or [`Error::Buffer`] when tensors or scratch do not fit the plan, [`Error::Plan`] when the
    /// stores do not match the plan, [`Error::DeviceLost`].
    pub fn bind(
        &self,
        kernels: &Kernels,
        stores: &[&Store],
        scratch: &Scratch,
        tensors: AttendTensors<'_>,
    ) -> Result<Launches> {
        self.check_tensors(kernels, tensors, Rows::Exact)?;
        self.check_stores(stores)?;
        self.bind_checked(kernels, stores, (scratch, 0), tensors)
    }

    /// [`AttendStep::bind`] for tensors with at least the rows of the plan, and stores that have all pages of its
    /// layout. Tables begin at a byte of those of the scratch. Every later plan for which [`AttendStep::is_bound_like`]
    /// holds may use the bindings.
    pub(in crate::wgpu) fn bind_with_room(
        &self,
        kernels: &Kernels,
        stores: &[&Store],
        scratch: (&Scratch, u64),
        tensors: AttendTensors<'_>,
    ) -> Result<Launches> {
        self.check_tensors(kernels, tensors, Rows::Room)?;
        self.bind_checked(kernels, stores, scratch, tensors)
    }

    /// Whether launches bound for another step serve this one with its own grids, because the kernels, the buffers and
    /// their parts are the same.
    pub(in crate::wgpu) fn is_bound_like(&self, other: &Self) -> bool {
        self.scratch == other.scratch
            && (Arc::ptr_eq(&self.decided, &other.decided) || self.decided.launches == other.decided.launches)
    }

    /// Checks that tensors have at least the rows of the plan.
    pub(in crate::wgpu) fn check_rows(&self, tensors: AttendTensors<'_>) -> Result<()> {
        let (shape, rows) = (self.work.shape(), self.work.rows().len());
        let [of_queries, of_output] = self.layouts();
        of_queries.check_room("queries", tensors.queries.elements(), rows, shape)?;
        of_output.check_room("output", tensors.output.elements(), rows, shape)?;
        tensors.lse.map_or(Ok(()), |lse| self.check_lse(lse, Rows::Room))
    }

    /// Workgroups of the launches, in order.
    pub(in crate::wgpu) fn grids(&self) -> impl Iterator<Item = [u32; 3]> + '_ {
        self.grids.iter().copied()
    }

    fn bind_checked(
        &self,
        kernels: &Kernels,
        stores: &[&Store],
        (scratch, tables_at): (&Scratch, u64),
        tensors: AttendTensors<'_>,
    ) -> Result<Launches> {
        self.check_scratch(scratch, tables_at)?;
        let buffers = BoundBuffers { stores, scratch, tables_at, tensors };
        let launches = self
            .decided
            .launches
            .iter()
            .zip(self.grids())
            .map(|(launch, grid)| {
                let bindings = launch
                    .buffers
                    .iter()
                    .map(|&(name, slot)| {
                        debug_assert_eq!(SHADERS.is_table(name), matches!(slot, Slot::Tables(_)), "{name}");
                        Ok((name, buffers.binding(slot)?))
                    })
                    .collect::<Result<Vec<_>>>()?;
                planned(kernels, &launch.variant, &bindings, grid)
            })
            .collect::<Result<_>>()?;
        // On a lost device wgpu creates unusable bind groups without an error.
        guard::check_alive(kernels.device())?;
        Ok(launches)
    }

    fn check_tensors(&self, kernels: &Kernels, tensors: AttendTensors<'_>, has: Rows) -> Result<()> {
        if tensors.queries.overlaps(tensors.output) {
            let reason = "it overlaps the queries, which are read while outputs are written";
            return Err(Error::Buffer { what: "output", reason: reason.into() });
        }
        for (with, other) in [("output", tensors.output), ("queries", tensors.queries)] {
            if tensors.lse.is_some_and(|lse| lse.overlaps(other)) {
                let reason = format!("overlap the {with}");
                return Err(Error::Buffer { what: "log-sum-exps", reason });
            }
        }
        let (shape, rows) = (self.work.shape(), self.work.rows().len());
        let lse_type = match self.decided.options.lse {
            LseOutput::None => None,
            LseOutput::F32 => Some(ElementType::F32),
        };
        if tensors.lse.is_some() != lse_type.is_some() {
            let reason = match tensors.lse {
                Some(_) => "was given, but the step was not planned with AttendStep::states",
                None => "is missing, but the step was planned with AttendStep::states",
            };
            return Err(Error::Buffer { what: "log-sum-exps", reason: reason.into() });
        }
        let [of_queries, of_output] = self.layouts();
        has.check(&of_queries, "queries", tensors.queries.elements(), rows, shape)?;
        has.check(&of_output, "output", tensors.output.elements(), rows, shape)?;
        tensors.lse.map_or(Ok(()), |lse| self.check_lse(lse, has))?;
        let given = [
            Some(("queries", tensors.queries, self.decided.options.input)),
            Some(("output", tensors.output, self.decided.options.attend.output)),
            tensors.lse.zip(lse_type).map(|(lse, element_type)| ("log-sum-exps", lse, element_type)),
        ];
        for (what, tensor, element_type) in given.into_iter().flatten() {
            if tensor.element_type() != element_type {
                return Err(Error::Buffer {
                    what,
                    reason: format!("is {:?}, but the step was planned for {element_type:?}", tensor.element_type()),
                });
            }
            tensor.check_aligned(what, &kernels.device().limits())?;
        }
        Ok(())
    }

    fn check_lse(&self, lse: &Tensor, has: Rows) -> Result<()> {
        let (rows, heads, given) = (self.work.rows().len(), self.work.shape().query_heads(), lse.elements());
        let expected = rows * heads;
        if given == expected || (has == Rows::Room && given > expected) {
            return Ok(());
        }
        let shape = format!("{rows} queries × {heads} query heads");
        Err(Error::Elements { what: "log-sum-exps", given, expected, shape })
    }

    fn check_scratch(&self, scratch: &Scratch, tables_at: u64) -> Result<()> {
        for (what, buffer, needed) in [
            ("scratch tables", &scratch.tables, tables_at.saturating_add(self.scratch.tables)),
            ("scratch queries", &scratch.queries, self.scratch.queries),
            ("scratch scores", &scratch.scores, self.scratch.scores),
            ("scratch counters", &scratch.arrived, self.scratch.arrived),
        ]
        .into_iter()
        .chain(scratch.states.iter().zip(self.scratch.states).map(|(buffer, bytes)| ("scratch states", buffer, bytes)))
        {
            if buffer.size() < needed {
                return Err(Error::Buffer {
                    what,
                    reason: format!("has {} bytes, but the step needs {needed}", buffer.size()),
                });
            }
        }
        Ok(())
    }

    fn check_stores(&self, stores: &[&Store]) -> Result<()> {
        for segment in self.work.segments() {
            let misfit = |reason: String| Error::Plan { what: "attend", reason };
            let index = segment.store();
            let store = stores
                .get(index)
                .ok_or_else(|| misfit(format!("the plan names store {index}; {} were given", stores.len())))?;
            if store.format() != segment.format() || store.shape() != self.work.shape() {
                return Err(misfit(format!("store {index} holds {}, not {}", store.format(), segment.format())));
            }
            for dispatch in segment.dispatches() {
                let pages = store.shard_pages(dispatch.shard);
                let of_items = segment.items_of(dispatch).iter().flat_map(|item| segment.pages_of(dispatch, item));
                if let Some(page) = of_items.map(|page| page.index).find(|&page| page >= pages) {
                    let shard = dispatch.shard;
                    return Err(misfit(format!(
                        "page {page} of shard {shard} of store {index}, which has {pages} pages"
                    )));
                }
            }
            let slots = segment.items().iter().map(|item| item.range_slot as usize + 1).max().unwrap_or(0);
            let ranged = segment.format().key.has_span_ranges() || segment.format().value.has_span_ranges();
            if ranged && slots > store.range_slots() {
                let (slot, has) = (slots - 1, store.range_slots());
                return Err(misfit(format!("range slot {slot} of store {index}, which has {has} slots")));
            }
        }
        Ok(())
    }

    fn check_limits(&self, capabilities: &Capabilities) -> Result<()> {
        let limit = |what: &str, needed: u64, allowed: u64, hint| match needed <= allowed {
            true => Ok(()),
            false => Err(Error::Limit { what: what.into(), needed, allowed, hint }),
        };
        let bytes = [
            ("tables of a step", self.scratch.tables),
            ("prepared queries", self.scratch.queries),
            ("scores of a calibrated segment", self.scratch.scores),
            ("attention states", self.scratch.states[0]),
            ("counters of workgroups", self.scratch.arrived),
        ];
        for (what, needed) in bytes {
            limit(what, needed, capabilities.limits.binding_bytes, "attend to fewer sequences per step")?;
        }
        let workgroups = self.grids.iter().flatten().copied().max().unwrap_or(0);
        limit(
            "a dispatch",
            u64::from(workgroups),
            u64::from(capabilities.limits.workgroups),
            "use a larger Split::max_tiles, or attend to fewer sequences per step",
        )
    }
}
