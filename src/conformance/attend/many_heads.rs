//! f16 with eight query heads per KV head, in many work items: the shapes for cooperative matrices, on devices that
//! have them.

use super::build::shape;
use super::case::{AttendCase, Fill, Paging, SinkPlace, SpanCase, StoreCase};
use crate::format::{Bits, SegmentFormat};
use crate::plan::{ElementType, Split};

/// Ragged lengths, a sink, and several segments, each with a sequence of more work items than one workgroup merges.
pub(super) fn many_heads() -> Vec<AttendCase> {
    let finely = |max_tiles| Split { target_items: usize::MAX, tile_step: 1, max_tiles };
    let mut lengths = case("split-many-heads").lengths(&[3700, 385, 129, 128, 1]).quick();
    lengths.options.split = Split { tile_step: 3, ..finely(3) };

    let mut sink = case("sink-long-many-heads").lengths(&[8192]);
    sink.sink = SinkPlace::Middle;
    sink.options.split = finely(5);

    let mut beside = case("segments-many-heads");
    beside.segments =
        [SegmentFormat::F16, SegmentFormat::per_channel(Bits::Two), SegmentFormat::F16].map(StoreCase::new).to_vec();
    beside.segments[2].fill = Fill::Append;
    let span = |segment, tokens| SpanCase { segment, tokens };
    beside.sequences =
        vec![vec![span(0, 700), span(1, 600), span(2, 300)], vec![span(0, 1), span(1, 129), span(2, 257)]];
    beside.input.elements = ElementType::F16;
    beside.paging = Paging::Scattered { shard_pages: 3 };
    beside.options.split = finely(1);
    vec![lengths, sink, beside]
}

fn case(name: &str) -> AttendCase {
    AttendCase::new(&format!("{name}-f16"), shape(8, 128), SegmentFormat::F16)
}
