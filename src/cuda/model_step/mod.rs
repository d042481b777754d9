//! A step of a whole model: bound once, then only launched, or replayed from a graph.

mod part;
mod written;

use part::{PartClass, PlannedPart};
use written::PackedParts;

use super::attend::attend_step::AttendStep;
use super::attend::prepare::prepare;
use super::backend::Cuda;
use super::device::page_format::PageFormat;
use super::device::store::Store;
use super::device::tensor::Tensor;
use super::pack::non_finite_flags::NonFiniteFlags;
use super::pack::store_step::StoreStep;
use super::table_upload::TableUpload;
use crate::Result;
use crate::backend::{BoundParts, OpenStep, StepClasses, StepKind, StepKinds, StepLayers, StepTensors};
use crate::format::AttentionShape;
use crate::plan::{PlannedRun, QueryLayout, RowLayout, StoreFormat};

pub(super) use part::ModelLaunches;
pub(super) use written::Part;
pub use written::{LaunchMemory, WrittenStep};

/// The tensors of one layer's step.
pub type LayerTensors = crate::backend::LayerTensors<Tensor>;

/// The steps of a model's layers, on the engine's stream.
///
/// [`ModelStep::write`] takes the open step of a cache, with all its parts, and queues two small tables for every part,
/// all of them in one copy. A step has one part where layers share their page tables, and as many as layers once they hold different numbers of
/// tokens ([`ModelCache::open_steps`](crate::cache::ModelCache::open_steps)); layers of different shapes need a
/// `ModelStep` each. Its result launches every layer between the engine's own kernels. Launches read their work from
/// the tables, so a graph that captured them all can be replayed while sequences grow. Kernels, scratch and tables last
/// from step to step. They are rebuilt when a store has grown or lengths have left their size class; classes are up to
/// an eighth apart. A step that was bound again has another [`WrittenStep::class`], and so has a step of other rows. A
/// graph serves the steps of its class. A step in which a sequence of a centred recipe begins has a class of its own: it
/// has one extra launch per store and layer, which ordinary decode steps lack. An engine that [keeps](ModelStep::keeping) several classes finds
/// the graph of its decode steps again.
///
/// ```no_run
/// use std::collections::HashMap;
///
/// use kvpack::cache::{ModelCache, TokenRun};
/// use kvpack::cuda::{Cuda, LayerTensors, ModelStep, Tensor};
/// use kvpack::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL};
/// use kvpack::plan::RowLayout;
/// # fn example(backend: &Cuda, cache: &mut ModelCache<Cuda>, tensors: Vec<LayerTensors>) -> Result<(), Box<dyn std::error::Error>> {
/// // Once: 64 sequences, the tensors of every layer.
/// let rows = RowLayout::token_major(64, cache.shape(0)?);
/// let mut steps = ModelStep::new(backend, rows, tensors)?;
/// steps.prepare(&*cache)?;
/// let mut graphs = HashMap::new();
///
/// // Every step:
/// let runs: Vec<TokenRun> = (0..64).map(TokenRun::decode).collect();
/// cache.begin_append(&runs)?;
/// let open = cache.open_steps()?;
/// let step = steps.write(&open)?;
/// if !graphs.contains_key(&step.class()) {
///     graphs.clear();
///     backend.stream().begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
///     for layer in 0..cache.layers() {
///         // The engine's kernels: keys, values and queries of the layer.
///         step.launch(layer)?;
///         // The engine's kernels: what becomes of the output.
///     }
///     let graph = backend.stream().end_capture(CUgraphInstantiate_flags(0))?;
///     graphs.extend(graph.map(|graph| (step.class(), (graph, step.memory()))));
/// }
/// if let Some((graph, _)) = graphs.get(&step.class()) {
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
    tensors: StepTensors<Tensor>,
    bound: BoundParts<PartClass>,
    classes: StepClasses,
    upload: TableUpload,
    /// Whether something was bound that no written step has told.
    bound_anew: bool,
}

impl ModelStep {
    /// Steps of layers with these tensors, whose keys and values have the layout `rows`.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) for no layers.
    pub fn new(backend: &Cuda, rows: RowLayout, layers: Vec<LayerTensors>) -> Result<Self> {
        let bound = BoundParts::new(layers.len(), 1);
        let (tensors, classes) = (StepTensors::new(rows, layers)?, StepClasses::default());
        let upload = TableUpload::default();
        Ok(Self { backend: backend.clone(), tensors, bound, classes, upload, bound_anew: false })
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

    /// The same steps, which keep the resources of `classes` classes of steps instead of only the last: for batches
    /// that alternate between sizes. An engine that captures graphs then keeps one for every [`WrittenStep::class`].
    #[must_use]
    pub fn keeping(self, classes: usize) -> Self {
        Self { bound: BoundParts::new(self.tensors.layers().len(), classes), ..self }
    }

    /// The same steps for queries with this layout, instead of contiguous rows. Earlier bindings are rebuilt.
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

    /// Compiles every kernel that decode steps of a cache can use, or reads it from the kernel cache, so that serving a
    /// model never compiles. It takes a `&ModelCache`, or the kind of some of its layers
    /// ([`ModelCache::step_kind`](crate::cache::ModelCache::step_kind)). [`ModelStep::prepare_chunks`] does so for
    /// chunks of prompts.
    ///
    /// # Errors
    /// Errors from compiling kernels; [`Error::Limit`](crate::Error::Limit) for a format that does not fit the device.
    pub fn prepare(&self, of: impl StepKinds) -> Result<()> {
        self.prepare_chunks(of, 1)
    }

    /// As [`ModelStep::prepare`], for steps with chunks of up to `longest` tokens: compiles kernels that take several
    /// queries of a sequence at a time.
    ///
    /// # Errors
    /// As [`ModelStep::prepare`].
    pub fn prepare_chunks(&self, of: impl StepKinds, longest: usize) -> Result<()> {
        let (program, kernel) = TableUpload::kernel();
        self.backend.kernels().function(&program, kernel)?;
        for StepKind { layout, stores, attention, .. } in of.step_kinds() {
            StoreStep::new(layout).prepare(&self.backend)?;
            prepare(&self.backend, layout.shape(), (stores, attention), longest)?;
            if longest > 1 && stores.len() > 1 {
                self.prepare_spans(layout.shape(), stores)?;
            }
        }
        Ok(())
    }

    /// Compiles what packs parts of prompts as spans: f16 pages are read back, and packed pages written.
    fn prepare_spans(&self, shape: &AttentionShape, stores: &[StoreFormat]) -> Result<()> {
        stores.iter().try_for_each(|store| {
            let program = PageFormat::new(shape, &store.format)?.rows_program();
            self.backend.kernels().function(&program, "quantize_keys").map(drop)
        })
    }

    /// Takes the parts of a step and queues their tables on the stream: a copy and a small kernel for all parts, before
    /// they or a graph of them are launched. The call itself must not be captured. If something must be bound again, it allocates
    /// memory, and compiles kernels that are missing.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) or [`Error::Elements`](crate::Error::Elements) when the parts have other
    /// layers, or more tokens than the tensors;
    /// [`Error::Unsupported`](crate::Error::Unsupported) when the step is to write log-sum-exps and keys are centred; [`Error::OutOfMemory`](crate::Error::OutOfMemory) or
    /// [`Error::Limit`](crate::Error::Limit) when binding again fails; errors of the driver from a copy.
    pub fn write<'a>(&'a mut self, parts: &[OpenStep<'a, Store, NonFiniteFlags>]) -> Result<WrittenStep<'a>> {
        let layers = StepLayers::of(parts, self.tensors.layers().len())?;
        let by_part = layers.by_part(parts.len());
        let plans = parts.iter().zip(by_part.iter()).map(|(part, layers)| self.plan_part(part, layers));
        let plans = plans.collect::<Result<Vec<_>>>()?;
        let mut bound_anew = false;
        self.upload.clear();
        for ((part, layers), planned) in parts.iter().zip(by_part.iter()).zip(plans) {
            let Self { backend, tensors, bound, classes, upload, .. } = self;
            bound_anew |= bound.serve((part, layers[0]), planned, |bound, planned| {
                PartClass::bind((&*backend, &*tensors), (part, layers), planned, (bound, classes.give()))
            })?;
            if let Some(bound) = bound.newest_mut(layers[0]) {
                bound.class.stage(part.table, upload)?;
            }
        }
        // A step that was written tells it, also what earlier calls bound before they failed.
        self.bound_anew |= bound_anew;
        self.upload.send(&self.backend)?;
        let bound_anew = std::mem::take(&mut self.bound_anew);
        let newest = || by_part.iter().filter_map(|layers| self.bound.newest(layers[0]));
        newest().for_each(|bound| bound.class.note_rows());
        // What is bound for a step that stores nothing may serve one that stores, but their graphs differ. Steps of other
        // rows may share what is bound, too, and their graphs differ by the kernels of the engine.
        let stores = parts.iter().any(|part| part.table.tokens_needed() > 0);
        let rows = parts.first().map_or(0, |part| part.plan.rows());
        let numbers = newest().map(|bound| bound.class.number()).chain([u64::from(stores), rows as u64]).collect();
        let class = self.classes.of_step(numbers);
        let Self { backend, bound, .. } = &*self;
        let packed = |_: usize, part: &OpenStep<'a, Store, NonFiniteFlags>| PackedParts {
            staged: part.staged,
            stores: if part.staged.is_empty() { Vec::new() } else { part.stores.clone() },
        };
        let parts = bound.written(parts, (layers, &by_part), packed);
        Ok(WrittenStep { backend, parts, class, bound_anew })
    }

    /// Plans a part of a step, whose layers are these of all.
    fn plan_part(&self, part: &OpenStep<'_, Store, NonFiniteFlags>, layers: &[usize]) -> Result<PlannedPart> {
        self.tensors.check(part)?;
        let mut plan = AttendStep::new(&self.backend, part.plan)?;
        let [query_rows, output_rows] = self.tensors.layouts();
        if let Some(rows) = query_rows {
            plan = plan.with_query_layout(rows);
        }
        if let Some(rows) = output_rows {
            plan = plan.with_output_layout(rows);
        }
        layers.iter().try_for_each(|&layer| plan.check_rows(self.tensors.attended(layer)))?;
        // The kernel that attends stores a token where it reads it.
        let decodes = part.table.decodes(part.plan.rows()) && part.plan.runs().iter().all(PlannedRun::sees_newest);
        Ok(PlannedPart { plan, begins: part.table.begins(), decodes })
    }
}
