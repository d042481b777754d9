//! What formats do to the attention outputs of a dump.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Run;

/// Everything about one dump.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename = "eval")]
pub struct EvalReport {
    /// The run.
    pub run: Option<Run>,
    /// The file.
    pub file: String,
    /// The model, where the dump names it.
    pub model: Option<String>,
    /// The text, where the dump names it.
    pub text: Option<String>,
    /// Where the attention ran.
    pub backend: String,
    /// First tokens kept in f16 whatever the format.
    pub kept_first: usize,
    /// Last tokens kept in f16 whatever the format.
    pub kept_last: usize,
    /// The layers, in ascending order.
    pub layers: Vec<LayerReport>,
    /// One row for each format, over all layers.
    pub summary: Vec<SummaryRow>,
}

/// One layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LayerReport {
    /// Its number in the model.
    pub layer: u32,
    /// Query heads.
    pub query_heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Tokens.
    pub tokens: usize,
    /// Queries on which calibrations were searched.
    pub calibration_queries: usize,
    /// Queries on which the errors were measured, all others.
    pub evaluation_queries: usize,
    /// One row for each format.
    pub formats: Vec<FormatRow>,
}

/// One format on one layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FormatRow {
    /// The format.
    pub format: String,
    /// The recipe that packs in this format, where one does.
    #[serde(default)]
    pub recipe: Option<String>,
    /// Relative L2 error of the attention outputs, without calibration.
    #[serde(deserialize_with = "crate::not_a_number::number")]
    pub error: f64,
    /// Squared error of the packed keys and values themselves, relative to their squares.
    pub row_error: Option<f64>,
    /// With the calibration found; none where the format is not packed or there was nothing to search on.
    pub calibrated: Option<CalibratedRow>,
    /// Bits per element of the packed tokens, ranges and padding included.
    pub packed_bits: f64,
    /// Bytes held, to the last range and padding byte.
    pub bytes: u64,
    /// The same in bits per element of keys and values.
    pub bits_per_element: f64,
    /// Bytes of f16 without padding over bytes held.
    pub times_smaller: f64,
}

/// The outcome of the calibration that was found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CalibratedRow {
    /// How much the lower end of the scores is moved down.
    pub tau1: f32,
    /// How much the upper end of the scores is moved down.
    pub tau2: f32,
    /// Relative L2 error of the attention outputs.
    #[serde(deserialize_with = "crate::not_a_number::number")]
    pub error: f64,
}

/// One format over all layers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SummaryRow {
    /// The format.
    pub format: String,
    /// The recipe that packs in this format, where one does.
    #[serde(default)]
    pub recipe: Option<String>,
    /// Mean of the layers' errors.
    #[serde(deserialize_with = "crate::not_a_number::number")]
    pub mean_error: f64,
    /// The largest of them.
    #[serde(deserialize_with = "crate::not_a_number::number")]
    pub worst_error: f64,
    /// Mean error with each layer's own calibration.
    pub mean_calibrated_error: Option<f64>,
    /// Layers whose error the calibration lowered, of those where one was searched for.
    pub layers_improved: Option<[usize; 2]>,
    /// Squared error of the packed keys and values themselves, relative to their squares: the mean over the layers.
    pub row_error: Option<f64>,
    /// Bits per element of the packed tokens, ranges and padding included: the mean over the layers.
    pub packed_bits: f64,
    /// Bytes held by all layers.
    pub bytes: u64,
    /// Bits per element over all layers.
    pub bits_per_element: f64,
    /// Bytes of f16 without padding over bytes held.
    pub times_smaller: f64,
}

/// Sums the layers up, format by format, in the order of the first layer.
pub fn summarize(layers: &[LayerReport]) -> Vec<SummaryRow> {
    let mut order = Vec::new();
    let mut rows: BTreeMap<&str, Vec<&FormatRow>> = BTreeMap::new();
    for row in layers.iter().flat_map(|layer| &layer.formats) {
        let of_format = rows.entry(&row.format).or_default();
        if of_format.is_empty() {
            order.push(row.format.as_str());
        }
        of_format.push(row);
    }
    order.into_iter().map(|format| SummaryRow::new(format, &rows[format])).collect()
}

impl FormatRow {
    /// What the row is called: its recipe, or its format where no recipe has it.
    pub fn name(&self) -> &str {
        self.recipe.as_deref().unwrap_or(&self.format)
    }
}

impl SummaryRow {
    /// What the row is called: its recipe, or its format where no recipe has it.
    pub fn name(&self) -> &str {
        self.recipe.as_deref().unwrap_or(&self.format)
    }

    fn new(format: &str, rows: &[&FormatRow]) -> Self {
        let calibrated: Vec<(f64, f64)> =
            rows.iter().filter_map(|row| Some((row.error, row.calibrated.as_ref()?.error))).collect();
        let improved = calibrated.iter().filter(|(plain, calibrated)| calibrated < plain).count();
        let bytes: u64 = rows.iter().map(|row| row.bytes).sum();
        let elements: f64 = rows.iter().map(|row| row.bytes as f64 * 8.0 / row.bits_per_element).sum();
        let bits_per_element = bytes as f64 * 8.0 / elements;
        Self {
            format: format.into(),
            recipe: rows.first().and_then(|row| row.recipe.clone()),
            mean_error: mean(rows.iter().map(|row| row.error)),
            worst_error: rows.iter().map(|row| row.error).fold(0.0, f64::max),
            mean_calibrated_error: (!calibrated.is_empty()).then(|| mean(calibrated.iter().map(|(_, error)| *error))),
            layers_improved: (!calibrated.is_empty()).then_some([improved, calibrated.len()]),
            row_error: rows
                .iter()
                .map(|row| row.row_error)
                .collect::<Option<Vec<f64>>>()
                .map(|all| mean(all.into_iter())),
            packed_bits: mean(rows.iter().map(|row| row.packed_bits)),
            bytes,
            bits_per_element,
            times_smaller: 16.0 / bits_per_element,
        }
    }
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len();
    values.sum::<f64>() / count as f64
}
