//! Checks that all backends that bind steps share.

use std::sync::Arc;

use super::OpenStep;
use crate::plan::{RowLayout, WriteLayout};
use crate::{Error, Result};

impl<S, F> OpenStep<'_, S, F> {
    /// Checks that an engine's steps have this number of layers, and that the bound resources can serve the step: its
    /// attention reads what the layout's stores have, and keys and values lie in tensors of `rows`.
    pub(crate) fn check(&self, layers: usize, rows: &RowLayout) -> Result<&Arc<WriteLayout>> {
        if self.layers.len() != layers || self.stores.len() != layers {
            let reason = format!("{} layers, and tensors of {layers}", self.layers.len());
            return Err(Error::Plan { what: "step of a model", reason });
        }
        let layout = self.table.layout();
        layout.check_plan(self.plan)?;
        self.table.check_rows(rows)?;
        Ok(layout)
    }
}

/// The resources bound for a layer, by its place among the layers of a step.
///
/// # Errors
/// [`Error::Plan`] when there is no such layer.
pub(crate) fn of_layer<T>(layers: &[T], layer: usize) -> Result<&T> {
    layers.get(layer).ok_or_else(|| {
        let reason = format!("layer {layer} of a step of {} layers", layers.len());
        Error::Plan { what: "step of a model", reason }
    })
}
