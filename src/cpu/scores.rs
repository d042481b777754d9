//! Kernel `scores`: `q·k/√D` of whole spans and their extremes (CalibQuant, arXiv 2502.14882, algorithm 1).

use rayon::prelude::*;

use super::check::check_segment;
use super::key_tiles::KeyTiles;
use super::prepare_query::PreparedQueries;
use super::store::CpuStore;
use super::tile_lines::TileLines;
use crate::format::{Calibration, KeyOrValue, ScoreMap, TILE_TOKENS};
use crate::plan::{Elements, Page, SegmentPlan};
use crate::{Error, Result};

/// Smallest and largest score of one query head over one span: γ and δ of the paper's eq. 7.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreExtremes {
    /// γ.
    pub smallest: f32,
    /// δ.
    pub largest: f32,
}

/// Scores of all spans of a segment plan.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentScores {
    query_heads: usize,
    scores: Vec<f32>,
    extremes: Vec<ScoreExtremes>,
}

impl SegmentScores {
    /// Scores `[tile of the page table][query_head][128]`; those past the end of a span are 0.
    pub fn scores(&self) -> &[f32] {
        &self.scores
    }

    /// Extremes `[span][query_head]`.
    pub fn extremes(&self) -> &[ScoreExtremes] {
        &self.extremes
    }

    /// The calibration of every span and query head, `[span][query_head]`.
    pub fn maps(&self, calibration: &Calibration) -> Vec<ScoreMap> {
        self.extremes.iter().map(|extremes| calibration.map(extremes.smallest, extremes.largest)).collect()
    }

    /// The scores of one query head over one span, in token order.
    ///
    /// # Errors
    /// [`Error::Plan`] when the plan is another one or has no such span.
    pub fn of_span(&self, segment: &SegmentPlan, span: usize, query_head: usize) -> Result<Vec<f32>> {
        let span = segment.spans.get(span).filter(|_| query_head < self.query_heads);
        let rows = span.and_then(|span| {
            let tiles = (span.tokens as usize).div_ceil(TILE_TOKENS);
            let row = |tile| (span.page_offset as usize + tile) * self.query_heads + query_head;
            let scores = (0..tiles).map(|tile| self.scores.get(row(tile) * TILE_TOKENS..)?.get(..TILE_TOKENS));
            let mut scores = scores.collect::<Option<Vec<_>>>()?.concat();
            scores.truncate(span.tokens as usize);
            Some(scores)
        });
        rows.ok_or_else(|| Error::Plan { what: "scores", reason: "there is no such span or query head".into() })
    }
}

/// Computes the scores of all spans of a segment plan, and their extremes.
///
/// `queries` are `[sequences, query_heads, head_dim]`.
///
/// # Errors
/// [`Error::Plan`] when store or queries are not those of the plan.
pub fn scores(segment: &SegmentPlan, store: &CpuStore, queries: Elements<'_>) -> Result<SegmentScores> {
    check_segment(segment, store, Some(queries))?;
    let (shape, format) = (store.shape(), store.format());
    let lines = TileLines::new(KeyOrValue::Key, &format.key, shape.head_dim());
    let queries = PreparedQueries::new(segment, store, &lines, queries);
    let tiles = tiles_of(segment);

    let (query_heads, group) = (shape.query_heads(), shape.group());
    let none = ScoreExtremes { smallest: f32::INFINITY, largest: f32::NEG_INFINITY };
    let mut scores = vec![0.0; segment.page_table.len() * query_heads * TILE_TOKENS];
    let mut tile_extremes = vec![none; segment.page_table.len() * query_heads];
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
                keys.score(words, tile.tokens, queries.group(tile.span, kv_head), scores);
                for (scores, extremes) in scores.chunks_exact(TILE_TOKENS).zip(extremes) {
                    extremes.smallest = scores[..tile.tokens].iter().copied().fold(f32::INFINITY, f32::min);
                    extremes.largest = scores[..tile.tokens].iter().copied().fold(f32::NEG_INFINITY, f32::max);
                }
            },
        );

    let mut extremes = vec![none; segment.spans.len() * query_heads];
    for (tile, of_tile) in tiles.iter().zip(tile_extremes.chunks_exact(query_heads)) {
        let Some(tile) = tile else { continue };
        for (all, part) in extremes[tile.span * query_heads..].iter_mut().zip(of_tile) {
            all.smallest = all.smallest.min(part.smallest);
            all.largest = all.largest.max(part.largest);
        }
    }
    Ok(SegmentScores { query_heads, scores, extremes })
}

/// What an entry of the page table stands for.
struct PlannedTile {
    page: Page,
    span: usize,
    tokens: usize,
}

/// The tiles of a segment plan in the order of its page table.
fn tiles_of(segment: &SegmentPlan) -> Vec<Option<PlannedTile>> {
    let mut tiles: Vec<_> = segment.page_table.iter().map(|_| None).collect();
    for dispatch in &segment.dispatches {
        for item in &segment.items[dispatch.first_item..][..dispatch.items] {
            for (tile, first) in (0..item.tokens as usize).step_by(TILE_TOKENS).enumerate() {
                let entry = item.page_offset as usize + tile;
                tiles[entry] = Some(PlannedTile {
                    page: Page { shard: dispatch.shard, index: segment.page_table[entry] },
                    span: item.span as usize,
                    tokens: TILE_TOKENS.min(item.tokens as usize - first),
                });
            }
        }
    }
    tiles
}
