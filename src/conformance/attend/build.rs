//! The building blocks of cases: shapes, formats, names.

use super::case::{AttendCase, DataKind, InputLayout, Paging, Queries, RowOrder, SinkPlace, SpanCase, StoreCase};
use crate::backend::{AttendOptions, QueryPrecision};
use crate::format::{
    AffineFormat, AttentionShape, Bits, Calibration, Grouping, RangeRule, SegmentFormat, TensorFormat,
};
use crate::plan::{ElementType, Scoring};

/// Group sizes of grouped-query attention that the registry covers.
pub(super) const GROUPS: [usize; 5] = [1, 3, 4, 7, 8];

/// Ragged lengths of most cases: one token, exactly a tile, a tile and one token, and a tail that does not fill a word.
pub(super) const RAGGED: [usize; 4] = [1, 128, 129, 300];

impl AttendCase {
    /// Two KV heads, the ragged lengths, and one segment of `format`.
    pub(super) fn new(name: &str, shape: AttentionShape, format: SegmentFormat) -> Self {
        let case = Self {
            name: name.into(),
            shape,
            segments: vec![StoreCase::new(format)],
            sequences: Vec::new(),
            data: DataKind::ChannelOffsets,
            sink: SinkPlace::First,
            input: InputLayout { elements: ElementType::F32, order: RowOrder::TokenMajor },
            centred: false,
            paging: Paging::InOrder,
            queries: Queries::Decode,
            scoring: Scoring::of(&shape),
            // Cases choose the query precision themselves. Most are to be as exact as possible.
            options: AttendOptions { query: QueryPrecision::Int16, ..AttendOptions::default() },
            seed: 0, // its place among the cases
            quick: false,
        };
        case.lengths(&RAGGED)
    }

    /// One sequence for each length, all in the first segment.
    pub(super) fn lengths(mut self, lengths: &[usize]) -> Self {
        self.sequences = lengths.iter().map(|&tokens| vec![SpanCase { segment: 0, tokens }]).collect();
        self
    }

    pub(super) fn quick(self) -> Self {
        Self { quick: true, ..self }
    }
}

/// Two KV heads with `group` query heads each.
pub(super) fn shape(group: usize, head_dim: usize) -> AttentionShape {
    AttentionShape::new(2 * group, 2, head_dim).expect("the registry's shapes have kernels")
}

pub(super) fn offsets(tau1: f32, tau2: f32) -> Calibration {
    Calibration::new(tau1, tau2).expect("the registry's offsets are finite and not negative")
}

pub(super) const fn affine(bits: Bits, grouping: Grouping) -> TensorFormat {
    TensorFormat::Affine(AffineFormat::new(bits, grouping))
}

pub(super) const fn both(format: TensorFormat) -> SegmentFormat {
    SegmentFormat { key: format, value: format }
}

/// A format as part of a name.
pub(super) fn slug(format: &TensorFormat) -> String {
    let AffineFormat { bits, grouping, rotation, ranges, .. } = match format {
        TensorFormat::F16 => return "f16".into(),
        TensorFormat::Affine(affine) => affine,
        TensorFormat::Codebook(codebook) => return format!("{}bit-codebook", codebook.bits),
    };
    let codes = match grouping {
        Grouping::Channel => format!("{bits}bit"),
        Grouping::ChannelTokens(tokens) => format!("{bits}bit-{tokens}tokens"),
        Grouping::Token => format!("{bits}bit-token"),
        Grouping::TokenChannels(channels) => format!("{bits}bit-token-{channels}channels"),
    };
    let codes = if *ranges == RangeRule::Symmetric { format!("{codes}-symmetric") } else { codes };
    match rotation {
        None => codes,
        Some(rotation) => format!("{codes}-{}", rotation.to_string().to_lowercase().replace(' ', "-")),
    }
}
