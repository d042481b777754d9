//! The cases of attention: every axis once, and the pairs of axes that have been known to hide mistakes.

use super::build::{GROUPS, RAGGED, affine, both, offsets, shape, slug};
use super::case::{AttendCase, DataKind, Fill, InputLayout, Paging, RowOrder, SinkPlace, SpanCase, StoreCase};
use super::{centred, formats, lone_heads, many_heads, query_precision, query_runs, read_path, small_values};
use crate::backend::QueryPrecision;
use crate::format::{AttentionShape, Bits, Grouping, SegmentFormat, TensorFormat};
use crate::plan::{ElementType, Split};

/// All cases of attention. Names are unique; the order is stable.
pub fn attend_cases() -> Vec<AttendCase> {
    let mut cases = Vec::new();
    cases.extend(every_format());
    cases.extend(every_shape());
    cases.extend(mixed_keys_and_values());
    cases.extend(formats::symmetric());
    cases.extend(formats::rotated());
    cases.extend(formats::codebooks());
    cases.extend(formats::sketches());
    cases.extend(lengths());
    cases.extend(several_segments());
    cases.extend(calibrated());
    cases.extend(degenerate_data());
    cases.extend(sinks());
    cases.extend(options());
    cases.extend(layouts());
    cases.extend(query_precision::byte_weights());
    cases.extend(query_precision::group_ranges());
    cases.extend(small_groups());
    cases.extend(many_heads::many_heads());
    cases.extend(query_runs::query_runs());
    cases.extend(centred::centred());
    cases.extend(small_values::small_values());
    cases.extend(read_path::read_path());
    cases.extend(lone_heads::lone_heads());
    for (seed, case) in cases.iter_mut().enumerate() {
        case.seed = seed as u64 + 1;
    }
    cases
}

/// f16, and every width with every grouping, keys and values alike.
fn every_format() -> Vec<AttendCase> {
    let groupings = [
        Grouping::Channel,
        Grouping::ChannelTokens(32),
        Grouping::ChannelTokens(64),
        Grouping::ChannelTokens(128),
        Grouping::Token,
        Grouping::TokenChannels(32),
    ];
    let mut cases = vec![AttendCase::new("format-f16", shape(4, 128), SegmentFormat::F16).quick()];
    for grouping in groupings {
        for bits in Bits::ALL {
            let format = both(affine(bits, grouping));
            let case = AttendCase::new(&format!("format-{}", slug(&format.key)), shape(4, 128), format);
            let in_quick = matches!((bits, grouping), (_, Grouping::Channel) | (Bits::Two, _));
            cases.push(if in_quick { case.quick() } else { case });
        }
    }
    cases
}

/// Every group size with every head dimension. The format advances by one from cell to cell, so that every group size
/// and every head dimension meets f16 and all widths.
fn every_shape() -> Vec<AttendCase> {
    let formats = [
        SegmentFormat::F16,
        SegmentFormat::per_channel(Bits::Eight),
        SegmentFormat::per_channel(Bits::Four),
        SegmentFormat::per_channel(Bits::Two),
        SegmentFormat::calibquant(Bits::One),
    ];
    let mut cases = Vec::new();
    for (row, head_dim) in crate::format::HEAD_DIMS.into_iter().enumerate() {
        for (column, group) in GROUPS.into_iter().enumerate() {
            let format = formats[(row + column) % formats.len()];
            let name = format!("shape-g{group}-d{head_dim}-{}", slug(&format.key));
            let case = AttendCase::new(&name, shape(group, head_dim), format).lengths(&[300, 129]);
            cases.push(if row == column { case.quick() } else { case });
        }
        // The layout of groups of channels and of tokens also depends on head_dim.
        let kivi = SegmentFormat {
            key: affine(Bits::Two, Grouping::ChannelTokens(32)),
            value: affine(Bits::Four, Grouping::TokenChannels(if head_dim == 80 { 16 } else { 32 })),
        };
        cases.push(AttendCase::new(&format!("shape-d{head_dim}-grouped"), shape(3, head_dim), kivi).lengths(&[300, 2]));
    }
    cases
}

/// Keys and values choose their formats independently.
fn mixed_keys_and_values() -> Vec<AttendCase> {
    let pairs = [
        (TensorFormat::F16, affine(Bits::Two, Grouping::Channel)),
        (TensorFormat::F16, affine(Bits::Four, Grouping::TokenChannels(64))),
        (affine(Bits::Two, Grouping::Channel), TensorFormat::F16),
        (affine(Bits::Four, Grouping::Token), TensorFormat::F16),
        (affine(Bits::Eight, Grouping::Channel), affine(Bits::One, Grouping::Channel)),
        (affine(Bits::One, Grouping::Channel), affine(Bits::Eight, Grouping::Channel)),
        (affine(Bits::Two, Grouping::ChannelTokens(32)), affine(Bits::Two, Grouping::TokenChannels(32))),
        (affine(Bits::Four, Grouping::Token), affine(Bits::Two, Grouping::Channel)),
    ];
    pairs
        .into_iter()
        .enumerate()
        .map(|(i, (key, value))| {
            let name = format!("mixed-k-{}-v-{}", slug(&key), slug(&value));
            let case = AttendCase::new(&name, shape(4, 128), SegmentFormat { key, value }).lengths(&[300, 129]);
            if i % 3 == 0 { case.quick() } else { case }
        })
        .collect()
}

/// Lengths around words, tiles and work items.
fn lengths() -> Vec<AttendCase> {
    let formats = [SegmentFormat::F16, SegmentFormat::per_channel(Bits::Four), SegmentFormat::calibquant(Bits::One)];
    let mut cases = Vec::new();
    for format in formats {
        let name = |what: &str| format!("length-{what}-{}", slug(&format.key));
        cases.push(AttendCase::new(&name("tails"), shape(3, 64), format).lengths(&[2, 3, 31, 33, 97, 127, 130]));
        cases.push(AttendCase::new(&name("one-token"), shape(7, 80), format).lengths(&[1]));
        cases.push(AttendCase::new(&name("steps"), shape(1, 128), format).lengths(&[512, 513, 1024, 640]));
    }
    cases
}

/// Several segments per sequence, as recipes store a prompt and its continuation.
fn several_segments() -> Vec<AttendCase> {
    let packed = StoreCase::new(SegmentFormat::per_channel(Bits::Two));
    let recent = StoreCase { fill: Fill::Append, ..StoreCase::new(SegmentFormat::F16) };
    let prompt = StoreCase::new(SegmentFormat::F16);
    let span = |segment, tokens| SpanCase { segment, tokens };

    let mut visual = AttendCase::new("segments-prompt-visual-recent", shape(4, 128), SegmentFormat::F16).quick();
    visual.segments = vec![prompt, StoreCase::new(SegmentFormat::calibquant(Bits::One)), recent];
    visual.sequences = vec![
        vec![span(0, 35), span(1, 576), span(2, 40)],
        vec![span(0, 200), span(1, 0), span(2, 129)],
        vec![span(0, 0), span(1, 129), span(2, 0)],
    ];
    let mut widths = AttendCase::new("segments-three-widths", shape(8, 64), SegmentFormat::F16);
    widths.segments =
        [Bits::Eight, Bits::Four, Bits::Two].map(|b| StoreCase::new(SegmentFormat::per_channel(b))).into();
    widths.sequences = vec![vec![span(2, 300), span(0, 128), span(1, 1)], vec![span(1, 257), span(2, 5), span(0, 0)]];
    let mut images = AttendCase::new("segments-several-spans-of-one-store", shape(7, 128), SegmentFormat::F16).quick();
    images.segments = vec![prompt, packed];
    images.sequences = vec![
        vec![span(0, 20), span(1, 130), span(0, 7), span(1, 128), span(1, 65), span(0, 3)],
        vec![span(1, 1), span(1, 2)],
    ];
    let mut unused = AttendCase::new("segments-one-store-empty", shape(1, 96), SegmentFormat::F16);
    unused.segments = vec![packed, prompt];
    unused.sequences = vec![vec![span(0, 0), span(1, 200)], vec![span(1, 129)]];
    let mut appended = AttendCase::new("segments-appended", shape(3, 80), SegmentFormat::F16).lengths(&RAGGED);
    appended.segments = vec![recent];
    let mut cases = vec![visual, widths, images, unused, appended];
    // Enough short spans that a large GPU chooses other blocks for them.
    let kivi = SegmentFormat {
        key: affine(Bits::Two, Grouping::ChannelTokens(32)),
        value: affine(Bits::Two, Grouping::TokenChannels(32)),
    };
    for (query_heads, kv_heads, head_dim) in [(32, 16, 64), (64, 8, 128)] {
        let shape = AttentionShape::new(query_heads, kv_heads, head_dim).expect("the registry's shapes have kernels");
        let mut many = AttendCase::new(&format!("segments-many-spans-{head_dim}"), shape, SegmentFormat::F16);
        many.segments = vec![packed, StoreCase::new(kivi)];
        many.sequences = vec![(0..60).map(|i| span(i % 2, 70 + i)).collect()];
        cases.push(many);
    }
    // Single tokens into packed pages, in f16 and f32, rotated or not.
    let appended = [
        SegmentFormat::saw_int4(),
        both(affine(Bits::One, Grouping::Token)),
        both(affine(Bits::Three, Grouping::Token)),
        SegmentFormat {
            key: affine(Bits::Two, Grouping::TokenChannels(16)),
            value: affine(Bits::Eight, Grouping::Token),
        },
        SegmentFormat { key: TensorFormat::F16, value: affine(Bits::Two, Grouping::TokenChannels(16)) },
    ];
    for (i, format) in appended.into_iter().enumerate() {
        let head_dim = [128, 80, 64, 96, 256][i];
        let mut case = AttendCase::new(
            &format!("appended-k-{}-v-{}", slug(&format.key), slug(&format.value)),
            shape(4, head_dim),
            format,
        );
        case.segments[0].fill = Fill::Append;
        case.input.elements = ElementType::ALL[i % 3];
        case.quick = i == 0;
        cases.push(case);
    }
    cases
}

/// CalibQuant's calibration: scores are mapped by their extremes over the span before the softmax.
fn calibrated() -> Vec<AttendCase> {
    let with = |name: &str, group, format, (tau1, tau2)| {
        let mut case = AttendCase::new(&format!("calibrated-{name}"), shape(group, 128), format);
        case.segments[0].calibration = Some(offsets(tau1, tau2));
        case
    };
    let one_bit = SegmentFormat::calibquant(Bits::One);
    let mut cases = vec![
        with("1bit-t0-3", 4, one_bit, (0.0, 3.0)).quick(),
        with("1bit-t3-0", 1, one_bit, (3.0, 0.0)),
        with("1bit-t2-2", 7, one_bit, (2.0, 2.0)),
        with("identity", 4, SegmentFormat::per_channel(Bits::Four), (0.0, 0.0)),
        with("2bit-t1-2", 8, SegmentFormat::per_channel(Bits::Two), (1.0, 2.0)),
        with("8bit-t0-1", 3, SegmentFormat::per_channel(Bits::Eight), (0.0, 1.0)),
        with("4bit-token-t1-1", 4, both(affine(Bits::Four, Grouping::Token)), (1.0, 1.0)),
        with("f16-t0-2", 4, SegmentFormat::F16, (0.0, 2.0)),
        // τ2 exceeds the spread of all scores: the slope is clamped at 0, and the weights are flat.
        with("flat", 4, SegmentFormat::per_channel(Bits::Four), (0.0, 1000.0)),
    ];
    let mut beside_f16 = with("beside-f16", 4, one_bit, (0.0, 3.0)).quick();
    beside_f16.segments.push(StoreCase::new(SegmentFormat::F16));
    beside_f16.sequences = vec![
        vec![
            SpanCase { segment: 1, tokens: 35 },
            SpanCase { segment: 0, tokens: 576 },
            SpanCase { segment: 1, tokens: 9 },
        ],
        vec![SpanCase { segment: 0, tokens: 1 }, SpanCase { segment: 0, tokens: 130 }],
    ];
    cases.push(beside_f16);
    cases
}

/// Groups without spread, and elements far from all others.
fn degenerate_data() -> Vec<AttendCase> {
    let groupings = [Grouping::Channel, Grouping::ChannelTokens(32), Grouping::Token, Grouping::TokenChannels(32)];
    let mut cases = Vec::new();
    for (grouping, bits) in groupings.into_iter().zip([Bits::One, Bits::Two, Bits::Four, Bits::Eight]) {
        let format = both(affine(bits, grouping));
        for (what, data) in [
            ("constant-channels", DataKind::ConstantChannels),
            ("constant-tokens", DataKind::ConstantTokens),
            ("outliers", DataKind::Outliers),
        ] {
            let mut case = AttendCase::new(&format!("data-{what}-{}", slug(&format.key)), shape(3, 64), format);
            case.data = data;
            cases.push(case);
        }
    }
    cases[0].quick = true;
    cases
}

/// Sinks over spans so long that the weights of all other tokens matter together, although each is far below the
/// sink's.
fn sinks() -> Vec<AttendCase> {
    let formats = [
        SegmentFormat::F16,
        SegmentFormat::per_channel(Bits::Eight),
        SegmentFormat::per_channel(Bits::Four),
        both(affine(Bits::Four, Grouping::Token)),
        SegmentFormat::per_channel(Bits::Two),
    ];
    let mut cases = Vec::new();
    for (format, place) in
        formats.into_iter().zip([SinkPlace::First, SinkPlace::Last, SinkPlace::Middle].into_iter().cycle())
    {
        let mut case =
            AttendCase::new(&format!("sink-long-{}", slug(&format.key)), shape(4, 128), format).lengths(&[8192]);
        case.sink = place;
        case.options.split = Split { target_items: 8, ..Split::default() };
        cases.push(case);
    }
    let mut apart = AttendCase::new("sink-in-its-own-segment", shape(4, 128), SegmentFormat::F16);
    apart.segments.push(StoreCase::new(SegmentFormat::per_channel(Bits::Two)));
    apart.sequences = vec![vec![SpanCase { segment: 0, tokens: 4 }, SpanCase { segment: 1, tokens: 4096 }]];
    cases.push(apart);
    let integers_of_tokens = [both(affine(Bits::Eight, Grouping::Token)), SegmentFormat::saw_int4()];
    for format in [SegmentFormat::F16, SegmentFormat::kivi(Bits::Four)].into_iter().chain(integers_of_tokens) {
        let mut case = AttendCase::new(&format!("sink-empty-{}", slug(&format.key)), shape(4, 128), format);
        (case.data, case.quick) = (DataKind::EmptySink, format == SegmentFormat::F16);
        cases.push(case.lengths(&[2048]));
    }
    cases[2].quick = true;
    cases
}

/// Options of the attend call.
fn options() -> Vec<AttendCase> {
    let mut cases = Vec::new();
    for bits in Bits::ALL {
        let mut case =
            AttendCase::new(&format!("int8-query-{bits}bit"), shape(4, 128), SegmentFormat::per_channel(bits));
        case.options.query = QueryPrecision::Int8;
        case.quick = bits == Bits::Four;
        cases.push(case);
    }
    let mut codebook =
        AttendCase::new("int8-query-2bit-codebook", shape(4, 128), SegmentFormat::turboquant(Bits::Two, 128));
    codebook.options.query = QueryPrecision::Int8;
    cases.push(codebook);
    let mut grouped = AttendCase::new("int8-query-g8-token", shape(8, 64), both(affine(Bits::Four, Grouping::Token)));
    grouped.options.query = QueryPrecision::Int8;
    cases.push(grouped);
    for format in [SegmentFormat::F16, SegmentFormat::per_channel(Bits::Four)] {
        let mut case = AttendCase::new(&format!("f16-output-{}", slug(&format.key)), shape(7, 96), format);
        case.options.output = ElementType::F16;
        case.quick = true;
        cases.push(case);
        let mut case = AttendCase::new(&format!("bf16-output-{}", slug(&format.key)), shape(7, 96), format);
        (case.input.elements, case.options.output) = (ElementType::Bf16, ElementType::Bf16);
        case.quick = true;
        cases.push(case);
    }
    cases
}

/// Input layouts, pages out of order and spans cut at other places.
fn layouts() -> Vec<AttendCase> {
    let packed = SegmentFormat::per_channel(Bits::Four);
    let mut cases = Vec::new();
    for (name, elements, order) in [
        ("f16-token-major", ElementType::F16, RowOrder::TokenMajor),
        ("f16-head-major", ElementType::F16, RowOrder::HeadMajor),
        ("f32-head-major", ElementType::F32, RowOrder::HeadMajor),
        ("bf16-token-major", ElementType::Bf16, RowOrder::TokenMajor),
        ("bf16-head-major", ElementType::Bf16, RowOrder::HeadMajor),
    ] {
        let mut case = AttendCase::new(&format!("input-{name}"), shape(3, 80), packed);
        case.input = InputLayout { elements, order };
        case.quick = elements != ElementType::F32 && order == RowOrder::HeadMajor;
        cases.push(case);
    }
    for (name, elements) in [("f16", ElementType::F16), ("bf16", ElementType::Bf16)] {
        let mut unpacked = AttendCase::new(&format!("input-{name}-into-f16"), shape(3, 80), SegmentFormat::F16);
        unpacked.input.elements = elements;
        cases.push(unpacked);
    }
    for (name, format) in [
        ("rotated", SegmentFormat::saw_int4()),
        ("sketched", SegmentFormat::turboquant_prod(Bits::Three, 128)),
        (
            "grouped",
            SegmentFormat {
                key: affine(Bits::Two, Grouping::ChannelTokens(32)),
                value: affine(Bits::Two, Grouping::TokenChannels(32)),
            },
        ),
    ] {
        let mut case = AttendCase::new(&format!("input-bf16-{name}"), shape(4, 128), format);
        case.input.elements = ElementType::Bf16;
        cases.push(case);
    }
    for (shard_pages, format) in [(3, packed), (1, SegmentFormat::F16), (5, SegmentFormat::calibquant(Bits::One))] {
        let name = format!("paging-shards-of-{shard_pages}-{}", slug(&format.key));
        let mut case = AttendCase::new(&name, shape(4, 128), format).lengths(&[700, 129, 1, 384]);
        case.paging = Paging::Scattered { shard_pages };
        case.quick = shard_pages == 3;
        cases.push(case);
    }
    for (name, split) in [
        ("one-tile-items", Split { target_items: usize::MAX, tile_step: 1, max_tiles: 1 }),
        ("few-long-items", Split { target_items: 1, tile_step: 4, max_tiles: 64 }),
        ("odd-steps", Split { target_items: 4, tile_step: 3, max_tiles: 9 }),
    ] {
        let mut case = AttendCase::new(&format!("split-{name}"), shape(4, 128), packed).lengths(&[1300, 128]);
        case.options.split = split;
        cases.push(case);
    }
    cases
}

/// Groups of channels that are not a multiple of those that a kernel multiplies at once.
fn small_groups() -> Vec<AttendCase> {
    let groups = |group, head_dim, key: (Bits, usize), value: (Bits, usize)| {
        let tensor = |(bits, channels)| affine(bits, Grouping::TokenChannels(channels));
        let format = SegmentFormat { key: tensor(key), value: tensor(value) };
        let name = format!("groups-of-{}-and-{}-g{group}-d{head_dim}", key.1, value.1);
        AttendCase::new(&name, shape(group, head_dim), format).lengths(&[300, 129])
    };
    vec![
        groups(3, 64, (Bits::Two, 4), (Bits::Four, 4)),
        groups(8, 96, (Bits::Four, 24), (Bits::Eight, 12)),
        groups(4, 128, (Bits::Eight, 8), (Bits::One, 64)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_plain() {
        let cases = attend_cases();
        let names: BTreeSet<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(names.len(), cases.len());
        assert!(names.iter().all(|n| n.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-')));
    }

    #[test]
    fn formats_fit_shapes_and_every_sequence_has_tokens() {
        for case in attend_cases() {
            for segment in &case.segments {
                segment.format.check(&case.shape).unwrap();
            }
            assert!((0..case.sequences.len()).all(|sequence| case.tokens(sequence) > 0), "{}", case.name);
            assert!(case.sequences.iter().flatten().all(|span| span.segment < case.segments.len()), "{}", case.name);
        }
    }

    #[test]
    fn every_group_and_head_dim_is_covered() {
        let seen: BTreeSet<_> = attend_cases().iter().map(|case| (case.shape.group(), case.shape.head_dim())).collect();
        for group in GROUPS {
            assert!(crate::format::HEAD_DIMS.iter().all(|&head_dim| seen.contains(&(group, head_dim))));
        }
    }

    #[test]
    fn the_quick_subset_is_small_and_covers_every_width() {
        let quick: Vec<AttendCase> = attend_cases().into_iter().filter(|case| case.quick).collect();
        assert!((15..=64).contains(&quick.len()), "{} quick cases", quick.len());
    }
}
