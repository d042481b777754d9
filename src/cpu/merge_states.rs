//! Kernel `merge_states`: the states of a sequence's parts become the state of the sequence.

use rayon::prelude::*;

use super::softmax::larger;
use super::states::States;
use crate::plan::DecodePlan;
use crate::{Error, Result};

/// Merges the state rows of each sequence of a plan: row s of the result is the state of sequence s over all its tokens.
///
/// A part with log-sum-exp `l` counts with weight `exp(l)`, so the merge is exact however tokens were split.
///
/// # Errors
/// [`Error::Plan`] when the states are not those of the plan, [`Error::OutOfMemory`].
pub fn merge_states(plan: &DecodePlan, states: &States) -> Result<States> {
    if states.rows() != plan.states() {
        let reason = format!("{} state rows, the plan has {}", states.rows(), plan.states());
        return Err(Error::Plan { what: "merging states", reason });
    }
    let (heads, head_dim) = (plan.shape.query_heads(), plan.shape.head_dim());
    let mut merged = States::new(plan.sequences(), &plan.shape)?;
    merged.chunks_mut(1).collect::<Vec<_>>().into_par_iter().enumerate().for_each(|(i, (output, lse))| {
        let (sequence, head) = (i / heads, i % heads);
        let rows = plan.first_state[sequence] as usize..plan.first_state[sequence + 1] as usize;
        let states_of_head = rows.map(|row| {
            let state = row * heads + head;
            (states.lse()[state], &states.outputs()[state * head_dim..][..head_dim])
        });
        lse[0] = merge_head(states_of_head, output);
    });
    Ok(merged)
}

/// Merges states of one query head into `output` and returns the log-sum-exp.
fn merge_head<'a>(states: impl Iterator<Item = (f32, &'a [f32])> + Clone, output: &mut [f32]) -> f32 {
    let largest = states.clone().map(|(lse, _)| lse).fold(f32::NEG_INFINITY, larger);
    if largest == f32::NEG_INFINITY {
        return largest; // no tokens at all: the output stays 0
    }
    let mut sum = vec![0.0f64; output.len()];
    let mut weight_sum = 0.0;
    for (lse, part) in states {
        let weight = f64::from(lse - largest).exp();
        weight_sum += weight;
        sum.iter_mut().zip(part).for_each(|(sum, &x)| *sum += weight * f64::from(x));
    }
    output.iter_mut().zip(sum).for_each(|(output, sum)| *output = (sum / weight_sum) as f32);
    (f64::from(largest) + weight_sum.ln()) as f32
}
