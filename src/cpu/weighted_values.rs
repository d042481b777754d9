//! Kernel `weighted_values`: states from scores (CalibQuant, arXiv 2502.14882, algorithm 2).

use rayon::prelude::*;

use super::check::{check_calibrated, check_segment};
use super::scores::SegmentScores;
use super::softmax::OnlineSoftmax;
use super::states::{ItemJob, States, item_jobs};
use super::store::CpuStore;
use super::tile_lines::TileLines;
use super::value_tiles::ValueTiles;
use crate::format::{KeyOrValue, ScoreMap, TILE_TOKENS};
use crate::plan::{Page, StoreWork};
use crate::{Error, Result};

/// Softmax of mapped scores times values, for all items of a segment: writes their states.
///
/// `maps` are `[prepared query][query_head]`, as returned by [`SegmentScores::maps`].
///
/// # Errors
/// [`Error::Plan`] when store, scores, maps or states do not match the work.
pub fn weighted_values(
    segment: &StoreWork,
    store: &CpuStore,
    scores: &SegmentScores,
    maps: &[ScoreMap],
    states: &mut States,
) -> Result<()> {
    check_calibrated(segment)?;
    check_segment(segment, store, None)?;
    let (shape, format) = (store.shape(), store.format());
    let needed_scores = segment.score_tiles() * shape.query_heads() * TILE_TOKENS;
    let needed_maps = segment.queries().len() * shape.query_heads();
    if scores.scores().len() != needed_scores || maps.len() != needed_maps {
        let reason = format!(
            "{} scores and {} maps were given, the work has {needed_scores} and {needed_maps}",
            scores.scores().len(),
            maps.len()
        );
        return Err(Error::Plan { what: "weighted values", reason });
    }

    let lines = TileLines::new(KeyOrValue::Value, &format.value, shape.head_dim());
    let buffers = || WeightedValues {
        values: ValueTiles::new(format.value, shape.head_dim(), shape.group(), &lines),
        weights: vec![0.0; shape.group() * TILE_TOKENS],
        softmax: vec![OnlineSoftmax::EMPTY; shape.group()],
    };
    item_jobs(segment, shape, states)?.into_par_iter().for_each_init(buffers, |buffers, job| {
        let head = job.kv_head * shape.group();
        let maps = &maps[job.item.query as usize * shape.query_heads() + head..][..shape.group()];
        buffers.weigh_item(segment, store, scores, maps, job);
    });
    Ok(())
}

/// The state of one thread in addition to the stores.
struct WeightedValues<'a> {
    values: ValueTiles<'a>,
    weights: Vec<f32>,
    softmax: Vec<OnlineSoftmax>,
}

impl WeightedValues<'_> {
    fn weigh_item(
        &mut self,
        segment: &StoreWork,
        store: &CpuStore,
        scores: &SegmentScores,
        maps: &[ScoreMap],
        job: ItemJob<'_>,
    ) {
        let (item, shape) = (job.item, store.shape());
        self.softmax.fill(OnlineSoftmax::EMPTY);
        self.values.clear();
        for (tile, first) in (0..item.tokens as usize).step_by(TILE_TOKENS).enumerate() {
            let tokens = TILE_TOKENS.min(item.tokens as usize - first);
            let row = (item.scores as usize + tile) * shape.query_heads() + job.kv_head * shape.group();
            let scores = scores.scores()[row * TILE_TOKENS..].chunks_exact(TILE_TOKENS);
            for (head, (weights, scores)) in self.weights.chunks_exact_mut(TILE_TOKENS).zip(scores).enumerate() {
                weights[tokens..].fill(0.0);
                weights[..tokens].iter_mut().zip(scores).for_each(|(to, &score)| *to = maps[head].apply(score));
                let factor = self.softmax[head].weigh(&mut weights[..tokens]);
                self.values.rescale(head, factor);
            }
            let page = Page { shard: job.shard, index: segment.page_table()[item.page_offset as usize + tile] };
            self.values.add(store.tensor(KeyOrValue::Value).tile(page, job.kv_head), &self.weights);
        }
        let ranges = store.tensor(KeyOrValue::Value).head_ranges(item.range_slot as usize, job.kv_head);
        self.values.finish(&self.softmax, ranges, job.outputs, job.lse);
    }
}
