//! Figures that are not numbers: JSON has none, and writes `null`.

use serde::{Deserialize, Deserializer};

/// A figure, or NaN where the JSON has `null`.
pub(crate) fn number<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// Figures, some of which may be.
pub(crate) fn numbers<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
    Ok(Vec::<Option<f64>>::deserialize(from)?.into_iter().map(|of| of.unwrap_or(f64::NAN)).collect())
}

#[cfg(test)]
mod tests {
    use crate::model::RecipeRow;

    /// What a report has of a recipe that breaks a model is read again.
    #[test]
    fn rows_of_nan_are_read_again() {
        let row = RecipeRow {
            recipe: "f16".into(),
            perplexities: vec![3.0, f64::NAN],
            divergence: f64::NAN,
            divergence_by_chunk: vec![f64::NAN],
            agreement: 0.5,
            passkeys: Vec::new(),
            bytes: 1,
            bits_per_element: 16.0,
            attention_seconds: 1.0,
            model_seconds: 1.0,
        };
        let read: RecipeRow = serde_json::from_str(&serde_json::to_string(&row).unwrap()).unwrap();
        assert!(read.divergence.is_nan() && read.divergence_by_chunk[0].is_nan() && read.perplexities[1].is_nan());
        assert_eq!((read.perplexities[0], read.agreement), (3.0, 0.5));
    }
}
