//! A step of a whole model: bound once, then only launched, or replayed from a graph.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUstreamCaptureStatus;

use super::attend::attend_step::{AttendStep, AttendTensors};
use super::attend::launch::BoundAttendStep;
use super::attend::model_tables::{ModelTables, PAGE_ADDRESSES};
use super::attend::prepare::prepare;
use super::attend::scratch::{AttendScratch, Sizing};
use super::backend::Cuda;
use super::device::driver::driver_error;
use super::device::store::Store;
use super::device::tensor::Tensor;
use super::pack::non_finite_flags::NonFiniteFlags;
use super::pack::store_step::{BoundStoreStep, StoreStep};
use super::pack::write_memory::WriteMemory;
use crate::backend::{
    BoundClasses, LayerPlace, OpenStep, StagedSpan, StepKind, StepKinds, StepLayers, StoredLayers, WriteInput, of_layer,
};
use crate::plan::{AttendPlan, QueryLayout, RowLayout, WriteLayout};
use crate::{Error, Result};

/// The tensors of one layer's step.
pub type LayerTensors = crate::backend::LayerTensors<Tensor>;

/// The steps of a model's layers, on the engine's stream.
///
/// [`ModelStep::write`] takes the open step of a cache, with all its parts, and queues two small tables for every part.
/// A step has one part where layers share their page tables, and as many as layers once they hold different numbers of
/// tokens ([`ModelCache::open_steps`](crate::cache::ModelCache::open_steps)); layers of different shapes need a
/// `ModelStep` each. Its result launches every layer between the engine's own kernels. Launches read their work from
/// the tables, so a graph that captured them all can be replayed while sequences grow. Kernels, scratch and tables last
/// from step to step. They are rebuilt when a store has grown or lengths have left their size class; classes are up to
/// an eighth apart. [`WrittenStep::bound_anew`] tells whether anything was rebuilt, and then the graph must be captured
/// again. A step in which a sequence of a centred recipe begins has a class of its own: it has one extra launch per
/// store and layer, which ordinary decode steps lack. An engine that [keeps](ModelStep::keeping) several classes finds
/// the graph of its decode steps again.
///
/// ```no_run
/// use kvpack::cache::{ModelCache, TokenRun};
/// use kvpack::cuda::{Cuda, LayerTensors, ModelStep, Tensor};
/// use kvpack::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL};
/// use kvpack::plan::RowLayout;
/// # fn example(backend: &Cuda, cache: &mut ModelCache<Cuda>, tensors: Vec<LayerTensors>) -> Result<(), Box<dyn std::error::Error>> {
/// // Once: 64 sequences, the tensors of every layer.
/// let rows = RowLayout::token_major(64, cache.shape(0)?);
/// let mut steps = ModelStep::new(backend, rows, tensors)?;
/// steps.prepare(&*cache)?;
/// let mut graph = None;
///
/// // Every step:
/// let runs: Vec<TokenRun> = (0..64).map(TokenRun::decode).collect();
/// cache.begin_append(&runs)?;
/// let open = cache.open_steps()?;
/// let step = steps.write(&open)?;
/// if step.bound_anew() || graph.is_none() {
///     backend.stream().begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
///     for layer in 0..cache.layers() {
///         // The engine's kernels: keys, values and queries of the layer.
///         step.launch(layer)?;
///         // The engine's kernels: what becomes of the output.
///     }
///     graph = backend.stream().end_capture(CUgraphInstantiate_flags(0))?.map(|graph| (graph, step.memory()));
/// }
/// if let Some((graph, _)) = &graph {
///     graph.launch()?;
///     step.replayed();
/// }
/// drop(open);
/// cache.commit()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ModelStep {
    backend: Cuda,
    rows: RowLayout,
    layers: Vec<LayerTensors>,
    query_rows: Option<QueryLayout>,
    output_rows: Option<QueryLayout>,
    /// Log-sum-exps of every layer, or none.
    lse: Vec<Tensor>,
    /// What is bound for parts, by their first layer.
    bound: Vec<BoundClasses<Bound>>,
    /// The classes of steps, by those of their parts, the newest last.
    steps: Vec<(Vec<u64>, u64)>,
    /// Number of classes of parts and of steps so far.
    classes: u64,
}

/// Number of classes of steps whose numbers are remembered.
const KNOWN_STEPS: usize = 64;

/// The resources that all steps of one class use in a part. Scratch memory and the memory of the step's table are
/// shared with other classes, and scratch memory with other parts.
#[derive(Debug)]
pub(super) struct Bound {
    class: u64,
    layout: Arc<WriteLayout>,
    /// The indices of the layers. Layers that were split off from one group share a layout, but not their stores.
    numbers: Vec<usize>,
    /// Whether its launches compute centres.
    begins: bool,
    /// Whether attention may overlap with the storing kernels.
    pub(super) beside: bool,
    table: WriteMemory,
    pub(super) plan: AttendStep,
    scratch: AttendScratch,
    tables: ModelTables,
    pub(super) launches: Arc<ModelLaunches>,
}

/// The launches of all layers, with all memory that they read and write.
#[derive(Debug)]
pub(super) struct ModelLaunches {
    pub(super) stores: Vec<BoundStoreStep>,
    pub(super) attention: Vec<BoundAttendStep>,
}

/// A step whose tables are queued, ready to be launched or captured. Layers are counted over all parts of the step, in
/// the order of their indices in the model: where the step has all layers of a model, a layer's place is its index.
#[derive(Clone, Debug)]
pub struct WrittenStep<'a> {
    backend: &'a Cuda,
    pub(super) parts: Vec<WrittenPart<'a>>,
    pub(super) layers: StepLayers,
    class: u64,
    bound_anew: bool,
}

/// Layers of the step that share their page tables.
#[derive(Clone, Debug)]
pub(super) struct WrittenPart<'a> {
    pub(super) bound: &'a Bound,
    staged: &'a [StagedSpan],
    /// The stores of every layer that packs a part of a prompt.
    stores: Vec<Vec<&'a Store>>,
    stored: &'a StoredLayers,
}

/// Keeps alive the memory that the launches of a step read and write. Hold it for as long as a graph that captured them
/// is replayed.
#[derive(Clone, Debug)]
pub struct LaunchMemory(#[expect(dead_code, reason = "held only to keep the launches alive")] Vec<Arc<ModelLaunches>>);

impl ModelStep {
    /// Steps of layers with these tensors, whose keys and values have the layout `rows`.
    ///
    /// # Errors
    /// [`Error::Plan`] for no layers.
    pub fn new(backend: &Cuda, rows: RowLayout, layers: Vec<LayerTensors>) -> Result<Self> {
        if layers.is_empty() {
            return Err(Error::Plan { what: "step of a model", reason: "it needs at least one layer".into() });
        }
        let bound = layers.iter().map(|_| BoundClasses::new(1)).collect();
        Ok(Self {
            backend: backend.clone(),
            rows,
            layers,
            query_rows: None,
            output_rows: None,
            lse: Vec::new(),
            bound,
            steps: Vec::new(),
            classes: 0,
        })
    }

    /// The same steps, which also write the natural log-sum-exp of the scores of every query and head: f32
    /// `[rows, query_heads]`, a tensor for each layer. With it an engine merges the output with attention to tokens
    /// that lie elsewhere. Layers that run one after the other may share a tensor.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is not one tensor for each layer, [`Error::Buffer`] when one is not f32.
    pub fn with_log_sum_exps(mut self, lse: Vec<Tensor>) -> Result<Self> {
        crate::backend::check_log_sum_exps(self.layers.len(), lse.iter().map(Tensor::element_type))?;
        self.drop_bound();
        Ok(Self { lse, ..self })
    }

    /// The same steps, which keep the resources of `classes` classes of steps instead of only the last: for batches
    /// that alternate between sizes. An engine that captures graphs then keeps one for every [`WrittenStep::class`].
    #[must_use]
    pub fn keeping(self, classes: usize) -> Self {
        let bound = self.layers.iter().map(|_| BoundClasses::new(classes)).collect();
        Self { bound, ..self }
    }

    /// The same steps for queries with this layout, instead of contiguous rows. Earlier bindings are rebuilt.
    #[must_use]
    pub fn with_query_layout(mut self, rows: QueryLayout) -> Self {
        self.drop_bound();
        Self { query_rows: Some(rows), ..self }
    }

    /// The same steps for outputs with this layout, instead of contiguous rows.
    #[must_use]
    pub fn with_output_layout(mut self, rows: QueryLayout) -> Self {
        self.drop_bound();
        Self { output_rows: Some(rows), ..self }
    }

    /// Compiles every kernel that decode steps of a cache can use, or reads it from the kernel cache, so that serving a
    /// model never compiles. It takes a `&ModelCache`, or the kind of some of its layers
    /// ([`ModelCache::step_kind`](crate::cache::ModelCache::step_kind)). [`ModelStep::prepare_chunks`] does so for
    /// chunks of prompts.
    ///
    /// # Errors
    /// Errors from compiling kernels; [`Error::Limit`] for a format that does not fit the device.
    pub fn prepare(&self, of: impl StepKinds) -> Result<()> {
        self.prepare_chunks(of, 1)
    }

    /// As [`ModelStep::prepare`], for steps with chunks of up to `longest` tokens: compiles kernels that take several
    /// queries of a sequence at a time.
    ///
    /// # Errors
    /// As [`ModelStep::prepare`].
    pub fn prepare_chunks(&self, of: impl StepKinds, longest: usize) -> Result<()> {
        let page_addresses = ModelTables::program();
        self.backend.kernels().function(&page_addresses, PAGE_ADDRESSES)?;
        for StepKind { layout, stores, attention, .. } in of.step_kinds() {
            StoreStep::new(layout).prepare(&self.backend)?;
            prepare(&self.backend, layout.shape(), (stores, attention), longest)?;
        }
        Ok(())
    }

    /// Takes the parts of a step and queues their tables on the stream: once for all layers of a part, before they or a
    /// graph of them are launched. The call itself must not be captured. If something must be bound again, it allocates
    /// memory, and compiles kernels that are missing.
    ///
    /// # Errors
    /// [`Error::Plan`] or [`Error::Elements`] when the parts have other layers, or more tokens than the tensors;
    /// [`Error::Unsupported`] when the step is to write log-sum-exps and keys are centred; [`Error::OutOfMemory`] or
    /// [`Error::Limit`] when binding again fails; errors of the driver from a copy.
    pub fn write<'a>(&'a mut self, parts: &[OpenStep<'a, Store, NonFiniteFlags>]) -> Result<WrittenStep<'a>> {
        let layers = StepLayers::of(parts, self.layers.len())?;
        let by_part = layers.by_part(parts.len());
        let plans = parts.iter().zip(by_part.iter()).map(|(part, layers)| self.plan_part(part, layers));
        let plans = plans.collect::<Result<Vec<_>>>()?;
        let mut bound_anew = false;
        for ((part, layers), plan) in parts.iter().zip(by_part.iter()).zip(plans) {
            let begins = part.table.begins();
            let fits = |bound: &Bound| bound.is_over(part) && bound.begins == begins && plan.is_bound_like(&bound.plan);
            let kept = self.bound[layers[0]].take(fits);
            bound_anew |= kept.is_none();
            let mut bound = match kept {
                Some(bound) => Bound { plan, ..bound },
                None => self.bind(part, plan, layers)?,
            };
            bound.table.write(self.backend.stream(), part.table)?;
            bound.tables.write(&bound.plan, bound.beside.then_some(part.table))?;
            self.bound[layers[0]].put(bound);
        }
        let bound = &self.bound;
        let classes = by_part.iter().filter_map(|layers| bound[layers[0]].newest()).map(|bound| bound.class).collect();
        let class = self.class_of(classes);
        let Self { backend, bound, .. } = &*self;
        let written = |(part, layers): (&OpenStep<'a, Store, NonFiniteFlags>, &[usize])| {
            let stores = if part.staged.is_empty() { Vec::new() } else { part.stores.clone() };
            let bound = bound[layers[0]].newest()?;
            Some(WrittenPart { bound, staged: part.staged, stores, stored: part.stored })
        };
        let parts = parts.iter().zip(by_part.iter()).filter_map(written).collect();
        Ok(WrittenStep { backend, parts, layers, class, bound_anew })
    }

    /// The number of the class of steps whose parts have these classes.
    fn class_of(&mut self, parts: Vec<u64>) -> u64 {
        let known = self.steps.iter().position(|(of, _)| *of == parts).map(|place| self.steps.remove(place));
        let step = known.unwrap_or_else(|| {
            self.classes += 1;
            (parts, self.classes)
        });
        if self.steps.len() >= KNOWN_STEPS {
            self.steps.remove(0);
        }
        let class = step.1;
        self.steps.push(step);
        class
    }

    fn drop_bound(&mut self) {
        self.bound.iter_mut().for_each(|classes| classes.retain(|_| false));
    }

    /// Plans a part of a step, whose layers are these of all.
    fn plan_part(&self, part: &OpenStep<'_, Store, NonFiniteFlags>, layers: &[usize]) -> Result<AttendStep> {
        part.check(&self.rows)?;
        if !self.lse.is_empty() {
            part.check_not_centred()?;
        }
        let plan = self.plan(part.plan)?;
        for &layer in layers {
            let LayerTensors { queries, output, .. } = &self.layers[layer];
            plan.check_rows(AttendTensors { queries, output, lse: self.lse.get(layer) })?;
        }
        Ok(plan)
    }

    fn plan(&self, plan: &AttendPlan) -> Result<AttendStep> {
        let mut step = AttendStep::new(&self.backend, plan)?;
        if let Some(rows) = self.query_rows {
            step = step.with_query_layout(rows);
        }
        if let Some(rows) = self.output_rows {
            step = step.with_output_layout(rows);
        }
        Ok(step)
    }

    fn bind(
        &mut self,
        step: &OpenStep<'_, Store, NonFiniteFlags>,
        plan: AttendStep,
        layers: &[usize],
    ) -> Result<Bound> {
        let (backend, layout) = (&self.backend, step.table.layout());
        let begins = step.table.begins();
        // Drops what was bound before a store grew, or when these layers were in other parts.
        let is_current =
            |bound: &Bound| bound.is_over(step) || !bound.numbers.iter().any(|number| step.layers.contains(number));
        self.bound.iter_mut().for_each(|classes| classes.retain(is_current));
        let table = match self.bound[layers[0]].iter().find(|bound| bound.is_over(step)) {
            Some(bound) => bound.table.clone(),
            None => WriteMemory::new(backend.stream(), layout)?,
        };
        // Steps and layers run in the order of the stream, so they may share scratch.
        let sizes = plan.sizes(Sizing::Classes);
        let scratch = match self.bound.iter().flat_map(BoundClasses::iter).find(|bound| bound.scratch.holds(&sizes)) {
            Some(bound) => bound.scratch.clone(),
            None => AttendScratch::new(backend.stream(), &sizes)?,
        };
        let tables = ModelTables::new(backend, &plan, &step.stores, layout.shape().query_heads())?;
        let pack = StoreStep::new(layout);
        // A row of queries for every token. Steps that share the bindings have as many rows, or some fewer.
        let room = (Sizing::Classes.of(plan.rows()), begins);
        let mut launches = ModelLaunches { stores: Vec::new(), attention: Vec::new() };
        for (place, (&layer, stores)) in layers.iter().zip(&step.stores).enumerate() {
            let LayerTensors { keys, values, queries, output } = &self.layers[layer];
            let input = WriteInput { keys, values, rows: self.rows, flags: step.flags, layer: step.layers[place] };
            launches.stores.push(pack.bind_with_room(backend, stores, &table, input, room)?);
            let tensors = AttendTensors { queries, output, lse: self.lse.get(layer) };
            launches.attention.push(plan.bind_to(backend, stores, tensors, &scratch, &tables.of_layer(place))?);
        }
        let beside = plan.begins_beside_storing(backend.kernels().facts())
            && launches.stores.iter().all(BoundStoreStep::appends);
        self.classes += 1;
        Ok(Bound {
            class: self.classes,
            layout: layout.clone(),
            numbers: step.layers.to_vec(),
            begins,
            beside,
            table,
            plan,
            scratch,
            tables,
            launches: Arc::new(launches),
        })
    }
}

impl Bound {
    /// Whether it was bound to the stores of a step.
    fn is_over(&self, step: &OpenStep<'_, Store, NonFiniteFlags>) -> bool {
        Arc::ptr_eq(&self.layout, step.table.layout()) && self.numbers == step.layers
    }
}

impl WrittenStep<'_> {
    /// Whether this step allocated memory, so that a graph must be captured again.
    pub const fn bound_anew(&self) -> bool {
        self.bound_anew
    }

    /// The number of the step's class. Steps of one class have the same launches, and therefore the same graph. A
    /// number is never used twice.
    pub const fn class(&self) -> u64 {
        self.class
    }

    /// Launches the writes of a layer and, right behind them, its attention, by its place among the layers of the step.
    /// Does not allocate or wait. Keys, values and queries must be complete before: attention may overlap with the
    /// storing kernels, which saves up to a few microseconds compared with [`WrittenStep::launch_store`] and
    /// [`WrittenStep::launch_attend`].
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer; errors of the driver from a launch.
    pub fn launch(&self, layer: usize) -> Result<()> {
        self.launch_store(layer)?;
        let (part, place) = self.part(layer)?;
        let attention = of_layer(&part.bound.launches.attention, place)?;
        let beside = part.bound.beside && self.is_for_graphs() && !attention.writes_unseen_rows();
        if beside { attention.launch_beside_storing() } else { attention.launch() }
    }

    /// Launches the writes of a layer, by its place among the layers of the step. Does not wait, and does not allocate
    /// unless the step packs a part of a prompt as a span: such a step is [not for
    /// graphs](WrittenStep::is_for_graphs).
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer, or a graph is captured that cannot hold the step; errors of the
    /// driver from a launch; [`Error::OutOfMemory`].
    pub fn launch_store(&self, layer: usize) -> Result<()> {
        if !self.is_for_graphs() && is_capturing(self.backend.stream())? {
            let reason = "it packs a part of a prompt as a span; launch such steps without a graph".into();
            return Err(Error::Plan { what: "graph of a step", reason });
        }
        let (part, place) = self.part(layer)?;
        of_layer(&part.bound.launches.stores, place)?.launch()?;
        if let Some(stores) = part.stores.get(place) {
            part.staged.iter().try_for_each(|span| self.backend.pack_staged(stores, span))?;
        }
        part.stored.mark(part.bound.numbers[place]);
        Ok(())
    }

    /// Whether a graph may capture the launches, and be replayed for steps of the class. It may not where the step packs
    /// a part of a prompt as a span ([`TokenRun::prompt`](crate::cache::TokenRun::prompt) in a recipe that keeps appended
    /// tokens in f16): the pages of spans are no table.
    pub fn is_for_graphs(&self) -> bool {
        self.parts.iter().all(|part| part.staged.is_empty())
    }

    /// Notes that a graph which captured these launches was replayed for this step: all its layers have stored their
    /// tokens, and the step can be committed. Notes nothing for a step that is [not for
    /// graphs](WrittenStep::is_for_graphs).
    pub fn replayed(&self) {
        if !self.is_for_graphs() {
            return;
        }
        self.parts.iter().for_each(|part| part.bound.numbers.iter().for_each(|&layer| part.stored.mark(layer)));
    }

    /// Launches the attention of a layer, by its place among the layers of the step. It reads what the step stores, so
    /// [`WrittenStep::launch_store`] of the same step and layer must precede it on the stream. Does not allocate or
    /// wait.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer; errors of the driver from a launch.
    pub fn launch_attend(&self, layer: usize) -> Result<()> {
        let (part, place) = self.part(layer)?;
        of_layer(&part.bound.launches.attention, place)?.launch()
    }

    /// Keeps the memory of the launches alive. Hold it as long as a graph that captured them may be replayed.
    pub fn memory(&self) -> LaunchMemory {
        LaunchMemory(self.parts.iter().map(|part| part.bound.launches.clone()).collect())
    }

    /// The part of a layer, and its place there.
    fn part(&self, layer: usize) -> Result<(&WrittenPart<'_>, usize)> {
        let LayerPlace { part, place } = self.layers.place(layer)?;
        Ok((of_layer(&self.parts, part)?, place))
    }
}

/// Whether a graph captures the stream.
fn is_capturing(stream: &CudaStream) -> Result<bool> {
    let status = stream.capture_status().map_err(|error| driver_error("capture status", 0, error))?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}
