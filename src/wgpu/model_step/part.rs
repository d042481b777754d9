//! What is bound for a part of a step: layers that share their page tables.

use super::SharedMemory;
use super::step_tables::StepTables;
use crate::backend::{BoundClass, BoundPart, OpenStep, StepTensors, of_layer};
use crate::plan::{AttendPlan, WriteLayout, WriteTable};
use crate::wgpu::attend::{AttendStep, Scratch, StepOptions};
use crate::wgpu::backend::Wgpu;
use crate::wgpu::device::encoded::Encoders;
use crate::wgpu::device::{Launches, Store, Tensor};
use crate::wgpu::pack::{BoundStoreStep, NonFiniteFlags, StoreStep, WriteMemory, table_bytes};
use crate::{Error, Result};

/// The resources that all steps of one class use in a part. Buffers are shared with other classes and parts.
#[derive(Debug)]
pub(super) struct PartClass {
    /// Where its tables begin in a slot, those of what is stored, and then those of attention.
    first: u64,
    attend_at: u64,
    stores: Vec<BoundStoreStep>,
    /// Whose steps use the stores of a layer, by its place in the part.
    encoders: Vec<Vec<Encoders>>,
    plan: AttendStep,
    attention: Vec<Launches>,
}

/// A step of a part, and where its tables begin in a slot.
#[derive(Debug)]
pub(super) struct PlannedPart {
    pub(super) plan: AttendStep,
    pub(super) first: u64,
}

/// Where the tables of attention begin, in bytes behind those of what is stored.
pub(super) fn attend_tables_at(layout: &WriteLayout, alignment: u64) -> u64 {
    table_bytes(layout).next_multiple_of(alignment)
}

impl BoundClass for PartClass {
    type Planned = PlannedPart;

    fn serves(&self, planned: &PlannedPart) -> bool {
        self.first == planned.first && planned.plan.is_bound_like(&self.plan)
    }

    fn take_on(&mut self, planned: PlannedPart) {
        self.plan = planned.plan;
    }
}

impl PartClass {
    /// Serves the next step of its part by what it is bound to, if that differs from its own by a few tokens alone. If
    /// not, its own step is of no use any more: false, where the part has to be planned.
    pub(super) fn grow(&mut self, plan: &AttendPlan, options: StepOptions, first: u64) -> bool {
        self.first == first && self.plan.grow(plan, options)
    }

    pub(super) fn plan(&self) -> &AttendStep {
        &self.plan
    }

    pub(super) fn into_plan(self) -> AttendStep {
        self.plan
    }

    /// The tables of a step, and where they lie in a slot.
    pub(super) fn tables<'a>(&'a self, table: &'a WriteTable) -> [(u64, &'a [u8]); 2] {
        [(self.first, bytemuck::cast_slice(table.words())), (self.first + self.attend_at, self.plan.tables())]
    }

    /// The launches that store in a layer, by its place in the part.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub(super) fn store(&self, place: usize) -> Result<&BoundStoreStep> {
        of_layer(&self.stores, place)
    }

    /// Checks that all steps over a layer are submitted, but for this many of the engine's own.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer, [`Error::NotSubmitted`].
    pub(super) fn check_others_submitted(&self, place: usize, device: &wgpu::Device, own: usize) -> Result<()> {
        let mut stores = of_layer(&self.encoders, place)?.iter();
        stores.try_for_each(|store| store.check_others_submitted(device, "step of a layer", own))
    }

    /// The launches that attend in a layer, by its place in the part.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub(super) fn attention(&self, place: usize) -> Result<&Launches> {
        of_layer(&self.attention, place)
    }
}

/// The memory that classes are bound to.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartMemory<'a> {
    pub(super) backend: &'a Wgpu,
    pub(super) tensors: &'a StepTensors<Tensor>,
    pub(super) tables: &'a StepTables,
    pub(super) shared: &'a SharedMemory,
}

impl PartMemory<'_> {
    /// Binds a class of a part, whose layers are these of the step: attention always, stores only if none of the other
    /// classes has them.
    pub(super) fn bind<'b>(
        &self,
        (part, layers): (&OpenStep<'_, Store, NonFiniteFlags>, &[usize]),
        PlannedPart { plan, first }: PlannedPart,
        mut others: impl Iterator<Item = &'b BoundPart<PartClass>>,
    ) -> Result<PartClass> {
        let Self { backend, tensors, shared, .. } = *self;
        let layout = part.table.layout();
        let missing = |what: &'static str| Error::Plan { what, reason: "no memory was made for it".into() };
        let tables = self.tables.buffer().ok_or_else(|| missing("tables of a step"))?;
        let stores = match others.find(|bound| bound.class.first == first) {
            Some(bound) => bound.class.stores.clone(),
            None => {
                let steps = self.tables.slots().steps();
                part.stores.iter().flatten().for_each(|store| store.encoders().add(steps));
                part.flags.encoders().add(steps);
                let memory = WriteMemory::within((backend.device(), layout), (tables, first), shared.rotated.as_ref());
                let pack = StoreStep::new(layout);
                let of_layer = |((&number, &layer), stores): ((&usize, &usize), &Vec<&Store>)| {
                    let input = tensors.stored(layer, part.flags, number);
                    pack.bind_with_room(backend.kernels(), stores, &memory, input)
                };
                part.layers.iter().zip(layers).zip(&part.stores).map(of_layer).collect::<Result<_>>()?
            }
        };
        let scratch = shared.scratch.as_ref().ok_or_else(|| missing("scratch of a step"))?;
        let scratch = Scratch { tables: tables.clone(), ..Scratch::clone(scratch) };
        let attend_at = attend_tables_at(layout, backend.capabilities().limits.binding_alignment);
        let of_layer = |(&layer, stores): (&usize, &Vec<&Store>)| {
            plan.bind_with_room(backend.kernels(), stores, (&scratch, first + attend_at), tensors.attended(layer))
        };
        let attention = layers.iter().zip(&part.stores).map(of_layer).collect::<Result<_>>()?;
        let encoders_of = |stores: &Vec<&Store>| stores.iter().map(|store| store.encoders().clone()).collect();
        let encoders = part.stores.iter().map(encoders_of).collect();
        Ok(PartClass { first, attend_at, stores, encoders, plan, attention })
    }
}
