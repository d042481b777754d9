//! The class `Recipe`.

use kvpack::cache::ModelRecipe;
use pyo3::prelude::*;

use crate::errors::raised;

/// A recipe, from its text: how a cache stores keys and values. ``kvpack.recipes()`` lists the methods.
#[pyclass(frozen, module = "kvpack")]
pub struct Recipe {
    pub recipe: ModelRecipe,
}

#[pymethods]
impl Recipe {
    #[new]
    fn new(text: &str) -> PyResult<Self> {
        Ok(Self { recipe: text.parse().map_err(raised)? })
    }

    /// Whether the recipe names a policy that evicts tokens of a prompt: see ``Cache.compress``.
    #[getter]
    fn evicts(&self) -> bool {
        self.recipe.policy().is_some()
    }

    fn __str__(&self) -> String {
        self.recipe.to_string()
    }

    fn __repr__(&self) -> String {
        format!("Recipe('{}')", self.recipe)
    }
}

/// A recipe given as such or as its text.
pub fn recipe_of(given: &Bound<'_, PyAny>) -> PyResult<ModelRecipe> {
    if let Ok(recipe) = given.cast::<Recipe>() {
        return Ok(recipe.get().recipe.clone());
    }
    given.extract::<String>()?.parse().map_err(raised)
}
