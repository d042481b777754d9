//! Reading what was measured.

use kvpack::AttentionShape;
use serde::Deserialize;

use crate::recipes;
use crate::{BenchReport, ConformanceReport, DocumentsReport, EvalReport, ModelReport, PeersReport, SuiteReport};

/// What a file holds, by its field `kind`.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Measured {
    /// `kvpack bench --json` of steps: shapes, dumps and the suites decode and mixed.
    Bench(BenchReport),
    /// `kvpack eval DUMP` without `--precision`.
    Eval(EvalReport),
    /// `kvpack eval --model`.
    Model(ModelReport),
    /// `kvpack eval --model --documents`.
    Documents(DocumentsReport),
    /// `kvpack check --json`.
    Check(ConformanceReport),
    /// `scripts/peers.py`.
    Peers(PeersReport),
    /// `kvpack bench --suite append`.
    Append(SuiteReport),
    /// `kvpack bench --suite causal`.
    Causal(SuiteReport),
    /// `kvpack bench --suite chunks`.
    Chunks(SuiteReport),
    /// `kvpack bench --suite evict`.
    Evict(SuiteReport),
    /// `kvpack bench --suite linear`.
    Linear(SuiteReport),
    /// `kvpack bench --suite prefill`.
    Prefill(SuiteReport),
    /// `kvpack bench --suite ranks`.
    Ranks(SuiteReport),
    /// `kvpack bench --suite step`.
    Step(SuiteReport),
}

/// Why a text is none of them.
#[derive(Debug, thiserror::Error)]
#[error(
    "this is not a report that kvpack reads: the JSON of `check`, `eval` without --precision, `bench` or \
     scripts/peers.py, one or a list of them"
)]
pub struct ReadError(#[from] serde_json::Error);

/// Reads one report, or a list of them.
///
/// # Errors
/// When the text is no such JSON.
pub fn read(text: &str) -> Result<Vec<Measured>, ReadError> {
    let mut reports: Vec<Measured> = match text.trim_start().starts_with('[') {
        true => serde_json::from_str(text)?,
        false => vec![serde_json::from_str(text)?],
    };
    for report in &mut reports {
        if let Measured::Bench(report) = report {
            name_recipes(report);
        }
    }
    Ok(reports)
}

/// Reports of older builds name formats alone.
fn name_recipes(report: &mut BenchReport) {
    for shape in &mut report.shapes {
        let Ok(heads) = AttentionShape::new(shape.query_heads, shape.kv_heads, shape.head_dim) else { continue };
        let named = recipes::names(&heads);
        for row in shape.rows.iter_mut().filter(|row| row.recipe.is_none()) {
            row.recipe = named.iter().find(|(format, _)| *format == row.format).map(|(_, recipe)| recipe.clone());
        }
    }
}
