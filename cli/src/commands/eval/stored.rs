//! A layer of a dump in the stores of a backend.

use std::ops::Range;

use kvpack::backend::{AttendOptions, FilledSpan, FilledStores, NewSpan, QueryPrecision, SpanRead, SpanSource};
use kvpack::format::{AttentionShape, Calibration, SegmentFormat, TILE_TOKENS};
use kvpack::plan::{AttendPlan, QueryRun, RowLayout, SpanView, StoreView, TokenRange};
use kvpack::{Backend, Result};

use crate::dump::Layer;

/// A query and the tokens that it may see: those up to its own.
pub struct VisibleQuery<'a> {
    /// `[query_heads, head_dim]`.
    pub query: &'a [f32],
    /// How many tokens it may see.
    pub tokens: usize,
}

/// Tokens that stay in f16 whatever the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub struct KeptInF16 {
    /// Keep this many first tokens in f16: a system prompt, or the attention sink of a language model.
    #[arg(
        long = "keep-first", value_name = "TOKENS", default_value_t = 0, conflicts_with = "model",
        help_heading = super::dump::DUMP
    )]
    pub first: usize,
    /// Keep this many last tokens in f16: a residual window.
    #[arg(
        long = "keep-last", value_name = "TOKENS", default_value_t = 0, conflicts_with = "model",
        help_heading = super::dump::DUMP
    )]
    pub last: usize,
}

/// The segments of a layer: consecutive tokens, each in a store of its own.
pub struct StoredLayer<B: Backend> {
    shape: AttentionShape,
    pub(super) stores: FilledStores<B>,
    pub(super) segments: Vec<StorePart>,
}

pub(super) struct StorePart {
    format: SegmentFormat,
    tokens: Range<usize>,
    pub(super) span: FilledSpan,
}

impl<B: Backend> StoredLayer<B> {
    /// Stores a layer: what is kept in f16, and the tokens between in `format`.
    pub async fn new(
        backend: &B,
        layer: &Layer,
        format: SegmentFormat,
        kept: KeptInF16,
        (keys, values): (&B::Tensor, &B::Tensor),
    ) -> Result<Self> {
        let (begin, end) = (kept.first, layer.tokens - kept.last);
        let parts = [(SegmentFormat::F16, 0..begin), (format, begin..end), (SegmentFormat::F16, end..layer.tokens)];
        let parts: Vec<(SegmentFormat, Range<usize>)> =
            parts.into_iter().filter(|(_, tokens)| !tokens.is_empty()).collect();
        let formats: Vec<SegmentFormat> = parts.iter().map(|(format, _)| *format).collect();
        let mut stores = FilledStores::new(backend, layer.shape, &formats)?;
        let rows = RowLayout::head_major(layer.tokens, &layer.shape);
        let mut spans = Vec::with_capacity(parts.len());
        for (store, (_, tokens)) in parts.iter().enumerate() {
            let span = NewSpan { store, sequence: 0, start: tokens.start, tokens: tokens.len() };
            let tokens = TokenRange::new(tokens.start, tokens.end)?.into();
            spans.push((span, SpanSource { rows, tokens, keys, values }));
        }
        let filled = stores.fill(backend, &spans).await?;
        let segment = |((format, tokens), span)| StorePart { format, tokens, span };
        let segments = parts.into_iter().zip(filled).map(segment).collect();
        Ok(Self { shape: layer.shape, stores, segments })
    }

    /// Bytes held.
    pub fn bytes(&self, backend: &B) -> u64 {
        self.stores.bytes(backend)
    }

    /// Bits per element of the packed tokens, with all ranges and padding and a centre of `centre_bytes` bytes. 16 if
    /// no token is packed.
    pub fn packed_bits(&self, centre_bytes: usize) -> f64 {
        let Some(segment) = self.packed() else { return 16.0 };
        let (format, shape) = (segment.format, &self.shape);
        let bytes = segment.span.pages.len() * format.page_bytes(shape) + format.range_slot_bytes(shape) + centre_bytes;
        bytes as f64 * 8.0 / (2 * segment.tokens.len() * shape.kv_heads() * shape.head_dim()) as f64
    }

    /// Squared error of the packed keys and values, relative to the squares of those of `layer`. `stored` is what was
    /// stored in its place: the layer itself, or the layer with centred keys. Errors of both compare. None where nothing
    /// is packed.
    pub async fn row_error(&self, backend: &B, stored: &Layer, layer: &Layer) -> Result<Option<f64>> {
        let Some(segment) = self.packed() else { return Ok(None) };
        let FilledSpan { span, pages, range_slot } = &segment.span;
        let read = SpanRead { pages, tokens: segment.tokens.len(), range_slot: *range_slot, centre: None };
        let (keys, values) = backend.dequantize(self.stores.stores()[span.store], read)?;
        let (mut error, mut size) = (0.0, 0.0);
        for (got, wanted, original) in [(keys, &stored.keys, &layer.keys), (values, &stored.values, &layer.values)] {
            let got = backend.download(&got).await?;
            for ((got, wanted), original) in
                got.iter().zip(segment.rows(wanted, layer)).zip(segment.rows(original, layer))
            {
                error += f64::from(got - wanted).powi(2);
                size += f64::from(*original).powi(2);
            }
        }
        Ok((size > 0.0).then(|| error / size))
    }

    /// The segment in the format that was asked for, if that packs.
    fn packed(&self) -> Option<&StorePart> {
        self.segments.iter().find(|segment| segment.format != SegmentFormat::F16)
    }

    /// The outputs of queries, one sequence each over the tokens that it may see. Packed segments are calibrated.
    pub async fn attend(
        &self,
        backend: &B,
        queries: &[VisibleQuery<'_>],
        calibration: Option<Calibration>,
        query: QueryPrecision,
    ) -> Result<Vec<f32>> {
        let views: Vec<StoreView<'_>> =
            self.segments.iter().map(|segment| segment.view(queries, calibration)).collect();
        let plan = AttendPlan::new(self.shape, &QueryRun::decode_batch(queries.len()), &views)?;
        let elements: Vec<f32> = queries.iter().flat_map(|query| query.query).copied().collect();
        let queries = backend.upload(elements.as_slice().into()).await?;
        let options = AttendOptions { query, ..AttendOptions::default() };
        let output = backend.attend(&plan, &self.stores.stores(), &queries, options).await?;
        backend.download(&output).await
    }
}

impl StorePart {
    /// The elements of its tokens in a `[kv_heads, tokens, head_dim]` tensor of the layer.
    fn rows<'a>(&'a self, tensor: &'a [f32], layer: &'a Layer) -> impl Iterator<Item = &'a f32> {
        let head_dim = layer.shape.head_dim();
        let heads = tensor.chunks(layer.tokens * head_dim);
        heads.flat_map(move |head| &head[self.tokens.start * head_dim..self.tokens.end * head_dim])
    }

    /// What each query, as a sequence, sees of the segment.
    fn view(&self, queries: &[VisibleQuery<'_>], calibration: Option<Calibration>) -> StoreView<'_> {
        let spans = queries.iter().enumerate().map(|(sequence, query)| {
            let tokens = query.tokens.min(self.tokens.end).saturating_sub(self.tokens.start);
            let pages = &self.span.pages[..tokens.div_ceil(TILE_TOKENS)];
            SpanView { sequence, start: 0, tokens, gathered: None, pages, range_slot: self.span.range_slot }
        });
        StoreView {
            format: self.format,
            calibration: calibration.filter(|_| self.format != SegmentFormat::F16),
            spans: spans.collect(),
        }
    }
}
