//! What attention over stored data must give, in f64.

use rayon::prelude::*;

use super::accuracy::Expected;
use super::case::AttendCase;
use super::stored::StoredSpan;
use crate::Result;
use crate::conformance::data::SequenceData;
use crate::cpu::{DenseSegment, exact_scored_attention};
use crate::format::{AttentionShape, Calibration};
use crate::plan::{AttendPlan, QueryRun, Scoring, Visible};

/// Tokens from a position of a sequence on.
struct DenseSpan<'a> {
    start: usize,
    segment: DenseSegment<'a>,
}

impl<'a> DenseSpan<'a> {
    fn new(case: &AttendCase, stored: &'a StoredSpan) -> Self {
        let (span, calibration) = (stored.span, case.segments[stored.span.store].calibration);
        let segment = DenseSegment { keys: &stored.keys, values: &stored.values, tokens: span.tokens, calibration };
        Self { start: span.start, segment }
    }
}

/// The exact outputs of all queries of a case over what was stored, in the order of the plan's rows.
pub(super) fn of_case(
    case: &AttendCase,
    data: &[SequenceData],
    spans: &[StoredSpan],
    plan: &AttendPlan,
) -> Result<Expected> {
    let mut all = Expected::default();
    let elements = case.shape.query_heads() * case.shape.head_dim();
    for planned in plan.runs() {
        let sequence = planned.run.sequence;
        let of_sequence: Vec<DenseSpan<'_>> = spans
            .iter()
            .filter(|stored| stored.span.sequence == sequence)
            .map(|stored| DenseSpan::new(case, stored))
            .collect();
        let tokens = case.tokens(sequence);
        for (query, queries) in data[sequence].queries.chunks_exact(elements).enumerate() {
            let sees = |position: usize| sees(&planned.run, tokens, query, position);
            all.extend(attention(&case.shape, plan.scoring(), &of_sequence, sees, queries)?);
        }
    }
    Ok(all)
}

/// Whether a query of a run sees a position of its sequence of `tokens` tokens: the definition, pair by pair.
fn sees(run: &QueryRun, tokens: usize, query: usize, position: usize) -> bool {
    let end = run.end.unwrap_or(tokens);
    let own = end as i64 - run.queries as i64 + query as i64;
    let behind = own - position as i64;
    let within = |left: usize| behind >= 0 && behind <= left as i64;
    match &run.visible {
        Visible::All => true,
        Visible::Causal => behind >= 0,
        Visible::Window { left } => within(*left),
        Visible::Spans { left, spans } => {
            let causal = left.map_or(behind >= 0, within);
            causal || spans.iter().any(|span| span.contains(&position) && span.contains(&(own as usize)))
        }
        Visible::Tree(mask) => {
            let first = end - mask.tokens();
            position < first || mask.sees(query, position - first)
        }
    }
}

/// The exact outputs of the queries of one sequence, which see all of it.
pub(in crate::conformance) fn decode(
    shape: &AttentionShape,
    segments: &[DenseSegment<'_>],
    queries: &[f32],
) -> Result<Expected> {
    let spans: Vec<DenseSpan<'_>> = segments.iter().map(|&segment| DenseSpan { start: 0, segment }).collect();
    attention(shape, &Scoring::of(shape), &spans, |_| true, queries)
}

/// The exact outputs of one query of each head, which sees some positions of its sequence; KV heads in parallel.
fn attention(
    shape: &AttentionShape,
    scoring: &Scoring,
    spans: &[DenseSpan<'_>],
    sees: impl Fn(usize) -> bool,
    queries: &[f32],
) -> Result<Expected> {
    let group = AttentionShape::new(shape.group(), 1, shape.head_dim())?;
    let seen: Vec<Vec<usize>> =
        spans.iter().map(|span| (0..span.segment.tokens).filter(|token| sees(span.start + token)).collect()).collect();
    let heads: Vec<Expected> = (0..shape.kv_heads())
        .into_par_iter()
        .map(|kv_head| {
            let rows: Vec<HeadRows> = spans
                .iter()
                .zip(&seen)
                .filter(|(_, seen)| !seen.is_empty())
                .map(|(span, seen)| HeadRows::new(&span.segment, kv_head, shape.head_dim(), seen))
                .collect();
            let of_head: Vec<DenseSegment<'_>> = rows.iter().map(HeadRows::segment).collect();
            let scoring = match scoring.sinks() {
                Some(sinks) => scoring.clone().with_sinks(&sinks[kv_head * shape.group()..][..shape.group()])?,
                None => scoring.clone(),
            };
            let query_elements = shape.group() * shape.head_dim();
            let queries = &queries[kv_head * query_elements..][..query_elements];
            let state = exact_scored_attention(&group, &scoring, &of_head, queries)?;
            let mean_values = mean_value(&of_head, shape.head_dim()).repeat(shape.group());
            Ok(Expected { outputs: state.outputs, lse: state.lse, mean_values })
        })
        .collect::<Result<_>>()?;
    Ok(heads.into_iter().fold(Expected::default(), |mut all, head| {
        all.extend(head);
        all
    }))
}

/// The tokens of one KV head of a segment that a query sees.
struct HeadRows {
    keys: Vec<f32>,
    values: Vec<f32>,
    tokens: usize,
    calibration: Option<Calibration>,
}

impl HeadRows {
    fn new(segment: &DenseSegment<'_>, kv_head: usize, head_dim: usize, seen: &[usize]) -> Self {
        let of_seen = |rows: &[f32]| {
            let row = |&token: &usize| &rows[(kv_head * segment.tokens + token) * head_dim..][..head_dim];
            seen.iter().flat_map(row).copied().collect()
        };
        let (keys, values) = (of_seen(segment.keys), of_seen(segment.values));
        Self { keys, values, tokens: seen.len(), calibration: segment.calibration }
    }

    fn segment(&self) -> DenseSegment<'_> {
        let Self { keys, values, tokens, calibration } = self;
        DenseSegment { keys, values, tokens: *tokens, calibration: *calibration }
    }
}

/// The mean over all value rows of one head.
fn mean_value(segments: &[DenseSegment<'_>], head_dim: usize) -> Vec<f64> {
    let tokens: usize = segments.iter().map(|segment| segment.tokens).sum();
    let mut mean = vec![0.0; head_dim];
    for row in segments.iter().flat_map(|segment| segment.values.chunks(head_dim)) {
        mean.iter_mut().zip(row).for_each(|(mean, &value)| *mean += f64::from(value) / tokens as f64);
    }
    mean
}
