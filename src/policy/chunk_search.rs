//! The precision of every chunk of a context, by its similarity to the query (Cocktail).

use std::ops::RangeInclusive;

use crate::counts::{TokenCount, collected, filled};
use crate::{Error, Result};

/// Allowed sizes of a chunk in tokens. Cocktail uses 32.
pub const CHUNK_TOKENS: RangeInclusive<usize> = 16..=128;

/// The precision of a stored chunk, from the coarsest to the finest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ChunkPrecision {
    /// 2 bits.
    Int2,
    /// 4 bits.
    Int4,
    /// f16.
    F16,
}

/// The place of the thresholds between the smallest and the largest similarity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChunkSearch {
    /// Fraction of the range, counted from the smallest similarity. Chunks below are stored at 2 bits.
    pub alpha: f64,
    /// Fraction of the range, counted from the largest similarity. Chunks above are stored in f16.
    pub beta: f64,
}

impl Default for ChunkSearch {
    /// α = 0.6, β = 0.1, as in the paper.
    fn default() -> Self {
        Self { alpha: 0.6, beta: 0.1 }
    }
}

/// The thresholds of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChunkThresholds {
    /// Chunks below it are stored at 2 bits.
    pub low: f64,
    /// Chunks above it are stored in f16.
    pub high: f64,
}

impl ChunkSearch {
    /// Number of whole chunks of `chunk_tokens` tokens in a context of `tokens`. The remaining tokens stay in f16.
    ///
    /// # Errors
    /// [`Error::Chunks`] when chunks of this size are not supported.
    pub fn chunks(tokens: usize, chunk_tokens: usize) -> Result<usize> {
        if CHUNK_TOKENS.contains(&chunk_tokens) {
            return Ok(tokens / chunk_tokens);
        }
        let (least, most) = CHUNK_TOKENS.into_inner();
        Err(Error::Chunks { reason: format!("a chunk of {chunk_tokens} tokens; chunks have {least} to {most} tokens") })
    }
}

/// Decides the precision of every chunk from the cosine similarity of its embedding with the query's (Cocktail eq. 2-3
/// and algorithm 1):
///
/// `T_low = s_min + (s_max − s_min) · α`, `T_high = s_max − (s_max − s_min) · β`; below `T_low` 2 bits, above `T_high`
/// f16, otherwise 4 bits.
///
/// Both comparisons are strict, and the first wins if both hold. Therefore:
///
/// - a similarity equal to a threshold gives 4 bits; so does a single chunk, and so do similarities that are all equal;
/// - with β > 0 a single best chunk is f16; with β = 0 no chunk is;
/// - with α + β > 1 the thresholds cross: chunks below `T_low` have 2 bits, and all others are f16;
/// - negative similarities are treated like all others.
///
/// ```
/// use kvpack::policy::{ChunkPrecision::*, ChunkSearch, chunk_search};
/// let (thresholds, precision) = chunk_search(&[0.0, 0.7, 1.0], ChunkSearch::default())?;
/// assert_eq!(precision, [Int2, Int4, F16]);
/// assert_eq!((thresholds.low, thresholds.high), (0.6, 0.9));
/// # Ok::<(), kvpack::Error>(())
/// ```
///
/// # Errors
/// [`Error::Chunks`] when there are no chunks; [`Error::NotANumber`] for a similarity that is NaN; [`Error::Budget`]
/// when α or β is not in 0 ..= 1.
pub fn chunk_search(similarities: &[f32], search: ChunkSearch) -> Result<(ChunkThresholds, Vec<ChunkPrecision>)> {
    super::check_ratio("alpha of the chunk search", search.alpha)?;
    super::check_ratio("beta of the chunk search", search.beta)?;
    check_similarities(similarities)?;
    let smallest = f64::from(similarities.iter().copied().fold(f32::INFINITY, f32::min));
    let largest = f64::from(similarities.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let low = smallest + (largest - smallest) * search.alpha;
    let high = largest - (largest - smallest) * search.beta;
    let precision = |&similarity: &f32| match f64::from(similarity) {
        similarity if similarity < low => ChunkPrecision::Int2,
        similarity if similarity > high => ChunkPrecision::F16,
        _ => ChunkPrecision::Int4,
    };
    Ok((ChunkThresholds { low, high }, similarities.iter().map(precision).collect()))
}

/// Assigns chunks to tiers by rank. The first share of the chunks, those most similar to the query, goes to tier 0, the
/// next share to tier 1 and so on. The remaining chunks form one more tier. Ties go to the earlier chunk.
///
/// A tier ends at the sum of its share and those before it, rounded down to whole chunks: `[0.1, 0.3]` of 25 chunks
/// give 2, 8 and 15.
///
/// ```
/// use kvpack::policy::chunk_shares;
/// assert_eq!(chunk_shares(&[0.1, 0.9, 0.5, 0.4], &[0.25, 0.5])?, [2, 0, 1, 1]);
/// # Ok::<(), kvpack::Error>(())
/// ```
///
/// # Errors
/// [`Error::Chunks`] when there are no chunks; [`Error::NotANumber`] for a similarity that is NaN; [`Error::Budget`]
/// when a share, or the sum of the shares, is not in 0 ..= 1.
pub fn chunk_shares(similarities: &[f32], shares: &[f64]) -> Result<Vec<usize>> {
    check_similarities(similarities)?;
    let mut ends = Vec::with_capacity(shares.len());
    let mut sum = 0.0;
    for &share in shares {
        super::check_ratio("share of the chunks", share)?;
        sum += share;
        let below = super::budget::whole_tokens(sum * similarities.len() as f64);
        ends.push(below.min(similarities.len()));
    }
    super::check_ratio("sum of the shares of chunks", (sum - super::budget::ROUNDING).max(0.0))?;
    let mut order: Vec<usize> = (0..similarities.len()).collect();
    // The sort is stable, so that equal similarities stay in order. None is NaN.
    order.sort_by(|&a, &b| similarities[b].partial_cmp(&similarities[a]).unwrap_or(std::cmp::Ordering::Equal));
    let mut tiers = vec![0; similarities.len()];
    for (rank, chunk) in order.into_iter().enumerate() {
        tiers[chunk] = ends.partition_point(|&end| end <= rank);
    }
    Ok(tiers)
}

fn check_similarities(similarities: &[f32]) -> Result<()> {
    if similarities.is_empty() {
        return Err(Error::Chunks {
            reason: "there are none to search; a context shorter than a chunk stays f16".into(),
        });
    }
    match similarities.iter().position(|similarity| similarity.is_nan()) {
        Some(index) => Err(Error::NotANumber { what: "similarities of chunks", index }),
        None => Ok(()),
    }
}

/// The order in which chunks of equal precision are contiguous: 2 bits, then 4 bits, then f16, ascending within each
/// (Cocktail, algorithm 1). Entry i is the chunk in place i.
///
/// # Errors
/// [`Error::Limit`] when there are more chunks than tokens in the longest sequence; [`Error::OutOfMemory`].
pub fn reorder_plan(precision: &[ChunkPrecision]) -> Result<Vec<u32>> {
    let mut order = collected("order of chunks", TokenCount::new(precision.len())?.positions())?;
    order.sort_by_key(|&chunk| precision[chunk as usize]);
    Ok(order)
}

/// Checks that `order` names every whole chunk of a context exactly once.
///
/// # Errors
/// [`Error::Chunks`] when it does not, or chunks of this size are not supported; [`Error::Limit`] when the context is
/// longer than [`MOST_TOKENS`](crate::plan::MOST_TOKENS).
pub fn check_order(tokens: usize, chunk_tokens: usize, order: &[u32]) -> Result<()> {
    let chunks = ChunkSearch::chunks(TokenCount::new(tokens)?.get(), chunk_tokens)?;
    if order.len() < chunks {
        let reason = format!("the order names {} chunks; there are {chunks}", order.len());
        return Err(Error::Chunks { reason });
    }
    let mut seen = filled("chunks of a context", chunks, false)?;
    for &chunk in order {
        match seen.get_mut(chunk as usize) {
            Some(seen) if !*seen => *seen = true,
            Some(_) => return Err(Error::Chunks { reason: format!("chunk {chunk} is twice in the order") }),
            None => return Err(Error::Chunks { reason: format!("chunk {chunk} of {chunks}") }),
        }
    }
    match seen.iter().position(|&seen| !seen) {
        Some(chunk) => Err(Error::Chunks { reason: format!("chunk {chunk} of {chunks} is not in the order") }),
        None => Ok(()),
    }
}

/// Checks that a tensor consists of chunks of the query's width, and returns their number.
///
/// # Errors
/// [`Error::Chunks`] when they do not, or the query's embedding has no elements.
pub fn check_widths(query: usize, chunks: usize) -> Result<usize> {
    if query == 0 {
        return Err(Error::Chunks { reason: "the query's embedding has no elements".into() });
    }
    if !chunks.is_multiple_of(query) {
        let reason = format!("{chunks} elements of embeddings are not whole rows of {query}, the width of the query's");
        return Err(Error::Chunks { reason });
    }
    Ok(chunks / query)
}
