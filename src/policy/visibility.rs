//! Scores that do not favour tokens that have been visible for longer.

use super::query_positions::QueryPositions;
use crate::{Error, Result};

/// Divides each column sum by the number of rows that saw its token, so that early tokens lose the advantage of more
/// summands (RoCo; the normalised attention score of ZipCache). Tokens that no row saw score 0.
///
/// `scores` holds one score of a head per token of the context.
///
/// # Errors
/// [`Error::Elements`] when there is not one score per token.
pub fn normalize_by_visibility(scores: &[f32], rows: &QueryPositions) -> Result<Vec<f32>> {
    if scores.len() != rows.tokens() {
        let (given, expected) = (scores.len(), rows.tokens());
        return Err(Error::Elements { what: "scores", given, expected, shape: "[tokens]".into() });
    }
    let mut unseen = rows.positions().iter().copied().peekable();
    let mut seen_by = rows.len();
    let normalized = scores.iter().enumerate().map(|(token, &score)| {
        while unseen.next_if(|&position| (position as usize) < token).is_some() {
            seen_by -= 1;
        }
        if seen_by == 0 { 0.0 } else { score / seen_by as f32 }
    });
    Ok(normalized.collect())
}
