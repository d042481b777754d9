//! Kernel `merge_states`: joins the states of all work items and writes the output.

use crate::format::AttentionShape;
use crate::plan::ElementType;
use crate::wgpu::device::Variant;

/// The kernel that writes outputs of `output` elements.
pub(super) fn merge_states(shape: &AttentionShape, output: ElementType) -> Variant {
    Variant::new("merge_states")
        .constant("HEAD_DIM", shape.head_dim())
        .constant("QUERY_HEADS", shape.query_heads())
        .import("output", output_file(output))
}

pub(super) fn output_file(output: ElementType) -> &'static str {
    match output {
        ElementType::F32 => "attend/output/f32.wgsl",
        ElementType::F16 => "attend/output/f16.wgsl",
        ElementType::Bf16 => "attend/output/bf16.wgsl",
    }
}

/// Bytes of the states of one row: every query head's output and log-sum-exp, padded to 16 bytes.
pub(super) const fn state_row_bytes(shape: &AttentionShape) -> u64 {
    (shape.query_heads() * (shape.head_dim() + 4) * 4) as u64
}
