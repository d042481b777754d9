//! The tensors that the steps of a model read and write.

use crate::backend::{LayerTensors, OpenStep, TypedTensor, WriteInput};
use crate::plan::{ElementType, QueryLayout, RowLayout};
use crate::{Error, Result};

/// The tensors of a step of attention: queries and output, both `[rows, query_heads, head_dim]`, contiguous unless the
/// step was planned for rows of another layout. They may lie in one allocation, but must not overlap. `T` is the
/// backend's tensor.
#[derive(Debug)]
pub struct AttendTensors<'a, T> {
    /// Queries, after rotary embedding, not scaled.
    pub queries: &'a T,
    /// The attention outputs.
    pub output: &'a T,
    /// The natural log-sum-exps, f32 `[rows, query_heads]`, if the step returns them.
    pub lse: Option<&'a T>,
}

impl<T> Clone for AttendTensors<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for AttendTensors<'_, T> {}

/// The tensors of the layers of a model, and how their rows lie.
#[derive(Debug)]
pub(crate) struct StepTensors<T> {
    /// Layout of keys and values.
    rows: RowLayout,
    /// At least one.
    layers: Vec<LayerTensors<T>>,
    /// Layouts of queries and outputs that are not contiguous rows.
    layouts: [Option<QueryLayout>; 2],
    /// Log-sum-exps of every layer, or none.
    lse: Vec<T>,
}

impl<T: TypedTensor> StepTensors<T> {
    /// Layers with these tensors, whose keys and values have the layout `rows`.
    ///
    /// # Errors
    /// [`Error::Plan`] when there are no layers.
    pub(crate) fn new(rows: RowLayout, layers: Vec<LayerTensors<T>>) -> Result<Self> {
        if layers.is_empty() {
            return Err(Error::Plan { what: "step of a model", reason: "it needs at least one layer".into() });
        }
        Ok(Self { rows, layers, layouts: [None; 2], lse: Vec::new() })
    }

    /// Checks that all layers have the types of the first.
    ///
    /// # Errors
    /// [`Error::Plan`].
    #[cfg(feature = "wgpu")]
    pub(crate) fn check_types(&self) -> Result<()> {
        let types = |layer: &LayerTensors<T>| {
            [&layer.keys, &layer.values, &layer.queries, &layer.output].map(TypedTensor::element_type)
        };
        match self.layers.iter().position(|layer| types(layer) != types(&self.layers[0])) {
            None => Ok(()),
            Some(layer) => {
                let reason = format!("the tensors of layer {layer} and layer 0 differ in type");
                Err(Error::Plan { what: "step of a model", reason })
            }
        }
    }

    /// Takes tensors for log-sum-exps.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is not one for each layer, [`Error::Buffer`] when one is not f32.
    pub(crate) fn set_log_sum_exps(&mut self, lse: Vec<T>) -> Result<()> {
        let (given, layers) = (lse.len(), self.layers.len());
        if given != layers {
            let reason = format!("log-sum-exps of {given} layers for a step of {layers}");
            return Err(Error::Plan { what: "step of a model", reason });
        }
        if let Some(of) = lse.iter().map(TypedTensor::element_type).find(|of| *of != ElementType::F32) {
            return Err(Error::Buffer { what: "log-sum-exps", reason: format!("are {of:?}; they are f32") });
        }
        self.lse = lse;
        Ok(())
    }

    /// Sets the layout of queries.
    pub(crate) const fn set_query_layout(&mut self, rows: QueryLayout) {
        self.layouts[0] = Some(rows);
    }

    /// Sets the layout of outputs.
    pub(crate) const fn set_output_layout(&mut self, rows: QueryLayout) {
        self.layouts[1] = Some(rows);
    }

    /// Layout of keys and values.
    #[cfg(feature = "wgpu")]
    pub(crate) const fn rows(&self) -> &RowLayout {
        &self.rows
    }

    /// Those of every layer.
    pub(crate) fn layers(&self) -> &[LayerTensors<T>] {
        &self.layers
    }

    /// Layouts of queries and outputs that are not contiguous rows.
    pub(crate) const fn layouts(&self) -> [Option<QueryLayout>; 2] {
        self.layouts
    }

    /// Whether steps write log-sum-exps.
    pub(crate) fn have_log_sum_exps(&self) -> bool {
        !self.lse.is_empty()
    }

    /// Those of a layer's attention.
    pub(crate) fn attended(&self, layer: usize) -> AttendTensors<'_, T> {
        let LayerTensors { queries, output, .. } = &self.layers[layer];
        AttendTensors { queries, output, lse: self.lse.get(layer) }
    }

    /// What a layer stores, which has this number in its model.
    pub(crate) fn stored<'a, F>(&'a self, layer: usize, flags: &'a F, number: usize) -> WriteInput<'a, T, F> {
        let LayerTensors { keys, values, .. } = &self.layers[layer];
        WriteInput { keys, values, rows: self.rows, flags, layer: number }
    }

    /// Checks that a part of a step suits the tensors, but for their lengths of queries and outputs.
    ///
    /// # Errors
    /// [`Error::Plan`], or [`Error::Unsupported`] where keys are centred and log-sum-exps are written.
    pub(crate) fn check<S, F>(&self, part: &OpenStep<'_, S, F>) -> Result<()> {
        part.check(&self.rows)?;
        if self.have_log_sum_exps() { part.check_not_centred() } else { Ok(()) }
    }
}
