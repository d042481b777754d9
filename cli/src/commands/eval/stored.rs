//! A layer of a dump in the stores of a backend.

use std::ops::Range;

use kvpack::backend::{AttendOptions, SpanWrite};
use kvpack::format::{AttentionShape, Calibration, SegmentFormat, TILE_TOKENS};
use kvpack::plan::{AttendPlan, Page, PageAllocator, QueryRun, RowLayout, SpanView, StoreView, TokenRange};
use kvpack::{Backend, Result};

use super::layer::VisibleQuery;
use crate::dump::Layer;

/// Tokens that stay in f16 whatever the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub struct KeptInF16 {
    /// Keep this many first tokens in f16: a system prompt, or the sink of a language model.
    #[arg(long = "keep-first", value_name = "TOKENS", default_value_t = 0)]
    pub first: usize,
    /// Keep this many last tokens in f16: a recent window.
    #[arg(long = "keep-last", value_name = "TOKENS", default_value_t = 0)]
    pub last: usize,
}

/// The segments of a layer.
pub struct StoredLayer<B: Backend> {
    shape: AttentionShape,
    segments: Vec<Segment<B>>,
}

/// Consecutive tokens in a store of their own.
struct Segment<B: Backend> {
    format: SegmentFormat,
    store: B::Store,
    tokens: Range<usize>,
    pages: Vec<Page>,
}

impl<B: Backend> StoredLayer<B> {
    /// Stores a layer: what is kept in f16, and the tokens between in `format`.
    pub async fn new(
        backend: &B,
        layer: &Layer,
        format: SegmentFormat,
        kept: KeptInF16,
        tensors: (&B::Tensor, &B::Tensor),
    ) -> Result<Self> {
        let (begin, end) = (kept.first, layer.tokens - kept.last);
        let parts = [(SegmentFormat::F16, 0..begin), (format, begin..end), (SegmentFormat::F16, end..layer.tokens)];
        let mut segments = Vec::with_capacity(parts.len());
        for (format, tokens) in parts.into_iter().filter(|(_, tokens)| !tokens.is_empty()) {
            segments.push(Segment::new(backend, layer, format, tokens, tensors).await?);
        }
        Ok(Self { shape: layer.shape, segments })
    }

    /// Bytes held.
    pub fn bytes(&self, backend: &B) -> u64 {
        self.segments.iter().map(|segment| backend.store_bytes(&segment.store)).sum()
    }

    /// The outputs of queries, one sequence each over the tokens that it may see. Packed segments are calibrated.
    pub async fn attend(
        &self,
        backend: &B,
        queries: &[VisibleQuery<'_>],
        calibration: Option<Calibration>,
    ) -> Result<Vec<f32>> {
        let views: Vec<StoreView<'_>> =
            self.segments.iter().map(|segment| segment.view(queries, calibration)).collect();
        let plan = AttendPlan::new(self.shape, &QueryRun::decode_batch(queries.len()), &views)?;
        let stores: Vec<&B::Store> = self.segments.iter().map(|segment| &segment.store).collect();
        let elements: Vec<f32> = queries.iter().flat_map(|query| query.query).copied().collect();
        let queries = backend.upload(elements.as_slice().into()).await?;
        let output = backend.attend(&plan, &stores, &queries, AttendOptions::default()).await?;
        backend.download(&output).await
    }
}

impl<B: Backend> Segment<B> {
    /// What each query, as a sequence, sees of the segment.
    fn view(&self, queries: &[VisibleQuery<'_>], calibration: Option<Calibration>) -> StoreView<'_> {
        let spans = queries.iter().enumerate().map(|(sequence, query)| {
            let tokens = query.tokens.min(self.tokens.end).saturating_sub(self.tokens.start);
            SpanView { sequence, start: 0, tokens, pages: &self.pages[..tokens.div_ceil(TILE_TOKENS)], range_slot: 0 }
        });
        StoreView {
            format: self.format,
            calibration: calibration.filter(|_| self.format != SegmentFormat::F16),
            spans: spans.collect(),
        }
    }

    async fn new(
        backend: &B,
        layer: &Layer,
        format: SegmentFormat,
        tokens: Range<usize>,
        (keys, values): (&B::Tensor, &B::Tensor),
    ) -> Result<Self> {
        let mut store = backend.create_store(layer.shape, format)?;
        let needed = tokens.len().div_ceil(TILE_TOKENS);
        let most = backend.max_shard_pages(&layer.shape, &format).max(1) as usize;
        let mut allocator = PageAllocator::default();
        while allocator.capacity() < needed {
            let pages = (needed - allocator.capacity()).min(most) as u32;
            backend.add_shard(&mut store, pages).await?;
            allocator.add_shard(pages);
        }
        backend.reserve_ranges(&mut store, 1).await?;
        let pages = allocator.allocate(needed)?;
        let rows = RowLayout::head_major(layer.tokens, &layer.shape);
        let range = TokenRange::new(tokens.start, tokens.end)?;
        backend.quantize(
            &mut store,
            keys,
            values,
            SpanWrite { rows, tokens: range.into(), pages: &pages, range_slot: 0 },
        )?;
        Ok(Self { format, store, tokens, pages })
    }
}
