//! Kernel `centre_keys`: subtracts their centre from rows of keys.

/// Subtracts the centre of a KV head, `[head_dim]`, from a row. Does nothing if the centre is empty.
pub(super) fn centre_row(row: &mut [f32], centre: &[f32]) {
    row.iter_mut().zip(centre).for_each(|(x, centre)| *x -= centre);
}
