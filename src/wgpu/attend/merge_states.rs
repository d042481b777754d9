//! Kernel `merge_states`: joins the states of all work items and writes the output.

use super::parts::output_file;
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

/// Bytes of the states of one row: every query head's output and log-sum-exp, padded to 16 bytes.
pub(super) const fn state_row_bytes(shape: &AttentionShape) -> u64 {
    (shape.query_heads() * (shape.head_dim() + 4) * 4) as u64
}
