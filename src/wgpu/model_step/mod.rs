//! A step of a whole model: bound once, then only encoded.

mod part;
mod prepare;
mod step_tables;
mod table_slots;
mod written;

use std::sync::Arc;

use part::{PartClass, PartMemory, PlannedPart, attend_tables_at};
use step_tables::{Regions, StepTables};
use written::PartTables;
pub use written::WrittenStep;

use super::attend::{AttendStep, LseOutput, Scratch, ScratchBytes, Sizing, StepOptions};
use super::backend::Wgpu;
use super::device::guard::{self, Request};
use super::device::{Launches, Store, Tensor};
use super::pack::{NonFiniteFlags, rotated_now, rotated_window_bytes, staged};
use crate::Result;
use crate::backend::{AttendOptions, BoundParts, OpenStep, PartLayers, QueryPrecision, StepLayers, StepTensors};
use crate::format::AttentionShape;
use crate::plan::{ElementType, QueryLayout, RowLayout, Split};

/// The tensors of one layer's step.
pub type LayerTensors = crate::backend::LayerTensors<Tensor>;

/// The steps of a model's layers, in the engine's own passes.
///
/// [`ModelStep::write`] takes the open step of a cache, with all its parts, and writes their tables to the device at
/// once. Its result encodes every layer into the engine's pass, between the engine's own kernels. Encoding does not
/// submit, wait, map or allocate. Kernels, scratch and bind groups last from step to step. They are rebuilt when a
/// store has grown or lengths have left their size class; classes are up to a quarter apart. The classes of eight
/// batches are kept. [`WrittenStep::bound_anew`] tells whether anything was rebuilt.
///
/// A step has one part where layers share their page tables, and as many as layers once they hold different numbers of
/// tokens ([`ModelCache::open_steps`](crate::cache::ModelCache::open_steps)). One `ModelStep` serves all parts, however
/// they change from step to step: tables lie in one buffer, and scratch is shared, since layers run one after the
/// other. Layers of different shapes need a `ModelStep` each, since `rows` belongs to a shape.
///
/// An engine may write and encode further steps before it submits the first: tables of a step stay where they are until
/// the device has finished the commands that read them, or these were dropped. Two steps may be under way before the
/// tables are rebuilt with twice the room. Steps are submitted in the order in which they were written. Until they are,
/// calls of the cache that submit commands by themselves return [`Error::NotSubmitted`](crate::Error::NotSubmitted).
///
/// ```no_run
/// use kvpack::cache::{ModelCache, TokenRun};
/// use kvpack::plan::RowLayout;
/// use kvpack::wgpu::{LayerTensors, ModelStep, Wgpu};
/// # async fn example(backend: &Wgpu, cache: &mut ModelCache<Wgpu>, tensors: Vec<LayerTensors>) -> kvpack::Result<()> {
/// // Once: 64 sequences, the tensors of every layer.
/// let rows = RowLayout::token_major(64, cache.shape(0)?);
/// let mut steps = ModelStep::new(backend, rows, tensors)?;
/// steps.prepare(&*cache).await?;
///
/// // Every step:
/// let runs: Vec<TokenRun> = (0..64).map(TokenRun::decode).collect();
/// cache.begin_append(&runs)?;
/// let open = cache.open_steps()?;
/// let step = steps.write(&open)?;
/// let mut encoder = backend.device().create_command_encoder(&Default::default());
/// let mut pass = encoder.begin_compute_pass(&Default::default());
/// for layer in 0..cache.layers() {
///     // The engine's kernels: keys, values and queries of the layer.
///     step.encode_store(layer, &mut pass)?;
///     step.encode_attend(layer, &mut pass)?;
///     // The engine's kernels: what becomes of the output.
/// }
/// drop((pass, open));
/// backend.queue().submit([encoder.finish()]);
/// cache.commit()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ModelStep {
    backend: Wgpu,
    tensors: StepTensors<Tensor>,
    /// Precision of the queries where it is not that of the recipe.
    query: Option<QueryPrecision>,
    split: Split,
    bound: BoundParts<PartClass>,
    tables: StepTables,
    /// What all parts share.
    shared: SharedMemory,
    /// What packs the parts of prompts of the step that was written last, by part and layer.
    staged: Vec<Vec<Launches>>,
}

/// Number of classes of steps that are kept.
const KEPT_CLASSES: usize = 8;

/// Memory that the parts of a step use one after the other.
#[derive(Debug, Default)]
struct SharedMemory {
    /// What the steps on the device share.
    scratch: Option<Arc<Scratch>>,
    /// Rotated rows of windows.
    rotated: Option<wgpu::Buffer>,
}

impl LayerTensors {
    /// Zeroed tensors with `rows` contiguous rows of keys, values, queries and output.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::Limit`](crate::Error::Limit) or
    /// [`Error::DeviceLost`](crate::Error::DeviceLost).
    pub fn zeroed(device: &wgpu::Device, shape: &AttentionShape, rows: usize, of: ElementType) -> Result<Self> {
        let zeroed = |heads: usize| Tensor::zeroed(device, rows * heads * shape.head_dim(), of);
        let (kv, query) = (shape.kv_heads(), shape.query_heads());
        Ok(Self { keys: zeroed(kv)?, values: zeroed(kv)?, queries: zeroed(query)?, output: zeroed(query)? })
    }
}

impl ModelStep {
    /// Steps of layers with these tensors, whose keys and values have the layout `rows`. Queries have the precision
    /// that the recipe of the layers asks for, unless [`ModelStep::with_query_precision`] sets another.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when there are no layers, or layers differ in the types of their queries or
    /// outputs.
    pub fn new(backend: &Wgpu, rows: RowLayout, layers: Vec<LayerTensors>) -> Result<Self> {
        let bound = BoundParts::new(layers.len(), KEPT_CLASSES);
        let tensors = StepTensors::new(rows, layers)?;
        tensors.check_types()?;
        let tables = StepTables::new(backend.kernels().submissions());
        let (query, split) = (None, Split::default());
        let (shared, staged) = (SharedMemory::default(), Vec::new());
        Ok(Self { backend: backend.clone(), tensors, query, split, bound, tables, shared, staged })
    }

    /// The same steps, which also write the natural log-sum-exp of the scores of every query and head: f32
    /// `[rows, query_heads]`, a tensor for each layer. With it an engine merges the output with attention to tokens
    /// that lie elsewhere. Layers that run one after the other may share a tensor.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when there is not one tensor for each layer,
    /// [`Error::Buffer`](crate::Error::Buffer) when one is not f32.
    pub fn with_log_sum_exps(mut self, lse: Vec<Tensor>) -> Result<Self> {
        self.tensors.set_log_sum_exps(lse)?;
        self.bound.clear();
        Ok(self)
    }

    /// The same with another precision of the queries than that of the recipe.
    #[must_use]
    pub fn with_query_precision(self, query: QueryPrecision) -> Self {
        Self { query: Some(query), ..self }
    }

    /// The same with work that is cut otherwise; results differ only by rounding.
    #[must_use]
    pub fn with_split(self, split: Split) -> Self {
        Self { split, ..self }
    }

    /// The same steps for queries with this layout, instead of contiguous rows: see [`AttendStep::with_query_layout`].
    #[must_use]
    pub fn with_query_layout(mut self, rows: QueryLayout) -> Self {
        self.tensors.set_query_layout(rows);
        self.bound.clear();
        self
    }

    /// The same steps for outputs with this layout, instead of contiguous rows.
    #[must_use]
    pub fn with_output_layout(mut self, rows: QueryLayout) -> Self {
        self.tensors.set_output_layout(rows);
        self.bound.clear();
        self
    }

    /// Takes the parts of a step and writes their tables to the device, in the order of the queue: at once for all
    /// layers, and before the pass that encodes them is submitted. Allocates memory if something must be bound again, or
    /// if the step packs a part of a prompt as a span.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) or [`Error::Elements`](crate::Error::Elements) when the parts have other
    /// layers, or more tokens than the tensors; [`Error::Unsupported`](crate::Error::Unsupported) when the step is to
    /// write log-sum-exps and keys are centred; [`Error::NotSubmitted`](crate::Error::NotSubmitted) when what
    /// [`Wgpu::record`] returned for the pages is not encoded; [`Error::Limit`](crate::Error::Limit) when 256 steps are
    /// encoded of
    /// which the device has finished none; [`Error::OutOfMemory`](crate::Error::OutOfMemory),
    /// [`Error::Limit`](crate::Error::Limit) or [`Error::DeviceLost`](crate::Error::DeviceLost) when binding again
    /// fails.
    pub fn write<'a>(&'a mut self, parts: &[OpenStep<'a, Store, NonFiniteFlags>]) -> Result<WrittenStep<'a>> {
        let stores = parts.iter().flat_map(|part| part.stores.iter().flatten());
        stores.into_iter().try_for_each(|store| store.encoders().check_encoded("tables of a step"))?;
        let layers = StepLayers::of(parts, self.tensors.layers().len())?;
        let by_part = layers.by_part(parts.len());
        let mut plans = Vec::with_capacity(parts.len());
        for (at, (part, layers)) in parts.iter().zip(by_part.iter()).enumerate() {
            let grows = self.grow(part, layers[0], (at, parts.len()))?;
            plans.push(if grows { None } else { Some(self.plan(part, layers, parts.len())?) });
        }
        let slots = self.tables.slots().len();
        let provided = self.provide(parts, &by_part, &mut plans);
        if provided.is_err() {
            self.tables.keep_slots(slots);
        }
        let (slot, regions) = provided?;
        let mut bound_anew = false;
        for (at, ((part, layers), plan)) in parts.iter().zip(by_part.iter()).zip(plans).enumerate() {
            let Some(plan) = plan else { continue };
            let planned = PlannedPart { plan, first: regions.first(at) };
            let Self { backend, tensors, tables, shared, bound, .. } = self;
            let memory = PartMemory { backend, tensors, tables, shared };
            bound_anew |= bound.serve((part, layers[0]), planned, |bound, planned| {
                memory.bind((part, layers), planned, bound.of(layers[0]).filter(|bound| bound.is_over(part)))
            })?;
        }
        let Self { backend, bound, tables, .. } = self;
        let tables_of = |(part, layers): (&OpenStep<'a, Store, NonFiniteFlags>, &[usize])| {
            bound.newest(layers[0]).map(|bound| bound.class.tables(part.table))
        };
        let of_parts = parts.iter().zip(by_part.iter()).filter_map(tables_of).flatten();
        guard::captured_now(backend.device(), Request::call("tables of a step"), || {
            tables.upload(backend.queue(), slot, of_parts);
        })?;
        self.staged = parts.iter().map(|part| staged::bind(self.backend.kernels(), part)).collect::<Result<_>>()?;
        let steps: &'a Self = self;
        let with = |at: usize, part: &OpenStep<'a, Store, NonFiniteFlags>| PartTables {
            table: part.table,
            staged: steps.staged.get(at).map_or(&[], Vec::as_slice),
        };
        let parts = steps.bound.written(parts, (layers, &by_part), with);
        Ok(WrittenStep { steps, parts, slot, bound_anew })
    }

    /// Whether the class that served the part with this first layer last serves its next step, too.
    fn grow(
        &mut self,
        part: &OpenStep<'_, Store, NonFiniteFlags>,
        first_layer: usize,
        (at, parts): (usize, usize),
    ) -> Result<bool> {
        let (options, first) = (self.options(part.query, parts), self.tables.regions(parts).first(at));
        let Some(bound) = self.bound.newest_mut(first_layer) else { return Ok(false) };
        if !(bound.is_over(part) && bound.class.grow(part.plan, options, first)) {
            return Ok(false);
        }
        let tables = bound.class.plan().tables();
        let planned = || AttendStep::with_options(self.backend.capabilities(), part.plan, options, std::iter::empty());
        debug_assert!(planned().is_ok_and(|planned| planned.tables() == tables), "the step is not as it is planned");
        // Pages and slots are those of the step before, over the same layout.
        part.table.check_rows(self.tensors.rows())?;
        Ok(true)
    }

    /// Plans a part of a step, whose layers are these of all.
    fn plan(&self, part: &OpenStep<'_, Store, NonFiniteFlags>, layers: &[usize], parts: usize) -> Result<AttendStep> {
        self.tensors.check(part)?;
        let options = self.options(part.query, parts);
        let kept = self.bound.of(layers[0]).map(|bound| bound.class.plan().decided());
        let plan = AttendStep::with_options(self.backend.capabilities(), part.plan, options, kept)?;
        layers.iter().try_for_each(|&layer| plan.check_rows(self.tensors.attended(layer)))?;
        Ok(plan)
    }

    /// What the steps have in common whose recipe asks for this precision of the queries, and that have this number of
    /// parts.
    fn options(&self, of_recipe: QueryPrecision, parts: usize) -> StepOptions {
        let LayerTensors { queries, output, .. } = &self.tensors.layers()[0];
        let (query, output, split) = (self.query.unwrap_or(of_recipe), output.element_type(), self.split);
        StepOptions {
            input: queries.element_type(),
            attend: AttendOptions { query, output, split },
            lse: if self.tensors.have_log_sum_exps() { LseOutput::F32 } else { LseOutput::None },
            room: Sizing::Classes { parts: parts.next_power_of_two() },
            rows: self.tensors.layouts(),
        }
    }

    /// Room for a step: a slot for its tables, with a region for every part, and the memory that parts share. Where
    /// that is other memory than before, what is bound goes, and is planned for all parts. A part without a plan has
    /// one that is bound.
    fn provide(
        &mut self,
        parts: &[OpenStep<'_, Store, NonFiniteFlags>],
        by_part: &PartLayers,
        plans: &mut [Option<AttendStep>],
    ) -> Result<(usize, Regions)> {
        let slot = self.tables.free_slot()?;
        // What serves all parts is bound to memory that has the room.
        if plans.iter().all(Option::is_none) && self.tables.have_room(parts.len(), 0) {
            return Ok((slot, self.tables.regions(parts.len())));
        }
        let bound = |layers: &[usize]| self.bound.newest(layers[0]).map(|bound| bound.class.plan());
        let scratch_of = |(plan, layers): (&Option<AttendStep>, &[usize])| {
            plan.as_ref().or_else(|| bound(layers)).map_or_else(ScratchBytes::default, AttendStep::scratch)
        };
        let scratch: Vec<ScratchBytes> = plans.iter().zip(by_part.iter()).map(scratch_of).collect();
        let needed = scratch.iter().fold(ScratchBytes::default(), |all, &of| all.or(of));
        let needed = ScratchBytes { tables: 0, ..needed };
        let rotated = parts.iter().map(|part| rotated_window_bytes(part.table.layout())).max().unwrap_or(0);
        let alignment = self.backend.capabilities().limits.binding_alignment;
        let region = |(part, scratch): (&OpenStep<'_, Store, NonFiniteFlags>, &ScratchBytes)| {
            attend_tables_at(part.table.layout(), alignment) + scratch.tables
        };
        let region = parts.iter().zip(&scratch).map(region).max().unwrap_or(0);
        let has_scratch = self.shared.scratch.as_ref().is_some_and(|scratch| scratch.holds(needed));
        let has_rotated = self.shared.rotated.as_ref().map_or(0, wgpu::Buffer::size) >= rotated;
        let has_tables = self.tables.have_room(parts.len(), region);
        if !(has_scratch && has_rotated && has_tables) {
            for (plan, layers) in plans.iter_mut().zip(by_part.iter()).filter(|(plan, _)| plan.is_none()) {
                *plan = self.bound.take_newest(layers[0]).map(PartClass::into_plan);
            }
            self.bound.clear();
        }
        let device = self.backend.device();
        if !has_scratch {
            self.shared.scratch = Some(self.backend.step_scratch(needed)?);
        }
        if !has_rotated {
            self.shared.rotated = rotated_now(device, rotated)?;
        }
        if !has_tables {
            self.tables.make_room(device, &self.backend.capabilities().limits, parts.len(), region)?;
        }
        Ok((slot, self.tables.regions(parts.len())))
    }
}
