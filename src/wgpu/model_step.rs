//! A step of a whole model: bound once, then only encoded.

use std::sync::Arc;

use super::attend::{AttendStep, AttendTensors, LEAST_SPREAD, LseOutput, Scratch, ScratchBytes, full_runs};
use super::backend::Wgpu;
use super::device::guard::{self, Request};
use super::device::{Launches, Store, Tensor, Variant};
use super::pack::{BoundStoreStep, NonFiniteFlags, StoreStep, WriteMemory, staged};
use super::table_slots::TableSlots;
use crate::backend::{
    AttendOptions, BoundClasses, OpenStep, QueryPrecision, StepKind, StepKinds, StoredLayers, WriteInput, of_layer,
};
use crate::format::{AttentionShape, TILE_TOKENS};
use crate::plan::{
    AttendPlan, ElementType, LayerAttention, Page, QueryLayout, QueryRun, RowLayout, SpanView, Split, StoreFormat,
    StoreView, Visible, WriteLayout, WriteTable,
};
use crate::{Error, Result};

/// The tensors of one layer's step.
pub type LayerTensors = crate::backend::LayerTensors<Tensor>;

/// The steps of layers that share their page tables, in the engine's own passes.
///
/// [`ModelStep::write`] takes the open step of a cache and writes two small tables to the device, once for all layers.
/// Its result encodes every layer into the engine's pass, between the engine's own kernels. Encoding does not submit,
/// wait, map or allocate. Kernels, scratch and bind groups last from step to step. They are rebuilt when a store has
/// grown or lengths have left their size class; classes are up to a quarter apart. The classes of eight batches are
/// kept. [`WrittenStep::bound_anew`] tells whether anything was rebuilt.
///
/// An engine may write and encode further steps before it submits the first: tables of a step stay where they are until
/// the device has finished the commands that read them, or these were dropped. Four steps may be under way before the
/// tables are rebuilt with twice the room. Steps are submitted in the order in which they were written. Until they are,
/// calls of the cache that submit commands by themselves return [`Error::NotSubmitted`].
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
/// let open = cache.open_steps()?.remove(0); // layers of one shape and recipe
/// let step = steps.write(&open)?;
/// let mut encoder = backend.device().create_command_encoder(&Default::default());
/// let mut pass = encoder.begin_compute_pass(&Default::default());
/// for layer in 0..open.layers.len() {
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
    rows: RowLayout,
    layers: Vec<LayerTensors>,
    /// Precision of the queries where it is not that of the recipe.
    query: Option<QueryPrecision>,
    split: Split,
    query_rows: Option<QueryLayout>,
    output_rows: Option<QueryLayout>,
    /// Log-sum-exps of every layer, or none.
    lse: Vec<Tensor>,
    bound: BoundClasses<Bound>,
    slots: TableSlots,
    /// What packs the parts of prompts of the step that was written last, by layer.
    staged: Vec<Launches>,
}

/// Number of classes of steps that are kept.
const KEPT_CLASSES: usize = 8;

/// The resources that all steps of one class use. Buffers are shared with other classes.
#[derive(Debug)]
struct Bound {
    layout: Arc<WriteLayout>,
    /// The indices of the layers. Layers that were split off from one group share a layout, but not their stores.
    numbers: Vec<usize>,
    memory: WriteMemory,
    stores: Vec<BoundStoreStep>,
    plan: AttendStep,
    scratch: Scratch,
    /// What the scratch shares with other steps on the device, but for its tables.
    shared: Arc<Scratch>,
    /// Bytes of a slot of the scratch's tables.
    slot_bytes: u64,
    attention: Vec<Launches>,
}

impl LayerTensors {
    /// Zeroed tensors with `rows` contiguous rows of keys, values, queries and output.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Limit`] or [`Error::DeviceLost`].
    pub fn zeroed(device: &wgpu::Device, shape: &AttentionShape, rows: usize, of: ElementType) -> Result<Self> {
        let zeroed = |heads: usize| Tensor::zeroed(device, rows * heads * shape.head_dim(), of);
        let (kv, query) = (shape.kv_heads(), shape.query_heads());
        Ok(Self { keys: zeroed(kv)?, values: zeroed(kv)?, queries: zeroed(query)?, output: zeroed(query)? })
    }
}

/// A step whose tables are written to the queue, ready to be encoded.
#[derive(Clone, Copy, Debug)]
pub struct WrittenStep<'a> {
    backend: &'a Wgpu,
    rows: &'a RowLayout,
    layers: &'a [LayerTensors],
    bound: &'a Bound,
    table: &'a WriteTable,
    slots: &'a TableSlots,
    slot: usize,
    /// By layer; none where the step packs no part of a prompt.
    staged: &'a [Launches],
    stored: &'a StoredLayers,
    bound_anew: bool,
}

impl ModelStep {
    /// Steps of layers with these tensors, whose keys and values have the layout `rows`. Queries have the precision
    /// that the recipe of the layers asks for, unless [`ModelStep::with_query_precision`] sets another.
    ///
    /// # Errors
    /// [`Error::Plan`] when there are no layers, or layers differ in the types of their queries or outputs.
    pub fn new(backend: &Wgpu, rows: RowLayout, layers: Vec<LayerTensors>) -> Result<Self> {
        let Some(first) = layers.first() else {
            return Err(Error::Plan { what: "step of a model", reason: "it needs at least one layer".into() });
        };
        let types = |layer: &LayerTensors| {
            [&layer.keys, &layer.values, &layer.queries, &layer.output].map(Tensor::element_type)
        };
        if let Some(layer) = layers.iter().position(|layer| types(layer) != types(first)) {
            let reason = format!("the tensors of layer {layer} and layer 0 differ in type");
            return Err(Error::Plan { what: "step of a model", reason });
        }
        let slots = TableSlots::new(backend.kernels().submissions());
        let (backend, bound) = (backend.clone(), BoundClasses::new(KEPT_CLASSES));
        let (query, split, query_rows, output_rows) = (None, Split::default(), None, None);
        let (lse, staged) = (Vec::new(), Vec::new());
        Ok(Self { backend, rows, layers, query, split, query_rows, output_rows, lse, bound, slots, staged })
    }

    /// The same steps, which also write the natural log-sum-exp of the scores of every query and head: f32
    /// `[rows, query_heads]`, a tensor for each layer. With it an engine merges the output with attention to tokens
    /// that lie elsewhere. Layers that run one after the other may share a tensor.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is not one tensor for each layer, [`Error::Buffer`] when one is not f32.
    pub fn with_log_sum_exps(mut self, lse: Vec<Tensor>) -> Result<Self> {
        crate::backend::check_log_sum_exps(self.layers.len(), lse.iter().map(Tensor::element_type))?;
        self.bound.retain(|_| false);
        Ok(Self { lse, ..self })
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
        self.bound.retain(|_| false);
        Self { query_rows: Some(rows), ..self }
    }

    /// The same steps for outputs with this layout, instead of contiguous rows.
    #[must_use]
    pub fn with_output_layout(mut self, rows: QueryLayout) -> Self {
        self.bound.retain(|_| false);
        Self { output_rows: Some(rows), ..self }
    }

    /// Compiles every kernel that decode steps of a cache can use, however long their sequences become, so that serving
    /// a model never compiles. It takes a `&ModelCache`, or the kind of some of its layers
    /// ([`ModelCache::step_kind`](crate::cache::ModelCache::step_kind)). [`ModelStep::prepare_chunks`] does so for
    /// prompts in chunks.
    ///
    /// # Errors
    /// As [`AttendStep::new`], and [`Error::Gpu`] when the device refuses a kernel.
    pub async fn prepare(&self, of: impl StepKinds) -> Result<()> {
        self.prepare_runs(&of.step_kinds(), |_| vec![QueryRun::decode(0)], &[1, MANY_TILES]).await
    }

    /// As [`ModelStep::prepare`], for steps with chunks of up to `longest` tokens, or as many as the tensors have rows:
    /// compiles kernels that take several queries of a sequence at a time.
    ///
    /// # Errors
    /// As [`ModelStep::prepare`].
    pub async fn prepare_chunks(&self, of: impl StepKinds, longest: usize) -> Result<()> {
        let (kinds, longest) = (of.step_kinds(), longest.min(self.rows.tokens));
        let causal = |tokens| QueryRun::causal(0, tokens);
        // Kernels of longer runs take their queries from items of many queries.
        let spread = Some(LEAST_SPREAD).filter(|&least| least <= longest);
        let short = |_: &StepKind<'_>| (2..=longest.min(MOST_CHUNK_KINDS)).chain(spread).map(causal).collect();
        self.prepare_runs(&kinds, short, &[1, MANY_TILES]).await?;
        let staged: Vec<Vec<Variant>> = kinds.iter().map(|&kind| staged::variants_of(kind)).collect::<Result<_>>()?;
        self.backend.kernels().prepare(&staged.concat()).await?;
        if !self.backend.capabilities().matrices {
            return Ok(());
        }
        let long = |kind: &StepKind<'_>| {
            let full = full_runs(kind.layout.shape()).map(|queries| queries.min(longest)).into_iter();
            full.filter(|&queries| queries > MOST_CHUNK_KINDS).map(causal).collect()
        };
        self.prepare_runs(&kinds, long, &[RUN_TILES]).await
    }

    /// Compiles the kernels that some query runs of each kind can use, over spans of the given numbers of tiles.
    async fn prepare_runs(
        &self,
        kinds: &[StepKind<'_>],
        runs: impl Fn(&StepKind<'_>) -> Vec<QueryRun>,
        spans: &[u32],
    ) -> Result<()> {
        let mut variants = Vec::new();
        for kind in kinds {
            variants.extend(self.variants_of(*kind, &runs(kind), spans)?);
        }
        variants.sort_unstable();
        variants.dedup();
        self.backend.kernels().prepare(&variants).await
    }

    /// The kernels of a kind of steps that each of these query runs can use.
    fn variants_of(&self, kind: StepKind<'_>, runs: &[QueryRun], spans: &[u32]) -> Result<Vec<Variant>> {
        let StepKind { layout, stores, query, attention } = kind;
        let LayerTensors { keys, values, .. } = &self.layers[0];
        let buffers = self.backend.kernels().storage_buffers();
        let mut variants = StoreStep::new(layout).variants(buffers, keys.element_type(), values.element_type());
        for &tiles in spans {
            let pages: Vec<Page> = (0..tiles).map(|index| Page { shard: 0, index }).collect();
            let tokens = pages.len() * TILE_TOKENS;
            // All stores of one sequence. With one tile each, there are few states. With many, there are too many to be
            // merged without a launch.
            let view = |(place, &StoreFormat { format, calibration }): (usize, &StoreFormat)| {
                let span = SpanView {
                    sequence: 0,
                    start: place * tokens,
                    tokens,
                    gathered: None,
                    pages: &pages,
                    range_slot: 0,
                };
                StoreView { format, calibration, spans: vec![span] }
            };
            let alone = stores.iter().map(|store| vec![view((0, store))]);
            let together = stores.iter().enumerate().map(view).collect();
            for views in alone.chain([together]) {
                for run in runs.iter().flat_map(|run| masked_runs(attention, run, views.len() * tokens)) {
                    let plan = AttendPlan::new(*layout.shape(), &[run], &views)?;
                    variants.extend(self.plan(&attention.score(plan)?, query)?.variants());
                }
            }
        }
        Ok(variants)
    }

    /// Takes a step and writes its tables to the device, in the order of the queue: once for all layers, and before the
    /// pass that encodes them is submitted. Allocates memory only if something must be bound again.
    ///
    /// # Errors
    /// [`Error::Plan`] or [`Error::Elements`] when the step belongs to other layers, or has more tokens than the
    /// tensors; [`Error::Unsupported`] when it is to write log-sum-exps and keys are centred; [`Error::Limit`] when
    /// 256 steps are encoded of which the device has finished none; [`Error::OutOfMemory`], [`Error::Limit`] or
    /// [`Error::DeviceLost`] when binding again fails.
    pub fn write<'a>(&'a mut self, step: &OpenStep<'a, Store, NonFiniteFlags>) -> Result<WrittenStep<'a>> {
        step.check(self.layers.len(), &self.rows)?;
        if !self.lse.is_empty() {
            step.check_not_centred()?;
        }
        let plan = self.plan(step.plan, step.query)?;
        for layer in 0..self.layers.len() {
            plan.check_rows(self.attended(layer))?;
        }
        let slot = self.free_slot()?;
        let kept = self.bound.take(|bound| bound.is_over(step) && plan.is_bound_like(&bound.plan));
        let bound_anew = kept.is_none();
        let bound = match kept {
            Some(bound) => Bound { plan, ..bound },
            None => self.bind(step, plan)?,
        };
        let queue = self.backend.queue();
        guard::captured_now(self.backend.device(), Request::call("tables of a step"), || {
            queue.write_buffer(&bound.scratch.tables, u64::from(bound.slot_offset(slot)), bound.plan.tables());
            bound.memory.write_slot(queue, step.table, slot)
        })??;
        self.staged = staged::bind(self.backend.kernels(), step)?;
        let Self { backend, rows, layers, slots, staged, .. } = self;
        let (bound, table, stored) = (self.bound.put(bound), step.table, step.stored);
        Ok(WrittenStep { backend, rows, layers, bound, table, slots, slot, staged, stored, bound_anew })
    }

    /// A slot for the tables of a step. Where steps that are under way read all of them, what is bound goes, since
    /// tables with more slots are other buffers.
    fn free_slot(&mut self) -> Result<usize> {
        if let Some(slot) = self.slots.free() {
            return Ok(slot);
        }
        let first_new = self.slots.len();
        self.slots.grow()?;
        self.bound.retain(|_| false);
        Ok(first_new)
    }

    /// The plan of a step whose recipe asks for this precision of the queries.
    fn plan(&self, plan: &AttendPlan, of_recipe: QueryPrecision) -> Result<AttendStep> {
        let LayerTensors { queries, output, .. } = &self.layers[0];
        let (query, output, split) = (self.query.unwrap_or(of_recipe), output.element_type(), self.split);
        let options = AttendOptions { query, output, split };
        let (capabilities, input) = (self.backend.capabilities(), queries.element_type());
        let lse = if self.lse.is_empty() { LseOutput::None } else { LseOutput::F32 };
        let mut step = AttendStep::with_room(capabilities, plan, input, options, lse)?;
        if let Some(rows) = self.query_rows {
            step = step.with_query_layout(rows);
        }
        if let Some(rows) = self.output_rows {
            step = step.with_output_layout(rows);
        }
        Ok(step)
    }

    /// Binds a class: attention always, stores and their table only if no other class has them.
    fn bind(&mut self, step: &OpenStep<'_, Store, NonFiniteFlags>, plan: AttendStep) -> Result<Bound> {
        let (backend, layout) = (&self.backend, step.table.layout());
        // Drops what was bound before a store grew.
        self.bound.retain(|bound| bound.numbers != step.layers || bound.is_over(step));
        let (memory, stores) = match self.bound.iter().find(|bound| bound.is_over(step)) {
            Some(bound) => (bound.memory.clone(), bound.stores.clone()),
            None => {
                step.stores.iter().flatten().for_each(|store| store.encoders().add(self.slots.steps()));
                step.flags.encoders().add(self.slots.steps());
                let memory = WriteMemory::with_slots(backend.device(), layout, self.slots.len())?;
                let pack = StoreStep::new(layout);
                let of_layer = |((&layer, tensors), stores): ((&usize, &LayerTensors), &Vec<&Store>)| {
                    let LayerTensors { keys, values, .. } = tensors;
                    let input = WriteInput { keys, values, rows: self.rows, flags: step.flags, layer };
                    pack.bind_with_room(backend.kernels(), stores, &memory, input)
                };
                let layers = step.layers.iter().zip(&self.layers).zip(&step.stores);
                let bound = layers.map(of_layer).collect::<Result<_>>()?;
                (memory, bound)
            }
        };
        // Steps run in the order of the queue, so they may share scratch.
        let needed = plan.scratch();
        let holds = |bound: &&Bound| bound.scratch.holds(needed) && bound.slot_bytes >= needed.tables;
        let (scratch, shared, slot_bytes) = match self.bound.iter().find(holds) {
            Some(bound) => (bound.scratch.clone(), bound.shared.clone(), bound.slot_bytes),
            None => self.new_scratch(needed)?,
        };
        let of_layer = |(layer, stores): (usize, &Vec<&Store>)| {
            plan.bind_with_room(backend.kernels(), stores, &scratch, self.attended(layer))
        };
        let attention = step.stores.iter().enumerate().map(of_layer).collect::<Result<_>>()?;
        let (layout, numbers) = (layout.clone(), step.layers.to_vec());
        Ok(Bound { layout, numbers, memory, stores, plan, scratch, shared, slot_bytes, attention })
    }

    /// The tensors of a layer's attention.
    fn attended(&self, layer: usize) -> AttendTensors<'_> {
        let LayerTensors { queries, output, .. } = &self.layers[layer];
        AttendTensors { queries, output, lse: self.lse.get(layer) }
    }

    /// Scratch of a step, with tables in every slot, what it shares, and the bytes of a slot.
    fn new_scratch(&self, needed: ScratchBytes) -> Result<(Scratch, Arc<Scratch>, u64)> {
        let limits = self.backend.capabilities().limits;
        let slot_bytes = needed.tables.next_multiple_of(limits.binding_alignment);
        let tables = slot_bytes.saturating_mul(self.slots.len() as u64);
        if tables > limits.binding_bytes {
            let (what, hint) = ("tables of steps in bytes".into(), "attend to fewer sequences per step");
            return Err(Error::Limit { what, needed: tables, allowed: limits.binding_bytes, hint });
        }
        let shared = self.backend.step_scratch(needed)?;
        Ok((shared.with_tables_now(self.backend.device(), tables)?, shared, slot_bytes))
    }
}

impl Bound {
    /// Whether it was bound to the stores of a step.
    fn is_over(&self, step: &OpenStep<'_, Store, NonFiniteFlags>) -> bool {
        Arc::ptr_eq(&self.layout, step.table.layout()) && self.numbers == step.layers
    }

    /// Where the attention tables of a slot begin, in bytes: a buffer of scratch is smaller than 4 GiB.
    const fn slot_offset(&self, slot: usize) -> u32 {
        (self.slot_bytes * slot as u64) as u32
    }
}

/// A run over sequences of `tokens` tokens as a layer sees it: all of what is before, where a window ends at the border
/// of a tile, and where it cuts one.
fn masked_runs(attention: &LayerAttention, run: &QueryRun, tokens: usize) -> Vec<QueryRun> {
    let mut runs = vec![run.clone()];
    if let (Some(left), true) = (attention.window(), run.queries + 1 < tokens) {
        let ending = |end| QueryRun { visible: Visible::Window { left }, end: Some(end), ..run.clone() };
        runs.extend([ending(tokens), ending(tokens - 1)]);
    }
    runs
}

/// Tiles of a span that is cut into more items than can be merged without a launch of its own.
const MANY_TILES: u32 = 256;

/// Tiles of a span in which the queries of the longest block together see more than one tile.
const RUN_TILES: u32 = 4;

/// Length of the longest chunk whose kernels differ from those of shorter ones, except for those of `attend_run`: it
/// has more queries than a workgroup of the other kernels takes at a time.
const MOST_CHUNK_KINDS: usize = 16;

impl WrittenStep<'_> {
    /// Whether this step allocated memory and built bind groups.
    pub const fn bound_anew(&self) -> bool {
        self.bound_anew
    }

    /// Encodes the writes of a layer, by its place among the layers of the step. Does not submit, wait or allocate.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub fn encode_store(&self, layer: usize, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let stores = of_layer(&self.bound.stores, layer)?;
        self.slots.hold(self.slot, pass);
        stores.encode_slot(self.table, self.bound.memory.slot_offset(self.slot), pass)?;
        if let Some(staged) = self.staged.get(layer) {
            staged.encode(pass);
        }
        self.stored.mark(self.bound.numbers[layer]);
        Ok(())
    }

    /// Encodes the attention of a layer, by its place among the layers of the step. Does not submit, wait or allocate.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub fn encode_attend(&self, layer: usize, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let attention = of_layer(&self.bound.attention, layer)?;
        self.slots.hold(self.slot, pass);
        attention.encode_grids(self.bound.plan.grids(), self.bound.slot_offset(self.slot), pass);
        Ok(())
    }

    /// Stores and attends in a layer, by its place among the layers of the step. This is for an engine that submits its
    /// commands itself and whose tensors move from step to step. The rows of keys, values and queries are copied to the
    /// tensors of the layer, and the outputs from there, all in one submission. It does not wait.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer, [`Error::Elements`] or [`Error::Buffer`] when the tensors have
    /// fewer rows than the step, or cannot be [copied](Tensor::encode_copy); [`Error::NotSubmitted`] when an earlier
    /// step is encoded and not submitted; [`Error::DeviceLost`].
    pub fn submit(&self, layer: usize, given: &LayerTensors) -> Result<()> {
        self.slots.check_others_submitted(self.slot, self.backend.device(), "step of a layer")?;
        let (plan, own) = (&self.bound.plan, of_layer(self.layers, layer)?);
        let (shape, rows) = (plan.work().shape(), RowLayout { tokens: plan.work().rows().len(), ..*self.rows });
        rows.check("keys", given.keys.elements(), shape)?;
        rows.check("values", given.values.elements(), shape)?;
        plan.check_rows(AttendTensors { queries: &given.queries, output: &given.output, lse: None })?;
        let output = own.output.slice(0, given.output.elements())?;
        let encode = |encoder: &mut wgpu::CommandEncoder| {
            given.keys.encode_copy(&own.keys, encoder)?;
            given.values.encode_copy(&own.values, encoder)?;
            given.queries.encode_copy(&own.queries, encoder)?;
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            self.encode_store(layer, &mut pass)?;
            self.encode_attend(layer, &mut pass)?;
            drop(pass);
            output.encode_copy(&given.output, encoder)
        };
        guard::encode_and_submit(self.backend.device(), self.backend.queue(), "layer of a step", encode)
    }

    /// Number of dispatches of a layer's attention.
    pub fn launches(&self) -> usize {
        self.bound.plan.grids().count()
    }
}
