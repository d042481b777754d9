//! How fast packed formats are beside f16: where packing saves memory and no time, the plan says so.

use super::{AttendPlan, Segment};
use crate::format::{AttentionShape, Grouping, SegmentFormat, TensorFormat};

/// How a decode step over a packed format stands beside the same step over f16, through wgpu and with the default query.
///
/// Read on one NVIDIA H200 through Vulkan, at 1, 4 and 8 query heads per KV head and head dimension 128:
/// `docs/results/nvidia-h200.json`, which a test holds this against. Other devices may differ, and so may a build after that
/// of the table (`docs/lab/wgpu.md` has KIVI 1 to 10 % faster than f16 at 8 heads): `kvpack bench` tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BesideF16 {
    /// Every row that was read is faster.
    Faster,
    /// Every row that was read is slower: the format saves memory and no time.
    Slower,
    /// Not read at this number of query heads per KV head, or not in this format.
    NotMeasured,
}

impl BesideF16 {
    /// What was read of a packed format at a shape's number of query heads per KV head.
    ///
    /// Ranges that hold for a run of tokens (KIVI's keys, a range per channel and tile) or of channels (KIVI's values) are
    /// multiplied into the query and the weights of each query head: at one and at four heads that is faster than f16, at
    /// eight it costs more than the bytes that it saves (read at 4 and 2 bits). One range per channel of a span costs nothing in the loop.
    ///
    /// ```
    /// use kvpack::cache::ModelRecipe;
    /// use kvpack::plan::BesideF16;
    /// use kvpack::{AttentionShape, Bits, SegmentFormat};
    /// let eight = AttentionShape::new(64, 8, 128)?;
    /// let kivi = "kivi:2".parse::<ModelRecipe>()?.layer(0, &eight).packed().format;
    /// assert_eq!(BesideF16::through_wgpu(&kivi, &eight), BesideF16::Slower);
    /// assert_eq!(BesideF16::through_wgpu(&SegmentFormat::per_channel(Bits::Two), &eight), BesideF16::Faster);
    /// # Ok::<(), kvpack::Error>(())
    /// ```
    pub fn through_wgpu(format: &SegmentFormat, shape: &AttentionShape) -> Self {
        let of_groups = |tensor: &TensorFormat| {
            let grouped = matches!(tensor.grouping(), Some(Grouping::ChannelTokens(_) | Grouping::TokenChannels(_)));
            grouped && matches!(tensor.element_bits(), 2 | 4)
        };
        let of_spans = format.key.has_span_ranges() && format.value.has_span_ranges();
        match (shape.group(), of_groups(&format.key) && of_groups(&format.value)) {
            (1 | 4, true) => Self::Faster,
            (8.., true) => Self::Slower,
            (1 | 4 | 8, false) if of_spans => Self::Faster,
            _ => Self::NotMeasured,
        }
    }
}

impl AttendPlan {
    /// The segments that a decode step through wgpu would read faster if they were stored in f16 ([`BesideF16::Slower`]).
    pub fn slower_than_f16(&self) -> impl Iterator<Item = &Segment> {
        self.segments()
            .iter()
            .filter(|segment| BesideF16::through_wgpu(segment.format(), self.shape()) == BesideF16::Slower)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AffineFormat, Bits};
    use crate::plan::{Page, QueryRun, SpanView, StoreView};

    #[test]
    fn a_plan_names_the_segments_that_f16_would_beat() {
        let pages = [Page { shard: 0, index: 0 }];
        let spans = || vec![SpanView { sequence: 0, start: 0, tokens: 9, pages: &pages, range_slot: 0 }];
        let store = |format| StoreView { format, calibration: None, spans: spans() };
        let groups = TensorFormat::Affine(AffineFormat::new(Bits::Four, Grouping::ChannelTokens(32)));
        let grouped = SegmentFormat { key: groups, value: groups };
        let slower = |query_heads: usize| {
            let shape = AttentionShape::new(query_heads, 1, 64).unwrap();
            let stores = [SegmentFormat::F16, grouped, SegmentFormat::per_channel(Bits::Four)];
            let plan = AttendPlan::new(shape, &[QueryRun::decode(0)], &stores.map(store)).unwrap();
            plan.slower_than_f16().map(Segment::store).collect::<Vec<_>>()
        };
        assert_eq!(slower(4), [0; 0]);
        assert_eq!(slower(8), [1]);
    }
}
