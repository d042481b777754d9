//! Kernel `uncentre_keys`: adds the centre of their sequence back to dense rows of keys.

use super::tile_call::TileCall;
use crate::Result;
use crate::format::{KeyOrValue, TensorFormat};
use crate::wgpu::device::launch::{Launch, flat_grid};
use crate::wgpu::device::{Kernels, Store, Tensor, Variant};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;

/// Adds the centre in slot `centre` to rows `[kv_heads, tokens, head_dim]`, in place.
pub(super) fn uncentre(
    kernels: &Kernels,
    store: &Store,
    centre: usize,
    tokens: usize,
    rows: &Tensor,
) -> Result<Launch> {
    let total = rows.elements() as u64;
    let call = TileCall {
        tokens: tokens as u32,
        range_slot: centre as u32,
        total: total as u32,
        ..TileCall::new(store.shape(), &TensorFormat::F16, KeyOrValue::Key)
    };
    let call = call.upload(kernels.device(), &[])?;
    let grid = flat_grid(total, &kernels.device().limits())?;
    let buffers =
        [("call", call.as_entire_buffer_binding()), ("output", rows.binding()), ("centres", store.centres_binding()?)];
    planned(kernels, &variant(), &buffers, grid)
}

/// The variant of [`uncentre`].
pub(super) fn variant() -> Variant {
    Variant::new(&SHADERS, "uncentre_keys")
}
