//! Kernel `merge_states`: merges the states of a query's parts into its state over all tokens that it sees.

use rayon::prelude::*;

use super::dense::CpuTensor;
use super::foreign::ElementsMut;
use super::softmax::larger;
use super::states::States;
use crate::backend::StateParts;
use crate::format::AttentionShape;
use crate::plan::{ElementType, Elements, Work};
use crate::{Error, Result};

/// Merges the state rows of every query: row i of the result is the state of query i over all tokens that it sees.
///
/// A part with log-sum-exp `l` counts with weight `exp(l)`, so the merge is exact however tokens were split. A sink is
/// one more part: of output 0, with its logit for a log-sum-exp.
///
/// # Errors
/// [`Error::Plan`] when the states do not match the work, [`Error::OutOfMemory`].
pub fn merge_states(work: &Work, states: &States) -> Result<States> {
    if states.rows() != work.states() {
        let reason = format!("{} state rows, the work has {}", states.rows(), work.states());
        return Err(Error::Plan { what: "merging states", reason });
    }
    let (heads, head_dim) = (work.shape().query_heads(), work.shape().head_dim());
    let mut merged = States::new(work.rows().len(), work.shape())?;
    let no_output = vec![0.0; head_dim];
    merged.chunks_mut(1).collect::<Vec<_>>().into_par_iter().enumerate().for_each(|(i, (output, lse))| {
        let (rows, head) = (work.rows()[i / heads], i % heads);
        let states_of_head = (rows.first..rows.end).map(|row| {
            let state = row as usize * heads + head;
            (states.lse()[state], &states.outputs()[state * head_dim..][..head_dim])
        });
        let sink = work.scoring().sinks().map(|sinks| (sinks[head], no_output.as_slice()));
        lse[0] = merge_head(states_of_head.chain(sink), output);
    });
    Ok(merged)
}

/// Merges two states of every row, over two sets of tokens that do not overlap: for an engine with attention of its
/// own.
///
/// # Errors
/// [`Error::Plan`] when they differ in rows, heads or head dimension.
pub fn merge_pair(first: &States, second: &States) -> Result<States> {
    if first.outputs().len() != second.outputs().len() || first.lse().len() != second.lse().len() {
        let rows = |states: &States| format!("{} of {} elements", states.rows(), states.outputs().len());
        let reason = format!("rows of states: {} and {}", rows(first), rows(second));
        return Err(Error::Plan { what: "merging states", reason });
    }
    let mut merged = first.clone();
    let parts = [first, second].map(|states| PartStates { outputs: states.outputs(), lse: states.lse() });
    merge_heads(&parts, &mut merged);
    Ok(merged)
}

/// Kernel `merge_parts`: the parts lie one after the other in the same tensors, and the result in those of the caller.
///
/// # Errors
/// [`Error::Buffer`] for states that are not f32, [`Error::OutOfMemory`]. The caller has checked the lengths.
pub(super) fn merge_parts(
    shape: &AttentionShape,
    StateParts { states, parts, rows }: StateParts<'_, CpuTensor>,
    output: &mut CpuTensor,
    lse: Option<&mut CpuTensor>,
) -> Result<()> {
    let (heads, head_dim) = (rows * shape.query_heads(), shape.head_dim());
    let (from, from_lse) = (floats("outputs of the parts", &states.outputs)?, floats("log-sum-exps", &states.lse)?);
    let mut merged = States::new(rows, shape)?;
    let of = |part: usize| PartStates {
        outputs: &from[part * heads * head_dim..][..heads * head_dim],
        lse: &from_lse[part * heads..][..heads],
    };
    merge_heads(&(0..parts).map(of).collect::<Vec<_>>(), &mut merged);
    if let Some(lse) = lse {
        let of = lse.elements().element_type();
        let ElementsMut::F32(to) = lse.elements_mut() else { return Err(not_floats("merged log-sum-exps", of)) };
        to[..heads].copy_from_slice(merged.lse());
    }
    output.elements_mut().write_f32(0, &merged.outputs()[..heads * head_dim]);
    Ok(())
}

fn floats<'a>(what: &'static str, tensor: &'a CpuTensor) -> Result<&'a [f32]> {
    match tensor.elements() {
        Elements::F32(x) => Ok(x),
        other => Err(not_floats(what, other.element_type())),
    }
}

fn not_floats(what: &'static str, given: ElementType) -> Error {
    let reason = format!("are {given:?}, but states are f32");
    Error::Buffer { what, reason }
}

/// The states of one part.
#[derive(Clone, Copy)]
struct PartStates<'a> {
    outputs: &'a [f32],
    lse: &'a [f32],
}

/// Merges the same query heads of all parts, in the order of the parts.
fn merge_heads(parts: &[PartStates<'_>], merged: &mut States) {
    merged.chunks_mut(1).collect::<Vec<_>>().into_par_iter().enumerate().for_each(|(i, (output, lse))| {
        let head_dim = output.len();
        let states = parts.iter().map(|part| (part.lse[i], &part.outputs[i * head_dim..][..head_dim]));
        lse[0] = merge_head(states, output);
    });
}

/// Merges states of one query head into `output` and returns the log-sum-exp.
fn merge_head<'a>(states: impl Iterator<Item = (f32, &'a [f32])> + Clone, output: &mut [f32]) -> f32 {
    // What a part without tokens has for an output is nobody's value: it may be NaN.
    let states = states.filter(|(lse, _)| *lse != f32::NEG_INFINITY);
    let largest = states.clone().map(|(lse, _)| lse).fold(f32::NEG_INFINITY, larger);
    if largest == f32::NEG_INFINITY {
        output.fill(0.0); // no tokens at all
        return largest;
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
