//! What the layers of a model are: their shapes, recipes and how they attend.

use kvpack::cache::ModelRecipe;
use kvpack::plan::{LayerAttention, MOST_LAYERS, Scoring};
use kvpack::{AttentionShape, Error, Result};

/// How the layers of a model attend.
pub struct LayersAttend {
    pub scale: Option<f32>,
    pub soft_cap: Option<f32>,
    pub windows: Option<Vec<Option<usize>>>,
    pub sinks: Option<Vec<Option<Vec<f32>>>>,
}

impl LayersAttend {
    fn check(&self, layers: usize) -> Result<()> {
        let lists = [("windows", self.windows.as_ref().map(Vec::len)), ("sinks", self.sinks.as_ref().map(Vec::len))];
        match lists.into_iter().find(|(_, given)| given.is_some_and(|given| given != layers)) {
            None => Ok(()),
            Some((what, given)) => {
                let reason =
                    format!("{} for {layers} layers; give one for each, None where there is none", given.unwrap_or(0));
                Err(Error::Plan { what, reason })
            }
        }
    }

    fn layer(&self, layer: usize, shape: &AttentionShape) -> Result<LayerAttention> {
        let mut attention = LayerAttention::default();
        let sinks = self.sinks.as_ref().and_then(|sinks| sinks[layer].as_ref());
        if self.scale.is_some() || self.soft_cap.is_some() || sinks.is_some() {
            let mut scoring = Scoring::of(shape);
            if let Some(scale) = self.scale {
                scoring = scoring.with_scale(scale)?;
            }
            if let Some(cap) = self.soft_cap {
                scoring = scoring.with_soft_cap(cap)?;
            }
            if let Some(sinks) = sinks {
                scoring = scoring.with_sinks(sinks)?;
            }
            attention = attention.with_scoring(scoring);
        }
        match self.windows.as_ref().and_then(|windows| windows[layer]) {
            None => Ok(attention),
            Some(window) if window > 1 => Ok(attention.with_window(window - 1)),
            Some(window) => {
                let reason =
                    format!("{window} positions; a query sees itself and at least one before it, so 2 or more");
                Err(Error::Plan { what: "window", reason })
            }
        }
    }
}

/// Shape and recipe of every layer.
pub fn kinds(
    recipe: &ModelRecipe,
    layers: usize,
    shape: &AttentionShape,
    attend: &LayersAttend,
) -> Result<Vec<(AttentionShape, kvpack::Recipe)>> {
    if layers > MOST_LAYERS {
        let (needed, allowed) = (layers as u64, MOST_LAYERS as u64);
        return Err(Error::Limit { what: "layers of a cache".into(), needed, allowed, hint: "use fewer layers" });
    }
    if recipe.mixture().is_some() {
        recipe.plain()?;
    }
    if let Some(layer) = recipe.highest_layer().filter(|&layer| layer >= layers) {
        let reason = format!("it names layer {layer} of a cache with {layers} layers");
        return Err(Error::Recipe { given: recipe.to_string(), reason });
    }
    attend.check(layers)?;
    (0..layers)
        .map(|layer| Ok((*shape, recipe.layer(layer, shape).with_attention(attend.layer(layer, shape)?))))
        .collect()
}
