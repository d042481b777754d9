//! Kernel `chunk_similarity`: the similarity of each chunk to the query.

use rayon::prelude::*;

use super::input::dot;
use crate::policy::check_widths;
use crate::{Error, Result};

/// Cosine similarities between the embedding of a query, `[width]`, and those of chunks, `[chunks, width]` (Cocktail
/// eq. 1). An embedding of zeros has similarity 0.
///
/// # Errors
/// [`Error::Chunks`] when an embedding has no elements, or the chunks do not have the query's width;
/// [`Error::NotANumber`] when an element is NaN.
pub fn chunk_similarity(query: &[f32], chunks: &[f32]) -> Result<Vec<f32>> {
    check_widths(query.len(), chunks.len())?;
    for (what, elements) in [("elements of the query's embedding", query), ("elements of chunk embeddings", chunks)] {
        if let Some(index) = elements.iter().position(|x| x.is_nan()) {
            return Err(Error::NotANumber { what, index });
        }
    }
    let query_norm = dot(query, query).sqrt();
    let similarity = |chunk: &[f32]| {
        let norms = query_norm * dot(chunk, chunk).sqrt();
        if norms > 0.0 { (dot(query, chunk) / norms) as f32 } else { 0.0 }
    };
    Ok(chunks.par_chunks_exact(query.len()).map(similarity).collect())
}
