//! The cases of formats other than plain affine codes: ranges about 0, rotated rows, codebooks, sketches.

use super::build::{GROUPS, affine, both, offsets, shape, slug};
use super::case::{AttendCase, DataKind, Fill, Paging, SpanCase, StoreCase};
use crate::backend::QueryPrecision;
use crate::format::{AffineFormat, Bits, CodebookFormat, Grouping, Rotation, SegmentFormat, TensorFormat};
use crate::plan::ElementType;

/// Ranges about 0: every grouping, several widths, single tokens, rotated rows.
pub(super) fn symmetric() -> Vec<AttendCase> {
    let format = |bits, grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping).symmetric());
    let mut cases = Vec::new();
    for (i, (bits, grouping)) in [
        (Bits::Eight, Grouping::Token),
        (Bits::Eight, Grouping::Channel),
        (Bits::Eight, Grouping::ChannelTokens(32)),
        (Bits::Eight, Grouping::TokenChannels(16)),
        (Bits::Four, Grouping::Token),
        (Bits::Three, Grouping::Channel),
        (Bits::Two, Grouping::Token),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format(bits, grouping);
        let head_dim = crate::format::HEAD_DIMS[i % crate::format::HEAD_DIMS.len()];
        let mut case =
            AttendCase::new(&format!("symmetric-{}", slug(&key)), shape(GROUPS[i % GROUPS.len()], head_dim), both(key));
        case.quick = i < 2;
        if bits == Bits::Four {
            case.segments[0].fill = Fill::Append;
        }
        cases.push(case);
    }
    let rotated = AffineFormat::new(Bits::Eight, Grouping::Token).symmetric().rotated(Rotation::hadamard(64));
    let mut case = AttendCase::new("symmetric-rotated-outliers", shape(3, 64), both(TensorFormat::Affine(rotated)));
    case.data = DataKind::Outliers;
    cases.push(case);
    cases
}

/// Rotated keys and values: every grouping and width, every head dimension and group size, one tensor or both, together
/// with segments of other rotations.
pub(super) fn rotated() -> Vec<AttendCase> {
    let groupings = [Grouping::Token, Grouping::Channel, Grouping::ChannelTokens(32), Grouping::TokenChannels(16)];
    let turned = |bits, grouping, rotation| TensorFormat::Affine(AffineFormat::new(bits, grouping).rotated(rotation));
    let mut cases = Vec::new();
    for (i, (head_dim, group)) in crate::format::HEAD_DIMS.into_iter().zip(GROUPS).enumerate() {
        let largest = Rotation::largest_order(head_dim);
        for (j, grouping) in groupings.into_iter().enumerate() {
            let bits = Bits::ALL[(i + j) % Bits::ALL.len()];
            let rotation = match (i + j) % 3 {
                0 => Rotation::hadamard(16),
                1 => Rotation::hadamard(largest),
                _ => Rotation::randomized(largest, 7),
            };
            let format = both(turned(bits, grouping, rotation));
            let case =
                AttendCase::new(&format!("rotated-d{head_dim}-{}", slug(&format.key)), shape(group, head_dim), format);
            cases.push(case.lengths(&[300, 1, 129]));
        }
    }
    let four_bit = turned(Bits::Four, Grouping::Token, Rotation::hadamard(16));
    for (name, key, value) in [
        ("keys-only", four_bit, affine(Bits::Four, Grouping::Token)),
        ("values-only", TensorFormat::F16, four_bit),
        ("apart", four_bit, turned(Bits::Two, Grouping::TokenChannels(32), Rotation::randomized(128, 1))),
    ] {
        let case = AttendCase::new(&format!("rotated-{name}"), shape(4, 128), SegmentFormat { key, value });
        cases.push(if name == "apart" { case.quick() } else { case });
    }
    let mut beside = AttendCase::new("rotated-beside-others", shape(4, 128), SegmentFormat::F16).quick();
    beside.segments = vec![
        StoreCase::new(SegmentFormat::F16),
        StoreCase::new(both(four_bit)),
        StoreCase {
            calibration: Some(offsets(0.0, 1.0)),
            ..StoreCase::new(both(turned(Bits::Two, Grouping::Channel, Rotation::hadamard(128))))
        },
    ];
    let span = |segment, tokens| SpanCase { segment, tokens };
    beside.sequences = vec![
        vec![span(0, 20), span(1, 200), span(2, 300)],
        vec![span(2, 129), span(0, 0), span(1, 1)],
        vec![span(1, 130), span(2, 1), span(0, 5)],
    ];
    cases.push(beside);
    cases
}

/// TurboQuant: every width at every head dimension and group size, one tensor or both, single tokens, data that its
/// rotation does not spread.
pub(super) fn codebooks() -> Vec<AttendCase> {
    let widths = [Bits::One, Bits::Two, Bits::Three, Bits::Four];
    let mut cases = Vec::new();
    for (i, (head_dim, group)) in crate::format::HEAD_DIMS.into_iter().zip(GROUPS).enumerate() {
        for bits in widths {
            let mut case = AttendCase::new(
                &format!("codebook-d{head_dim}-{bits}bit"),
                shape(group, head_dim),
                SegmentFormat::turboquant(bits, head_dim),
            );
            case.segments[0].fill = if i % 2 == 0 { Fill::Quantize } else { Fill::Append };
            case.quick = head_dim == 128 && matches!(bits, Bits::Two | Bits::Three);
            cases.push(case);
        }
    }
    let turboquant = |bits| TensorFormat::Codebook(CodebookFormat::turboquant(bits, 128));
    let plain = CodebookFormat { rotation: Rotation::hadamard(16), ..CodebookFormat::turboquant(Bits::Two, 128) };
    for (name, key, value) in [
        ("keys-only", turboquant(Bits::Four), TensorFormat::F16),
        ("values-only", affine(Bits::Four, Grouping::Channel), turboquant(Bits::Two)),
        ("unlike", turboquant(Bits::One), turboquant(Bits::Four)),
        ("plain-rotation", TensorFormat::Codebook(plain), affine(Bits::Two, Grouping::TokenChannels(32))),
    ] {
        cases.push(AttendCase::new(&format!("codebook-{name}"), shape(4, 128), SegmentFormat { key, value }));
    }
    for (i, bits) in widths.into_iter().enumerate() {
        let head_dim = crate::format::HEAD_DIMS[(i + 1) % crate::format::HEAD_DIMS.len()];
        let format = SegmentFormat::turboquant_renormalized(bits, head_dim);
        let mut case = AttendCase::new(
            &format!("codebook-renormalized-d{head_dim}-{bits}bit"),
            shape(GROUPS[i], head_dim),
            format,
        );
        case.segments[0].fill = if i % 2 == 0 { Fill::Append } else { Fill::Quantize };
        case.quick = bits == Bits::Four;
        cases.push(case);
    }
    for (what, data) in [
        ("constant-channels", DataKind::ConstantChannels),
        ("constant-tokens", DataKind::ConstantTokens),
        ("outliers", DataKind::Outliers),
    ] {
        let mut case =
            AttendCase::new(&format!("codebook-{what}"), shape(3, 64), SegmentFormat::turboquant(Bits::Four, 64));
        case.data = data;
        cases.push(case);
    }
    let mut calibrated =
        AttendCase::new("codebook-calibrated", shape(4, 128), SegmentFormat::turboquant(Bits::Two, 128));
    calibrated.segments[0].calibration = Some(offsets(0.0, 1.0));
    calibrated.segments.push(StoreCase::new(SegmentFormat::F16));
    calibrated.sequences[0].push(SpanCase { segment: 1, tokens: 3 });
    cases.push(calibrated);
    cases
}

/// Keys with sign sketches, QJL (1 bit) and TurboQuant for inner products: every width at every head dimension and
/// group size, single tokens, an int8 query, calibration.
pub(super) fn sketches() -> Vec<AttendCase> {
    let widths = [Bits::One, Bits::Two, Bits::Three, Bits::Four];
    let mut cases = Vec::new();
    for (i, (head_dim, group)) in crate::format::HEAD_DIMS.into_iter().zip(GROUPS).enumerate() {
        for (j, bits) in widths.into_iter().enumerate() {
            let format = match bits {
                Bits::One => SegmentFormat::qjl(head_dim),
                bits => SegmentFormat::turboquant_prod(bits, head_dim),
            };
            let mut case = AttendCase::new(&format!("sketch-d{head_dim}-{bits}bit"), shape(group, head_dim), format);
            case.segments[0].fill = if (i + j) % 2 == 0 { Fill::Quantize } else { Fill::Append };
            case.input.elements = [ElementType::F32, ElementType::F16][(i + j) / 2 % 2];
            case.quick =
                head_dim == 128 && matches!(bits, Bits::One | Bits::Three) || head_dim == 80 && bits == Bits::Four;
            cases.push(case);
        }
    }
    let mut int8 =
        AttendCase::new("sketch-int8-query", shape(4, 128), SegmentFormat::turboquant_prod(Bits::Three, 128));
    int8.options.query = QueryPrecision::Int8;
    cases.push(int8);
    for (what, data) in [
        ("constant-channels", DataKind::ConstantChannels),
        ("constant-tokens", DataKind::ConstantTokens),
        ("outliers", DataKind::Outliers),
    ] {
        let mut case =
            AttendCase::new(&format!("sketch-{what}"), shape(3, 96), SegmentFormat::turboquant_prod(Bits::Four, 96));
        case.data = data;
        cases.push(case);
    }
    let mut scattered =
        AttendCase::new("sketch-scattered", shape(4, 64), SegmentFormat::turboquant_prod(Bits::Two, 64));
    scattered.paging = Paging::Scattered { shard_pages: 3 };
    cases.push(scattered.lengths(&[700, 129, 1, 384]));
    let mut calibrated = AttendCase::new("sketch-calibrated", shape(4, 128), SegmentFormat::qjl(128));
    calibrated.segments[0].calibration = Some(offsets(0.0, 1.0));
    calibrated.segments.push(StoreCase::new(SegmentFormat::F16));
    calibrated.sequences[0].push(SpanCase { segment: 1, tokens: 3 });
    cases.push(calibrated);
    cases
}
