//! The cases of visibility and scoring: windows, spans that see themselves, trees, scales, soft caps and sinks, over
//! every family of formats and every head dimension, for one row, few, many and ragged batches of all.

use std::sync::Arc;

use super::build::{affine, both, shape, slug};
use super::case::{AttendCase, Paging, Queries, SinkPlace, SpanCase, StoreCase};
use crate::format::{Bits, Grouping, HEAD_DIMS, SegmentFormat};
use crate::plan::{ElementType, QueryRun, Scoring, TreeMask, Visible};

/// A way of scoring, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scored {
    Plain,
    Scaled,
    Capped,
    Sinks,
    All,
}

impl Scored {
    const ALL: [Self; 5] = [Self::Plain, Self::Scaled, Self::Capped, Self::Sinks, Self::All];

    const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Scaled => "scaled",
            Self::Capped => "capped",
            Self::Sinks => "sinks",
            Self::All => "scaled-capped-sinks",
        }
    }

    /// A cap that the scores of planted tokens reach, and sinks from none to one that takes most of the weight.
    fn of(self, case: &AttendCase) -> Scoring {
        let scoring = Scoring::of(&case.shape);
        let scale = scoring.scale() * 0.6;
        let sinks: Vec<f32> =
            (0..case.shape.query_heads()).map(|head| [f32::NEG_INFINITY, 6.0, 0.0, 14.0][head % 4]).collect();
        let (scaled, capped, sunk) = (
            matches!(self, Self::Scaled | Self::All),
            matches!(self, Self::Capped | Self::All),
            matches!(self, Self::Sinks | Self::All),
        );
        // By the one cap the planted sink is bent, by the other it is cut off: tanh of 1.2 and of 3.5.
        let cap = if matches!(self, Self::Capped) { 4.0 } else { 12.0 };
        let built = Ok(scoring)
            .and_then(|scoring| if scaled { scoring.with_scale(scale) } else { Ok(scoring) })
            .and_then(|scoring| if capped { scoring.with_soft_cap(cap) } else { Ok(scoring) })
            .and_then(|scoring| if sunk { scoring.with_sinks(&sinks) } else { Ok(scoring) });
        built.expect("the registry's numbers are finite and above 0")
    }
}

/// A kind of visibility, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Causal,
    Window,
    Spans,
    Tree,
}

impl Seen {
    const ALL: [Self; 4] = [Self::Causal, Self::Window, Self::Spans, Self::Tree];

    const fn name(self) -> &'static str {
        match self {
            Self::Causal => "causal",
            Self::Window => "window",
            Self::Spans => "spans",
            Self::Tree => "tree",
        }
    }

    /// What `queries` queries of a sequence of `tokens` tokens see. Windows begin within a tile, at its first token and
    /// at its last by the seed.
    fn of(self, queries: usize, tokens: usize, seed: usize) -> Visible {
        let left = [5, 128, 127, 40, 200][seed % 5];
        match self {
            Self::Causal => Visible::Causal,
            Self::Window => Visible::Window { left },
            Self::Spans => {
                let (first, last) = (tokens / 5, tokens - tokens / 4);
                let spans = [first..tokens / 2, last..tokens].into_iter().filter(|span| !span.is_empty());
                let left = (seed % 2 == 1).then_some(left);
                Visible::Spans { left, spans: spans.collect::<Arc<[_]>>() }
            }
            Self::Tree => {
                let parents: Vec<Option<usize>> = (0..queries)
                    .map(|node| (node * (seed + 3) % (node + 2)).checked_sub(1).filter(|&p| p < node))
                    .collect();
                Visible::Tree(TreeMask::from_parents(&parents).expect("parents come before their children"))
            }
        }
    }
}

/// The formats, each of a family of its own.
fn formats(head_dim: usize) -> Vec<SegmentFormat> {
    vec![
        SegmentFormat::F16,
        SegmentFormat::per_channel(Bits::Four),
        both(affine(Bits::Eight, Grouping::Token)),
        SegmentFormat {
            key: affine(Bits::Two, Grouping::ChannelTokens(32)),
            value: affine(Bits::Two, Grouping::TokenChannels(16)),
        },
        SegmentFormat::turboquant(Bits::Three, head_dim),
        SegmentFormat::turboquant_prod(Bits::Four, head_dim),
        SegmentFormat::per_channel(Bits::One),
        both(affine(Bits::Three, Grouping::Token)),
        SegmentFormat::saw_int4(),
    ]
}

/// All cases of outputs.
pub(super) fn read_path() -> Vec<AttendCase> {
    let mut cases = Vec::new();
    for (place, seen) in Seen::ALL.into_iter().enumerate() {
        for i in 0..formats(64).len() {
            let (head_dim, scored) = (HEAD_DIMS[(i + place) % HEAD_DIMS.len()], Scored::ALL[(i + 2 * place) % 5]);
            let head_dim = if i == 8 { 128 } else { head_dim };
            let format = formats(head_dim)[i];
            let rows = [1, 8, 30, 300][(i + place) % 4];
            let mut case = case(seen, scored, (format, [1, 4, 3, 8][i % 4], head_dim), rows, i + place);
            // One of 300 queries with a window: workgroups take them one by one.
            case.quick = i == 1 || (i != 6 && seen == Seen::Window && (i == 0 || rows == 300));
            cases.push(case);
        }
    }
    cases.push(unseen(3, Scored::Plain));
    cases.push(unseen(3, Scored::Sinks));
    cases.extend(histories());
    cases.extend(far_caps());
    cases
}

/// Caps far above all scores, as engines say that there is none.
fn far_caps() -> impl Iterator<Item = AttendCase> {
    let kinds = [(SegmentFormat::F16, 64, 300, 1e6), (SegmentFormat::per_channel(Bits::Four), 128, 8, 1e9)];
    kinds.into_iter().enumerate().map(|(i, (format, head_dim, rows, cap))| {
        let mut case = case(Seen::Causal, Scored::Plain, (format, 4, head_dim), rows, i);
        case.name = format!("read-far-cap-{rows}-d{head_dim}-{}", slug(&format.key));
        case.quick = i == 1;
        case.scoring = Scoring::of(&case.shape).with_soft_cap(cap).expect("the cap is finite and above 0");
        case
    })
}

/// A part of a prompt over a history that is several times as long as its rows are wide, which kernels may unpack once
/// for all of them; a query of another sequence, whose history nobody else reads.
fn histories() -> impl Iterator<Item = AttendCase> {
    let kivi = SegmentFormat {
        key: affine(Bits::Two, Grouping::ChannelTokens(32)),
        value: affine(Bits::Two, Grouping::TokenChannels(16)),
    };
    let eight = both(affine(Bits::Eight, Grouping::Token));
    let kinds = [
        (SegmentFormat::per_channel(Bits::Four), 128, Scored::Plain, Visible::Causal),
        (SegmentFormat::per_channel(Bits::Two), 256, Scored::All, Visible::Window { left: 450 }),
        (SegmentFormat::turboquant(Bits::Three, 80), 80, Scored::Plain, Visible::All),
        (SegmentFormat::turboquant(Bits::Four, 128), 128, Scored::Sinks, Visible::Window { left: 300 }),
        (SegmentFormat::saw_int4(), 64, Scored::Capped, Visible::Causal),
        (kivi, 96, Scored::Sinks, Visible::Causal),
        (SegmentFormat { key: SegmentFormat::F16.key, ..eight }, 128, Scored::Plain, Visible::Causal),
    ];
    kinds.into_iter().enumerate().map(|(i, (format, head_dim, scored, visible))| {
        let mut case = case(Seen::Causal, scored, (format, 8, head_dim), 130, i);
        case.name = format!("read-history-{}-d{head_dim}-{}", scored.name(), slug(&format.value));
        let span = |segment, tokens| SpanCase { segment, tokens };
        case.sequences = vec![vec![span(1, 300)], vec![span(0, 20), span(1, 650), span(0, 90)]];
        case.queries = Queries::Runs(vec![QueryRun::decode(0), QueryRun::new(1, 130, visible)]);
        case.input.elements = [ElementType::F16, ElementType::F32, ElementType::Bf16][i % 3];
        case
    })
}

/// All cases of states.
pub(super) fn read_path_states() -> Vec<AttendCase> {
    let f16 = (SegmentFormat::per_channel(Bits::Four), 4, 128);
    let mut cases: Vec<AttendCase> = Seen::ALL
        .into_iter()
        .enumerate()
        .map(|(i, seen)| {
            let mut case = case(seen, Scored::ALL[(i + 1) % 5], f16, 8, i);
            case.name = format!("states-{}", case.name);
            case.quick = i == 1;
            case
        })
        .collect();
    for scored in [Scored::Plain, Scored::Sinks] {
        let case = unseen(3, scored);
        cases.push(AttendCase { name: format!("states-{}", case.name), quick: scored == Scored::Plain, ..case });
    }
    // As many as kernels for many queries take.
    let many = unseen(40, Scored::Plain);
    cases.push(AttendCase { name: format!("states-{}-40", many.name), quick: false, ..many });
    cases.push(partly_unseen());
    cases
}

/// Three sequences over f16 and a format: `rows` queries of the first, one of the second and a few of the third.
fn case(
    seen: Seen,
    scored: Scored,
    (format, group, head_dim): (SegmentFormat, usize, usize),
    rows: usize,
    seed: usize,
) -> AttendCase {
    let name = format!("read-{}-{}-{rows}-g{group}-d{head_dim}-{}", seen.name(), scored.name(), slug(&format.key));
    let mut case = AttendCase::new(&name, shape(group, head_dim), SegmentFormat::F16);
    case.segments.push(StoreCase::new(format));
    let span = |segment, tokens| SpanCase { segment, tokens };
    case.sequences = vec![
        vec![span(0, 130), span(1, 270), span(0, 9)],
        vec![span(0, 1), span(1, 140)],
        vec![span(0, 3), span(1, 128), span(1, 77), span(0, 20)],
    ];
    case.paging = Paging::Scattered { shard_pages: 2 };
    case.sink = [SinkPlace::First, SinkPlace::Middle, SinkPlace::Last][seed % 3];
    case.input.elements = [ElementType::F32, ElementType::F16][seed % 2];
    let run = |sequence: usize, queries: usize| {
        QueryRun::new(sequence, queries, seen.of(queries, case.tokens(sequence), seed + sequence))
    };
    case.queries = Queries::Runs(vec![run(0, rows), run(1, 1), run(2, 5)]);
    case.scoring = scored.of(&case);
    case
}

/// As many, of which the last 13 see nothing: kernels for many queries take them with those that do.
fn partly_unseen() -> AttendCase {
    let case = unseen(40, Scored::Plain);
    let beyond = QueryRun { end: Some(220), ..QueryRun::new(0, 40, Visible::Window { left: 7 }) };
    let queries = Queries::Runs(vec![beyond, QueryRun::new(1, 2, Visible::Window { left: 9 })]);
    AttendCase { name: "states-read-nothing-at-the-end-40".into(), quick: true, queries, ..case }
}

/// Queries that see nothing: their window is beyond all stored tokens. Another sequence's see some.
fn unseen(rows: usize, scored: Scored) -> AttendCase {
    let name = format!("read-nothing-{}", scored.name());
    let mut case = AttendCase::new(&name, shape(4, 64), SegmentFormat::F16).lengths(&[200, 150]);
    case.segments.push(StoreCase::new(SegmentFormat::per_channel(Bits::Four)));
    case.sequences[1].push(SpanCase { segment: 1, tokens: 30 });
    let beyond = QueryRun { end: Some(1000), ..QueryRun::new(0, rows, Visible::Window { left: 7 }) };
    case.queries = Queries::Runs(vec![beyond, QueryRun::new(1, 2, Visible::Window { left: 9 })]);
    case.scoring = scored.of(&case);
    case.quick = scored == Scored::Sinks;
    case
}
