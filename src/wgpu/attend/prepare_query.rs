//! Kernel `prepare_query`: scales, quantises and lays out the query for the kernels that score keys.

use super::attend::Specialisation;
use crate::format::{Bits, Direction, TileLayout};
use crate::plan::ElementType;
use crate::wgpu::device::Variant;
use crate::wgpu::pack::hadamard::{Turn, with_sketch, with_turn};

impl Specialisation<'_> {
    /// The kernel that prepares queries of `input` elements; `calibrated` segments also reset their extremes.
    pub fn prepare_query(&self, input: ElementType, extremes: Extremes) -> Variant {
        let head_dim = self.shape.head_dim();
        let layout = TileLayout::new(&self.format.key, head_dim);
        let mut variant = Variant::new("prepare_query")
            .constant("HEAD_DIM", head_dim)
            .constant("KV_HEADS", self.shape.kv_heads())
            .constant("QUERY_HEADS", self.shape.query_heads())
            .constant("ROW_FIELDS", layout.key_row_channels() / 4)
            .float("SCORE_SCALE", self.score_scale())
            .import("input", input_file(input));
        if extremes == Extremes::Reset {
            variant = variant.import("extremes", "attend/extremes/reset.wgsl");
        }
        if let Some(rotation) = self.format.key.rotation() {
            let turn = Turn { rotation, direction: Direction::Forth };
            variant = match self.format.key.sketched().and_then(|format| format.sketch) {
                None => variant.import("query_rotation", "attend/query_rotation/hadamard.wgsl"),
                Some(sketch) => {
                    let sketched = variant.import("query_rotation", "attend/query_rotation/sketch.wgsl");
                    with_sketch(sketched, sketch, rotation.order(), head_dim).constant("PARTS", self.query_parts())
                }
            };
            variant = with_turn(variant, turn, head_dim);
        }
        match self.integer_keys() {
            true => self.with_query_fields(variant).constant("QUERY_PLANES", self.query_planes()),
            false => variant.import("query_row", "attend/query_row/f32.wgsl"),
        }
    }

    /// What makes integers of a query: in this kernel, or in `attend` where that prepares its own.
    pub(super) fn with_query_fields(&self, variant: Variant) -> Variant {
        let layout = TileLayout::new(&self.format.key, self.shape.head_dim());
        let mut variant = variant;
        if self.format.key.has_span_ranges() {
            let middle = self.key_bytes().middle;
            variant = variant.import("query_ranges", "attend/query_ranges/span.wgsl").float("KEY_MIDDLE", middle);
        }
        let largest = match self.query_planes() {
            1 => 127.0,
            _ => 32639.0,
        };
        let (words, planes) = match self.format.key.code_bits() {
            Some(Bits::Three) => (1, 8),
            bits => (layout.key_vector(), bits.map_or(1, Bits::planes)),
        };
        // Scores of sketched keys have units of their own.
        let unit = match self.format.key.sketched() {
            Some(_) => 1.0,
            None => self.key_bytes().unit / self.key_bytes().step,
        };
        variant
            .constant("PLACE_WORDS", words)
            .constant("PLACE_PLANES", planes)
            .float("QUERY_LARGEST", largest)
            .float("CODE_UNIT", unit)
    }

    /// What a query is multiplied with: log2(e) / √D.
    pub(super) fn score_scale(&self) -> f32 {
        std::f32::consts::LOG2_E / (self.shape.head_dim() as f32).sqrt()
    }
}

/// Whether the extremes of a span's scores are collected anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extremes {
    /// The segment is not calibrated.
    None,
    /// The kernel resets them for `scores`.
    Reset,
}

pub(super) fn input_file(input: ElementType) -> &'static str {
    match input {
        ElementType::F32 => "attend/input/f32.wgsl",
        ElementType::F16 => "attend/input/f16.wgsl",
        ElementType::Bf16 => "attend/input/bf16.wgsl",
    }
}
