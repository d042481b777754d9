//! A case's data in the stores of a backend.

use super::data::{Random, SequenceData};
use super::{Case, Fill, Paging, SegmentCase, SpanCase};
use crate::backend::{SpanRead, SpanWrite, TokenWrite};
use crate::format::TILE_TOKENS;
use crate::plan::{AttendPlan, Page, PageAllocator, QueryRun, SpanView, StoreView, TokenRange};
use crate::{Backend, Result};

/// The stores of a case, filled.
pub(super) struct Stored<B: Backend> {
    /// One per segment of the case.
    pub stores: Vec<B::Store>,
    /// All spans, sequence after sequence.
    spans: Vec<PlacedSpan>,
}

/// A span and where it lies.
struct PlacedSpan {
    sequence: usize,
    segment: usize,
    /// First token within the sequence.
    start: usize,
    tokens: usize,
    pages: Vec<Page>,
    range_slot: usize,
}

/// The stored keys and values of one span, dense, `[kv_heads, tokens, head_dim]`.
pub(super) struct StoredSpan {
    pub sequence: usize,
    pub segment: usize,
    pub tokens: usize,
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
}

impl<B: Backend> Stored<B> {
    /// Fills stores on `backend` as the case says. `tensors` are the keys and values of each sequence on it.
    pub(super) async fn fill(
        backend: &B,
        case: &Case,
        data: &[SequenceData],
        tensors: &[(B::Tensor, B::Tensor)],
    ) -> Result<Self> {
        let mut spans = place(case);
        let mut stores = Vec::with_capacity(case.segments.len());
        for (index, segment) in case.segments.iter().enumerate() {
            let mut store = backend.create_store(case.shape, segment.format)?;
            let mut of_segment: Vec<&mut PlacedSpan> = spans.iter_mut().filter(|span| span.segment == index).collect();
            give_pages(backend, case, segment, &mut store, &mut of_segment).await?;
            for span in of_segment.iter().filter(|span| span.tokens > 0) {
                let (keys, values) = &tensors[span.sequence];
                let rows = data[span.sequence].rows;
                match segment.fill {
                    Fill::Quantize => {
                        let tokens = TokenRange::new(span.start, span.start + span.tokens)?;
                        let write =
                            SpanWrite { rows, tokens: tokens.into(), pages: &span.pages, range_slot: span.range_slot };
                        backend.quantize(&mut store, keys, values, write)?;
                    }
                    Fill::Append => backend.append(&mut store, keys, values, rows, &span.token_writes())?,
                }
            }
            stores.push(store);
        }
        Ok(Self { stores, spans })
    }

    /// Reads all spans that have tokens back through `dequantize`.
    pub(super) async fn read_back(&self, backend: &B) -> Result<Vec<StoredSpan>> {
        let mut read = Vec::with_capacity(self.spans.len());
        for span in self.spans.iter().filter(|span| span.tokens > 0) {
            let place = SpanRead { pages: &span.pages, tokens: span.tokens, range_slot: span.range_slot };
            let (keys, values) = backend.dequantize(&self.stores[span.segment], place)?;
            read.push(StoredSpan {
                sequence: span.sequence,
                segment: span.segment,
                tokens: span.tokens,
                keys: backend.download(&keys).await?,
                values: backend.download(&values).await?,
            });
        }
        Ok(read)
    }

    /// The plan of one step over everything stored.
    pub(super) fn plan(&self, case: &Case) -> Result<AttendPlan> {
        let views: Vec<StoreView<'_>> = case
            .segments
            .iter()
            .enumerate()
            .map(|(index, segment)| StoreView {
                format: segment.format,
                calibration: segment.calibration,
                spans: self.spans.iter().filter(|span| span.segment == index).map(PlacedSpan::view).collect(),
            })
            .collect();
        AttendPlan::new(case.shape, &QueryRun::decode_batch(case.sequences.len()), &views)
    }
}

impl PlacedSpan {
    fn view(&self) -> SpanView<'_> {
        SpanView {
            sequence: self.sequence,
            start: self.start,
            tokens: self.tokens,
            pages: &self.pages,
            range_slot: self.range_slot,
        }
    }

    fn token_writes(&self) -> Vec<TokenWrite> {
        (0..self.tokens)
            .map(|token| TokenWrite {
                token: self.start + token,
                page: self.pages[token / TILE_TOKENS],
                slot: token % TILE_TOKENS,
            })
            .collect()
    }
}

/// All spans of a case, without pages yet. Slots of span ranges count up within a segment.
fn place(case: &Case) -> Vec<PlacedSpan> {
    let mut next_slot = vec![0; case.segments.len()];
    let mut placed = Vec::new();
    for (sequence, spans) in case.sequences.iter().enumerate() {
        let mut start = 0;
        for &SpanCase { segment, tokens } in spans {
            let range_slot = next_slot[segment];
            placed.push(PlacedSpan { sequence, segment, start, tokens, pages: Vec::new(), range_slot });
            next_slot[segment] += 1;
            start += tokens;
        }
    }
    placed
}

/// Makes room in a store for its spans and deals the pages out.
async fn give_pages<B: Backend>(
    backend: &B,
    case: &Case,
    segment: &SegmentCase,
    store: &mut B::Store,
    spans: &mut [&mut PlacedSpan],
) -> Result<()> {
    let needed: usize = spans.iter().map(|span| span.tokens.div_ceil(TILE_TOKENS)).sum();
    let device_most = backend.max_shard_pages(&case.shape, &segment.format).max(1);
    let most = match case.paging {
        Paging::InOrder => device_most,
        Paging::Scattered { shard_pages } => shard_pages.clamp(1, device_most),
    };
    let mut allocator = PageAllocator::default();
    while allocator.capacity() < needed {
        let pages = (needed - allocator.capacity()).min(most as usize) as u32;
        backend.add_shard(store, pages).await?;
        allocator.add_shard(pages);
    }
    backend.reserve_ranges(store, spans.len()).await?;
    let mut pages = allocator.allocate(needed)?;
    if let Paging::Scattered { .. } = case.paging {
        Random::new(case.seed).shuffle(&mut pages);
    }
    for span in spans {
        span.pages = pages.drain(..span.tokens.div_ceil(TILE_TOKENS)).collect();
    }
    Ok(())
}
