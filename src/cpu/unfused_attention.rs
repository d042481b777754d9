//! Attention in steps, as in Cocktail (arXiv 2503.23294, algorithm 1): the scores of every block in its own format, one
//! softmax over all of them, the weighted values of every block, and their sum. It is a comparison for [`attend`],
//! which stores no scores and no weights.
//!
//! [`attend`]: super::attend::attend

use super::merge_states::merge_states;
use super::scores::{SegmentScores, scores};
use super::states::States;
use super::store::CpuStore;
use super::weighted_values::weighted_values;
use crate::format::{Calibration, ScoreMap};
use crate::plan::{AttendPlan, Elements, Split, StoreWork, Work};
use crate::{Error, Result};

/// The state of every query of a plan over all tokens that it sees, row by row, computed in steps.
///
/// `queries` are `[rows, query_heads, head_dim]`. Every store of the plan needs a calibration, because only then it has
/// places for scores. [`Calibration::IDENTITY`] leaves scores unchanged.
///
/// # Errors
/// [`Error::Plan`] or [`Error::Elements`] when stores or queries are not those of the plan, or one of its stores has no
/// calibration.
pub fn unfused_attention(plan: &AttendPlan, stores: &[&CpuStore], queries: Elements<'_>) -> Result<States> {
    plan.check_elements("queries", queries.len())?;
    if plan.scoring().sinks().is_some() {
        return Err(Error::Unsupported {
            what: "unfused attention with sinks".into(),
            hint: "its weights are shares of all stored tokens; attend with the fused kernels".into(),
        });
    }
    let work = Work::new(plan, Split::default(), 1)?;
    let mut blocks = Vec::with_capacity(work.segments().len());
    for segment in work.segments() {
        blocks.push(Block::new(segment, stores, queries, &work)?);
    }
    let lse = log_sum_exp(&blocks, plan.rows(), work.shape().query_heads())?;
    let mut states = States::for_work(&work)?;
    for block in &blocks {
        // A weight of the softmax is exp(score − lse): its share of all tokens, not of the block's alone.
        let query_heads = work.shape().query_heads();
        let shifted = |(at, map): (usize, &ScoreMap)| {
            let row = block.segment.queries()[at / query_heads].row as usize;
            ScoreMap { offset: map.offset - lse[row * query_heads + at % query_heads], ..*map }
        };
        let maps: Vec<ScoreMap> = block.maps.iter().enumerate().map(shifted).collect();
        weighted_values(block.segment, block.store, &block.scores, &maps, &mut states)?;
    }
    let summed = merge_states(&work, &states)?;
    States::from_parts(work.shape(), summed.into_outputs(), lse)
}

/// What one store holds for a call.
struct Block<'a> {
    segment: &'a StoreWork,
    store: &'a CpuStore,
    scores: SegmentScores,
    /// `[prepared query][query_head]`.
    maps: Vec<ScoreMap>,
}

impl<'a> Block<'a> {
    fn new(segment: &'a StoreWork, stores: &[&'a CpuStore], queries: Elements<'_>, work: &Work) -> Result<Self> {
        let store = stores.get(segment.store()).filter(|store| store.shape() == work.shape());
        let store = *store.ok_or_else(|| Error::Plan {
            what: "unfused attention",
            reason: format!("store {} is missing or of another shape than {:?}", segment.store(), work.shape()),
        })?;
        let scores = scores(segment, store, queries)?;
        let maps = scores.maps(segment.calibration().unwrap_or(&Calibration::IDENTITY));
        Ok(Self { segment, store, scores, maps })
    }

    /// The mapped scores of one query head of one prepared query.
    fn of_query(&self, query: usize, query_head: usize, query_heads: usize) -> Result<impl Iterator<Item = f64>> {
        let map = self.maps[query * query_heads + query_head];
        let scores = self.scores.of_query(self.segment, query, query_head)?;
        Ok(scores.into_iter().map(move |score| f64::from(map.apply(score))))
    }
}

/// The natural log-sum-exp of the scores of all blocks, `[row][query_head]`.
fn log_sum_exp(blocks: &[Block<'_>], rows: usize, query_heads: usize) -> Result<Vec<f32>> {
    let mut side_by_side: Vec<Vec<f64>> = vec![Vec::new(); rows * query_heads];
    for block in blocks {
        for (query, prepared) in block.segment.queries().iter().enumerate() {
            // A causal run has queries that see nothing of a span.
            if !block.segment.items().iter().any(|item| item.query as usize == query) {
                continue;
            }
            for head in 0..query_heads {
                let scores = block.of_query(query, head, query_heads)?;
                side_by_side[prepared.row as usize * query_heads + head].extend(scores);
            }
        }
    }
    let of_head = |scores: &Vec<f64>| {
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        (largest + scores.iter().map(|score| (score - largest).exp()).sum::<f64>().ln()) as f32
    };
    Ok(side_by_side.iter().map(of_head).collect())
}
