//! The page of a report on a model.

use std::path::Path;

use anyhow::Result;

use super::super::page::Page;
use super::plots;
use super::report::{ModelReport, RecipeRow};

/// Writes `path.json` and `path.html`, both or neither.
///
/// # Errors
/// When a file cannot be written.
pub fn write(report: &ModelReport, path: &Path) -> Result<()> {
    let mut page = Page::new(&report.model);
    page.paragraph(&format!(
        "Text: {}. Attention on {}. The f16 cache against full-precision attention: NMSE {:.1e} of the \
         log-probabilities of {} tokens.",
        report.text, report.backend, report.f16_nmse, report.compared_tokens
    ));
    let perplexities = report.lengths.iter().map(|length| format!("perplexity, {length} tokens"));
    let others = ["KL, nats", "top-1 agreement", "pass key, nats", "found", "bits per element", "bytes"];
    let header: Vec<String> =
        std::iter::once("recipe".to_owned()).chain(perplexities).chain(others.map(str::to_owned)).collect();
    page.table(&header, report.rows.iter().map(cells));
    page.plot(&plots::divergence_by_bits(report)?);
    page.plot(&plots::divergence_by_position(report)?);
    page.write(path, report)
}

fn cells(row: &RecipeRow) -> Vec<String> {
    let passkeys = row.passkeys_found();
    let mut cells = vec![row.recipe.clone()];
    cells.extend(row.perplexities.iter().map(|perplexity| format!("{perplexity:.3}")));
    cells.extend([
        format!("{:.5}", row.divergence),
        format!("{:.2} %", row.agreement * 100.0),
        passkeys.map_or("-".into(), |(log_probability, _)| format!("{log_probability:.3}")),
        passkeys.map_or("-".into(), |(_, found)| format!("{found} of {}", row.passkeys.len())),
        format!("{:.3}", row.bits_per_element),
        row.bytes.to_string(),
    ]);
    cells
}
