//! The layers of a step, which lie in its parts.

use std::sync::Arc;

use crate::backend::OpenStep;
use crate::plan::{RowLayout, WriteLayout};
use crate::{Error, Result};

/// Where a layer of a step lies: its part, and its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LayerPlace {
    part: usize,
    place: usize,
}

/// The layers of all parts of a step, in the order of their indices in the model.
#[derive(Clone, Debug)]
pub(crate) struct StepLayers(Vec<LayerPlace>);

impl StepLayers {
    /// Checks that the parts have this number of layers together, each once.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub(crate) fn of<S, F>(parts: &[OpenStep<'_, S, F>], layers: usize) -> Result<Self> {
        let refuse = |reason: String| Err(Error::Plan { what: "step of a model", reason });
        let found: usize = parts.iter().map(|part| part.layers.len()).sum();
        if found != layers || parts.iter().any(|part| part.layers.is_empty() || part.stores.len() != part.layers.len())
        {
            let parts = parts.len();
            return refuse(format!(
                "{found} layers in {parts} parts, and tensors of {layers} layers; pass all parts of ModelCache::open_steps"
            ));
        }
        let mut sorted = Vec::with_capacity(layers);
        for (part, of) in parts.iter().enumerate() {
            let places = of.layers.iter().enumerate();
            sorted.extend(places.map(|(place, &number)| (number, LayerPlace { part, place })));
        }
        sorted.sort_unstable_by_key(|&(number, _)| number);
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return refuse(format!("layer {} is in two parts", twice[0].0));
        }
        Ok(Self(sorted.into_iter().map(|(_, place)| place).collect()))
    }

    /// The place of a layer.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    fn place(&self, layer: usize) -> Result<LayerPlace> {
        of_layer(&self.0, layer).copied()
    }

    /// For every part the indices of its layers among all, in its order.
    pub(crate) fn by_part(&self, parts: usize) -> PartLayers {
        let mut ends = vec![0; parts];
        self.0.iter().for_each(|of| ends[of.part] += 1);
        let mut end = 0;
        for of_part in &mut ends {
            end += *of_part;
            *of_part = end;
        }
        let mut layers = vec![0; self.0.len()];
        for (layer, of) in self.0.iter().enumerate() {
            let first = if of.part == 0 { 0 } else { ends[of.part - 1] };
            layers[first + of.place] = layer;
        }
        PartLayers { layers, ends }
    }
}

/// The layers of every part of a step, in the order of the part.
#[derive(Clone, Debug)]
pub(crate) struct PartLayers {
    layers: Vec<usize>,
    /// Where the layers of every part end.
    ends: Vec<usize>,
}

impl PartLayers {
    /// The layers of every part, which has some.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[usize]> {
        let firsts = std::iter::once(0).chain(self.ends.iter().copied());
        firsts.zip(&self.ends).map(|(first, &end)| &self.layers[first..end])
    }
}

impl<S, F> OpenStep<'_, S, F> {
    /// Checks that the bound resources can serve the step: its attention reads what the layout's stores have, and keys
    /// and values lie in tensors of `rows`.
    pub(crate) fn check(&self, rows: &RowLayout) -> Result<&Arc<WriteLayout>> {
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

/// What there is for every part of a step, by the layers of the step: counted over all parts, in the order of their
/// indices in the model.
#[derive(Clone, Debug)]
pub(crate) struct ByPart<P> {
    parts: Vec<P>,
    layers: StepLayers,
}

impl<P> ByPart<P> {
    /// What there is for the parts whose layers these are, in their order.
    pub(crate) const fn new(parts: Vec<P>, layers: StepLayers) -> Self {
        Self { parts, layers }
    }

    /// Of all parts.
    #[cfg(feature = "cuda")]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &P> {
        self.parts.iter()
    }

    /// Of the part that a layer is in, and the place of the layer there.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub(crate) fn of_layer(&self, layer: usize) -> Result<(&P, usize)> {
        let LayerPlace { part, place } = self.layers.place(layer)?;
        Ok((of_layer(&self.parts, part)?, place))
    }

    /// Something else for the same parts.
    #[cfg(feature = "cuda")]
    pub(crate) fn map<Q>(&self, of: impl FnMut(&P) -> Q) -> ByPart<Q> {
        ByPart { parts: self.parts.iter().map(of).collect(), layers: self.layers.clone() }
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
