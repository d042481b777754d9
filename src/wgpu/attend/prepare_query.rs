//! Kernel `prepare_query`: scales, quantises and lays out the query for the kernels that score keys.

use super::specialisation::Specialisation;
use crate::format::{Direction, TileLayout};
use crate::plan::ElementType;
use crate::wgpu::device::Variant;
use crate::wgpu::pack::hadamard::{DirectedRotation, with_sketch, with_turn};
use crate::wgpu::sources::SHADERS;

impl Specialisation<'_> {
    /// The kernel that prepares queries of `input` elements, and resets `extremes` if a segment has some.
    pub fn prepare_query(&self, input: ElementType, extremes: Extremes) -> Variant {
        let variant = match extremes {
            Extremes::Reset => self.prepare_rotated_query(input).import("extremes", "attend/extremes.wgsl#reset"),
            Extremes::None => self.prepare_rotated_query(input),
        };
        match self.integer_keys() {
            true => self.query_fields().put(variant).constant("QUERY_PLANES", self.query_planes()),
            false => variant.import("query_row", "attend/query_row.wgsl#f32"),
        }
    }

    /// A kernel that prepares rows of queries of `input` elements.
    pub(super) fn put_rows(&self, kernel: &'static str, input: ElementType) -> Variant {
        let layout = TileLayout::of(&self.format.key, self.shape.head_dim());
        let variant = Variant::new(&SHADERS, kernel)
            .constant("HEAD_DIM", self.shape.head_dim())
            .constant("KV_HEADS", self.shape.kv_heads())
            .constant("QUERY_HEADS", self.shape.query_heads())
            .constant("ROW_FIELDS", layout.key_row_channels() / 4);
        self.given_query(input).put(variant)
    }

    /// The same kernel, without the choices of how rows are stored and which ranges are folded into them.
    pub(super) fn prepare_rotated_query(&self, input: ElementType) -> Variant {
        let head_dim = self.shape.head_dim();
        let mut variant = self.put_rows("prepare_query", input);
        if let Some(rotation) = self.format.key.rotation() {
            let turn = DirectedRotation { rotation, direction: Direction::Forward };
            variant = match self.format.key.sketched().and_then(|format| format.sketch) {
                None => variant.import("query_rotation", "attend/query_rotation.wgsl#hadamard"),
                Some(sketch) => {
                    let sketched = variant.import("query_rotation", "attend/query_rotation.wgsl#sketch");
                    with_sketch(sketched, sketch, rotation.order(), head_dim).constant("PARTS", self.query_parts())
                }
            };
            variant = with_turn(variant, turn, head_dim);
        }
        variant
    }
}

/// Whether the extremes of a span's scores are collected again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extremes {
    /// The segment is not calibrated.
    None,
    /// The kernel resets them for `scores`.
    Reset,
}
