//! Checks that all backends that bind steps share.

use std::sync::Arc;

use super::OpenStep;
use crate::plan::{ElementType, RowLayout, WriteLayout};
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

    /// Checks that the scores of the step are those of the original keys.
    pub(crate) fn check_not_centred(&self) -> Result<()> {
        let layout = self.table.layout();
        if !(0..layout.stores().len()).any(|store| layout.has_centres(store)) {
            return Ok(());
        }
        let what = "log-sum-exps of a step over centred keys".into();
        let hint = "take them from ModelCache::attend_states, or use a recipe without +centre".into();
        Err(Error::Unsupported { what, hint })
    }
}

/// Checks the tensors for the log-sum-exps of a step.
///
/// # Errors
/// [`Error::Plan`] when there is not one for each layer, [`Error::Buffer`] when one is not f32.
pub(crate) fn check_log_sum_exps(layers: usize, types: impl ExactSizeIterator<Item = ElementType>) -> Result<()> {
    if types.len() != layers {
        let reason = format!("log-sum-exps of {} layers for a step of {layers}", types.len());
        return Err(Error::Plan { what: "step of a model", reason });
    }
    match types.into_iter().find(|of| *of != ElementType::F32) {
        None => Ok(()),
        Some(of) => Err(Error::Buffer { what: "log-sum-exps", reason: format!("are {of:?}; they are f32") }),
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
