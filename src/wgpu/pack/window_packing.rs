//! How a full f16 page becomes a tile of another format.

use crate::format::{AttentionShape, Rotation, TILE_TOKENS, TensorFormat};

/// How windows become tiles of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WindowPacking {
    /// Kernel `append`, row by row: rotated rows whose ranges belong to single tokens.
    Rows,
    /// Kernels `ranges_window` or `ranges_tile`, and `quantize`, which read the f16 tiles.
    Tiles,
    /// As [`Self::Tiles`], after kernel `hadamard` rotates the rows into scratch memory, because their ranges span
    /// tokens.
    RotatedTiles(Rotation),
}

impl WindowPacking {
    pub fn of(format: &TensorFormat) -> Self {
        match format.rotation() {
            Some(_) if format.takes_single_tokens() => Self::Rows,
            Some(rotation) => Self::RotatedTiles(rotation),
            None => Self::Tiles,
        }
    }
}

/// Bytes of scratch memory that one window of keys or of values passes through, or 0 if it is packed directly.
pub(super) fn scratch_bytes(shape: &AttentionShape, format: &TensorFormat) -> u64 {
    match WindowPacking::of(format) {
        WindowPacking::RotatedTiles(_) => (TILE_TOKENS * shape.kv_heads() * shape.head_dim() * size_of::<f32>()) as u64,
        WindowPacking::Rows | WindowPacking::Tiles => 0,
    }
}
