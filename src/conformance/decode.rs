//! Decode steps of realistic size, for timing: the part of the registry that `kvpack bench` runs.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::accuracy::Expected;
use super::data::{DataRecipe, Random, SequenceData};
use super::reference;
use super::report::{Limits, Report};
use super::{DataKind, InputLayout, RowOrder, SinkPlace};
use crate::backend::{AttendOptions, SpanRead, SpanWrite};
use crate::cpu::DenseSegment;
use crate::format::{AffineFormat, AttentionShape, Bits, Grouping, SegmentFormat, TILE_TOKENS, TensorFormat};
use crate::plan::{DecodePlan, ElementType, Page, PageAllocator, SpanView, Split, StoreView, TokenRange};
use crate::{Backend, Result};

/// How long the sequences of a batch are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchLengths {
    /// All of them as long as the longest.
    Even,
    /// Eight lengths in turn, from an eighth of the longest on, that fill no tile.
    Ragged,
}

/// Where the pages of a batch lie in its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageOrder {
    /// One after the other.
    Consecutive,
    /// In no order, as where sequences grow in turn and give pages back.
    Shuffled,
}

/// A decode step: one query per sequence over a span each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeShape {
    /// Unique name.
    pub name: String,
    /// Heads of the layer.
    pub shape: AttentionShape,
    /// Sequences of the batch.
    pub sequences: usize,
    /// Tokens of the longest sequence.
    pub tokens: usize,
    /// How long the others are.
    pub lengths: BatchLengths,
    /// Where their pages lie.
    pub pages: PageOrder,
    /// True for the small shapes of a quick look.
    pub quick: bool,
}

/// The decode steps that are timed: two that read 0.5 GiB of keys and as much of values even at 1 bit, group sizes 1, 4
/// to 16, batches of equal and of mixed lengths and a single long sequence, pages in no order, other head dimensions, and two
/// small ones.
pub fn decode_shapes() -> Vec<DecodeShape> {
    let step = |name: &str, (query_heads, kv_heads, head_dim), sequences, tokens| DecodeShape {
        name: name.into(),
        shape: AttentionShape::new(query_heads, kv_heads, head_dim).expect("the registry's shapes have kernels"),
        sequences,
        tokens,
        lengths: BatchLengths::Even,
        pages: PageOrder::Consecutive,
        quick: sequences * tokens <= 4096,
    };
    let ragged = |name, heads, sequences, tokens| DecodeShape {
        lengths: BatchLengths::Ragged,
        ..step(name, heads, sequences, tokens)
    };
    vec![
        ragged("g1-b64-ragged", (32, 32, 128), 64, 8192),
        ragged("g4-b64-ragged", (32, 8, 128), 64, 32_768),
        step("g1-b128-8k", (32, 32, 128), 128, 8192),
        step("g4-b128-32k", (32, 8, 128), 128, 32_768),
        step("g1-b8-8k", (32, 32, 128), 8, 8192),
        step("g4-b8-32k", (32, 8, 128), 8, 32_768),
        step("g4-b32-8k", (32, 8, 128), 32, 8192),
        DecodeShape { pages: PageOrder::Shuffled, ..step("g4-b8-32k-shuffled", (32, 8, 128), 8, 32_768) },
        step("g8-b8-32k", (64, 8, 128), 8, 32_768),
        step("g16-b8-32k", (32, 2, 128), 8, 32_768),
        step("g4-b1-128k", (32, 8, 128), 1, 131_072),
        step("g7-b4-16k", (28, 4, 128), 4, 16_384),
        step("g3-d64-b8-8k", (9, 3, 64), 8, 8192),
        step("g4-b1-4k", (32, 8, 128), 1, 4096),
        step("g1-b1-4k", (8, 8, 128), 1, 4096),
    ]
}

/// The formats that are timed, f16 first: every width with one range per channel, and the groupings of other methods.
pub fn decode_formats() -> Vec<SegmentFormat> {
    let affine = |bits, grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping));
    let both = |format| SegmentFormat { key: format, value: format };
    let mut formats = vec![SegmentFormat::F16];
    formats.extend(Bits::ALL.into_iter().rev().map(SegmentFormat::calibquant));
    formats.push(both(affine(Bits::Four, Grouping::Token)));
    formats.push(both(affine(Bits::Two, Grouping::Token)));
    let kivi = |bits| SegmentFormat {
        key: affine(bits, Grouping::ChannelTokens(32)),
        value: affine(bits, Grouping::TokenChannels(32)),
    };
    formats.extend([kivi(Bits::Four), kivi(Bits::Two)]);
    formats.push(SegmentFormat::saw_int4());
    // The rotation divides the heads of all shapes of the registry.
    let turboquant = |bits| SegmentFormat::turboquant(bits, 64);
    formats.extend([Bits::Four, Bits::Three, Bits::Two, Bits::One].map(turboquant));
    formats.extend([Bits::Four, Bits::Three, Bits::Two].map(|bits| SegmentFormat::turboquant_prod(bits, 64)));
    formats.push(SegmentFormat::qjl(64));
    formats
}

/// Keys and values of one sequence on a device, and queries for all. Every sequence of the batch, and every copy,
/// stores the same keys and values in pages of its own.
pub struct DecodeData<B: Backend> {
    /// The step that the data are for.
    pub decode: DecodeShape,
    host: SequenceData,
    keys: B::Tensor,
    values: B::Tensor,
    queries: B::Tensor,
}

/// A filled store with several copies of a batch, so that steps that go round the copies find cold caches.
pub struct Workload<B: Backend> {
    /// The store of all copies.
    pub store: B::Store,
    /// The step over each copy.
    pub plans: Vec<DecodePlan>,
    /// Bytes of the store that one step reads: codes and ranges.
    pub step_bytes: u64,
    spans: Vec<Vec<Page>>,
}

impl<B: Backend> DecodeData<B> {
    /// Makes Gaussian data with a sink and uploads them as f16.
    ///
    /// # Errors
    /// When they do not fit the device.
    pub async fn generated(backend: &B, decode: DecodeShape) -> Result<Self> {
        let input = InputLayout { elements: ElementType::F16, order: RowOrder::TokenMajor };
        let host = SequenceData::new(&DataRecipe {
            shape: decode.shape,
            tokens: decode.tokens,
            kind: DataKind::ChannelOffsets,
            sink: SinkPlace::First,
            input,
            seed: 1,
        });
        Self::of_sequence(backend, decode, host).await
    }

    /// Uploads the data of one sequence.
    ///
    /// # Errors
    /// When they are not those of `decode`, or do not fit the device.
    pub async fn of_sequence(backend: &B, decode: DecodeShape, host: SequenceData) -> Result<Self> {
        host.check(&decode.shape, decode.tokens)?;
        let queries: Vec<f32> = host.queries.repeat(decode.sequences);
        Ok(Self {
            decode,
            keys: backend.upload(host.keys.elements()).await?,
            values: backend.upload(host.values.elements()).await?,
            queries: backend.upload(queries.as_slice().into()).await?,
            host,
        })
    }

    /// The queries, `[sequences, query_heads, head_dim]`.
    pub fn queries(&self) -> &B::Tensor {
        &self.queries
    }

    /// The host's side of the data: keys, values and queries of one sequence.
    pub fn host(&self) -> &SequenceData {
        &self.host
    }
}

impl DecodeShape {
    /// Tokens of a sequence.
    pub const fn length(&self, sequence: usize) -> usize {
        match self.lengths {
            BatchLengths::Even => self.tokens,
            BatchLengths::Ragged => {
                let eighths = sequence % 8 + 1;
                (self.tokens * eighths).div_ceil(8).saturating_sub(5 * eighths).saturating_add(1)
            }
        }
    }

    /// Tokens of all sequences.
    pub fn total_tokens(&self) -> usize {
        (0..self.sequences).map(|sequence| self.length(sequence)).sum()
    }

    /// Bytes of one batch in `format` without ranges: what one step must read at least.
    pub fn code_bytes(&self, format: &SegmentFormat) -> u64 {
        let elements = self.total_tokens() * self.shape.kv_heads() * self.shape.head_dim();
        ((format.key.element_bits() + format.value.element_bits()) * elements / 8) as u64
    }
}

impl<B: Backend> Workload<B> {
    /// Stores the batch in `format`, as many times as it takes to hold at least `bytes` bytes, and plans a step over
    /// each copy.
    ///
    /// # Errors
    /// When the copies do not fit the device.
    pub async fn new(
        backend: &B,
        data: &DecodeData<B>,
        format: SegmentFormat,
        bytes: u64,
        split: Split,
    ) -> Result<Self> {
        let decode = &data.decode;
        let copies = bytes.div_ceil(decode.code_bytes(&format)).max(1) as usize;
        let spans_needed = copies * decode.sequences;
        let span_pages = |sequence| decode.length(sequence).div_ceil(TILE_TOKENS);
        let pages_needed = copies * (0..decode.sequences).map(span_pages).sum::<usize>();

        let mut store = backend.create_store(decode.shape, format)?;
        let mut allocator = PageAllocator::default();
        let most = backend.max_shard_pages(&decode.shape, &format).max(1) as usize;
        while allocator.capacity() < pages_needed {
            let pages = (pages_needed - allocator.capacity()).min(most) as u32;
            backend.add_shard(&mut store, pages).await?;
            allocator.add_shard(pages);
        }
        backend.reserve_ranges(&mut store, spans_needed).await?;
        let mut spans = Vec::with_capacity(spans_needed);
        let mut batch = Vec::new();
        for range_slot in 0..spans_needed {
            let sequence = range_slot % decode.sequences;
            if sequence == 0 {
                batch = allocator.allocate(pages_needed / copies)?;
                if decode.pages == PageOrder::Shuffled {
                    Random::new(range_slot as u64).shuffle(&mut batch);
                }
            }
            let pages: Vec<Page> = batch.drain(..span_pages(sequence)).collect();
            let tokens = TokenRange::new(0, decode.length(sequence))?;
            let write = SpanWrite { rows: data.host.rows, tokens, pages: &pages, range_slot };
            backend.quantize(&mut store, &data.keys, &data.values, write)?;
            spans.push(pages);
        }
        let plans = (0..copies).map(|copy| plan(decode, format, copy, &spans, split)).collect::<Result<_>>()?;
        let step_bytes = backend.store_bytes(&store) / copies as u64;
        Ok(Self { store, plans, step_bytes, spans })
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
                entry.insert(self.expected(backend, data, sequence).await?);
            }
        }
        let head_dim = data.decode.shape.head_dim();
        let limits = Limits::new(options.query);
        let mut report =
            Report { case: data.decode.name.clone(), error: Default::default(), limits, failures: Vec::new() };
        for plan in &self.plans {
            let output = backend.attend(plan, &[&self.store], &data.queries, options).await?;
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
        let tokens = data.decode.length(sequence);
        let read = SpanRead { pages: &self.spans[sequence], tokens, range_slot: sequence };
        let (keys, values) = backend.dequantize(&self.store, read)?;
        let (keys, values) = (backend.download(&keys).await?, backend.download(&values).await?);
        let span = DenseSegment { keys: &keys, values: &values, tokens, calibration: None };
        reference::attention(&data.decode.shape, &[span], &data.host.queries)
    }
}

/// The step over one copy.
fn plan(
    decode: &DecodeShape,
    format: SegmentFormat,
    copy: usize,
    spans: &[Vec<Page>],
    split: Split,
) -> Result<DecodePlan> {
    let first = copy * decode.sequences;
    let spans = (0..decode.sequences)
        .map(|sequence| SpanView {
            sequence,
            tokens: decode.length(sequence),
            pages: &spans[first + sequence],
            range_slot: first + sequence,
        })
        .collect();
    DecodePlan::new(decode.shape, decode.sequences, &[StoreView { format, calibration: None, spans }], split)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Cpu;

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
                quick: true,
            };
            let data = pollster::block_on(DecodeData::generated(&cpu, decode)).unwrap();
            let format = SegmentFormat::per_channel(Bits::Four);
            let bytes = 2 * data.decode.code_bytes(&format);
            let workload = Workload::new(&cpu, &data, format, bytes, Split::default());
            let workload = pollster::block_on(workload).unwrap();
            let report = pollster::block_on(workload.check(&cpu, &data, AttendOptions::default())).unwrap();
            assert!(report.passed(), "{}", report.reason());
            workload.spans
        };
        let (consecutive, shuffled) = (workload(PageOrder::Consecutive), workload(PageOrder::Shuffled));
        assert_eq!(consecutive.len(), 6, "three sequences, two copies");
        assert_ne!(consecutive, shuffled);
        for (consecutive, shuffled) in consecutive.chunks(3).zip(shuffled.chunks(3)) {
            let sorted = |spans: &[Vec<Page>]| {
                let mut indices: Vec<u32> = spans.concat().iter().map(|page| page.index).collect();
                indices.sort_unstable();
                indices
            };
            assert_eq!(sorted(consecutive), sorted(shuffled));
        }
    }
}
