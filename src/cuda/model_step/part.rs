//! What is bound for a part of a step: layers that share their page tables.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use cudarc::driver::CudaStream;

use crate::Result;
use crate::backend::{BoundClass, BoundPart, BoundParts, OpenStep, StepTensors, of_layer};
use crate::cuda::attend::attend_step::AttendStep;
use crate::cuda::attend::launch::BoundAttendStep;
use crate::cuda::attend::model_tables::ModelTables;
use crate::cuda::attend::scratch::{AttendScratch, Sizing};
use crate::cuda::backend::Cuda;
use crate::cuda::device::store::Store;
use crate::cuda::device::tensor::Tensor;
use crate::cuda::pack::non_finite_flags::NonFiniteFlags;
use crate::cuda::pack::store_step::{BoundStoreStep, StoreStep};
use crate::cuda::pack::write_memory::WriteMemory;
use crate::cuda::table_upload::TableUpload;
use crate::plan::WriteTable;

/// The resources that all steps of one class use in a part. Scratch memory and the memory of the step's table are
/// shared with other classes, and scratch memory with other parts.
#[derive(Debug)]
pub(in crate::cuda) struct PartClass {
    number: u64,
    /// Whether its launches compute centres.
    begins: bool,
    /// Whether attention may overlap with the storing kernels.
    beside: bool,
    /// Whether every sequence decodes one token, which attention itself stores.
    stores: bool,
    table: WriteMemory,
    plan: AttendStep,
    scratch: AttendScratch,
    tables: ModelTables,
    launches: Arc<ModelLaunches>,
}

/// The launches of all layers, with all memory that they read and write.
#[derive(Debug)]
pub(in crate::cuda) struct ModelLaunches {
    stores: Vec<BoundStoreStep>,
    attention: Vec<BoundAttendStep>,
    /// Rows of the step that the tables hold. Steps of one class may have different numbers of them.
    rows: AtomicUsize,
}

impl ModelLaunches {
    /// Rows that the launches read and write.
    pub(in crate::cuda) fn rows(&self) -> usize {
        self.rows.load(Relaxed)
    }

    /// Those that store in a layer, by its place in the part.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when there is no such layer.
    pub(in crate::cuda) fn store(&self, place: usize) -> Result<&BoundStoreStep> {
        of_layer(&self.stores, place)
    }

    /// Those that attend in a layer, by its place in the part.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when there is no such layer.
    pub(in crate::cuda) fn attention(&self, place: usize) -> Result<&BoundAttendStep> {
        of_layer(&self.attention, place)
    }

    /// Launches attention that stores the tokens of the step itself, and what is launched before it. The tensors are
    /// keys and values, then queries and output.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer; errors of the driver from a launch.
    pub(in crate::cuda) fn store_and_attend(
        &self,
        place: usize,
        stream: &Arc<CudaStream>,
        tensors: Option<[[&Tensor; 2]; 2]>,
    ) -> Result<()> {
        let (rows, attended) = (tensors.map(|of| of[0]), tensors.map(|of| of[1]));
        match self.store(place)?.launch_before_append(stream, rows)? {
            Some(append) => self.attention(place)?.launch_storing(stream, append, attended),
            None => Ok(()),
        }
    }

    /// Whether some layer has queries that see no token.
    pub(in crate::cuda) fn write_unseen_rows(&self) -> bool {
        self.attention.iter().any(BoundAttendStep::writes_unseen_rows)
    }
}

/// A step of a part.
#[derive(Debug)]
pub(in crate::cuda) struct PlannedPart {
    pub(super) plan: AttendStep,
    /// Whether a sequence of a centred recipe begins with it.
    pub(super) begins: bool,
    /// Whether it decodes one token of every sequence, in the order of the queries, all into one store, and every query
    /// sees its own token.
    pub(super) decodes: bool,
}

impl BoundClass for PartClass {
    type Planned = PlannedPart;

    fn serves(&self, planned: &PlannedPart) -> bool {
        self.begins == planned.begins && (planned.decodes || !self.stores) && planned.plan.is_bound_like(&self.plan)
    }

    fn take_on(&mut self, planned: PlannedPart) {
        self.plan = planned.plan;
    }
}

impl PartClass {
    /// Binds a class of a part, whose layers are these of the step.
    ///
    /// # Errors
    /// Those of memory, and of kernels that are compiled.
    pub(super) fn bind(
        (backend, tensors): (&Cuda, &StepTensors<Tensor>),
        (part, layers): (&OpenStep<'_, Store, NonFiniteFlags>, &[usize]),
        PlannedPart { plan, begins, decodes }: PlannedPart,
        (others, number): (&BoundParts<Self>, u64),
    ) -> Result<Self> {
        let layout = part.table.layout();
        let table = match others.of(layers[0]).find(|bound| bound.is_over(part)) {
            Some(bound) => bound.class.table.clone(),
            None => WriteMemory::new(backend.stream(), layout)?,
        };
        // Steps and layers run in the order of the stream, so they may share scratch.
        let sizes = plan.sizes(Sizing::Classes);
        let holds = |bound: &&BoundPart<Self>| bound.class.scratch.holds(&sizes);
        let scratch = match others.iter().find(holds) {
            Some(bound) => bound.class.scratch.clone(),
            None => AttendScratch::new(backend.stream(), &sizes)?,
        };
        let tables = ModelTables::new(backend, &plan, &part.stores, layout.shape().query_heads())?;
        let pack = StoreStep::new(layout);
        // A row of queries for every token. Steps that share the bindings have as many rows, or some fewer.
        let room = (Sizing::Classes.of(plan.rows()), begins);
        let rows = AtomicUsize::new(plan.rows());
        let mut launches = ModelLaunches { stores: Vec::new(), attention: Vec::new(), rows };
        for (place, (&layer, stores)) in layers.iter().zip(&part.stores).enumerate() {
            let input = tensors.stored(layer, part.flags, part.layers[place]);
            launches.stores.push(pack.bind_with_room(backend, stores, &table, input, room)?);
            let attended = tensors.attended(layer);
            launches.attention.push(plan.bind_to(backend, stores, attended, &scratch, &tables.of_layer(place))?);
        }
        let beside = plan.begins_beside_storing(backend.kernels().facts())
            && launches.stores.iter().all(BoundStoreStep::appends);
        let both = || launches.attention.iter().zip(&launches.stores);
        let stores = beside && decodes && both().all(|(of, stores)| of.stores() && stores.last_append().is_some());
        Ok(Self { number, begins, beside, stores, table, plan, scratch, tables, launches: Arc::new(launches) })
    }

    /// Adds the tables of a step that it serves to what the step uploads.
    ///
    /// # Errors
    /// Those of tables that are not of this class.
    pub(super) fn stage(&mut self, table: &WriteTable, upload: &mut TableUpload) -> Result<()> {
        // If sending the tables fails, they hold this step or the one before it.
        self.launches.rows.fetch_max(self.plan.rows(), Relaxed);
        self.table.stage(table, upload)?;
        self.tables.stage(&self.plan, self.beside.then_some(table), upload)
    }

    /// Notes the rows of the step that it serves, whose tables were sent.
    pub(super) fn note_rows(&self) {
        self.launches.rows.store(self.plan.rows(), Relaxed);
    }

    /// Its number, which no other class has.
    pub(super) const fn number(&self) -> u64 {
        self.number
    }

    /// Whether attention may overlap with the storing kernels.
    pub(in crate::cuda) const fn beside(&self) -> bool {
        self.beside
    }

    /// Whether attention itself stores the tokens of the step.
    pub(in crate::cuda) const fn stores(&self) -> bool {
        self.stores
    }

    /// The step that it serves.
    pub(in crate::cuda) const fn plan(&self) -> &AttendStep {
        &self.plan
    }

    pub(in crate::cuda) const fn launches(&self) -> &Arc<ModelLaunches> {
        &self.launches
    }
}
