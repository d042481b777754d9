//! Kernel `merge_states`: merges the states of all work items and writes the output.

use super::recipe::WrittenOutputs;
use super::specialisation::INVOCATIONS;
use super::state_buffers::STATE_BUFFERS;
use crate::format::AttentionShape;
use crate::wgpu::device::Variant;
use crate::wgpu::sources::SHADERS;

/// How a workgroup merges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MergedStates {
    /// Many states of a query head, which its lists of invocations share.
    Many,
    /// Few states of many queries: every list has a query head of its own.
    Few,
}

impl MergedStates {
    /// States that an invocation loads together where they are few.
    const FEW_AT_ONCE: usize = 4;

    /// Query heads of a workgroup.
    pub(super) fn heads(self, shape: &AttentionShape) -> usize {
        let lists = INVOCATIONS / (shape.head_dim() / 4);
        match self {
            Self::Few if shape.query_heads().is_multiple_of(lists) => lists,
            _ => 1,
        }
    }
}

/// The kernel that writes the outputs, and joins the sinks of a layer that has them.
pub(super) fn merge_states(shape: &AttentionShape, outputs: WrittenOutputs, merged: MergedStates) -> Variant {
    let variant = Variant::new(&SHADERS, "merge_states")
        .constant("HEAD_DIM", shape.head_dim())
        .constant("QUERY_HEADS", shape.query_heads())
        .constant("MERGED_HEADS", merged.heads(shape));
    let variant = match merged {
        MergedStates::Many => variant,
        MergedStates::Few => variant.constant("AT_ONCE", MergedStates::FEW_AT_ONCE),
    };
    outputs.put(variant)
}

/// The same kernel for states in several buffers.
pub(super) fn merge_buffers(variant: Variant) -> Variant {
    variant.import("state_buffers", "attend/state_buffers.wgsl#four").constant("ROW_WORDS", 1 + STATE_BUFFERS)
}

/// Bytes of the states of one row: every query head's output and log-sum-exp, padded to 16 bytes.
pub(super) const fn state_row_bytes(shape: &AttentionShape) -> u64 {
    (shape.query_heads() * (shape.head_dim() + 4) * 4) as u64
}
