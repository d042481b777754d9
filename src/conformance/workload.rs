//! A batch in a store, ready to be timed.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::accuracy::Expected;
use super::batch_format::{BatchFormat, BatchPart};
use super::data::Random;
use super::decode::{DecodeData, DecodeShape, PageOrder};
use super::reference;
use super::report::{Limits, Report};
use crate::backend::{AttendOptions, SpanRead, SpanWrite};
use crate::cpu::DenseSegment;
use crate::format::TILE_TOKENS;
use crate::plan::{AttendPlan, Page, PageAllocator, QueryRun, SpanView, StoreView, TokenRange};
use crate::{Backend, Result};

/// Filled stores with several copies of a batch, so that steps that go round the copies find cold caches.
pub struct Workload<B: Backend> {
    /// The stores of all copies, one for each part of the format.
    pub stores: Vec<B::Store>,
    /// The step over each copy.
    pub plans: Vec<AttendPlan>,
    /// Bytes that one step must read: codes and ranges of all tokens.
    pub step_bytes: u64,
    /// Every part's spans of every sequence: those of the first copy, then of the next.
    spans: Vec<Vec<Vec<StoredSpan>>>,
}

/// A span of one sequence in the store of its part.
struct StoredSpan {
    tokens: usize,
    pages: Vec<Page>,
    range_slot: usize,
}

impl<B: Backend> Workload<B> {
    /// Stores the batch in `format`, as many times as it takes to hold at least `bytes` bytes, and plans a step over
    /// each copy.
    ///
    /// # Errors
    /// When the copies do not fit the device.
    pub async fn new(backend: &B, data: &DecodeData<B>, format: BatchFormat, bytes: u64) -> Result<Self> {
        let copies = bytes.div_ceil(data.decode.code_bytes(&format)).max(1) as usize;
        let (mut stores, mut spans) = (Vec::new(), Vec::new());
        for part in format.parts() {
            let (store, stored) = store_part(backend, data, part, copies).await?;
            stores.push(store);
            spans.push(stored);
        }
        let plans = (0..copies).map(|copy| plan(&data.decode, &format, copy, &spans)).collect::<Result<_>>()?;
        let part_bytes = |(part, stored): (&BatchPart, &Vec<Vec<StoredSpan>>)| {
            let batch = || stored[..data.decode.sequences].iter().flatten();
            let tokens: usize = batch().map(|span| span.tokens).sum();
            let pages = part.format.page_bytes(&data.decode.shape) * tokens / TILE_TOKENS;
            (pages + part.format.range_slot_bytes(&data.decode.shape) * batch().count()) as u64
        };
        let step_bytes = format.parts().iter().zip(&spans).map(part_bytes).sum();
        Ok(Self { stores, plans, step_bytes, spans })
    }

    /// Runs every copy once and holds all outputs against an f64 attention over the stored data.
    ///
    /// # Errors
    /// Whatever the backend reports; a wrong result is no error but a [`Report`] that did not pass.
    pub async fn check(&self, backend: &B, data: &DecodeData<B>, options: AttendOptions) -> Result<Report> {
        // Sequences of one length hold the same.
        let mut expected: BTreeMap<usize, Expected> = BTreeMap::new();
        for sequence in 0..data.decode.sequences {
            let tokens = data.decode.length(sequence);
            if let Entry::Vacant(entry) = expected.entry(tokens) {
                entry.insert(self.expected(backend, data, sequence).await?.rounded_to(options.output));
            }
        }
        let head_dim = data.decode.shape.head_dim();
        let limits = Limits::new(options.query);
        let mut report =
            Report { case: data.decode.name.clone(), error: Default::default(), limits, failures: Vec::new() };
        let stores: Vec<&B::Store> = self.stores.iter().collect();
        for plan in &self.plans {
            let output = backend.attend(plan, &stores, &data.queries, options).await?;
            let output = backend.download(&output).await?;
            for (index, sequence) in output.chunks(data.decode.shape.query_heads() * head_dim).enumerate() {
                let expected = &expected[&data.decode.length(index)];
                let error = expected.error_of(sequence, head_dim);
                report.failures.extend(expected.failures(sequence, &error, &limits));
                if error.nmse >= report.error.nmse {
                    report.error = error;
                }
            }
        }
        report.failures.dedup();
        Ok(report)
    }

    /// What a sequence of the first copy must yield.
    async fn expected(&self, backend: &B, data: &DecodeData<B>, sequence: usize) -> Result<Expected> {
        let mut dense = Vec::new();
        for (store, sequences) in self.stores.iter().zip(&self.spans) {
            for StoredSpan { tokens, pages, range_slot } in &sequences[sequence] {
                let read = SpanRead { pages, tokens: *tokens, range_slot: *range_slot };
                let (keys, values) = backend.dequantize(store, read)?;
                dense.push((backend.download(&keys).await?, backend.download(&values).await?, *tokens));
            }
        }
        let segments: Vec<DenseSegment<'_>> = dense
            .iter()
            .map(|(keys, values, tokens)| DenseSegment { keys, values, tokens: *tokens, calibration: None })
            .collect();
        reference::attention(&data.decode.shape, &segments, &data.host.queries)
    }
}

/// Stores one part of every sequence, `copies` times, and says where.
async fn store_part<B: Backend>(
    backend: &B,
    data: &DecodeData<B>,
    part: &BatchPart,
    copies: usize,
) -> Result<(B::Store, Vec<Vec<StoredSpan>>)> {
    let decode = &data.decode;
    let batch: Vec<Vec<TokenRange>> =
        (0..decode.sequences).map(|sequence| decode.spans(part, sequence)).collect::<Result<_>>()?;
    let span_pages = |tokens: &TokenRange| tokens.len().div_ceil(TILE_TOKENS);
    let batch_pages = batch.iter().flatten().map(span_pages).sum::<usize>();

    let mut store = backend.create_store(decode.shape, part.format)?;
    let mut allocator = PageAllocator::default();
    let most = backend.max_shard_pages(&decode.shape, &part.format).max(1) as usize;
    while allocator.capacity() < copies * batch_pages {
        let pages = (copies * batch_pages - allocator.capacity()).min(most) as u32;
        backend.add_shard(&mut store, pages).await?;
        allocator.add_shard(pages);
    }
    backend.reserve_ranges(&mut store, copies * batch.iter().flatten().count()).await?;
    let mut range_slots = 0..;
    let mut stored = Vec::with_capacity(copies * decode.sequences);
    for copy in 0..copies {
        let mut pages = allocator.allocate(batch_pages)?;
        if decode.pages == PageOrder::Shuffled {
            Random::new((copy * decode.sequences) as u64).shuffle(&mut pages);
        }
        for sequence in &batch {
            let mut spans = Vec::with_capacity(sequence.len());
            for (&tokens, range_slot) in sequence.iter().zip(&mut range_slots) {
                let pages: Vec<Page> = pages.drain(..span_pages(&tokens)).collect();
                let write = SpanWrite { rows: data.host.rows, tokens: tokens.into(), pages: &pages, range_slot };
                backend.quantize(&mut store, &data.keys, &data.values, write)?;
                spans.push(StoredSpan { tokens: tokens.len(), pages, range_slot });
            }
            stored.push(spans);
        }
    }
    Ok((store, stored))
}

/// The step over one copy.
fn plan(decode: &DecodeShape, format: &BatchFormat, copy: usize, spans: &[Vec<Vec<StoredSpan>>]) -> Result<AttendPlan> {
    let sequences = copy * decode.sequences..(copy + 1) * decode.sequences;
    let views: Vec<StoreView<'_>> =
        format.parts().iter().zip(spans).map(|(part, stored)| view(part, &stored[sequences.clone()])).collect();
    AttendPlan::new(decode.shape, &QueryRun::decode_batch(decode.sequences), &views)
}

/// The spans of one part of each sequence.
fn view<'a>(part: &BatchPart, sequences: &'a [Vec<StoredSpan>]) -> StoreView<'a> {
    let spans = sequences.iter().enumerate().flat_map(|(sequence, spans)| {
        spans.iter().map(move |StoredSpan { tokens, pages, range_slot }| SpanView {
            sequence,
            start: 0, // every query sees all tokens
            tokens: *tokens,
            pages,
            range_slot: *range_slot,
        })
    });
    StoreView { format: part.format, calibration: None, spans: spans.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bits;
    use crate::conformance::{BatchLengths, decode_mixes};
    use crate::cpu::Cpu;
    use crate::format::{AttentionShape, SegmentFormat};

    /// A batch yields the same wherever its pages lie, and shuffled ones are those of its copy, each once.
    #[test]
    fn the_order_of_pages_does_not_matter() {
        let cpu = Cpu::new();
        let workload = |order| {
            let decode = DecodeShape {
                name: "small".into(),
                shape: AttentionShape::new(4, 2, 64).unwrap(),
                sequences: 3,
                tokens: 700,
                lengths: BatchLengths::Ragged,
                pages: order,
                span_tokens: 100,
                quick: true,
            };
            let data = pollster::block_on(DecodeData::generated(&cpu, decode)).unwrap();
            let format = SegmentFormat::per_channel(Bits::Four);
            let format = BatchFormat::from(format);
            let bytes = 2 * data.decode.code_bytes(&format);
            let workload = Workload::new(&cpu, &data, format, bytes);
            let workload = pollster::block_on(workload).unwrap();
            let report = pollster::block_on(workload.check(&cpu, &data, AttendOptions::default())).unwrap();
            assert!(report.passed(), "{}", report.reason());
            assert_eq!(workload.plans[0].segments()[0].spans().len(), 6, "of 84, 167 and 250 tokens");
            let pages = |spans: &Vec<StoredSpan>| -> Vec<u32> {
                spans.iter().flat_map(|span| span.pages.iter().map(|page| page.index)).collect()
            };
            workload.spans[0].iter().map(pages).collect::<Vec<_>>()
        };
        let (consecutive, shuffled) = (workload(PageOrder::Consecutive), workload(PageOrder::Shuffled));
        assert_eq!(consecutive.len(), 6, "three sequences, two copies");
        assert_ne!(consecutive, shuffled);
        for (consecutive, shuffled) in consecutive.chunks(3).zip(shuffled.chunks(3)) {
            let sorted = |spans: &[Vec<u32>]| {
                let mut indices = spans.concat();
                indices.sort_unstable();
                indices
            };
            assert_eq!(sorted(consecutive), sorted(shuffled));
        }
    }

    /// Segments of several formats yield what the f64 attention over all of them does.
    #[test]
    fn mixes_are_checked_as_a_whole() {
        let cpu = Cpu::new();
        let decode = DecodeShape {
            name: "small".into(),
            shape: AttentionShape::new(4, 2, 64).unwrap(),
            sequences: 9,
            tokens: 1500,
            lengths: BatchLengths::Ragged,
            pages: PageOrder::Consecutive,
            span_tokens: usize::MAX,
            quick: true,
        };
        let data = pollster::block_on(DecodeData::generated(&cpu, decode)).unwrap();
        for format in decode_mixes() {
            let parts = format.parts().len();
            let workload = pollster::block_on(Workload::new(&cpu, &data, format, 1)).unwrap();
            assert_eq!((workload.stores.len(), workload.plans[0].segments().len()), (parts, parts));
            let report = pollster::block_on(workload.check(&cpu, &data, AttendOptions::default())).unwrap();
            assert!(report.passed(), "{}", report.reason());
        }
    }
}
