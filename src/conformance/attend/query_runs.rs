//! The cases of query runs, causal and not, in ragged batches; and those of attention states and their merge.

use super::build::{affine, both, offsets, shape, slug};
use super::case::{AttendCase, Paging, Queries, SinkPlace, SpanCase, StoreCase};
use crate::backend::QueryPrecision;
use crate::format::{Bits, Grouping, SegmentFormat, TensorFormat};
use crate::plan::{ElementType, QueryRun, Scoring, Split, Visible};

/// Runs of 1, 2, 7, 128 and 300 queries in one batch, over spans that end within a tile.
pub(super) fn query_runs() -> Vec<AttendCase> {
    let mut cases = Vec::new();
    for (group, head_dim, format) in [
        (1, 64, SegmentFormat::per_channel(Bits::Four)),
        (4, 128, SegmentFormat::saw_int4()),
        (3, 80, kivi()),
        (8, 128, SegmentFormat::turboquant(Bits::Three, 128)),
    ] {
        let mut case = ragged(&format!("runs-g{group}-d{head_dim}-{}", slug(&format.key)), group, head_dim, format);
        case.queries = Queries::Runs(vec![QueryRun::causal(0, 20), QueryRun::decode(1), QueryRun::causal(2, 7)]);
        case.quick = group == 4;
        cases.push(case);
    }
    let mut f16 = ragged("runs-f16", 8, 128, SegmentFormat::F16).quick();
    f16.input.elements = ElementType::F16;
    f16.queries = Queries::Runs(vec![QueryRun::causal(2, 128), QueryRun::causal(0, 2), all(1, 5)]);
    cases.push(f16);
    let mut int8 = ragged("runs-int8-query", 2, 64, SegmentFormat::per_channel(Bits::Four));
    int8.options.query = QueryPrecision::Int8;
    int8.queries = Queries::Runs(vec![QueryRun::causal(0, 33), QueryRun::decode(1), all(2, 3)]);
    cases.push(int8);
    let mut longest = AttendCase::new("runs-of-300", shape(1, 64), SegmentFormat::per_channel(Bits::Two));
    longest = longest.lengths(&[300]);
    longest.queries = Queries::Runs(vec![QueryRun::causal(0, 300)]);
    cases.push(longest);
    // Every query has extremes of its own, over what it sees.
    let mut calibrated = ragged("runs-calibrated", 2, 64, SegmentFormat::per_channel(Bits::Two));
    calibrated.segments[1].calibration = Some(offsets(0.0, 1.0));
    calibrated.queries = Queries::Runs(vec![QueryRun::causal(0, 40), all(1, 3), QueryRun::causal(2, 2)]);
    cases.push(calibrated);
    let mut wide = AttendCase::new("runs-wide-calibrated", shape(4, 128), SegmentFormat::per_channel(Bits::One));
    wide.segments[0].calibration = Some(offsets(0.5, 2.0));
    wide = wide.lengths(&[1500, 300]);
    wide.queries = Queries::Runs(vec![QueryRun::causal(0, 100), all(1, 40)]);
    cases.push(wide);
    cases.extend(wide_runs());
    cases.extend(drafts());
    cases
}

/// Runs with more rows than a block of the kernels for many queries, together with short ones: over spans that end
/// within a tile, with a sink that lets weights grow, and with one range per channel of keys and one per token of
/// values.
fn wide_runs() -> Vec<AttendCase> {
    let mut f16 = AttendCase::new("runs-wide-f16", shape(3, 96), SegmentFormat::F16).lengths(&[1000, 300, 77, 200]);
    f16.queries =
        Queries::Runs(vec![QueryRun::causal(0, 200), all(1, 90), QueryRun::decode(2), QueryRun::causal(3, 5)]);
    // All that queries see is in one item each: the kernel reads the given queries and writes the outputs.
    let mut whole = AttendCase::new("runs-whole-f16", shape(4, 128), SegmentFormat::F16).lengths(&[900, 300, 200]);
    (whole.input.elements, whole.options.output) = (ElementType::F16, ElementType::F16);
    whole.options.split = Split { target_items: 1, tile_step: 1, max_tiles: 64 };
    whole.queries = Queries::Runs(vec![QueryRun::causal(0, 200), all(1, 64), QueryRun::causal(2, 130)]);
    let mut whole_d256 = AttendCase::new("runs-whole-f16-d256", shape(4, 256), SegmentFormat::F16).lengths(&[400, 150]);
    (whole_d256.input.elements, whole_d256.options) = (whole.input.elements, whole.options);
    whole_d256.queries = Queries::Runs(vec![QueryRun::causal(0, 100), all(1, 64)]);
    let channel = SegmentFormat::per_channel(Bits::Four);
    let mut sink = AttendCase::new("runs-wide-sink-4bit", shape(4, 128), channel).lengths(&[4000, 500]);
    sink.sink = SinkPlace::Middle;
    sink.queries = Queries::Runs(vec![QueryRun::causal(0, 70), all(1, 40)]);
    let mut f16_sink = AttendCase::new("runs-wide-sink-f16", shape(8, 128), SegmentFormat::F16).lengths(&[4000]);
    f16_sink.sink = SinkPlace::Middle;
    f16_sink.queries = Queries::Runs(vec![QueryRun::causal(0, 40)]);
    let mut rotated = ragged("runs-wide-saw", 8, 64, SegmentFormat::saw_int4());
    rotated.queries = Queries::Runs(vec![QueryRun::causal(0, 100), QueryRun::decode(1), QueryRun::causal(2, 33)]);
    let mixed = SegmentFormat { key: channel.key, value: affine(Bits::Four, Grouping::Token) };
    let mut apart = AttendCase::new("runs-wide-channel-keys-token-values", shape(1, 128), mixed).lengths(&[700]);
    apart.input.elements = ElementType::Bf16;
    apart.queries = Queries::Runs(vec![QueryRun::causal(0, 257)]);
    let mut cases = vec![f16, whole, whole_d256, sink, f16_sink, rotated, apart];
    // Eight neighbouring codes of one word, of two words, and of a part of one.
    let (eight, two) = (affine(Bits::Eight, Grouping::Token), affine(Bits::Two, Grouping::Token));
    let groups = SegmentFormat {
        key: affine(Bits::Four, Grouping::TokenChannels(16)),
        value: affine(Bits::Eight, Grouping::ChannelTokens(64)),
    };
    for (name, group, head_dim, format) in [
        ("8bit-2bit", 4, 128, SegmentFormat { key: eight, value: SegmentFormat::per_channel(Bits::Two).value }),
        ("2bit-8bit", 2, 96, SegmentFormat { key: SegmentFormat::per_channel(Bits::Two).key, value: eight }),
        ("1bit", 3, 96, SegmentFormat::per_channel(Bits::One)),
        ("tokens-2bit", 1, 64, both(two)),
        // Levels of every width, ranges of groups of tokens and of channels, and heads of 256 channels.
        ("turboquant-4bit", 4, 128, SegmentFormat::turboquant(Bits::Four, 128)),
        ("turboquant-1bit", 2, 64, SegmentFormat::turboquant(Bits::One, 64)),
        ("turboquant-d256", 4, 256, SegmentFormat::turboquant(Bits::Two, 256)),
        ("kivi", 4, 128, kivi()),
        ("groups-d256", 2, 256, groups),
        ("f16-d256", 4, 256, SegmentFormat::F16),
        ("saw-d256", 8, 256, SegmentFormat::saw_int4()),
    ] {
        let mut wide = ragged(&format!("runs-wide-{name}"), group, head_dim, format);
        wide.queries = Queries::Runs(vec![QueryRun::causal(0, 150), QueryRun::decode(1), all(2, 43)]);
        cases.push(wide);
    }
    // Blocks of 128 rows at most, and formats of which a block has room for many tokens and for few.
    for (name, format) in [
        ("saw", SegmentFormat::saw_int4()),
        ("8bit", both(affine(Bits::Eight, Grouping::Token))),
        ("f16", SegmentFormat::F16),
    ] {
        let mut halves =
            AttendCase::new(&format!("runs-half-wide-{name}"), shape(4, 128), format).lengths(&[1100, 330]);
        halves.sink = SinkPlace::Middle;
        halves.queries = Queries::Runs(vec![QueryRun::causal(0, 30), all(1, 11)]);
        cases.push(halves);
    }
    cases.extend(wide_sinks());
    cases
}

/// Sinks of a layer where queries have one state each, and where they have several.
fn wide_sinks() -> impl Iterator<Item = AttendCase> {
    let formats = [("4bit", 128, SegmentFormat::per_channel(Bits::Four)), ("f16", 64, SegmentFormat::F16)];
    formats.into_iter().map(|(name, head_dim, format)| {
        let mut case = AttendCase::new(&format!("runs-wide-sinks-{name}"), shape(4, head_dim), format);
        let logits = [f32::NEG_INFINITY, -2.0, 0.5, 6.0].repeat(2);
        case = case.lengths(&[500, 300, 1700]);
        case.scoring =
            Scoring::of(&case.shape).with_sinks(&logits).expect("the registry has a logit for every query head");
        case.queries = Queries::Runs(vec![QueryRun::causal(0, 200), all(1, 70), QueryRun::causal(2, 90)]);
        case
    })
}

/// Drafts of 2 to 16 queries over packed tokens, with an f16 store and without. Batches have several lengths. One case
/// has a window, and two have a sequence of 9000 tokens, which several blocks share.
fn drafts() -> Vec<AttendCase> {
    let mut cases = Vec::new();
    for (name, group, head_dim, format) in [
        ("4bit", 4, 128, SegmentFormat::per_channel(Bits::Four)),
        ("saw", 8, 64, SegmentFormat::saw_int4()),
        ("kivi", 3, 80, kivi()),
        ("turboquant", 4, 128, SegmentFormat::turboquant(Bits::Four, 128)),
        ("sketch", 5, 128, SegmentFormat::turboquant_prod(Bits::Four, 128)),
        ("8bit-d256", 4, 256, both(affine(Bits::Eight, Grouping::Token))),
    ] {
        let mut case = ragged(&format!("runs-drafts-{name}"), group, head_dim, format);
        case.queries = Queries::Runs(vec![QueryRun::causal(0, 8), all(1, 3), QueryRun::causal(2, 2)]);
        cases.push(case);
    }
    for (name, format) in
        [("1bit", SegmentFormat::per_channel(Bits::One)), ("4bit", SegmentFormat::per_channel(Bits::Four))]
    {
        let mut long = AttendCase::new(&format!("runs-drafts-long-{name}"), shape(4, 128), format);
        long = long.lengths(&[9000]);
        long.sink = SinkPlace::Middle;
        long.queries = Queries::Runs(vec![QueryRun::causal(0, 7)]);
        cases.push(long);
    }
    // Up to 64 rows, codes of every width, levels, and ranges of groups.
    for (name, group, head_dim, format) in [
        ("1bit", 4, 64, SegmentFormat::per_channel(Bits::One)),
        ("2bit", 4, 128, SegmentFormat::per_channel(Bits::Two)),
        ("3bit", 4, 128, both(affine(Bits::Three, Grouping::Token))),
        ("8bit", 4, 64, SegmentFormat::per_channel(Bits::Eight)),
        ("2bit-d64", 4, 64, SegmentFormat::per_channel(Bits::Two)),
        ("3bit-d256", 2, 256, SegmentFormat::per_channel(Bits::Three)),
        ("f16-keys", 4, 64, SegmentFormat { key: TensorFormat::F16, value: affine(Bits::Two, Grouping::Token) }),
        ("kivi", 4, 128, kivi()),
        ("turboquant-1bit", 2, 64, SegmentFormat::turboquant(Bits::One, 64)),
        ("turboquant-2bit", 2, 256, SegmentFormat::turboquant(Bits::Two, 256)),
        ("turboquant-3bit", 8, 64, SegmentFormat::turboquant(Bits::Three, 64)),
    ] {
        let mut case = ragged(&format!("runs-drafts-rows-{name}"), group, head_dim, format);
        case.queries = Queries::Runs(vec![QueryRun::causal(0, 64 / group), all(1, 5), QueryRun::causal(2, 6)]);
        cases.push(case);
    }
    let window = |sequence, queries| QueryRun::new(sequence, queries, Visible::Window { left: 130 });
    let mut windows = AttendCase::new("runs-drafts-window", shape(4, 128), SegmentFormat::saw_int4());
    windows = windows.lengths(&[1000, 300, 135]);
    windows.queries = Queries::Runs(vec![window(0, 8), window(1, 4), QueryRun::causal(2, 5)]);
    cases.push(windows);
    cases
}

/// What attention states are checked on: every sequence has tokens in the first store and in others, so that states
/// over the one and over the others are merged.
pub fn state_cases() -> Vec<AttendCase> {
    let mut cases = Vec::new();
    for (name, group, head_dim, format) in [
        ("f16", 8, 128, SegmentFormat::F16),
        ("4bit", 4, 128, SegmentFormat::per_channel(Bits::Four)),
        ("kivi", 3, 80, kivi()),
        ("rotated", 1, 64, SegmentFormat::saw_int4()),
        ("codebook", 7, 96, SegmentFormat::turboquant(Bits::Two, 96)),
    ] {
        let mut case = ragged(&format!("states-{name}"), group, head_dim, format);
        case.sequences[1].push(SpanCase { segment: 1, tokens: 2 });
        case.queries = Queries::Runs(vec![all(0, 3), QueryRun::decode(1), all(2, 6)]);
        case.quick = group == 4;
        cases.push(case);
    }
    let mut sink = AttendCase::new("states-sink-long", shape(4, 128), SegmentFormat::F16);
    sink.segments.push(StoreCase::new(SegmentFormat::per_channel(Bits::Two)));
    sink.sequences = vec![vec![SpanCase { segment: 0, tokens: 4 }, SpanCase { segment: 1, tokens: 4096 }]];
    sink.sink = SinkPlace::Middle;
    cases.push(sink);
    let mut several = AttendCase::new("states-four-stores", shape(2, 64), SegmentFormat::F16);
    several.segments =
        [SegmentFormat::F16, SegmentFormat::per_channel(Bits::Two), kivi(), both(affine(Bits::Four, Grouping::Token))]
            .map(StoreCase::new)
            .to_vec();
    let spans = |first: usize| (0..8).map(|i| SpanCase { segment: (first + i) % 4, tokens: 40 + 61 * i }).collect();
    several.sequences = vec![spans(0), spans(1)];
    several.paging = Paging::Scattered { shard_pages: 3 };
    cases.push(several);
    cases.push(super::centred::several("states"));
    cases.extend(super::read_path::read_path_states());
    for (index, case) in cases.iter_mut().enumerate() {
        case.seed = 1000 + index as u64;
    }
    cases
}

/// Three sequences in f16 and `format`.
fn ragged(name: &str, group: usize, head_dim: usize, format: SegmentFormat) -> AttendCase {
    let mut case = AttendCase::new(name, shape(group, head_dim), SegmentFormat::F16);
    case.segments.push(StoreCase::new(format));
    let span = |segment, tokens| SpanCase { segment, tokens };
    case.sequences = vec![
        vec![span(0, 130), span(1, 170), span(0, 9)],
        vec![span(0, 1)],
        vec![span(0, 3), span(1, 128), span(1, 77), span(0, 20)],
    ];
    case.paging = Paging::Scattered { shard_pages: 2 };
    case
}

fn kivi() -> SegmentFormat {
    SegmentFormat {
        key: affine(Bits::Two, Grouping::ChannelTokens(32)),
        value: affine(Bits::Two, Grouping::TokenChannels(16)),
    }
}

/// Queries that see all of their sequence.
const fn all(sequence: usize, queries: usize) -> QueryRun {
    QueryRun::new(sequence, queries, Visible::All)
}
