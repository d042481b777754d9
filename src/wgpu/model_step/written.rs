//! A step whose tables are on their way to the device.

use super::part::PartClass;
use super::step_tables::StepTables;
use super::{LayerTensors, ModelStep};
use crate::Result;
use crate::backend::{ByPart, WrittenPart, of_layer};
use crate::plan::{RowLayout, WriteTable};
use crate::wgpu::attend::AttendTensors;
use crate::wgpu::device::Launches;
use crate::wgpu::device::guard;

/// A step whose tables are written to the queue, ready to be encoded. Layers are counted over all parts of the step, in
/// the order of their indices in the model: where the step has all layers of a model, a layer's place is its index.
#[derive(Clone, Debug)]
pub struct WrittenStep<'a> {
    pub(super) steps: &'a ModelStep,
    pub(super) parts: ByPart<Part<'a>>,
    pub(super) slot: usize,
    pub(super) bound_anew: bool,
}

/// Layers of the step that share their page tables.
type Part<'a> = WrittenPart<'a, PartClass, PartTables<'a>>;

/// What a part stores.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartTables<'a> {
    pub(super) table: &'a WriteTable,
    /// By layer; none where the part packs no part of a prompt.
    pub(super) staged: &'a [Launches],
}

impl WrittenStep<'_> {
    /// Whether this step rebuilt bind groups and the memory that steps share.
    pub const fn bound_anew(&self) -> bool {
        self.bound_anew
    }

    /// Encodes the writes of a layer, by its place among the layers of the step. Does not submit, wait or allocate.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when there is no such layer.
    pub fn encode_store(&self, layer: usize, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let (part, place) = self.parts.of_layer(layer)?;
        let stores = part.class().store(place)?;
        self.tables().slots().hold(self.slot, pass);
        stores.encode_slot(part.with.table, self.tables().slot_offset(self.slot), pass)?;
        if let Some(staged) = part.with.staged.get(place) {
            staged.encode(pass);
        }
        part.mark(place);
        Ok(())
    }

    /// Encodes the attention of a layer, by its place among the layers of the step. Does not submit, wait or allocate.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when there is no such layer.
    pub fn encode_attend(&self, layer: usize, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let (part, place) = self.parts.of_layer(layer)?;
        let attention = part.class().attention(place)?;
        self.tables().slots().hold(self.slot, pass);
        let (grids, tables) = (part.class().plan().grids(), self.tables().slot_offset(self.slot));
        // SAFETY: The grids are those of the step's own plan, and its tables lie in the slot (docs/in-bounds.md, A3, A6).
        unsafe { attention.encode_grids(grids, tables, pass) };
        Ok(())
    }

    /// Stores and attends in a layer, by its place among the layers of the step. This is for an engine that submits its
    /// commands itself and whose tensors move from step to step. The rows of keys, values and queries are copied to the
    /// tensors of the layer, and the outputs from there, all in one submission. It does not wait.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when there is no such layer, [`Error::Elements`](crate::Error::Elements) or
    /// [`Error::Buffer`](crate::Error::Buffer) when the tensors have fewer rows than the step, or cannot be
    /// [copied](crate::wgpu::Tensor::encode_copy); [`Error::NotSubmitted`](crate::Error::NotSubmitted) when another
    /// step over the layer is encoded and not submitted; [`Error::DeviceLost`](crate::Error::DeviceLost).
    pub fn submit(&self, layer: usize, given: &LayerTensors) -> Result<()> {
        let ModelStep { backend, tensors, tables, .. } = self.steps;
        let (part, place) = self.parts.of_layer(layer)?;
        let own_steps = usize::from(tables.slots().is_encoded(self.slot));
        part.class().check_others_submitted(place, backend.device(), own_steps)?;
        let (plan, own) = (part.class().plan(), of_layer(tensors.layers(), layer)?);
        let (shape, rows) = (plan.work().shape(), RowLayout { tokens: plan.work().rows().len(), ..*tensors.rows() });
        rows.check("keys", given.keys.elements(), shape)?;
        rows.check("values", given.values.elements(), shape)?;
        plan.check_rows(AttendTensors { queries: &given.queries, output: &given.output, lse: None })?;
        // What lies between and behind the rows of the step stays as it was.
        let is_dense = tensors.layouts()[1].is_none();
        let elements =
            if is_dense { shape.query_heads() * shape.head_dim() * rows.tokens } else { given.output.elements() };
        let [output, to] = [&own.output, &given.output].map(|of| of.slice(0, elements));
        let (output, to) = (output?, to?);
        // Once the writes of the layer are encoded, nothing may fail but the device.
        output.check_copy(&to)?;
        let encode = |encoder: &mut wgpu::CommandEncoder| {
            given.keys.encode_copy(&own.keys, encoder)?;
            given.values.encode_copy(&own.values, encoder)?;
            given.queries.encode_copy(&own.queries, encoder)?;
            if !is_dense {
                to.encode_copy(&output, encoder)?;
            }
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            self.encode_store(layer, &mut pass)?;
            self.encode_attend(layer, &mut pass)?;
            drop(pass);
            output.encode_copy(&to, encoder)
        };
        guard::encode_and_submit(backend.device(), backend.queue(), "layer of a step", encode)
    }

    /// Number of dispatches of a layer's attention, by its place among the layers of the step.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when there is no such layer.
    pub fn launches(&self, layer: usize) -> Result<usize> {
        Ok(self.parts.of_layer(layer)?.0.class().plan().grids().count())
    }

    const fn tables(&self) -> &StepTables {
        &self.steps.tables
    }
}
