//! The cases of values so small that the steps of their codes are the smallest that f16 ranges hold.

use super::build::{affine, both, shape, slug};
use super::case::{AttendCase, DataKind, Fill, Queries};
use crate::format::{AffineFormat, Bits, Grouping, SegmentFormat, TensorFormat};
use crate::plan::QueryRun;

/// Every grouping at 8 bits, where steps are smallest, the other widths and families once, and a run of queries. Not
/// f16: a fifth of its elements would be subnormal, which devices may read as 0.
pub(super) fn small_values() -> Vec<AttendCase> {
    let symmetric = |grouping| TensorFormat::Affine(AffineFormat::new(Bits::Eight, grouping).symmetric());
    let formats = [
        both(affine(Bits::Eight, Grouping::Channel)),
        both(affine(Bits::Eight, Grouping::ChannelTokens(32))),
        both(affine(Bits::Eight, Grouping::ChannelTokens(128))),
        both(affine(Bits::Eight, Grouping::Token)),
        both(affine(Bits::Eight, Grouping::TokenChannels(32))),
        both(symmetric(Grouping::Token)),
        both(symmetric(Grouping::ChannelTokens(64))),
        both(affine(Bits::Four, Grouping::ChannelTokens(32))),
        both(affine(Bits::Three, Grouping::TokenChannels(16))),
        both(affine(Bits::Two, Grouping::Token)),
        both(affine(Bits::One, Grouping::ChannelTokens(128))),
        SegmentFormat::saw_int4(),
        SegmentFormat::turboquant_prod(Bits::Three, 128),
    ];
    let mut cases = Vec::new();
    for format in formats {
        let mut case = AttendCase::new(&format!("small-{}", slug(&format.key)), shape(4, 128), format);
        case.data = DataKind::Small;
        case.segments[0].fill = if format.takes_single_tokens() { Fill::Append } else { Fill::Quantize };
        case.quick = format == both(affine(Bits::Eight, Grouping::Token));
        cases.push(case);
    }
    let eight = both(affine(Bits::Eight, Grouping::Token));
    let mut run = AttendCase::new("small-run-8bit-token", shape(4, 128), eight).lengths(&[300, 129]);
    run.data = DataKind::Small;
    run.queries = Queries::Runs(vec![QueryRun::causal(0, 150), QueryRun::decode(1)]);
    cases.push(run);
    cases
}
