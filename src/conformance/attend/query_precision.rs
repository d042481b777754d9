//! The cases of query precisions: everything that an 8-bit query turns into bytes.

use super::build::{affine, both, offsets, shape, slug};
use super::case::{AttendCase, SinkPlace, SpanCase, StoreCase};
use crate::backend::QueryPrecision;
use crate::format::{Bits, Grouping, SegmentFormat};

/// Weights of one byte, which an int8 query uses where values have one range per channel: with a sink, over every
/// number of query heads and layout of fields, and calibrated.
pub(super) fn byte_weights() -> Vec<AttendCase> {
    let per_channel = SegmentFormat::per_channel;
    let mut cases = Vec::new();
    for (bits, place) in
        [(Bits::Eight, SinkPlace::Middle), (Bits::Four, SinkPlace::Last), (Bits::Two, SinkPlace::First)]
    {
        let name = format!("int8-query-sink-long-{bits}bit");
        let mut case = AttendCase::new(&name, shape(4, 128), per_channel(bits)).lengths(&[8192]);
        case.sink = place;
        case.quick = bits == Bits::Two;
        cases.push(case);
    }
    for (group, head_dim, format) in [
        (1, 64, per_channel(Bits::Two)),
        (3, 80, per_channel(Bits::Three)),
        (7, 96, SegmentFormat::calibquant(Bits::One)),
        (8, 128, per_channel(Bits::Eight)),
        (8, 256, per_channel(Bits::Four)),
    ] {
        let name = format!("int8-query-g{group}-d{head_dim}-{}", slug(&format.key));
        cases.push(AttendCase::new(&name, shape(group, head_dim), format));
    }
    let mut calibrated =
        AttendCase::new("int8-query-calibrated-1bit", shape(4, 128), SegmentFormat::calibquant(Bits::One));
    calibrated.segments[0].calibration = Some(offsets(0.0, 3.0));
    cases.push(calibrated);
    // Segments whose weights are bytes are merged with others.
    let mut beside = AttendCase::new("int8-query-beside-others", shape(4, 128), SegmentFormat::F16).quick();
    beside.segments = [SegmentFormat::F16, per_channel(Bits::Four), both(affine(Bits::Two, Grouping::Token))]
        .map(StoreCase::new)
        .to_vec();
    let span = |segment, tokens| SpanCase { segment, tokens };
    beside.sequences = vec![vec![span(0, 130), span(1, 600), span(2, 300)], vec![span(1, 129), span(0, 1)]];
    cases.push(beside);
    cases.iter_mut().for_each(|case| case.options.query = QueryPrecision::Int8);
    cases
}

/// Ranges of groups of tokens and of channels, which need queries and weights of their own, with either query
/// precision: with a sink, over every number of query heads and groups, calibrated, and merged with other segments.
pub(super) fn group_ranges() -> Vec<AttendCase> {
    let format = |(key, tokens): (Bits, usize), (value, channels): (Bits, usize)| SegmentFormat {
        key: affine(key, Grouping::ChannelTokens(tokens)),
        value: affine(value, Grouping::TokenChannels(channels)),
    };
    let kivi = |bits| format((bits, 32), (bits, 32));
    let mut cases = Vec::new();
    for query in [QueryPrecision::Int16, QueryPrecision::Int8] {
        let prefix = if query == QueryPrecision::Int8 { "int8-query-" } else { "" };
        let name = |what: &str| format!("{prefix}group-ranges-{what}");
        let from = cases.len();
        for (group, head_dim, format) in [
            (1, 64, kivi(Bits::Two)),
            (1, 128, both(affine(Bits::Four, Grouping::ChannelTokens(128)))),
            (2, 128, kivi(Bits::Four)),
            (3, 80, SegmentFormat { value: affine(Bits::One, Grouping::Token), ..kivi(Bits::Three) }),
            (4, 128, format((Bits::Three, 64), (Bits::Three, 64))),
            (
                7,
                96,
                SegmentFormat {
                    value: affine(Bits::Two, Grouping::Channel),
                    ..format((Bits::Eight, 128), (Bits::Two, 32))
                },
            ),
            (5, 64, SegmentFormat { key: affine(Bits::Four, Grouping::Token), ..kivi(Bits::Eight) }),
            (8, 128, kivi(Bits::Two)),
            (8, 256, format((Bits::Four, 32), (Bits::Eight, 64))),
            (16, 128, kivi(Bits::One)),
            (4, 128, both(affine(Bits::Two, Grouping::ChannelTokens(128)))),
            (3, 80, both(affine(Bits::One, Grouping::ChannelTokens(128)))),
            (8, 64, both(affine(Bits::Three, Grouping::ChannelTokens(128)))),
            (
                4,
                128,
                SegmentFormat {
                    key: affine(Bits::Two, Grouping::Channel),
                    value: affine(Bits::Four, Grouping::ChannelTokens(128)),
                },
            ),
        ] {
            let name = name(&format!("g{group}-d{head_dim}-{}-{}", slug(&format.key), slug(&format.value)));
            cases.push(AttendCase::new(&name, shape(group, head_dim), format).lengths(&[1300, 31]));
        }
        for (place, bits) in [(SinkPlace::First, Bits::Two), (SinkPlace::Middle, Bits::Four)] {
            let mut case =
                AttendCase::new(&name(&format!("sink-{bits}bit")), shape(4, 128), kivi(bits)).lengths(&[4096]);
            case.sink = place;
            cases.push(case);
        }
        let tiles = both(affine(Bits::Four, Grouping::ChannelTokens(128)));
        let mut case = AttendCase::new(&name("sink-of-tiles"), shape(4, 128), tiles).lengths(&[6000]);
        case.sink = SinkPlace::Middle;
        cases.push(case);
        let mut calibrated = AttendCase::new(&name("calibrated"), shape(4, 128), kivi(Bits::Two));
        calibrated.segments[0].calibration = Some(offsets(0.0, 3.0));
        cases.push(calibrated);
        let mut beside = AttendCase::new(&name("beside-others"), shape(4, 128), SegmentFormat::F16);
        beside.quick = query == QueryPrecision::Int8;
        beside.segments =
            [SegmentFormat::F16, kivi(Bits::Two), SegmentFormat::per_channel(Bits::Four)].map(StoreCase::new).to_vec();
        let span = |segment, tokens| SpanCase { segment, tokens };
        beside.sequences = vec![vec![span(0, 130), span(1, 600), span(2, 300)], vec![span(1, 129), span(0, 1)]];
        cases.push(beside);
        cases[from..].iter_mut().for_each(|case| case.options.query = query);
    }
    cases
}
