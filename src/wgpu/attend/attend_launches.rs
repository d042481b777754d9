//! The launches of a step of attention: kernels, grids and buffers.

use super::attend::Fused;
use super::attend_buffers::{Buffers, Grid, PlannedLaunch, STRIDED_OUTPUTS, STRIDED_QUERIES, Slot, Strided};
use super::merge_states::{MergedStates, merge_buffers, merge_states, state_row_bytes};
use super::prepare_query::Extremes;
use super::recipe::{LseOutput, RunItems, Sinks, WrittenOutputs};
use super::scratch::{Layout, ScratchSection};
use super::specialisation::{ItemScoring, MAX_RUN_TILES, MAX_TILES, Specialisation};
use super::state_buffers::{buffer_of, buffer_rows};
use crate::backend::AttendOptions;
use crate::format::{AttentionShape, Calibration, KeyOrValue, SegmentFormat, TILE_TOKENS};
use crate::plan::{Dispatch, ElementType, ItemMask, QueryLayout, Scoring, StateRows, StoreWork, Work};
use crate::wgpu::device::StoreBuffer;
use crate::wgpu::device::{Capabilities, Variant};
use crate::{Error, Result};

/// Storage buffers of `attend` when it merges states itself.
const MERGING_STORAGE_BUFFERS: u32 = 10;

/// What the launches of a step depend on, but for their grids: equal ones have the same launches.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Decisions {
    segments: Vec<SegmentDecisions>,
    shape: AttentionShape,
    scoring: Scoring,
    block_queries: usize,
    /// Whether a query has more states than are merged without a launch.
    many_states: bool,
    /// The states of every query, by buffer where launches write to several.
    state_rows: ScratchSection,
    sinks: Option<ScratchSection>,
    merging: StateMerging,
}

/// Those of one segment.
#[derive(Clone, Debug, PartialEq)]
struct SegmentDecisions {
    store: usize,
    format: SegmentFormat,
    calibration: Option<Calibration>,
    dispatches: Vec<DispatchDecisions>,
    sections: SegmentSections,
}

/// Those of one dispatch.
#[derive(Clone, Copy, Debug, PartialEq)]
struct DispatchDecisions {
    shard: u32,
    most_queries: usize,
    mask: ItemMask,
    /// Whether an item is spread over workgroups.
    spread: bool,
}

/// The sections of one segment.
#[derive(Clone, Debug, PartialEq)]
struct SegmentSections {
    prepared: ScratchSection,
    page_table: ScratchSection,
    items: Vec<ScratchSection>,
    queries: ScratchSection,
    /// Queries of `attend_run` and their constants, for a segment with such items, unless all read given queries.
    run_queries: Option<(ScratchSection, ScratchSection)>,
    /// Scores and extremes of a calibrated segment.
    scores: Option<(ScratchSection, ScratchSection)>,
}

impl SegmentSections {
    /// The queries of `attend_run`: prepared ones, or those of the caller.
    fn run_buffers(&self, items: RunItems) -> Buffers {
        match (items, self.run_queries) {
            (RunItems::Parts, Some((rows, constants))) => {
                vec![("run_queries", Slot::Queries(rows)), ("run_constants", Slot::Queries(constants))]
            }
            _ => vec![("inputs", Slot::Input)],
        }
    }
}

impl Decisions {
    /// Writes the items of work with these decisions to their place in the tables.
    pub(super) fn write_items(&self, work: &Work, tables: &mut [u8]) {
        for (of, segment) in self.segments.iter().zip(work.segments()) {
            for (section, dispatch) in of.sections.items.iter().zip(segment.dispatches()) {
                let items = bytemuck::cast_slice::<_, u8>(segment.items_of(dispatch));
                tables[section.offset as usize..][..items.len()].copy_from_slice(items);
            }
        }
    }
}

/// What merges states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Merging {
    /// `attend` and `weighted_values` do.
    Fused,
    /// `merge_states` does.
    Launch,
    /// There are none: `attend_run` writes all outputs.
    None,
}

/// The place of states, and what merges them.
#[derive(Clone, Copy, Debug, PartialEq)]
struct StateMerging {
    by: Merging,
    states: ScratchSection,
    /// Whether launches write their states to different buffers.
    by_launch: bool,
    arrived: ScratchSection,
}

/// Maximum number of states of a query that are merged without a separate launch. On an H200 that launch takes about 4
/// µs. Without it, an item waits until its states are written and counted. That takes 3 µs of a step with 8 states, and
/// with 32 as much as the launch or more.
const MOST_MERGED_STATES: usize = 8;

/// Decides the launches, and lays out tables and scratch.
pub(super) struct Builder<'a> {
    pub capabilities: &'a Capabilities,
    pub work: &'a Work,
    pub input: ElementType,
    pub options: AttendOptions,
    pub lse: LseOutput,
    pub layout: Layout,
}

/// The same launches, where a tensor has rows of this layout.
pub(super) fn with_rows(
    launches: &[PlannedLaunch],
    tensor: &Strided,
    rows: QueryLayout,
    shape: &AttentionShape,
) -> Vec<PlannedLaunch> {
    launches.iter().map(|launch| launch.with_rows(tensor, rows, shape)).collect()
}

impl Builder<'_> {
    /// The same launches, where queries and outputs have these layouts.
    pub fn with_rows(
        &self,
        launches: Vec<PlannedLaunch>,
        [queries, outputs]: [Option<QueryLayout>; 2],
    ) -> Vec<PlannedLaunch> {
        let shape = self.work.shape();
        let of = |launches: Vec<PlannedLaunch>, (tensor, rows): (&Strided, Option<QueryLayout>)| match rows {
            Some(rows) => with_rows(&launches, tensor, rows, shape),
            None => launches,
        };
        [(&STRIDED_QUERIES, queries), (&STRIDED_OUTPUTS, outputs)].into_iter().fold(launches, of)
    }

    /// Checks that kernels take items of as many tiles.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub fn check_tiles(&self) -> Result<()> {
        let of =
            self.work.segments().iter().flat_map(|segment| segment.dispatches().iter().map(move |of| (segment, of)));
        for (segment, dispatch) in of {
            let tokens = segment.items_of(dispatch).iter().map(|item| item.tokens as usize).max().unwrap_or(0);
            let needed = tokens.div_ceil(TILE_TOKENS) as u64;
            let allowed = if self.takes_run(segment, dispatch) { MAX_RUN_TILES } else { MAX_TILES } as u64;
            if needed > allowed {
                let (what, hint) = ("tiles of a work item".into(), "use a smaller Split::max_tiles");
                return Err(Error::Limit { what, needed, allowed, hint });
            }
        }
        Ok(())
    }

    /// Lays out tables and scratch, and decides what the launches depend on.
    pub fn decide(&mut self) -> Decisions {
        // A binding is never empty, even where no query sees a token.
        let rows = self.work.states().max(1) as u64;
        let bytes = self.layout.room.bytes(rows * state_row_bytes(self.work.shape()));
        let states = ScratchSection { offset: 0, bytes };
        let segments = self.work.segments().iter().map(|segment| self.decide_segment(segment)).collect();
        let merging = self.merging(states);
        let buffer_rows = (merging.by == Merging::Launch && !self.takes_runs())
            .then(|| buffer_rows(self.work, self.layout.room, state_row_bytes(self.work.shape())))
            .flatten();
        self.layout.scratch.states[0] = states.bytes;
        let state_rows = match &buffer_rows {
            Some(rows) => {
                self.layout.scratch.states.fill(states.bytes);
                self.layout.table(rows)
            }
            None => self.layout.table(self.work.rows()),
        };
        Decisions {
            segments,
            shape: *self.work.shape(),
            scoring: self.work.scoring().clone(),
            block_queries: self.work.block_queries(),
            many_states: self.work.most_states() > MOST_MERGED_STATES,
            state_rows,
            sinks: self.sinks(),
            merging: StateMerging { by_launch: buffer_rows.is_some(), ..merging },
        }
    }

    fn decide_segment(&mut self, segment: &StoreWork) -> SegmentDecisions {
        let of = |dispatch: &Dispatch| DispatchDecisions {
            shard: dispatch.shard,
            most_queries: dispatch.most_queries,
            mask: dispatch.mask,
            spread: dispatch.workgroups.is_some(),
        };
        SegmentDecisions {
            store: segment.store(),
            format: *segment.format(),
            calibration: segment.calibration().copied(),
            dispatches: segment.dispatches().iter().map(of).collect(),
            sections: self.sections(segment),
        }
    }

    /// All launches, in order. They depend on nothing but the decisions, and on what all steps of an engine have in
    /// common.
    pub fn launches(&self, decisions: &Decisions) -> Vec<PlannedLaunch> {
        let merging = &decisions.merging;
        let segments = || {
            let sections = decisions.segments.iter().map(|of| &of.sections);
            self.work.segments().iter().zip(sections).enumerate()
        };
        let mut launches: Vec<PlannedLaunch> = segments()
            .filter(|(_, (segment, _))| !self.own_query(segment))
            .map(|(at, (segment, sections))| self.prepare_query(at, segment, sections))
            .collect();
        launches
            .extend(segments().filter_map(|(at, (segment, sections))| self.prepare_run_query(at, segment, sections)));
        launches.extend(segments().flat_map(|(at, (segment, sections))| self.scores(at, segment, sections)));
        launches
            .extend(segments().flat_map(|(at, (segment, sections))| self.attend(at, (segment, sections), decisions)));
        if merging.by_launch {
            self.part_states(&mut launches, merging.states);
        }
        if merging.by == Merging::Launch {
            launches.push(self.merge(decisions));
        }
        launches
    }

    /// Lets every launch write its states to a buffer of its own, as far as there are buffers.
    fn part_states(&self, launches: &mut [PlannedLaunch], section: ScratchSection) {
        let one = Slot::States { buffer: 0, section };
        let slots = launches.iter_mut().flat_map(|launch| &mut launch.buffers).map(|(_, slot)| slot);
        for (dispatch, slot) in slots.filter(|slot| **slot == one).enumerate() {
            *slot = Slot::States { buffer: buffer_of(dispatch), section };
        }
    }

    fn merge(&self, decisions: &Decisions) -> PlannedLaunch {
        let mut buffers = vec![
            ("state_rows", Slot::Tables(decisions.state_rows)),
            ("states", Slot::States { buffer: 0, section: decisions.merging.states }),
        ];
        if decisions.merging.by_launch {
            let names = ["second_states", "third_states", "fourth_states"];
            let slot = |buffer| Slot::States { buffer, section: decisions.merging.states };
            buffers.extend(names.into_iter().zip((1..).map(slot)));
        }
        self.push_outputs(decisions, &mut buffers);
        let shape = self.work.shape();
        let merged = match self.takes_runs() {
            true => MergedStates::Few,
            false => MergedStates::Many,
        };
        PlannedLaunch {
            variant: match decisions.merging.by_launch {
                true => merge_buffers(merge_states(shape, self.outputs(decisions), merged)),
                false => merge_states(shape, self.outputs(decisions), merged),
            },
            grid: Grid::Rows { each: (shape.query_heads() / merged.heads(shape)) as u32 },
            buffers,
        }
    }

    /// What is written of every query.
    fn outputs(&self, decisions: &Decisions) -> WrittenOutputs {
        let sinks = if decisions.sinks.is_some() { Sinks::Logits } else { Sinks::None };
        WrittenOutputs { element_type: self.options.output, lse: self.lse, sinks }
    }

    fn push_outputs(&self, decisions: &Decisions, buffers: &mut Buffers) {
        buffers.push(("outputs", Slot::Output));
        if self.lse == LseOutput::F32 {
            buffers.push(("lse_rows", Slot::Lse));
        }
        buffers.extend(decisions.sinks.map(|sinks| ("sinks", Slot::Tables(sinks))));
    }

    /// Whether the last workgroup of every query head merges its states: it is alone at that, so they must not be many.
    /// It writes no log-sum-exp, knows no sinks, and finds only what items of one query wrote.
    fn merging(&mut self, states: ScratchSection) -> StateMerging {
        let fused = self.capabilities.coherent
            && self.capabilities.limits.storage_buffers >= MERGING_STORAGE_BUFFERS
            && self.lse == LseOutput::None
            && self.work.scoring().sinks().is_none()
            && self.work.rows().iter().all(|rows| rows.end > rows.first)
            && self.work.block_queries() == 1
            && self.work.most_states() <= MOST_MERGED_STATES;
        let counters = self.work.rows().len() * self.work.shape().query_heads();
        let bytes = self.layout.room.bytes(if fused { counters as u64 * 4 } else { 0 });
        let arrived = ScratchSection { offset: 0, bytes };
        self.layout.scratch.arrived = arrived.bytes;
        let by = match fused {
            true => Merging::Fused,
            false if self.work.rows().iter().all(|rows| *rows == StateRows::WRITTEN) => Merging::None,
            false => Merging::Launch,
        };
        StateMerging { by, states, by_launch: false, arrived }
    }

    /// Whether every workgroup of `attend` prepares the query of a segment itself.
    fn own_query(&self, segment: &StoreWork) -> bool {
        segment.calibration().is_none() && self.single(segment).prepares_own_query()
    }

    /// The logits of the sinks, where the layer has them.
    fn sinks(&mut self) -> Option<ScratchSection> {
        // −∞ is no number that shaders may count on.
        let logits: Vec<f32> = self.work.scoring().sinks()?.iter().map(|logit| logit.max(f32::MIN)).collect();
        Some(self.layout.table(&logits))
    }

    fn sections(&mut self, segment: &StoreWork) -> SegmentSections {
        let rows = (segment.queries().len() * self.work.shape().query_heads()) as u64;
        let row_bytes = match self.own_query(segment) {
            true => 0,
            false => self.single(segment).query_row_words() as u64 * 4,
        };
        let dispatches = segment.dispatches().iter();
        let items = dispatches.map(|dispatch| self.layout.table(segment.items_of(dispatch))).collect();
        let scores = segment.calibration().map(|_| {
            let tiles = (segment.score_tiles() * self.work.shape().query_heads()) as u64;
            let scores = self.layout.scores(tiles * TILE_TOKENS as u64 * 4);
            (scores, self.layout.scores(rows * 8))
        });
        let reads_prepared =
            |dispatch| self.takes_run(segment, dispatch) && self.run_items(segment, dispatch) == RunItems::Parts;
        let prepares = segment.dispatches().iter().any(reads_prepared);
        let run_queries = prepares.then(|| {
            let bytes = self.single(segment).run_query_bytes(segment.queries().len());
            (self.layout.queries(bytes[0]), self.layout.queries(bytes[1]))
        });
        SegmentSections {
            run_queries,
            prepared: self.layout.table(segment.queries()),
            page_table: self.layout.table(segment.page_table()),
            items,
            queries: self.layout.queries(rows * row_bytes),
            scores,
        }
    }

    /// The kernels of a segment for items of one query that are not masked.
    fn single<'s>(&'s self, segment: &'s StoreWork) -> Specialisation<'s> {
        self.specialisation(segment, 1, ItemMask::None)
    }

    /// The kernels of a segment for items of up to `queries` queries.
    fn specialisation<'s>(&'s self, segment: &'s StoreWork, queries: usize, mask: ItemMask) -> Specialisation<'s> {
        Specialisation {
            shape: self.work.shape(),
            format: segment.format(),
            query: self.options.query.bytes(segment.format()),
            capabilities: self.capabilities,
            may_use_matrices: segment.calibration().is_none()
                && self.work.block_queries() == 1
                && self.work.most_states() > MOST_MERGED_STATES,
            scoring: ItemScoring::new(self.work.scoring(), self.work.shape(), mask),
            queries,
        }
    }

    /// Whether the items of a dispatch are those of `attend_run`.
    fn takes_run(&self, segment: &StoreWork, dispatch: &Dispatch) -> bool {
        self.specialisation(segment, dispatch.most_queries, dispatch.mask).run_rows().is_some()
    }

    /// Whether those of any dispatch are.
    fn takes_runs(&self) -> bool {
        let any = |segment: &StoreWork| segment.dispatches().iter().any(|of| self.takes_run(segment, of));
        self.work.segments().iter().any(any)
    }

    /// What the items of a dispatch have, if they are those of `attend_run`. All else that a step asks for keeps the text
    /// that was compared with it on a card.
    fn run_items(&self, segment: &StoreWork, dispatch: &Dispatch) -> RunItems {
        let special = self.specialisation(segment, dispatch.most_queries, dispatch.mask);
        let writes_outputs = self.work.rows().iter().all(|rows| *rows == StateRows::WRITTEN);
        let in_halves = self.input == ElementType::F16 && self.options.output == ElementType::F16;
        let plain = self.lse == LseOutput::None && self.work.scoring().sinks().is_none();
        match writes_outputs && in_halves && plain && special.takes_whole_runs() {
            true => RunItems::Whole(special.given_query(self.input)),
            false => RunItems::Parts,
        }
    }

    fn prepare_run_query(&self, at: usize, segment: &StoreWork, sections: &SegmentSections) -> Option<PlannedLaunch> {
        let (rows, constants) = sections.run_queries?;
        let mut buffers = vec![
            ("prepared", Slot::Tables(sections.prepared)),
            ("inputs", Slot::Input),
            ("rows", Slot::Queries(rows)),
            ("row_constants", Slot::Queries(constants)),
        ];
        if segment.format().key.has_span_ranges() {
            buffers.push(("key_span_ranges", Slot::SpanRanges { store: segment.store(), which: KeyOrValue::Key }));
        }
        let special = self.single(segment);
        Some(PlannedLaunch {
            variant: special.prepare_run_query(self.input),
            grid: Grid::Prepared { segment: at, each: special.prepared_workgroups() as u32 },
            buffers,
        })
    }

    fn prepare_query(&self, at: usize, segment: &StoreWork, sections: &SegmentSections) -> PlannedLaunch {
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
        let special = self.single(segment);
        PlannedLaunch {
            variant: special.prepare_query(self.input, extremes),
            grid: Grid::Prepared {
                segment: at,
                each: (self.work.shape().query_heads() * special.query_parts()) as u32,
            },
            buffers,
        }
    }

    fn scores(&self, at: usize, segment: &StoreWork, sections: &SegmentSections) -> Vec<PlannedLaunch> {
        let Some((scores, extremes)) = sections.scores else { return Vec::new() };
        self.per_dispatch(at, (segment, sections), |dispatch, special, mut buffers| {
            buffers.push(("queries", Slot::Queries(sections.queries)));
            self.push_keys(segment, dispatch.shard, &mut buffers);
            buffers.push(("stored_scores", Slot::Scores(scores)));
            buffers.push(("extremes", Slot::Scores(extremes)));
            (special.scores().variant(), buffers)
        })
    }

    fn attend(
        &self,
        at: usize,
        (segment, sections): (&StoreWork, &SegmentSections),
        decisions: &Decisions,
    ) -> Vec<PlannedLaunch> {
        let merging = &decisions.merging;
        let output = (merging.by == Merging::Fused).then_some(self.options.output);
        self.per_dispatch(at, (segment, sections), |dispatch, special, mut buffers| {
            let items = self.run_items(segment, dispatch);
            let run = special.attend_run(items, self.outputs(decisions));
            let variant = match (segment.calibration(), sections.scores, run) {
                (Some(calibration), Some((scores, extremes)), _) => {
                    buffers.push(("stored_scores", Slot::Scores(scores)));
                    buffers.push(("extremes", Slot::Scores(extremes)));
                    special.weighted_values((calibration.tau1(), calibration.tau2()), output).variant()
                }
                (_, _, Some(run)) => {
                    buffers.extend(sections.run_buffers(items));
                    self.push_outputs(decisions, &mut buffers);
                    self.push_keys(segment, dispatch.shard, &mut buffers);
                    run.variant()
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
            if items == RunItems::Parts {
                buffers.push(("states", Slot::States { buffer: 0, section: merging.states }));
            }
            if merging.by == Merging::Fused {
                buffers.push(("arrived", Slot::Arrived(merging.arrived)));
                buffers.push(("outputs", Slot::Output));
            }
            (variant, buffers)
        })
    }

    fn per_dispatch(
        &self,
        at: usize,
        (segment, sections): (&StoreWork, &SegmentSections),
        launch: impl Fn(&Dispatch, Specialisation<'_>, Buffers) -> (Variant, Buffers),
    ) -> Vec<PlannedLaunch> {
        let dispatches = segment.dispatches().iter().zip(&sections.items).enumerate();
        dispatches
            .map(|(place, (dispatch, &items))| {
                let special = self.specialisation(segment, dispatch.most_queries, dispatch.mask);
                let each = (self.work.shape().kv_heads() * special.head_split().chunks) as u32;
                let work = vec![("items", Slot::Tables(items)), ("page_table", Slot::Tables(sections.page_table))];
                let (variant, buffers) = launch(dispatch, special, work);
                let variant = match dispatch.workgroups {
                    Some(_) => variant.import("item_of", "attend/item_of.wgsl#spread"),
                    None => variant,
                };
                PlannedLaunch { variant, grid: Grid::Items { segment: at, dispatch: place, each }, buffers }
            })
            .collect()
    }

    fn push_keys(&self, segment: &StoreWork, shard: u32, buffers: &mut Buffers) {
        let store = segment.store();
        buffers.push(("keys", Slot::Shard { store, shard, part: StoreBuffer::Keys }));
        if segment.format().key.ranges_per_tile(self.work.shape().head_dim()) > 0 {
            buffers.push(("key_ranges", Slot::Shard { store, shard, part: StoreBuffer::KeyRanges }));
        }
        if segment.format().key.has_span_ranges() {
            buffers.push(("key_span_ranges", Slot::SpanRanges { store, which: KeyOrValue::Key }));
        }
    }

    fn push_values(&self, segment: &StoreWork, shard: u32, buffers: &mut Buffers) {
        let store = segment.store();
        buffers.push(("values", Slot::Shard { store, shard, part: StoreBuffer::Values }));
        if segment.format().value.ranges_per_tile(self.work.shape().head_dim()) > 0 {
            buffers.push(("value_ranges", Slot::Shard { store, shard, part: StoreBuffer::ValueRanges }));
        }
        if segment.format().value.has_span_ranges() {
            buffers.push(("value_span_ranges", Slot::SpanRanges { store, which: KeyOrValue::Value }));
        }
    }
}
