//! What is bound for a part of a step: layers that share their page tables.

use std::sync::Arc;

use super::{LayerTensors, ModelStep};
use crate::backend::{OpenStep, WriteInput, of_layer};
use crate::plan::{WriteLayout, WriteTable};
use crate::wgpu::attend::{AttendStep, Scratch, StepOptions};
use crate::wgpu::device::{Launches, Store};
use crate::wgpu::pack::{BoundStoreStep, NonFiniteFlags, StoreStep, WriteMemory, table_bytes};
use crate::{Error, Result};

/// The resources that all steps of one class use in a part. Buffers are shared with other classes and parts.
#[derive(Debug)]
pub(super) struct BoundPart {
    layout: Arc<WriteLayout>,
    /// The indices of the layers. Layers that were split off from one group share a layout, but not their stores.
    numbers: Vec<usize>,
    /// Where its tables begin in a slot, those of what is stored, and then those of attention.
    first: u64,
    attend_at: u64,
    stores: Vec<BoundStoreStep>,
    plan: AttendStep,
    attention: Vec<Launches>,
}

/// Where the tables of attention begin, in bytes behind those of what is stored.
pub(super) fn attend_tables_at(layout: &WriteLayout, alignment: u64) -> u64 {
    table_bytes(layout).next_multiple_of(alignment)
}

impl BoundPart {
    /// Whether it was bound to the stores of a part.
    fn is_over(&self, part: &OpenStep<'_, Store, NonFiniteFlags>) -> bool {
        Arc::ptr_eq(&self.layout, part.table.layout()) && self.numbers == part.layers
    }

    /// Whether it serves a step whose tables begin there.
    pub(super) fn serves(&self, part: &OpenStep<'_, Store, NonFiniteFlags>, plan: &AttendStep, first: u64) -> bool {
        self.first == first && self.is_over(part) && plan.is_bound_like(&self.plan)
    }

    /// Serves the next step of a part by what it is bound to, if that differs from its own by a few tokens alone. If
    /// not, its own step is of no use any more: false, where the part has to be planned.
    pub(super) fn grow(
        &mut self,
        part: &OpenStep<'_, Store, NonFiniteFlags>,
        options: StepOptions,
        first: u64,
    ) -> bool {
        self.first == first && self.is_over(part) && self.plan.grow(part.plan, options)
    }

    /// The same for another step of the class.
    pub(super) fn with_plan(self, plan: AttendStep) -> Self {
        Self { plan, ..self }
    }

    pub(super) fn plan(&self) -> &AttendStep {
        &self.plan
    }

    pub(super) fn into_plan(self) -> AttendStep {
        self.plan
    }

    /// The indices of its layers in their model.
    pub(super) fn numbers(&self) -> &[usize] {
        &self.numbers
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

    /// The launches that attend in a layer, by its place in the part.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub(super) fn attention(&self, place: usize) -> Result<&Launches> {
        of_layer(&self.attention, place)
    }
}

impl ModelStep {
    /// Binds a class of a part: attention always, stores only if no other class has them. Its tables begin at byte
    /// `first` of a slot.
    pub(super) fn bind(
        &mut self,
        part: &OpenStep<'_, Store, NonFiniteFlags>,
        plan: AttendStep,
        layers: &[usize],
        first: u64,
    ) -> Result<BoundPart> {
        let (backend, layout) = (&self.backend, part.table.layout());
        // Drops what was bound before a store grew, or when these layers were in other parts.
        let is_current =
            |bound: &BoundPart| bound.is_over(part) || !bound.numbers.iter().any(|number| part.layers.contains(number));
        self.bound.iter_mut().for_each(|classes| classes.retain(is_current));
        let missing = |what: &'static str| Error::Plan { what, reason: "no memory was made for it".into() };
        let (tables, shared) = (self.tables.buffer().ok_or_else(|| missing("tables of a step"))?, &self.shared);
        let known = self.bound[layers[0]].iter().find(|bound| bound.first == first && bound.is_over(part));
        let stores = match known {
            Some(bound) => bound.stores.clone(),
            None => {
                part.stores.iter().flatten().for_each(|store| store.encoders().add(self.tables.slots().steps()));
                part.flags.encoders().add(self.tables.slots().steps());
                let memory = WriteMemory::within(layout, (tables, first), shared.rotated.as_ref());
                let pack = StoreStep::new(layout);
                let of_layer = |((&number, &layer), stores): ((&usize, &usize), &Vec<&Store>)| {
                    let LayerTensors { keys, values, .. } = &self.layers[layer];
                    let input = WriteInput { keys, values, rows: self.rows, flags: part.flags, layer: number };
                    pack.bind_with_room(backend.kernels(), stores, &memory, input)
                };
                part.layers.iter().zip(layers).zip(&part.stores).map(of_layer).collect::<Result<_>>()?
            }
        };
        let scratch = shared.scratch.as_ref().ok_or_else(|| missing("scratch of a step"))?;
        let scratch = Scratch { tables: tables.clone(), ..Scratch::clone(scratch) };
        let attend_at = attend_tables_at(layout, backend.capabilities().limits.binding_alignment);
        let of_layer = |(&layer, stores): (&usize, &Vec<&Store>)| {
            plan.bind_with_room(backend.kernels(), stores, (&scratch, first + attend_at), self.attended(layer))
        };
        let attention = layers.iter().zip(&part.stores).map(of_layer).collect::<Result<_>>()?;
        let (layout, numbers) = (layout.clone(), part.layers.to_vec());
        Ok(BoundPart { layout, numbers, first, attend_at, stores, plan, attention })
    }
}
