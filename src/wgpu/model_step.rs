//! A step of a whole model: bound once, then only encoded.

use std::sync::Arc;

use super::attend::{Scratch, StepPlan, StepTensors};
use super::backend::Wgpu;
use super::device::guard::{self, Request};
use super::device::{Launches, Store, Tensor};
use super::pack::{BoundPackStep, NonFiniteFlags, PackStepPlan, StepMemory};
use crate::backend::{AttendOptions, OpenStep, StepInput, of_layer};
use crate::format::TILE_TOKENS;
use crate::plan::{
    AttendPlan, Page, QueryRows, QueryRun, RowLayout, SpanView, StepLayout, StepTable, StoreFormat, StoreView,
};
use crate::{Error, Result};

/// The tensors of one layer's step.
pub type LayerTensors = crate::backend::LayerTensors<Tensor>;

/// The steps of layers that share their books, in an engine's own passes.
///
/// [`ModelStep::write`] takes the open step of a cache and puts two small tables on the device, once for all layers. What it
/// returns encodes every layer into the engine's pass, between the engine's own kernels: nothing is submitted, waited for,
/// mapped or allocated. Kernels, scratch and bind groups last from step to step; they are made anew when a store has grown or
/// lengths have left their class, which lie up to a quarter apart. [`WrittenStep::bound_anew`] tells.
///
/// ```no_run
/// use kvpack::backend::AttendOptions;
/// use kvpack::cache::{ModelCache, TokenRun};
/// use kvpack::plan::RowLayout;
/// use kvpack::wgpu::{LayerTensors, ModelStep, Wgpu};
/// # async fn example(backend: &Wgpu, cache: &mut ModelCache<Wgpu>, tensors: Vec<LayerTensors>) -> kvpack::Result<()> {
/// // Once: 64 sequences, the tensors of every layer.
/// let rows = RowLayout::token_major(64, cache.shape(0)?);
/// let mut steps = ModelStep::new(backend, rows, tensors, AttendOptions::default())?;
/// steps.prepare(cache.step_layout(0)?, cache.recipe(0)?.stores()).await?;
///
/// // Every step:
/// let runs: Vec<TokenRun> = (0..64).map(TokenRun::decode).collect();
/// cache.begin_append(&runs)?;
/// let open = cache.encode()?.remove(0); // layers of one shape and recipe
/// let step = steps.write(&open)?;
/// let mut encoder = backend.device().create_command_encoder(&Default::default());
/// let mut pass = encoder.begin_compute_pass(&Default::default());
/// for layer in 0..open.layers.len() {
///     // The engine's kernels: keys, values and queries of the layer.
///     step.encode_store(layer, &mut pass)?;
///     step.encode_attend(layer, &mut pass)?;
///     // The engine's kernels: what becomes of the output.
/// }
/// drop(pass);
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
    options: AttendOptions,
    query_rows: Option<QueryRows>,
    output_rows: Option<QueryRows>,
    bound: Option<Bound>,
}

/// What lasts from step to step.
#[derive(Debug)]
struct Bound {
    layout: Arc<StepLayout>,
    /// The numbers of the layers: those that were parted from one group share a layout, and not their stores.
    numbers: Vec<usize>,
    memory: StepMemory,
    stores: Vec<BoundPackStep>,
    plan: StepPlan,
    scratch: Scratch,
    attention: Vec<Launches>,
}

/// A step whose tables are on their way to the device, ready to be encoded.
#[derive(Clone, Copy, Debug)]
pub struct WrittenStep<'a> {
    bound: &'a Bound,
    table: &'a StepTable,
    bound_anew: bool,
}

impl ModelStep {
    /// Steps of layers with these tensors, whose keys and values lie as `rows` says.
    ///
    /// # Errors
    /// [`Error::Plan`] for no layers, or layers whose queries or outputs are of different types.
    pub fn new(backend: &Wgpu, rows: RowLayout, layers: Vec<LayerTensors>, options: AttendOptions) -> Result<Self> {
        let Some(first) = layers.first() else {
            return Err(Error::Plan { what: "step of a model", reason: "it needs at least one layer".into() });
        };
        let types = |layer: &LayerTensors| {
            [&layer.keys, &layer.values, &layer.queries, &layer.output].map(Tensor::element_type)
        };
        if let Some(layer) = layers.iter().position(|layer| types(layer) != types(first)) {
            let reason = format!("the tensors of layer {layer} are of other types than those of layer 0");
            return Err(Error::Plan { what: "step of a model", reason });
        }
        let options = AttendOptions { output: first.output.element_type(), ..options };
        let backend = backend.clone();
        Ok(Self { backend, rows, layers, options, query_rows: None, output_rows: None, bound: None })
    }

    /// The same for queries whose rows lie so, in place of one after the other: see [`StepPlan::with_query_rows`].
    #[must_use]
    pub fn with_query_rows(self, rows: QueryRows) -> Self {
        Self { query_rows: Some(rows), bound: None, ..self }
    }

    /// The same for outputs whose rows lie so, in place of one after the other.
    #[must_use]
    pub fn with_output_rows(self, rows: QueryRows) -> Self {
        Self { output_rows: Some(rows), bound: None, ..self }
    }

    /// Compiles every kernel that decoding steps over these stores can ask for, however long their sequences become, so that
    /// none is compiled while a model is served. `stores` are those of the recipe.
    ///
    /// # Errors
    /// Those of [`StepPlan::new`], and [`Error::Gpu`] when the device refuses a kernel.
    pub async fn prepare(&self, layout: &Arc<StepLayout>, stores: &[StoreFormat]) -> Result<()> {
        let LayerTensors { keys, values, .. } = &self.layers[0];
        let mut variants = PackStepPlan::new(layout).variants(keys.element_type(), values.element_type());
        for tiles in [1, MANY_TILES] {
            let pages: Vec<Page> = (0..tiles).map(|index| Page { shard: 0, index }).collect();
            let span =
                SpanView { sequence: 0, start: 0, tokens: pages.len() * TILE_TOKENS, pages: &pages, range_slot: 0 };
            // All stores of one sequence: with one tile each their states are few, with many there are too many to be merged
            // by the way.
            let view = |&StoreFormat { format, calibration }: &StoreFormat| StoreView {
                format,
                calibration,
                spans: vec![span.clone()],
            };
            let stores: Vec<StoreView<'_>> = stores.iter().map(view).collect();
            for stores in stores.chunks(1).chain([stores.as_slice()]) {
                let plan = AttendPlan::new(*layout.shape(), &[QueryRun::decode(0)], stores)?;
                variants.extend(self.plan(&plan)?.variants());
            }
        }
        variants.sort_unstable();
        variants.dedup();
        self.backend.kernels().prepare(&variants).await
    }

    /// Takes a step and puts its tables on the device, in the order of the queue: once for all layers, and before the pass that
    /// encodes them is submitted. Where something has to be bound anew, memory is allocated here.
    ///
    /// # Errors
    /// [`Error::Plan`] or [`Error::Elements`] when the step is not one of these layers, or has more tokens than the tensors;
    /// [`Error::OutOfMemory`], [`Error::Limit`] or [`Error::DeviceLost`] where something is bound anew.
    pub fn write<'a>(&'a mut self, step: &OpenStep<'a, Store, NonFiniteFlags>) -> Result<WrittenStep<'a>> {
        let layout = step.check(self.layers.len(), &self.rows)?;
        let plan = self.plan(step.plan)?;
        for layer in &self.layers {
            plan.check_rows(&layer.queries, &layer.output)?;
        }
        let same_stores = |bound: &Bound| Arc::ptr_eq(&bound.layout, layout) && bound.numbers == step.layers;
        let fits = |bound: &Bound| same_stores(bound) && plan.is_bound_like(&bound.plan);
        let bound_anew = !self.bound.as_ref().is_some_and(fits);
        let bound = match self.bound.take() {
            Some(bound) if !bound_anew => Bound { plan, ..bound },
            before => self.bind(step, plan, before)?,
        };
        let queue = self.backend.queue();
        guard::captured_now(self.backend.device(), Request::call("tables of a step"), || {
            queue.write_buffer(&bound.scratch.tables, 0, bound.plan.tables());
            bound.memory.write(queue, step.table)
        })??;
        Ok(WrittenStep { bound: self.bound.insert(bound), table: step.table, bound_anew })
    }

    fn plan(&self, plan: &AttendPlan) -> Result<StepPlan> {
        let input = self.layers[0].queries.element_type();
        let mut step = StepPlan::with_room(self.backend.capabilities(), plan, input, self.options)?;
        if let Some(rows) = self.query_rows {
            step = step.with_query_rows(rows);
        }
        if let Some(rows) = self.output_rows {
            step = step.with_output_rows(rows);
        }
        Ok(step)
    }

    /// Binds what has changed: stores and their table where the layout has, attention in any case.
    fn bind(&self, step: &OpenStep<'_, Store, NonFiniteFlags>, plan: StepPlan, before: Option<Bound>) -> Result<Bound> {
        let (backend, layout) = (&self.backend, step.table.layout());
        let (memory, stores, scratch) = match before {
            Some(Bound { layout: same, numbers, memory, stores, scratch, .. })
                if Arc::ptr_eq(&same, layout) && numbers == step.layers =>
            {
                (memory, stores, Some(scratch))
            }
            before => {
                let memory = StepMemory::new(backend.device(), layout)?;
                let pack = PackStepPlan::new(layout);
                let of_layer = |((&layer, tensors), stores): ((&usize, &LayerTensors), &Vec<&Store>)| {
                    let LayerTensors { keys, values, .. } = tensors;
                    let input = StepInput { keys, values, rows: self.rows, flags: step.flags, layer };
                    pack.bind_with_room(backend.kernels(), stores, &memory, input)
                };
                let layers = step.layers.iter().zip(&self.layers).zip(&step.stores);
                let bound = layers.map(of_layer).collect::<Result<_>>()?;
                (memory, bound, before.map(|before| before.scratch))
            }
        };
        let scratch = match scratch.filter(|scratch| scratch.holds(plan.scratch())) {
            Some(scratch) => scratch,
            None => Scratch::new_now(backend.device(), plan.scratch())?,
        };
        let of_layer = |(tensors, stores): (&LayerTensors, &Vec<&Store>)| {
            let tensors = StepTensors { queries: &tensors.queries, output: &tensors.output, lse: None };
            plan.bind_with_room(backend.kernels(), stores, &scratch, tensors)
        };
        let attention = self.layers.iter().zip(&step.stores).map(of_layer).collect::<Result<_>>()?;
        Ok(Bound { layout: layout.clone(), numbers: step.layers.to_vec(), memory, stores, plan, scratch, attention })
    }
}

/// Tiles of a span that is cut into more items than are merged without a launch of its own.
const MANY_TILES: u32 = 256;

impl WrittenStep<'_> {
    /// Whether memory was allocated and bind groups were made for this step.
    pub const fn bound_anew(&self) -> bool {
        self.bound_anew
    }

    /// Encodes what a layer stores, by its place among the layers of the step. It neither submits nor waits nor allocates.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub fn encode_store(&self, layer: usize, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        of_layer(&self.bound.stores, layer)?.encode(self.table, pass)
    }

    /// Encodes the attention of a layer, by its place among the layers of the step. It neither submits nor waits nor allocates.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub fn encode_attend(&self, layer: usize, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        of_layer(&self.bound.attention, layer)?.encode_grids(self.bound.plan.grids(), pass);
        Ok(())
    }

    /// Dispatches of a layer's attention.
    pub fn launches(&self) -> usize {
        self.bound.plan.grids().count()
    }
}
