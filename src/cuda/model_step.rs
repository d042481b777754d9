//! A step of a whole model: bound once, then only launched, or replayed from a graph.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUstreamCaptureStatus;

use super::attend::attend_step::{AttendStep, AttendTensors, prepare};
use super::attend::launch::BoundAttendStep;
use super::attend::model_tables::{ModelTables, PAGE_ADDRESSES};
use super::attend::scratch::{AttendScratch, Sizing};
use super::backend::Cuda;
use super::device::driver::driver_error;
use super::device::store::Store;
use super::device::tensor::Tensor;
use super::pack::non_finite_flags::NonFiniteFlags;
use super::pack::store_step::{BoundStoreStep, StoreStep};
use super::pack::write_memory::WriteMemory;
use crate::backend::{BoundClasses, OpenStep, StagedSpan, StepKind, StepKinds, StoredLayers, WriteInput, of_layer};
use crate::plan::{AttendPlan, QueryLayout, RowLayout, WriteLayout};
use crate::{Error, Result};

/// The tensors of one layer's step.
pub type LayerTensors = crate::backend::LayerTensors<Tensor>;

/// The steps of layers that share their page tables, on the engine's stream.
///
/// [`ModelStep::write`] takes the open step of a cache and queues two small tables, once for all layers. Its result
/// launches every layer between the engine's own kernels. Launches read their work from the tables, so a graph that
/// captured them all can be replayed while sequences grow. Kernels, scratch and tables last from step to step. They are
/// rebuilt when a store has grown or lengths have left their size class; classes are up to an eighth apart.
/// [`WrittenStep::bound_anew`] tells whether anything was rebuilt, and then the graph must be captured again. A step in
/// which a sequence of a centred recipe begins has a class of its own: it has one extra launch per store and layer,
/// which ordinary decode steps lack. An engine that [keeps](ModelStep::keeping) several classes finds the graph of its
/// decode steps again.
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
/// let open = cache.open_steps()?.remove(0); // layers of one shape and recipe
/// let step = steps.write(&open)?;
/// if step.bound_anew() || graph.is_none() {
///     backend.stream().begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
///     for layer in 0..open.layers.len() {
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
    bound: BoundClasses<Bound>,
    /// Number of classes that were bound so far.
    classes: u64,
}

/// The resources that all steps of one class use. Scratch memory and the memory of the step's table are shared with
/// other classes.
#[derive(Debug)]
struct Bound {
    class: u64,
    layout: Arc<WriteLayout>,
    /// The indices of the layers. Layers that were split off from one group share a layout, but not their stores.
    numbers: Vec<usize>,
    /// Whether its launches compute centres.
    begins: bool,
    /// Whether attention may overlap with the storing kernels.
    beside: bool,
    table: WriteMemory,
    plan: AttendStep,
    scratch: AttendScratch,
    tables: ModelTables,
    launches: Arc<ModelLaunches>,
}

/// The launches of all layers, with all memory that they read and write.
#[derive(Debug)]
struct ModelLaunches {
    stores: Vec<BoundStoreStep>,
    attention: Vec<BoundAttendStep>,
}

/// A step whose tables are queued, ready to be launched or captured.
#[derive(Clone, Debug)]
pub struct WrittenStep<'a> {
    backend: &'a Cuda,
    bound: &'a Bound,
    staged: &'a [StagedSpan],
    /// The stores of every layer that packs a part of a prompt.
    stores: Vec<Vec<&'a Store>>,
    stored: &'a StoredLayers,
    bound_anew: bool,
}

/// Keeps alive the memory that the launches of a step read and write. Hold it for as long as a graph that captured them
/// is replayed.
#[derive(Clone, Debug)]
pub struct LaunchMemory(#[expect(dead_code, reason = "held only to keep the launches alive")] Arc<ModelLaunches>);

impl ModelStep {
    /// Steps of layers with these tensors, whose keys and values have the layout `rows`.
    ///
    /// # Errors
    /// [`Error::Plan`] for no layers.
    pub fn new(backend: &Cuda, rows: RowLayout, layers: Vec<LayerTensors>) -> Result<Self> {
        if layers.is_empty() {
            return Err(Error::Plan { what: "step of a model", reason: "it needs at least one layer".into() });
        }
        let (backend, bound, lse) = (backend.clone(), BoundClasses::new(1), Vec::new());
        Ok(Self { backend, rows, layers, query_rows: None, output_rows: None, lse, bound, classes: 0 })
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

    /// The same steps, which keep the resources of `classes` classes of steps instead of only the last: for batches
    /// that alternate between sizes. An engine that captures graphs then keeps one for every [`WrittenStep::class`].
    #[must_use]
    pub fn keeping(self, classes: usize) -> Self {
        Self { bound: BoundClasses::new(classes), ..self }
    }

    /// The same steps for queries with this layout, instead of contiguous rows. Earlier bindings are rebuilt.
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

    /// Takes a step and queues its tables on the stream: once for all layers, before they or a graph of them are
    /// launched. The call itself must not be captured. If something must be bound again, it allocates memory, and
    /// compiles kernels that are missing.
    ///
    /// # Errors
    /// [`Error::Plan`] or [`Error::Elements`] when the step belongs to other layers, or has more tokens than the
    /// tensors; [`Error::Unsupported`] when it is to write log-sum-exps and keys are centred; [`Error::OutOfMemory`] or [`Error::Limit`] when binding again fails; errors of the driver from a copy.
    pub fn write<'a>(&'a mut self, step: &OpenStep<'a, Store, NonFiniteFlags>) -> Result<WrittenStep<'a>> {
        step.check(self.layers.len(), &self.rows)?;
        if !self.lse.is_empty() {
            step.check_not_centred()?;
        }
        let plan = self.plan(step.plan)?;
        for (place, LayerTensors { queries, output, .. }) in self.layers.iter().enumerate() {
            plan.check_rows(AttendTensors { queries, output, lse: self.lse.get(place) })?;
        }
        let begins = step.table.begins();
        let fits = |bound: &Bound| bound.is_over(step) && bound.begins == begins && plan.is_bound_like(&bound.plan);
        let kept = self.bound.take(fits);
        let bound_anew = kept.is_none();
        let mut bound = match kept {
            Some(bound) => Bound { plan, ..bound },
            None => self.bind(step, plan)?,
        };
        bound.table.write(self.backend.stream(), step.table)?;
        bound.tables.write(&bound.plan, bound.beside.then_some(step.table))?;
        let Self { backend, bound: classes, .. } = self;
        let (bound, staged, stored) = (classes.put(bound), step.staged, step.stored);
        let stores = if staged.is_empty() { Vec::new() } else { step.stores.clone() };
        Ok(WrittenStep { backend, bound, staged, stores, stored, bound_anew })
    }

    fn plan(&self, plan: &AttendPlan) -> Result<AttendStep> {
        let mut step = AttendStep::new(&self.backend, plan)?;
        step.check_seen()?;
        if let Some(rows) = self.query_rows {
            step = step.with_query_layout(rows);
        }
        if let Some(rows) = self.output_rows {
            step = step.with_output_layout(rows);
        }
        Ok(step)
    }

    fn bind(&mut self, step: &OpenStep<'_, Store, NonFiniteFlags>, plan: AttendStep) -> Result<Bound> {
        let (backend, layout) = (&self.backend, step.table.layout());
        let begins = step.table.begins();
        // Drops what was bound before a store grew.
        self.bound.retain(|bound| bound.numbers != step.layers || bound.is_over(step));
        let table = match self.bound.iter().find(|bound| bound.is_over(step)) {
            Some(bound) => bound.table.clone(),
            None => WriteMemory::new(backend.stream(), layout)?,
        };
        // Steps run in the order of the stream, so they may share scratch.
        let sizes = plan.sizes(Sizing::Classes);
        let scratch = match self.bound.iter().find(|bound| bound.scratch.holds(&sizes)) {
            Some(bound) => bound.scratch.clone(),
            None => AttendScratch::new(backend.stream(), &sizes)?,
        };
        let tables = ModelTables::new(backend, &plan, &step.stores, layout.shape().query_heads())?;
        let pack = StoreStep::new(layout);
        let mut launches = ModelLaunches { stores: Vec::new(), attention: Vec::new() };
        for (place, (tensors, stores)) in self.layers.iter().zip(&step.stores).enumerate() {
            let LayerTensors { keys, values, queries, output } = tensors;
            let layer = step.layers[place];
            let input = WriteInput { keys, values, rows: self.rows, flags: step.flags, layer };
            launches.stores.push(pack.bind_with_room(backend, stores, &table, input, begins)?);
            let tensors = AttendTensors { queries, output, lse: self.lse.get(place) };
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
        self.bound.class
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
        let attention = of_layer(&self.bound.launches.attention, layer)?;
        let beside = self.bound.beside && self.is_for_graphs();
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
        of_layer(&self.bound.launches.stores, layer)?.launch()?;
        if let Some(stores) = self.stores.get(layer) {
            self.staged.iter().try_for_each(|span| self.backend.pack_staged(stores, span))?;
        }
        self.stored.mark(self.bound.numbers[layer]);
        Ok(())
    }

    /// Whether a graph may capture the launches, and be replayed for steps of the class. It may not where the step packs
    /// a part of a prompt as a span ([`TokenRun::prompt`](crate::cache::TokenRun::prompt) in a recipe that keeps appended
    /// tokens in f16): the pages of spans are no table.
    pub const fn is_for_graphs(&self) -> bool {
        self.staged.is_empty()
    }

    /// Notes that a graph which captured these launches was replayed for this step: all its layers have stored their
    /// tokens, and the step can be committed. Notes nothing for a step that is [not for
    /// graphs](WrittenStep::is_for_graphs).
    pub fn replayed(&self) {
        if !self.is_for_graphs() {
            return;
        }
        self.bound.numbers.iter().for_each(|&layer| self.stored.mark(layer));
    }

    /// Launches the attention of a layer, by its place among the layers of the step. It reads what the step stores, so
    /// [`WrittenStep::launch_store`] of the same step and layer must precede it on the stream. Does not allocate or
    /// wait.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer; errors of the driver from a launch.
    pub fn launch_attend(&self, layer: usize) -> Result<()> {
        of_layer(&self.bound.launches.attention, layer)?.launch()
    }

    /// Keeps the memory of the launches alive. Hold it as long as a graph that captured them may be replayed.
    pub fn memory(&self) -> LaunchMemory {
        LaunchMemory(self.bound.launches.clone())
    }
}

/// Whether a graph captures the stream.
fn is_capturing(stream: &CudaStream) -> Result<bool> {
    let status = stream.capture_status().map_err(|error| driver_error("capture status", 0, error))?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}
