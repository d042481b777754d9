//! What attention over stored data must give, in f64.

use rayon::prelude::*;

use super::Case;
use super::accuracy::Expected;
use super::data::SequenceData;
use super::stored::StoredSpan;
use crate::Result;
use crate::cpu::{DenseSegment, exact_attention};
use crate::format::AttentionShape;

/// The exact outputs of all sequences of a case over what was stored.
pub(super) fn of_case(case: &Case, data: &[SequenceData], spans: &[StoredSpan]) -> Result<Expected> {
    let mut all = Expected::default();
    for (sequence, data) in data.iter().enumerate() {
        let segments: Vec<DenseSegment<'_>> = spans
            .iter()
            .filter(|span| span.sequence == sequence)
            .map(|span| DenseSegment {
                keys: &span.keys,
                values: &span.values,
                tokens: span.tokens,
                calibration: case.segments[span.segment].calibration,
            })
            .collect();
        all.extend(attention(&case.shape, &segments, &data.queries)?);
    }
    Ok(all)
}

/// The exact outputs of one sequence, KV heads in parallel.
pub(super) fn attention(shape: &AttentionShape, segments: &[DenseSegment<'_>], queries: &[f32]) -> Result<Expected> {
    let group = AttentionShape::new(shape.group(), 1, shape.head_dim())?;
    let heads: Vec<Expected> = (0..shape.kv_heads())
        .into_par_iter()
        .map(|kv_head| {
            let of_head: Vec<DenseSegment<'_>> =
                segments.iter().map(|segment| one_head(segment, kv_head, shape.head_dim())).collect();
            let query_elements = shape.group() * shape.head_dim();
            let state = exact_attention(&group, &of_head, &queries[kv_head * query_elements..][..query_elements])?;
            let mean_values = mean_value(&of_head, shape.head_dim()).repeat(shape.group());
            Ok(Expected { outputs: state.outputs, mean_values })
        })
        .collect::<Result<_>>()?;
    Ok(heads.into_iter().fold(Expected::default(), |mut all, head| {
        all.extend(head);
        all
    }))
}

/// One KV head of a segment.
fn one_head<'a>(segment: &DenseSegment<'a>, kv_head: usize, head_dim: usize) -> DenseSegment<'a> {
    let elements = segment.tokens * head_dim;
    DenseSegment {
        keys: &segment.keys[kv_head * elements..][..elements],
        values: &segment.values[kv_head * elements..][..elements],
        ..*segment
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
