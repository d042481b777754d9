//! The cases of centred keys, with a bias that would ruin ranges and norms of single tokens.

use super::build::{affine, both, offsets, shape};
use super::case::{AttendCase, DataKind, Fill, SpanCase, StoreCase};
use crate::format::{AffineFormat, Bits, Grouping, Rotation, SegmentFormat, TensorFormat};
use crate::plan::ElementType;

/// Every family of formats that can be centred, whole spans and single tokens, every type of elements, several stores.
pub(super) fn centred() -> Vec<AttendCase> {
    let symmetric = TensorFormat::Affine(AffineFormat::new(Bits::Eight, Grouping::Token).symmetric());
    let dealt = AffineFormat::new(Bits::Four, Grouping::TokenChannels(20)).rotated(Rotation::dealt(16, 3));
    let formats = [
        ("f16", 64, SegmentFormat::F16),
        ("4bit-token", 128, both(affine(Bits::Four, Grouping::Token))),
        ("8bit-symmetric", 96, both(symmetric)),
        (
            "2bit-groups",
            128,
            SegmentFormat {
                key: affine(Bits::Two, Grouping::TokenChannels(16)),
                value: affine(Bits::Two, Grouping::Channel),
            },
        ),
        ("saw-int4", 256, SegmentFormat::saw_int4()),
        ("dealt", 80, both(TensorFormat::Affine(dealt))),
        ("3bit-codebook", 128, SegmentFormat::turboquant(Bits::Three, 128)),
        ("renormalized", 64, SegmentFormat::turboquant_renormalized(Bits::Two, 64)),
        ("4bit-prod", 128, SegmentFormat::turboquant_prod(Bits::Four, 128)),
        ("qjl", 80, SegmentFormat::qjl(80)),
    ];
    let mut cases = Vec::new();
    for (i, (name, head_dim, format)) in formats.into_iter().enumerate() {
        for (how, fill) in [("quantize", Fill::Quantize), ("append", Fill::Append)] {
            if fill == Fill::Append && !format.takes_single_tokens() {
                continue;
            }
            let mut case = biased(&format!("{name}-{how}"), head_dim, format);
            case.segments[0].fill = fill;
            case.input.elements = ElementType::ALL[(i + cases.len()) % ElementType::ALL.len()];
            case.quick = matches!((name, fill), ("4bit-token", Fill::Append) | ("4bit-prod", Fill::Quantize));
            cases.push(case);
        }
    }
    let mut several = several("segments");
    several.segments[1].calibration = Some(offsets(0.0, 2.0));
    cases.push(several);
    cases
}

/// A case of biased keys, centred, in one store.
fn biased(name: &str, head_dim: usize, format: SegmentFormat) -> AttendCase {
    let mut case = AttendCase::new(&format!("centred-{name}"), shape(4, head_dim), format);
    (case.data, case.centred) = (DataKind::BiasedKeys, true);
    case
}

/// Sequences over an f16 store and two packed ones, each sequence with a centre of its own.
pub(super) fn several(name: &str) -> AttendCase {
    let mut case = biased(name, 128, SegmentFormat::F16);
    case.segments.push(StoreCase::new(SegmentFormat::saw_int4()));
    case.segments.push(StoreCase { fill: Fill::Append, ..StoreCase::new(both(affine(Bits::Eight, Grouping::Token))) });
    let span = |segment, tokens| SpanCase { segment, tokens };
    case.sequences = vec![vec![span(0, 20), span(1, 300), span(2, 129)], vec![span(0, 1), span(1, 1), span(2, 40)]];
    case.quick = true;
    case
}
