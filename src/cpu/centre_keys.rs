//! Kernel `centre_keys`: rows of keys less their centre.

/// Takes the centre of a KV head, `[head_dim]`, from a row; nothing where there is none.
pub(super) fn centre_row(row: &mut [f32], centre: &[f32]) {
    row.iter_mut().zip(centre).for_each(|(x, centre)| *x -= centre);
}
