//! The recipes of a model's layers, and the checks that all of them pass.

use super::parsed::Parsed;
use super::recipe_option::RecipeOption;
use super::recipe_text::{Base, ModelRecipe};
use super::{MOST_STORES, Recipe};
use crate::format::AttentionShape;

impl Base {
    fn recipe(&self, shape: &AttentionShape) -> Recipe {
        match self {
            Self::Method(choice) => choice.recipe(shape),
            Self::Mixture(mixture) => mixture.recipe(shape),
        }
    }
}

impl ModelRecipe {
    /// The recipe of a layer with heads of this shape.
    pub fn layer(&self, layer: usize, shape: &AttentionShape) -> Recipe {
        let named = self.layers.iter().find(|(named, _)| *named == layer);
        let base = named.map_or_else(|| self.base.recipe(shape), |(_, choice)| choice.recipe(shape));
        // Options for packed spans also apply to spans in further stores.
        let (stores, options): (Vec<_>, Vec<_>) =
            self.options.iter().partition(|option| matches!(option, RecipeOption::Store(_)));
        let all = stores.into_iter().chain(options);
        all.fold(base, |recipe, option: &RecipeOption| option.apply(recipe, shape))
    }

    /// Checks that the stores and options of the text suit all layers.
    pub(super) fn check_layers(&self) -> Parsed<()> {
        self.check_stores()?;
        self.check_centre()?;
        self.check_mixture()
    }

    /// Checks that all layers can be centred, if the recipe centres.
    fn check_centre(&self) -> Parsed<()> {
        if !self.options.iter().any(|option| matches!(option, RecipeOption::Centre)) {
            return Ok(());
        }
        self.kinds()?.try_for_each(|recipe| recipe.check()).map_err(|error| format!("centre: {error}"))
    }

    /// Checks that no layer has too many stores.
    fn check_stores(&self) -> Parsed<()> {
        let further = self.options.iter().filter(|option| matches!(option, RecipeOption::Store(_))).count();
        let stores = self.kinds()?.map(|recipe| recipe.stores().len()).max().unwrap_or(0);
        if stores <= MOST_STORES {
            return Ok(());
        }
        Err(format!("{stores} stores with the {further} further ones; a recipe has at most {MOST_STORES}"))
    }

    /// Checks that every layer has the stores of a mixture's chunks: one search assigns the chunks of all layers.
    fn check_mixture(&self) -> Parsed<()> {
        let Some(mixture) = self.mixture() else { return Ok(()) };
        let last = mixture.last_store();
        for (recipe, named) in self.kinds()?.zip(&self.layers) {
            // A store of appended tiles alone takes no chunks.
            if recipe.packs() && last.index() >= recipe.named_stores() {
                let (layer, choice) = named;
                return Err(format!(
                    "layers={layer}:{choice}: chunks of the mixture go to stores 1 to {}, and this layer has {} besides \
                     f16; leave the layer to the mixture, store it in f16, or add store= for those that it lacks",
                    last.index(),
                    recipe.named_stores() - 1
                ));
            }
        }
        Ok(())
    }

    /// The recipes of the layers that the text names, and of all others. The number of stores, and the tokens that they
    /// take, do not depend on the shape.
    fn kinds(&self) -> Parsed<impl Iterator<Item = Recipe>> {
        let shape = AttentionShape::new(1, 1, 128).map_err(|error| error.to_string())?;
        let named = self.layers.iter().map(|(layer, _)| *layer).chain([usize::MAX]);
        Ok(named.map(move |layer| self.layer(layer, &shape)))
    }

    /// The highest layer that the text names. The model must have it.
    pub fn highest_layer(&self) -> Option<usize> {
        self.layers.iter().map(|(layer, _)| *layer).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::QueryPrecision;
    use crate::cache::{Appended, StoreId};
    use crate::format::{Bits, Calibration, SegmentFormat};

    fn shape() -> AttentionShape {
        AttentionShape::new(4, 2, 64).unwrap()
    }

    #[test]
    fn options_reach_every_layer() {
        let text = "kivi:2+sink=128+tau=0,3+query=int8+layers=0,3:calibquant:8+window=64";
        let recipe: ModelRecipe = text.parse().unwrap();
        for layer in [0, 1, 3] {
            let recipe = recipe.layer(layer, &shape());
            assert_eq!((recipe.sink(), recipe.query()), (128, QueryPrecision::Int8));
            let to = if layer == 1 { StoreId::PACKED } else { StoreId(2) };
            assert_eq!(recipe.appended(), Appended::Tiles { to, newer: 64 });
            assert_eq!(recipe.stores()[1].calibration, Some(Calibration::new(0.0, 3.0).unwrap()));
        }
        let kivi: ModelRecipe = "kivi:2".parse().unwrap();
        assert_eq!(recipe.layer(3, &shape()).packed().format, SegmentFormat::calibquant(Bits::Eight));
        assert_eq!(recipe.layer(1, &shape()).packed().format, kivi.layer(0, &shape()).packed().format);
        assert_eq!(recipe.highest_layer(), Some(3));
        let f16: ModelRecipe = "f16+window=64".parse().unwrap();
        assert_eq!(f16.layer(0, &shape()).appended(), Appended::Keep);
    }

    #[test]
    fn every_layer_is_centred() {
        for text in ["int4+centre", "turboquant:3+centre+window=64", "int8+layers=0,1:saw-int4+centre", "f16+centre"] {
            let recipe: ModelRecipe = text.parse().unwrap();
            assert_eq!(recipe.to_string(), text);
            assert!((0..3).all(|layer| recipe.layer(layer, &shape()).is_centred()), "{text}");
        }
        let plain: ModelRecipe = "int4".parse().unwrap();
        assert!(!plain.layer(0, &shape()).is_centred());
    }
}
