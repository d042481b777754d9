//! Attention states: the results of attention over parts of a cache, which can be merged.

use super::dense::CpuTensor;
use crate::backend::AttentionStates;
use crate::counts::filled;
use crate::format::AttentionShape;
use crate::plan::{ItemMask, StoreWork, Work, WorkItem};
use crate::{Error, Result};

/// Attention states of all query heads, row by row.
///
/// The state of a query head over some tokens is its softmax-weighted mean of their values and the natural logarithm of
/// the sum of the exponentials of its scores (the log-sum-exp). States over disjoint tokens merge exactly.
#[derive(Clone, Debug, PartialEq)]
pub struct States {
    query_heads: usize,
    head_dim: usize,
    outputs: Vec<f32>,
    lse: Vec<f32>,
}

impl States {
    /// States of no tokens: outputs 0, log-sum-exp −∞.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(rows: usize, shape: &AttentionShape) -> Result<Self> {
        let (query_heads, head_dim) = (shape.query_heads(), shape.head_dim());
        let states = rows.saturating_mul(query_heads);
        Ok(Self {
            query_heads,
            head_dim,
            outputs: filled("attention states", states.saturating_mul(head_dim), 0.0)?,
            lse: filled("attention states", states, f32::NEG_INFINITY)?,
        })
    }

    /// States from given outputs `[row][query_head][head_dim]` and natural log-sum-exps `[row][query_head]`.
    ///
    /// # Errors
    /// [`Error::Elements`] when they have different rows.
    pub fn from_parts(shape: &AttentionShape, outputs: Vec<f32>, lse: Vec<f32>) -> Result<Self> {
        let (query_heads, head_dim) = (shape.query_heads(), shape.head_dim());
        let (given, expected) = (outputs.len(), lse.len().saturating_mul(head_dim));
        if given != expected || !lse.len().is_multiple_of(query_heads) {
            let shape = format!("[rows, {query_heads}, {head_dim}] with {} log-sum-exps", lse.len());
            return Err(Error::Elements { what: "outputs of states", given, expected, shape });
        }
        Ok(Self { query_heads, head_dim, outputs, lse })
    }

    /// One row of states for every state row of the work.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn for_work(work: &Work) -> Result<Self> {
        Self::new(work.states(), work.shape())
    }

    /// The states that a backend returned, for layers of `shape`.
    ///
    /// # Errors
    /// As [`States::from_parts`].
    pub fn of(shape: &AttentionShape, states: &AttentionStates<CpuTensor>) -> Result<Self> {
        Self::from_parts(shape, states.outputs.to_f32(), states.lse.to_f32())
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.lse.len() / self.query_heads
    }

    /// Normalised outputs `[row][query_head][head_dim]`.
    pub fn outputs(&self) -> &[f32] {
        &self.outputs
    }

    /// Natural log-sum-exp `[row][query_head]`.
    pub fn lse(&self) -> &[f32] {
        &self.lse
    }

    /// The outputs alone.
    pub fn into_outputs(self) -> Vec<f32> {
        self.outputs
    }

    /// Appends the rows of other states of the same shape.
    ///
    /// # Errors
    /// [`Error::Plan`] when the shapes differ.
    pub fn extend(&mut self, other: &Self) -> Result<()> {
        if (other.query_heads, other.head_dim) != (self.query_heads, self.head_dim) {
            let reason = format!(
                "{} heads × {} against {} × {}",
                other.query_heads, other.head_dim, self.query_heads, self.head_dim
            );
            return Err(Error::Plan { what: "joining states", reason });
        }
        self.outputs.extend_from_slice(&other.outputs);
        self.lse.extend_from_slice(&other.lse);
        Ok(())
    }

    /// Outputs and log-sum-exp in chunks of `heads` query heads, in order.
    pub(super) fn chunks_mut(&mut self, heads: usize) -> impl Iterator<Item = (&mut [f32], &mut [f32])> {
        self.outputs.chunks_exact_mut(heads * self.head_dim).zip(self.lse.chunks_exact_mut(heads))
    }
}

impl From<States> for AttentionStates<CpuTensor> {
    fn from(states: States) -> Self {
        Self { outputs: CpuTensor::F32(states.outputs), lse: CpuTensor::F32(states.lse) }
    }
}

/// The work of one item for one of its queries and one KV head, and its state.
pub(super) struct ItemJob<'a> {
    pub(super) item: &'a WorkItem,
    pub(super) shard: u32,
    /// Whether the query does not see all tokens of the item.
    pub(super) masked: bool,
    /// The query, counted from the item's first.
    pub(super) query: usize,
    pub(super) kv_head: usize,
    /// `[query head of the group][head_dim]`.
    pub(super) outputs: &'a mut [f32],
    /// Per query head of the group.
    pub(super) lse: &'a mut [f32],
}

/// One job per item, query and KV head of a segment.
///
/// # Errors
/// [`Error::Plan`] when two items share a state row or one lies outside the states.
pub(super) fn item_jobs<'a>(
    segment: &'a StoreWork,
    shape: &AttentionShape,
    states: &'a mut States,
) -> Result<Vec<ItemJob<'a>>> {
    let kv_heads = shape.kv_heads();
    let mut slots: Vec<_> = states.chunks_mut(shape.group()).map(Some).collect();
    let mut jobs = Vec::with_capacity(segment.items().len() * kv_heads);
    for dispatch in segment.dispatches() {
        for item in segment.items_of(dispatch) {
            for query in 0..item.queries as usize {
                let row = item.state as usize + query * item.stride as usize;
                for kv_head in 0..kv_heads {
                    let slot = slots.get_mut(row * kv_heads + kv_head).and_then(Option::take);
                    let (outputs, lse) = slot.ok_or_else(|| Error::Plan {
                        what: "attend",
                        reason: format!("state row {row} is missing or written twice"),
                    })?;
                    let (shard, masked) = (dispatch.shard, dispatch.mask == ItemMask::Bits);
                    jobs.push(ItemJob { item, shard, masked, query, kv_head, outputs, lse });
                }
            }
        }
    }
    Ok(jobs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_whole() {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let of = |heads: usize, lse: usize| States::from_parts(&shape, vec![0.0; heads * 64], vec![0.0; lse]);
        assert_eq!(of(8, 8).unwrap().lse().len(), 8);
        for (heads, lse) in [(4, 3), (3, 3), (8, 4)] {
            assert!(matches!(of(heads, lse), Err(Error::Elements { .. })), "{heads} heads, {lse} log-sum-exps");
        }
    }
}
