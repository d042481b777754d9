//! Kernel `centre_keys`: subtracts the centre of their sequence from rows of keys, and rotates them if the format does.

use super::hadamard::{DirectedRotation, with_turn};
use super::tile_call::{BoundRows, RowsKind, TileCall, with_rows};
use crate::Result;
use crate::format::{Direction, HEAD_DIMS, Rotation};
use crate::wgpu::device::launch::{FLAT_WORKGROUP, Launch, flat_grid};
use crate::wgpu::device::{Kernels, Store, Variant};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;

/// Writes `call.tokens` rows of every KV head, starting at `call.first_token`, into `[tokens, kv_heads, head_dim]`.
/// Subtracts the centre in slot `centre` of the store, and rotates the rows if `rotation` is given.
pub(super) fn centre(
    kernels: &Kernels,
    (store, centre): (&Store, usize),
    rotation: Option<Rotation>,
    call: TileCall,
    rows: &BoundRows<'_>,
    output: wgpu::BufferBinding<'_>,
) -> Result<Launch> {
    let variant = variant_of(call.head_dim as usize, rotation, rows.kind());
    let total = u64::from(call.tokens) * u64::from(call.kv_heads);
    let grid = flat_grid(total * u64::from(FLAT_WORKGROUP), &kernels.device().limits())?;
    let call = TileCall { total: total as u32, range_slot: centre as u32, ..call }.upload(kernels.device(), &[])?;
    let own = [("call", call.as_entire_buffer_binding()), ("output", output), ("centres", store.centres_binding()?)];
    let buffers: Vec<_> = own.into_iter().chain(rows.bindings()).collect();
    planned(kernels, &variant, &buffers, grid)
}

/// The variant of [`centre`].
pub(super) fn variant_of(head_dim: usize, rotation: Option<Rotation>, rows: RowsKind) -> Variant {
    let variant = with_rows(Variant::new(&SHADERS, "centre_keys").constant("HEAD_DIM", head_dim), rows);
    match rotation {
        None => variant,
        Some(rotation) => {
            let turn = DirectedRotation { rotation, direction: Direction::Forward };
            with_turn(variant.import("row", "pack/row.wgsl#rotated"), turn, head_dim)
        }
    }
}

/// Variants of every head dimension, rotation and kind of rows.
pub(crate) fn variants() -> Vec<Variant> {
    let mut found = Vec::new();
    for head_dim in HEAD_DIMS {
        let order = Rotation::largest_order(head_dim);
        for rotation in [None, Some(Rotation::hadamard(order)), Some(Rotation::dealt(order, 1))] {
            found.extend(RowsKind::all().map(|rows| variant_of(head_dim, rotation, rows)));
        }
    }
    found
}
