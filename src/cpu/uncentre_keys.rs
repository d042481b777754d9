//! Kernel `uncentre_keys`: adds their centre back to dense rows of keys.

/// Adds a centre, `[kv_heads, head_dim]`, to rows `[kv_heads, tokens, head_dim]`.
pub(super) fn uncentre_keys(rows: &mut [f32], centre: &[f32], head_dim: usize) {
    let of_head = rows.len() * head_dim / centre.len();
    for (rows, centre) in rows.chunks_exact_mut(of_head).zip(centre.chunks_exact(head_dim)) {
        for row in rows.chunks_exact_mut(head_dim) {
            row.iter_mut().zip(centre).for_each(|(x, centre)| *x += centre);
        }
    }
}
