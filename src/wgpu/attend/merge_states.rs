//! Kernel `merge_states`: merges the states of all work items and writes the output.

use super::parts::output_file;
use crate::format::AttentionShape;
use crate::plan::ElementType;
use crate::wgpu::device::Variant;

/// Whether the log-sum-exp is returned in addition to the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::wgpu) enum LseOutput {
    /// It is not.
    None,
    /// It is, as f32.
    F32,
}

/// The kernel that writes outputs of `output` elements, and joins the sinks of a layer that has them.
pub(super) fn merge_states(shape: &AttentionShape, output: ElementType, lse: LseOutput, has_sinks: bool) -> Variant {
    let variant = Variant::new("merge_states")
        .constant("HEAD_DIM", shape.head_dim())
        .constant("QUERY_HEADS", shape.query_heads())
        .import("output", output_file(output));
    let variant = if has_sinks { variant.import("sinks", "attend/sinks/logits.wgsl") } else { variant };
    match lse {
        LseOutput::None => variant,
        LseOutput::F32 => variant.import("lse", "attend/lse/f32.wgsl"),
    }
}

/// Bytes of the states of one row: every query head's output and log-sum-exp, padded to 16 bytes.
pub(super) const fn state_row_bytes(shape: &AttentionShape) -> u64 {
    (shape.query_heads() * (shape.head_dim() + 4) * 4) as u64
}
