//! A step of attention: plan, bind, encode.
//!
//! [`StepPlan::new`] is pure: it cuts an [`AttendPlan`] into work items, picks the kernel variants, lays the tables out in
//! bytes and says how much scratch the step needs. [`StepPlan::bind`] looks the kernels up and makes the bind groups.
//! [`Launches::encode`] only records dispatches into the caller's compute pass: nothing is submitted, waited for,
//! mapped or allocated.
//!
//! The launches of a step, in order: `prepare_query` for every segment that is calibrated or has rotated keys (for
//! others every workgroup of `attend` prepares the query itself); `scores` for every shard of a calibrated segment;
//! `attend` (or `weighted_values` where calibrated) for every shard; `merge_states` once, unless the last workgroup of
//! `attend` merges. Each waits for the one before, which costs more than what small ones do.

use super::attend::Fused;
use super::merge_states::{LseOutput, merge_states, state_row_bytes};
use super::prepare_query::Extremes;
use super::scratch::{Layout, Scratch, ScratchBytes, Section};
use super::specialisation::{MAX_TILES, Specialisation};
use crate::backend::AttendOptions;
use crate::format::{AttentionShape, KeyOrValue, TILE_TOKENS};
use crate::plan::{AttendPlan, Dispatch, ElementType, QueryRows, Segment, SegmentWork, Work};
use crate::wgpu::device::capabilities::MOST_STORAGE_BUFFERS;
use crate::wgpu::device::guard;
use crate::wgpu::device::store::StorePart;
use crate::wgpu::device::{Capabilities, Kernels, Launch, Launches, Store, Tensor, Variant};
use crate::{Error, Result};

/// A step of attention of one device, fully decided.
#[derive(Clone, Debug)]
pub struct StepPlan {
    work: Work,
    input: ElementType,
    output: ElementType,
    query_rows: QueryRows,
    output_rows: QueryRows,
    lse: LseOutput,
    launches: Vec<PlannedLaunch>,
    tables: Vec<u8>,
    scratch: ScratchBytes,
}

/// The tensors of a step: queries and output, both `[rows, query_heads, head_dim]`, one row after the other unless the step
/// was planned for other [rows](StepPlan::with_query_rows). They may lie in one buffer, next to each other, but not over each
/// other.
#[derive(Clone, Copy, Debug)]
pub struct StepTensors<'a> {
    /// Queries, after rotary embedding, not scaled.
    pub queries: &'a Tensor,
    /// Where the attention outputs go.
    pub output: &'a Tensor,
    /// Where the log-sum-exps go, f32 `[rows, query_heads]`: for plans of [`StepPlan::states`], and for no others.
    pub lse: Option<&'a Tensor>,
}

/// One dispatch and what it binds.
#[derive(Clone, Debug)]
struct PlannedLaunch {
    variant: Variant,
    workgroups: [u32; 2],
    buffers: Buffers,
}

/// A buffer of a launch, by role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Tables(Section),
    Queries(Section),
    Scores(Section),
    States(Section),
    Arrived(Section),
    Shard { store: usize, shard: u32, part: StorePart },
    SpanRanges { store: usize, which: KeyOrValue },
    Input,
    Output,
    Lse,
}

/// The buffers of a launch, by the names that the shader gives them.
type Buffers = Vec<(&'static str, Slot)>;

/// How a launch is told that rows do not lie one after the other.
struct Strided {
    tensor: Slot,
    slot: &'static str,
    file: &'static str,
    /// What lies before the first row, a row, and from one row to the next.
    constants: [&'static str; 3],
}

const STRIDED_QUERIES: Strided = Strided {
    tensor: Slot::Input,
    slot: "input_rows",
    file: "attend/input_rows/strided.wgsl",
    constants: ["INPUT_FIRST", "INPUT_ROW", "INPUT_STRIDE"],
};

const STRIDED_OUTPUTS: Strided = Strided {
    tensor: Slot::Output,
    slot: "output_rows",
    file: "attend/output_rows/strided.wgsl",
    constants: ["OUTPUT_FIRST", "OUTPUT_ROW", "OUTPUT_STRIDE"],
};

impl PlannedLaunch {
    /// The same launch; if it binds the tensor, its rows lie as `rows` says.
    fn with_rows(&self, strided: &Strided, rows: QueryRows, shape: &AttentionShape) -> Self {
        if self.buffers.iter().all(|(_, bound)| *bound != strided.tensor) {
            return self.clone();
        }
        let sizes = [rows.first, QueryRows::dense(shape).stride, rows.stride].map(|elements| elements / 4);
        let variant = self.variant.clone().import(strided.slot, strided.file);
        let set = |variant: Variant, (name, size)| variant.constant(name, size);
        Self { variant: strided.constants.into_iter().zip(sizes).fold(variant, set), ..self.clone() }
    }
}

impl StepPlan {
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
        Self::with_lse(capabilities, plan, input, options, LseOutput::None)
    }

    /// The same for a step that yields attention states: the log-sum-exp of every query and head beside the output.
    ///
    /// # Errors
    /// Those of [`StepPlan::new`].
    pub fn states(
        capabilities: &Capabilities,
        plan: &AttendPlan,
        input: ElementType,
        options: AttendOptions,
    ) -> Result<Self> {
        Self::with_lse(capabilities, plan, input, options, LseOutput::F32)
    }

    fn with_lse(
        capabilities: &Capabilities,
        plan: &AttendPlan,
        input: ElementType,
        options: AttendOptions,
        lse: LseOutput,
    ) -> Result<Self> {
        let work = Work::new(plan, options.split, block_queries(capabilities, plan, options))?;
        let mut builder = Builder { capabilities, work: &work, input, options, lse, layout: Layout::new(capabilities) };
        let launches = builder.launches();
        let Layout { tables, scratch, .. } = builder.layout;
        let (dense, output) = (QueryRows::dense(work.shape()), options.output);
        let step = Self { work, input, output, query_rows: dense, output_rows: dense, lse, launches, tables, scratch };
        step.check_limits(capabilities)?;
        Ok(step)
    }

    /// The same step for queries whose rows lie so, in place of one after the other. Every stride, and every number of
    /// elements before the first row, is a kernel variant of its own: what differs from step to step belongs into the offset of
    /// the tensor.
    #[must_use]
    pub fn with_query_rows(self, rows: QueryRows) -> Self {
        let launches = self.launches.iter().map(|launch| launch.with_rows(&STRIDED_QUERIES, rows, self.work.shape()));
        Self { query_rows: rows, launches: launches.collect(), ..self }
    }

    /// The same step for outputs whose rows lie so; see [`StepPlan::with_query_rows`].
    #[must_use]
    pub fn with_output_rows(self, rows: QueryRows) -> Self {
        let launches = self.launches.iter().map(|launch| launch.with_rows(&STRIDED_OUTPUTS, rows, self.work.shape()));
        Self { output_rows: rows, launches: launches.collect(), ..self }
    }

    /// The work items of the step.
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// How much scratch the step needs.
    pub fn scratch(&self) -> ScratchBytes {
        self.scratch
    }

    /// The tables, to be written to the start of [`Scratch::tables`] before the step runs.
    pub fn tables(&self) -> &[u8] {
        &self.tables
    }

    /// The kernel variants of the step, for [`Kernels::prepare`].
    pub fn variants(&self) -> Vec<Variant> {
        self.launches.iter().map(|launch| launch.variant.clone()).collect()
    }

    /// Labels of the launches, in order.
    pub fn launch_labels(&self) -> Vec<String> {
        self.launches.iter().map(|launch| launch.variant.label()).collect()
    }

    /// Looks the kernels up (compiling those that [`Kernels::prepare`] has not) and makes the bind groups.
    ///
    /// # Errors
    /// [`Error::Elements`] or [`Error::Buffer`] when tensors or scratch do not fit the plan, [`Error::Plan`] when the
    /// stores are not those that were planned, [`Error::DeviceLost`].
    pub fn bind(
        &self,
        kernels: &Kernels,
        stores: &[&Store],
        scratch: &Scratch,
        tensors: StepTensors<'_>,
    ) -> Result<Launches> {
        self.check_tensors(kernels, tensors)?;
        self.check_scratch(scratch)?;
        self.check_stores(stores)?;
        let buffers = BoundBuffers { stores, scratch, tensors };
        let launches = self
            .launches
            .iter()
            .map(|launch| {
                let bindings = launch
                    .buffers
                    .iter()
                    .map(|&(name, slot)| Ok((name, buffers.binding(slot)?)))
                    .collect::<Result<Vec<_>>>()?;
                let [x, y] = launch.workgroups;
                Launch::new(kernels, &launch.variant, &bindings, [x, y, 1])
            })
            .collect::<Result<_>>()?;
        // On a lost device wgpu makes bind groups without an error that nothing can be done with.
        guard::check_alive(kernels.device())?;
        Ok(launches)
    }

    fn check_tensors(&self, kernels: &Kernels, tensors: StepTensors<'_>) -> Result<()> {
        if tensors.queries.overlaps(tensors.output) {
            let reason = "it has bytes in common with the queries, which are read while outputs are written";
            return Err(Error::Buffer { what: "output", reason: reason.into() });
        }
        let (shape, rows) = (self.work.shape(), self.work.rows().len());
        let lse_type = match self.lse {
            LseOutput::None => None,
            LseOutput::F32 => Some(ElementType::F32),
        };
        if tensors.lse.is_some() != lse_type.is_some() {
            let reason = match tensors.lse {
                Some(_) => "was given, and the step was not planned with StepPlan::states",
                None => "is missing, and the step was planned with StepPlan::states",
            };
            return Err(Error::Buffer { what: "log-sum-exps", reason: reason.into() });
        }
        self.query_rows.check("queries", tensors.queries.elements(), rows, shape)?;
        self.output_rows.check("output", tensors.output.elements(), rows, shape)?;
        if let Some(lse) = tensors.lse.filter(|lse| lse.elements() != rows * shape.query_heads()) {
            let (given, expected) = (lse.elements(), rows * shape.query_heads());
            let shape = format!("{rows} queries × {} query heads", shape.query_heads());
            return Err(Error::Elements { what: "log-sum-exps", given, expected, shape });
        }
        let given = [
            Some(("queries", tensors.queries, self.input)),
            Some(("output", tensors.output, self.output)),
            tensors.lse.zip(lse_type).map(|(lse, element_type)| ("log-sum-exps", lse, element_type)),
        ];
        for (what, tensor, element_type) in given.into_iter().flatten() {
            if tensor.element_type() != element_type {
                return Err(Error::Buffer {
                    what,
                    reason: format!("is {:?}, the step was planned for {element_type:?}", tensor.element_type()),
                });
            }
            tensor.check_aligned(what, &kernels.device().limits())?;
        }
        Ok(())
    }

    fn check_scratch(&self, scratch: &Scratch) -> Result<()> {
        for (what, buffer, needed) in [
            ("scratch tables", &scratch.tables, self.scratch.tables),
            ("scratch queries", &scratch.queries, self.scratch.queries),
            ("scratch scores", &scratch.scores, self.scratch.scores),
            ("scratch states", &scratch.states, self.scratch.states),
            ("scratch counters", &scratch.arrived, self.scratch.arrived),
        ] {
            if buffer.size() < needed {
                return Err(Error::Buffer {
                    what,
                    reason: format!("has {} bytes, the step needs {needed}", buffer.size()),
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
                .ok_or_else(|| misfit(format!("the plan names store {index}, {} were given", stores.len())))?;
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
            ("attention states", self.scratch.states),
            ("counters of workgroups", self.scratch.arrived),
        ];
        for (what, needed) in bytes {
            limit(what, needed, capabilities.limits.binding_bytes, "attend to fewer sequences per step")?;
        }
        let items = self.work.segments().iter().flat_map(|segment| segment.items());
        let tokens = items.map(|item| u64::from(item.tokens)).max().unwrap_or(0);
        let what = "tiles of a work item";
        limit(what, tokens.div_ceil(TILE_TOKENS as u64), MAX_TILES as u64, "use a smaller Split::max_tiles")?;
        let workgroups = self.launches.iter().flat_map(|launch| launch.workgroups).max().unwrap_or(0);
        limit(
            "a dispatch",
            u64::from(workgroups),
            u64::from(capabilities.limits.workgroups),
            "use a larger Split::max_tiles, or attend to fewer sequences per step",
        )
    }
}

/// How many neighbouring queries every segment's kernel can take together, where a run has several.
fn block_queries(capabilities: &Capabilities, plan: &AttendPlan, options: AttendOptions) -> usize {
    let longest = plan.runs().iter().map(|planned| planned.run.queries).max().unwrap_or(1);
    let of_segment = |segment: &Segment| {
        let special = Specialisation {
            shape: plan.shape(),
            format: segment.format(),
            query: options.query.bytes(segment.format()),
            capabilities,
            may_use_matrices: false,
            queries: 1,
        };
        special.most_queries()
    };
    plan.segments().iter().map(of_segment).min().unwrap_or(1).min(longest)
}

/// The sections of one segment.
struct SegmentSections {
    prepared: Section,
    page_table: Section,
    items: Vec<Section>,
    queries: Section,
    /// Scores and extremes of a calibrated segment.
    scores: Option<(Section, Section)>,
}

/// Where states go, and who merges them.
struct Merging {
    /// `attend` and `weighted_values` do.
    fused: bool,
    states: Section,
    arrived: Section,
}

/// Most states of a query that are merged without a launch of its own. On an H200 that launch takes about 4 µs; what an
/// item waits for in its place, until its states are written and counted, takes 3 µs of a step with 8 of them, and with 32
/// as much as the launch or more.
const MOST_MERGED_STATES: usize = 8;

struct Builder<'a> {
    capabilities: &'a Capabilities,
    work: &'a Work,
    input: ElementType,
    options: AttendOptions,
    lse: LseOutput,
    layout: Layout,
}

impl Builder<'_> {
    fn launches(&mut self) -> Vec<PlannedLaunch> {
        let states = Section { offset: 0, bytes: self.work.states() as u64 * state_row_bytes(self.work.shape()) };
        self.layout.scratch.states = states.bytes;
        let sections: Vec<SegmentSections> =
            self.work.segments().iter().map(|segment| self.sections(segment)).collect();
        let state_rows = self.layout.table(self.work.rows());

        let merging = self.merging(states);
        let segments = || self.work.segments().iter().zip(&sections);
        let mut launches: Vec<PlannedLaunch> = segments()
            .filter(|(segment, _)| !self.own_query(segment))
            .map(|(segment, sections)| self.prepare_query(segment, sections))
            .collect();
        launches.extend(segments().flat_map(|(segment, sections)| self.scores(segment, sections)));
        launches.extend(segments().flat_map(|(segment, sections)| self.attend(segment, sections, &merging)));
        if merging.fused {
            return launches;
        }
        let mut buffers =
            vec![("state_rows", Slot::Tables(state_rows)), ("states", Slot::States(states)), ("outputs", Slot::Output)];
        if self.lse == LseOutput::F32 {
            buffers.push(("lse_rows", Slot::Lse));
        }
        launches.push(PlannedLaunch {
            variant: merge_states(self.work.shape(), self.options.output, self.lse),
            workgroups: [self.work.rows().len() as u32, self.work.shape().query_heads() as u32],
            buffers,
        });
        launches
    }

    /// Whether the last workgroup of every query head merges its states: it is alone at that, so they must not be many. It
    /// writes no log-sum-exp, and finds only what items of one query wrote.
    fn merging(&mut self, states: Section) -> Merging {
        let fused = self.capabilities.coherent
            && self.capabilities.limits.storage_buffers >= MOST_STORAGE_BUFFERS
            && self.lse == LseOutput::None
            && self.work.block_queries() == 1
            && self.work.most_states() <= MOST_MERGED_STATES;
        let counters = self.work.rows().len() * self.work.shape().query_heads();
        let arrived = Section { offset: 0, bytes: if fused { counters as u64 * 4 } else { 0 } };
        self.layout.scratch.arrived = arrived.bytes;
        Merging { fused, states, arrived }
    }

    /// Whether every workgroup of `attend` prepares the query of a segment itself.
    fn own_query(&self, segment: &SegmentWork) -> bool {
        segment.calibration().is_none() && self.specialisation(segment, 1).prepares_own_query()
    }

    fn sections(&mut self, segment: &SegmentWork) -> SegmentSections {
        let rows = (segment.queries().len() * self.work.shape().query_heads()) as u64;
        let row_bytes = match self.own_query(segment) {
            true => 0,
            false => self.specialisation(segment, 1).query_row_words() as u64 * 4,
        };
        let dispatches = segment.dispatches().iter();
        let items = dispatches.map(|dispatch| self.layout.table(segment.items_of(dispatch))).collect();
        let scores = segment.calibration().map(|_| {
            let tiles = (segment.score_tiles() * self.work.shape().query_heads()) as u64;
            let scores = self.layout.scores(tiles * TILE_TOKENS as u64 * 4);
            (scores, self.layout.scores(rows * 8))
        });
        SegmentSections {
            prepared: self.layout.table(segment.queries()),
            page_table: self.layout.table(segment.page_table()),
            items,
            queries: self.layout.queries(rows * row_bytes),
            scores,
        }
    }

    /// The kernels of a segment for items of up to `queries` queries.
    fn specialisation<'s>(&'s self, segment: &'s SegmentWork, queries: usize) -> Specialisation<'s> {
        Specialisation {
            shape: self.work.shape(),
            format: segment.format(),
            query: self.options.query.bytes(segment.format()),
            capabilities: self.capabilities,
            may_use_matrices: segment.calibration().is_none()
                && self.work.block_queries() == 1
                && self.work.most_states() > MOST_MERGED_STATES,
            queries,
        }
    }

    fn prepare_query(&self, segment: &SegmentWork, sections: &SegmentSections) -> PlannedLaunch {
        let extremes = if sections.scores.is_some() { Extremes::Reset } else { Extremes::None };
        let mut buffers = vec![
            ("prepared", Slot::Tables(sections.prepared)),
            ("inputs", Slot::Input),
            ("rows", Slot::Queries(sections.queries)),
        ];
        if segment.format().key.has_span_ranges() {
            let which = KeyOrValue::Key;
            buffers.push(("key_span_ranges", Slot::SpanRanges { store: segment.store(), which }));
        }
        if let Some((_, extremes)) = sections.scores {
            buffers.push(("extremes", Slot::Scores(extremes)));
        }
        let special = self.specialisation(segment, 1);
        PlannedLaunch {
            variant: special.prepare_query(self.input, extremes),
            workgroups: [
                segment.queries().len() as u32,
                (self.work.shape().query_heads() * special.query_parts()) as u32,
            ],
            buffers,
        }
    }

    fn scores(&self, segment: &SegmentWork, sections: &SegmentSections) -> Vec<PlannedLaunch> {
        let Some((scores, extremes)) = sections.scores else { return Vec::new() };
        self.per_dispatch(segment, sections, |dispatch, special, mut buffers| {
            buffers.push(("queries", Slot::Queries(sections.queries)));
            self.push_keys(segment, dispatch.shard, &mut buffers);
            buffers.push(("stored_scores", Slot::Scores(scores)));
            buffers.push(("extremes", Slot::Scores(extremes)));
            (special.scores().variant(), buffers)
        })
    }

    fn attend(&self, segment: &SegmentWork, sections: &SegmentSections, merging: &Merging) -> Vec<PlannedLaunch> {
        let output = merging.fused.then_some(self.options.output);
        self.per_dispatch(segment, sections, |dispatch, special, mut buffers| {
            let variant = match (segment.calibration(), sections.scores) {
                (Some(calibration), Some((scores, extremes))) => {
                    buffers.push(("stored_scores", Slot::Scores(scores)));
                    buffers.push(("extremes", Slot::Scores(extremes)));
                    special.weighted_values((calibration.tau1(), calibration.tau2()), output).variant()
                }
                _ => {
                    let queries = self.own_query(segment).then_some(self.input);
                    buffers.push(match queries {
                        Some(_) => ("inputs", Slot::Input),
                        None => ("queries", Slot::Queries(sections.queries)),
                    });
                    self.push_keys(segment, dispatch.shard, &mut buffers);
                    special.attend(Fused { queries, output }).variant()
                }
            };
            self.push_values(segment, dispatch.shard, &mut buffers);
            buffers.push(("states", Slot::States(merging.states)));
            if merging.fused {
                buffers.push(("arrived", Slot::Arrived(merging.arrived)));
                buffers.push(("outputs", Slot::Output));
            }
            (variant, buffers)
        })
    }

    fn per_dispatch(
        &self,
        segment: &SegmentWork,
        sections: &SegmentSections,
        launch: impl Fn(&Dispatch, Specialisation<'_>, Buffers) -> (Variant, Buffers),
    ) -> Vec<PlannedLaunch> {
        let dispatches = segment.dispatches().iter().zip(&sections.items);
        dispatches
            .map(|(dispatch, &items)| {
                let special = self.specialisation(segment, dispatch.most_queries);
                let rows = (self.work.shape().kv_heads() * special.head_split().chunks) as u32;
                let work = vec![("items", Slot::Tables(items)), ("page_table", Slot::Tables(sections.page_table))];
                let (variant, buffers) = launch(dispatch, special, work);
                PlannedLaunch { variant, workgroups: [rows, dispatch.items as u32], buffers }
            })
            .collect()
    }

    fn push_keys(&self, segment: &SegmentWork, shard: u32, buffers: &mut Buffers) {
        let store = segment.store();
        buffers.push(("keys", Slot::Shard { store, shard, part: StorePart::Keys }));
        if segment.format().key.ranges_per_tile(self.work.shape().head_dim()) > 0 {
            buffers.push(("key_ranges", Slot::Shard { store, shard, part: StorePart::KeyRanges }));
        }
        if segment.format().key.has_span_ranges() {
            buffers.push(("key_span_ranges", Slot::SpanRanges { store, which: KeyOrValue::Key }));
        }
    }

    fn push_values(&self, segment: &SegmentWork, shard: u32, buffers: &mut Buffers) {
        let store = segment.store();
        buffers.push(("values", Slot::Shard { store, shard, part: StorePart::Values }));
        if segment.format().value.ranges_per_tile(self.work.shape().head_dim()) > 0 {
            buffers.push(("value_ranges", Slot::Shard { store, shard, part: StorePart::ValueRanges }));
        }
        if segment.format().value.has_span_ranges() {
            buffers.push(("value_span_ranges", Slot::SpanRanges { store, which: KeyOrValue::Value }));
        }
    }
}

/// The buffers behind the roles.
struct BoundBuffers<'a> {
    stores: &'a [&'a Store],
    scratch: &'a Scratch,
    tensors: StepTensors<'a>,
}

impl BoundBuffers<'_> {
    fn binding(&self, slot: Slot) -> Result<wgpu::BufferBinding<'_>> {
        let section = |buffer, section: Section| {
            Ok(wgpu::BufferBinding { buffer, offset: section.offset, size: std::num::NonZeroU64::new(section.bytes) })
        };
        match slot {
            Slot::Tables(at) => section(&self.scratch.tables, at),
            Slot::Queries(at) => section(&self.scratch.queries, at),
            Slot::Scores(at) => section(&self.scratch.scores, at),
            Slot::States(at) => section(&self.scratch.states, at),
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
