//! Kernel `key_mean`: computes the mean of some keys as the centre of a sequence.

use super::dense::read_row;
use super::store::CpuStore;
use crate::backend::NewCentre;
use crate::plan::Elements;
use crate::{Error, Result};

/// Writes the mean of some keys into a slot of the store's centres. The sum is taken in f32, token after token, and
/// multiplied by `1 / tokens`, rounded to f32: the same bits on every backend. Keys that are not finite, or beyond
/// [`NewCentre::largest`], count as 0.
///
/// # Errors
/// [`Error::Plan`] when there is no such slot or token, [`Error::Elements`] when the keys are shorter than their layout
/// requires. On an error the store is unchanged.
pub fn key_mean(store: &mut CpuStore, keys: Elements<'_>, centre: NewCentre) -> Result<()> {
    let shape = *store.shape();
    centre.rows.check("keys", keys.len(), &shape)?;
    check_tokens(&centre)?;
    let factor = 1.0 / centre.tokens.len() as f32;
    let mut row = vec![0.0; shape.head_dim()];
    for (head, mean) in store.centre_mut(centre.slot)?.chunks_exact_mut(shape.head_dim()).enumerate() {
        mean.fill(0.0);
        for token in centre.tokens.start()..centre.tokens.end() {
            read_row(keys, centre.rows.row(token, head), &mut row);
            // False for NaN.
            let counts = |x: f32| x.abs() <= centre.largest;
            mean.iter_mut().zip(&row).for_each(|(sum, &x)| *sum += if counts(x) { x } else { 0.0 });
        }
        mean.iter_mut().for_each(|sum| *sum *= factor);
    }
    Ok(())
}

/// Checks that the tensor has the tokens of the centre.
fn check_tokens(centre: &NewCentre) -> Result<()> {
    if centre.tokens.end() <= centre.rows.tokens {
        return Ok(());
    }
    let reason = format!("tokens up to {} of {}", centre.tokens.end(), centre.rows.tokens);
    Err(Error::Plan { what: "key mean", reason })
}
