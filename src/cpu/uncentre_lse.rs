//! Kernel `uncentre_lse`: turns log-sum-exps over centred keys into those over the original keys.

use super::dense::read_row;
use super::states::States;
use super::store::CpuStore;
use crate::backend::RowCentres;
use crate::plan::Elements;
use crate::{Error, Result};

/// Adds `scale · q·m` to the log-sum-exp of every query and head, with `m` the centre in the slot that `centres` has
/// for the query. A state of no tokens, whose log-sum-exp is −∞, stays one.
///
/// # Errors
/// [`Error::Elements`] when states and queries are not of as many rows as there are slots, [`Error::Plan`] when a slot
/// does not exist.
pub fn uncentre_lse(
    store: &CpuStore,
    queries: Elements<'_>,
    centres: RowCentres<'_>,
    mut states: States,
) -> Result<States> {
    let RowCentres { slots, scale } = centres;
    let shape = *store.shape();
    let (heads, head_dim) = (shape.query_heads(), shape.head_dim());
    let rows = |what, given, elements: usize| {
        let expected = slots.len().saturating_mul(elements);
        let shape = format!("{} rows of {heads} query heads × {head_dim} channels", slots.len());
        if given == expected { Ok(()) } else { Err(Error::Elements { what, given, expected, shape }) }
    };
    rows("queries", queries.len(), heads * head_dim)?;
    rows("log-sum-exps", states.lse().len(), heads)?;
    let mut query = vec![0.0; head_dim];
    let centres = slots.iter().map(|&slot| store.centre(slot as usize)).collect::<Result<Vec<_>>>()?;
    for (row, ((_, lse), centre)) in states.chunks_mut(heads).zip(centres).enumerate() {
        for (head, lse) in lse.iter_mut().enumerate() {
            read_row(queries, (row * heads + head) * head_dim, &mut query);
            let centre = &centre[head / shape.group() * head_dim..][..head_dim];
            let product: f64 = query.iter().zip(centre).map(|(&q, &m)| f64::from(q) * f64::from(m)).sum();
            *lse += (f64::from(scale) * product) as f32;
        }
    }
    Ok(states)
}
