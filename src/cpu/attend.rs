//! Kernel `attend`: scores, online softmax and weighted values over consecutive tiles in one pass.

use rayon::prelude::*;

use super::check::check_segment;
use super::key_tiles::KeyTiles;
use super::prepare_query::PreparedQueries;
use super::softmax::OnlineSoftmax;
use super::states::{ItemJob, States, item_jobs};
use super::store::CpuStore;
use super::tile_lines::TileLines;
use super::value_tiles::ValueTiles;
use crate::Result;
use crate::format::{KeyOrValue, TILE_TOKENS};
use crate::plan::{Elements, Page, StoreWork};

/// Attends to all items of a segment and writes their states. Scores are scaled and capped, not calibrated.
///
/// `queries` are `[rows, query_heads, head_dim]`.
///
/// # Errors
/// [`Error::Plan`](crate::Error::Plan) when store, queries or states do not match the work.
pub fn attend(segment: &StoreWork, store: &CpuStore, queries: Elements<'_>, states: &mut States) -> Result<()> {
    check_segment(segment, store, Some(queries))?;
    let (shape, format) = (store.shape(), store.format());
    let key_lines = TileLines::new(KeyOrValue::Key, &format.key, shape.head_dim());
    let value_lines = TileLines::new(KeyOrValue::Value, &format.value, shape.head_dim());
    let queries = PreparedQueries::new(segment, store, &key_lines, queries);
    let buffers = || AttendBuffers {
        keys: KeyTiles::new(format.key, shape.head_dim(), &key_lines),
        values: ValueTiles::new(format.value, shape.head_dim(), shape.group(), &value_lines),
        weights: vec![0.0; shape.group() * TILE_TOKENS],
        softmax: vec![OnlineSoftmax::EMPTY; shape.group()],
        seen: Vec::new(),
        of_seen: Vec::new(),
    };
    item_jobs(segment, shape, states)?.into_par_iter().for_each_init(buffers, |buffers, job| {
        buffers.attend_item(segment, store, &queries, job);
    });
    Ok(())
}

/// The state of one thread in addition to the stores.
struct AttendBuffers<'a> {
    keys: KeyTiles<'a>,
    values: ValueTiles<'a>,
    /// Scores, then weights, `[query head of the group][128]`.
    weights: Vec<f32>,
    softmax: Vec<OnlineSoftmax>,
    /// Tokens of a tile that a masked item's query sees, and the weights of one head for them.
    seen: Vec<usize>,
    of_seen: Vec<f32>,
}

impl AttendBuffers<'_> {
    fn attend_item(&mut self, segment: &StoreWork, store: &CpuStore, queries: &PreparedQueries, job: ItemJob<'_>) {
        let item = job.item;
        let queries = queries.group(item.query as usize + job.query, job.kv_head);
        self.softmax.fill(OnlineSoftmax::EMPTY);
        self.values.clear();
        let pages = &segment.page_table()[item.page_offset as usize..];
        for (tile, first) in (0..item.tokens as usize).step_by(TILE_TOKENS).enumerate() {
            let page = Page { shard: job.shard, index: pages[tile] };
            let tokens = TILE_TOKENS.min(item.tokens as usize - first);
            if job.masked {
                self.seen.clear();
                self.seen.extend((0..tokens).filter(|&token| segment.sees(item, first + token)));
                if self.seen.is_empty() {
                    continue;
                }
            }
            if tokens < TILE_TOKENS {
                self.weights.fill(0.0);
            }
            let key_tile = store.tensor(KeyOrValue::Key).tile(page, job.kv_head);
            self.keys.score(key_tile, tokens, queries, &mut self.weights);
            for (head, weights) in self.weights.chunks_exact_mut(TILE_TOKENS).enumerate() {
                if let Some(cap) = segment.scoring().soft_cap() {
                    // NaN and infinities stay, so that the outputs of their query head are NaN.
                    let finite = weights[..tokens].iter_mut().filter(|score| score.is_finite());
                    finite.for_each(|score| *score = cap * (*score / cap).tanh());
                }
                let rescale_acc = match job.masked {
                    false => self.softmax[head].weigh(&mut weights[..tokens]),
                    true => weigh_seen(&mut self.softmax[head], &self.seen, &mut self.of_seen, weights),
                };
                self.values.rescale(head, rescale_acc);
            }
            self.values.add(store.tensor(KeyOrValue::Value).tile(page, job.kv_head), &self.weights);
        }
        let ranges = store.tensor(KeyOrValue::Value).head_ranges(item.range_slot as usize, job.kv_head);
        self.values.finish(&self.softmax, ranges, job.outputs, job.lse);
    }
}

/// Turns the scores of the seen tokens of a tile into weights, and those of the others into 0.
fn weigh_seen(softmax: &mut OnlineSoftmax, seen: &[usize], of_seen: &mut Vec<f32>, weights: &mut [f32]) -> f64 {
    of_seen.clear();
    of_seen.extend(seen.iter().map(|&token| weights[token]));
    let rescale_acc = softmax.weigh(of_seen);
    weights.fill(0.0);
    seen.iter().zip(of_seen).for_each(|(&token, weight)| weights[token] = *weight);
    rescale_acc
}
