//! The layers of a cache as policies see them: how their attention is measured, and whether tokens may be gathered.

use super::layers::LayerGroup;
use super::prompt::refuse_gathers;
use super::{MeasuredQueries, ModelCache};
use crate::Result;
use crate::backend::Backend;
use crate::format::AttentionShape;
use crate::plan::LayerAttention;

/// A layer whose attention a policy measures.
#[derive(Clone, Debug)]
pub(crate) struct MeasuredLayer {
    pub(crate) shape: AttentionShape,
    pub(super) attention: LayerAttention,
}

impl MeasuredLayer {
    /// Factor on `q·k`.
    pub(crate) fn scale(&self) -> f32 {
        self.attention.scale(&self.shape)
    }
}

impl<B: Backend> ModelCache<B> {
    /// All layers, in order.
    pub(crate) fn measured_layers(&self) -> Vec<MeasuredLayer> {
        let of = |&(group, _): &(usize, usize)| {
            let group = &self.groups[group];
            MeasuredLayer { shape: group.shape, attention: group.recipe().attention().clone() }
        };
        self.layers.iter().map(of).collect()
    }

    /// Checks that the attention of every layer can be measured by these queries.
    ///
    /// # Errors
    /// Those of [`LayerAttention::check_measured`].
    pub(super) fn check_measured(&self, queries: &[MeasuredQueries<'_, B::Tensor>]) -> Result<()> {
        let mut layers = self.measured_layers().into_iter().zip(queries).enumerate();
        layers.try_for_each(|(layer, (of, queries))| of.attention.check_measured(layer, queries.known_lse.is_some()))
    }

    /// Checks that tokens of every layer may be gathered from where they stood.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names the first layer with a window.
    pub(super) fn check_gathers(&self, what: &str) -> Result<()> {
        let windowed = |group: &LayerGroup<B>| Some((group.numbers()[0], group.recipe().attention().window()?));
        let Some((layer, left)) = self.groups.iter().find_map(windowed) else { return Ok(()) };
        Err(refuse_gathers(&format!("{what}, with a sliding window of {left} positions in layer {layer}")))
    }
}
