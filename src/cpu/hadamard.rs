//! Kernel `hadamard`: rotates rows of channels, forward or inverse.

use rayon::prelude::*;

use crate::format::{Direction, Rotation};
use crate::{Error, Result};

/// Rotates rows of `head_dim` channels in place: the blocked, normalised Walsh-Hadamard transform of [`Rotation`].
///
/// # Errors
/// [`Error::Format`] when the order of the rotation does not divide `head_dim`, [`Error::Elements`] when the last
/// row is incomplete.
pub fn hadamard(rows: &mut [f32], head_dim: usize, rotation: Rotation, direction: Direction) -> Result<()> {
    rotation.check_head_dim(head_dim)?;
    if !rows.len().is_multiple_of(head_dim) {
        let expected = rows.len() / head_dim * head_dim;
        let shape = format!("whole rows of {head_dim} channels");
        return Err(Error::Elements { what: "rows to rotate", given: rows.len(), expected, shape });
    }
    rows.par_chunks_exact_mut(head_dim).for_each(|row| rotation.turn_checked(direction, row));
    Ok(())
}
