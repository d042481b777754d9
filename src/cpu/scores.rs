//! Kernel `scores`: `q·k/√D` of whole spans and their extremes (CalibQuant, arXiv 2502.14882, algorithm 1).

use rayon::prelude::*;

use super::check::{check_calibrated, check_segment};
use super::key_tiles::KeyTiles;
use super::prepare_query::PreparedQueries;
use super::store::CpuStore;
use super::tile_lines::TileLines;
use crate::format::{Calibration, KeyOrValue, ScoreMap, TILE_TOKENS};
use crate::plan::{Elements, Page, StoreWork, WorkItem};
use crate::{Error, Result};

/// Smallest and largest score of one query head over one span: γ and δ of the paper's eq. 7.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreExtremes {
    /// γ.
    pub smallest: f32,
    /// δ.
    pub largest: f32,
}

/// Scores of all calibrated queries of a segment.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentScores {
    query_heads: usize,
    scores: Vec<f32>,
    extremes: Vec<ScoreExtremes>,
}

impl SegmentScores {
    /// Scores `[score tile][query_head][128]`: see [`WorkItem::scores`](crate::plan::WorkItem::scores). Scores past the
    /// end of a span are 0.
    pub fn scores(&self) -> &[f32] {
        &self.scores
    }

    /// Extremes `[prepared query][query_head]`.
    pub fn extremes(&self) -> &[ScoreExtremes] {
        &self.extremes
    }

    /// The calibration of every prepared query and query head, `[prepared query][query_head]`.
    pub fn maps(&self, calibration: &Calibration) -> Vec<ScoreMap> {
        self.extremes.iter().map(|extremes| calibration.map(extremes.smallest, extremes.largest)).collect()
    }

    /// The scores of one query head of one prepared query over its span, in token order.
    ///
    /// # Errors
    /// [`Error::Plan`] when the work does not match, or has no such query.
    pub fn of_query(&self, segment: &StoreWork, query: usize, query_head: usize) -> Result<Vec<f32>> {
        let mut items: Vec<&WorkItem> = segment.items().iter().filter(|item| item.query as usize == query).collect();
        items.sort_by_key(|item| item.scores);
        let mut scores = Vec::new();
        for item in items.iter().filter(|_| query_head < self.query_heads) {
            for (tile, first) in (0..item.tokens as usize).step_by(TILE_TOKENS).enumerate() {
                let row = (item.scores as usize + tile) * self.query_heads + query_head;
                let tokens = TILE_TOKENS.min(item.tokens as usize - first);
                scores.extend_from_slice(
                    self.scores.get(row * TILE_TOKENS..).and_then(|row| row.get(..tokens)).unwrap_or(&[]),
                );
            }
        }
        let tokens: usize = items.iter().map(|item| item.tokens as usize).sum();
        if scores.is_empty() || scores.len() != tokens {
            return Err(Error::Plan { what: "scores", reason: "there is no such query or query head".into() });
        }
        Ok(scores)
    }
}

/// Computes the scores of all items of a calibrated segment, and the extremes over each span.
///
/// `queries` are `[rows, query_heads, head_dim]`.
///
/// # Errors
/// [`Error::Plan`] when store or queries do not match the work.
pub fn scores(segment: &StoreWork, store: &CpuStore, queries: Elements<'_>) -> Result<SegmentScores> {
    check_calibrated(segment)?;
    check_segment(segment, store, Some(queries))?;
    let (shape, format) = (store.shape(), store.format());
    let lines = TileLines::new(KeyOrValue::Key, &format.key, shape.head_dim());
    let queries = PreparedQueries::new(segment, store, &lines, queries);
    let tiles = tiles_of(segment);

    let (query_heads, group) = (shape.query_heads(), shape.group());
    let none = ScoreExtremes { smallest: f32::INFINITY, largest: f32::NEG_INFINITY };
    let mut scores = vec![0.0; tiles.len() * query_heads * TILE_TOKENS];
    let mut tile_extremes = vec![none; tiles.len() * query_heads];
    scores
        .par_chunks_exact_mut(group * TILE_TOKENS)
        .zip(tile_extremes.par_chunks_exact_mut(group))
        .enumerate()
        .for_each_init(
            || KeyTiles::new(format.key, shape.head_dim(), &lines),
            |keys, (i, (scores, extremes))| {
                let kv_head = i % shape.kv_heads();
                let Some(tile) = &tiles[i / shape.kv_heads()] else { return };
                let words = store.tensor(KeyOrValue::Key).tile(tile.page, kv_head);
                keys.score(words, tile.tokens, queries.group(tile.query, kv_head), scores);
                for (scores, extremes) in scores.chunks_exact(TILE_TOKENS).zip(extremes) {
                    extremes.smallest = scores[..tile.tokens].iter().copied().fold(f32::INFINITY, f32::min);
                    extremes.largest = scores[..tile.tokens].iter().copied().fold(f32::NEG_INFINITY, f32::max);
                }
            },
        );

    let mut extremes = vec![none; segment.queries().len() * query_heads];
    for (tile, of_tile) in tiles.iter().zip(tile_extremes.chunks_exact(query_heads)) {
        let Some(tile) = tile else { continue };
        for (all, part) in extremes[tile.query * query_heads..].iter_mut().zip(of_tile) {
            all.smallest = all.smallest.min(part.smallest);
            all.largest = all.largest.max(part.largest);
        }
    }
    Ok(SegmentScores { query_heads, scores, extremes })
}

/// The source of one tile of scores.
struct ScoredTile {
    page: Page,
    /// The prepared query.
    query: usize,
    tokens: usize,
}

/// The source of every tile of scores; `None` for tiles that no query sees.
fn tiles_of(segment: &StoreWork) -> Vec<Option<ScoredTile>> {
    let mut tiles: Vec<_> = (0..segment.score_tiles()).map(|_| None).collect();
    for dispatch in segment.dispatches() {
        for item in segment.items_of(dispatch) {
            for (tile, page) in segment.pages_of(dispatch, item).enumerate() {
                let tokens = TILE_TOKENS.min(item.tokens as usize - tile * TILE_TOKENS);
                tiles[item.scores as usize + tile] = Some(ScoredTile { page, query: item.query as usize, tokens });
            }
        }
    }
    tiles
}
