//! What attention over stored data must give, in f64.

use rayon::prelude::*;

use super::accuracy::Expected;
use super::case::AttendCase;
use super::stored::StoredSpan;
use crate::Result;
use crate::conformance::data::SequenceData;
use crate::cpu::{DenseSegment, exact_attention};
use crate::format::AttentionShape;
use crate::plan::AttendPlan;

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
        for (query, queries) in data[sequence].queries.chunks_exact(elements).enumerate() {
            all.extend(attention(&case.shape, &of_sequence, planned.visible(query), queries)?);
        }
    }
    Ok(all)
}

/// The exact outputs of the queries of one sequence, which see all of it.
pub(in crate::conformance) fn decode(
    shape: &AttentionShape,
    segments: &[DenseSegment<'_>],
    queries: &[f32],
) -> Result<Expected> {
    let spans: Vec<DenseSpan<'_>> = segments.iter().map(|&segment| DenseSpan { start: 0, segment }).collect();
    attention(shape, &spans, usize::MAX, queries)
}

/// The exact outputs of one query of each head, which sees the first `visible` tokens of its sequence; KV
/// heads in parallel.
fn attention(shape: &AttentionShape, spans: &[DenseSpan<'_>], visible: usize, queries: &[f32]) -> Result<Expected> {
    let group = AttentionShape::new(shape.group(), 1, shape.head_dim())?;
    let heads: Vec<Expected> = (0..shape.kv_heads())
        .into_par_iter()
        .map(|kv_head| {
            let seen = |span: &DenseSpan<'_>| visible.saturating_sub(span.start).min(span.segment.tokens);
            let of_head: Vec<DenseSegment<'_>> = spans
                .iter()
                .filter(|span| seen(span) > 0)
                .map(|span| one_head(&span.segment, kv_head, shape.head_dim(), seen(span)))
                .collect();
            let query_elements = shape.group() * shape.head_dim();
            let state = exact_attention(&group, &of_head, &queries[kv_head * query_elements..][..query_elements])?;
            let mean_values = mean_value(&of_head, shape.head_dim()).repeat(shape.group());
            Ok(Expected { outputs: state.outputs, lse: state.lse, mean_values })
        })
        .collect::<Result<_>>()?;
    Ok(heads.into_iter().fold(Expected::default(), |mut all, head| {
        all.extend(head);
        all
    }))
}

/// The first tokens of one KV head of a segment.
fn one_head<'a>(segment: &DenseSegment<'a>, kv_head: usize, head_dim: usize, tokens: usize) -> DenseSegment<'a> {
    let of_head = |rows: &'a [f32]| &rows[kv_head * segment.tokens * head_dim..][..tokens * head_dim];
    DenseSegment { keys: of_head(segment.keys), values: of_head(segment.values), tokens, ..*segment }
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
