//! A stored batch, ready to be timed.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::attend::{Expected, exact_decode};
use super::batch_format::{BatchFormat, BatchPart};
use super::data::Random;
use super::decode::{DecodeData, DecodeShape, PageOrder};
use super::report::{Accuracy, Failure, Limits, OutputError, Report};

use crate::backend::{AttendOptions, FilledSpan, FilledStores, NewSpan, SpanSource};
use crate::counts::reserved;
use crate::cpu::DenseSegment;
use crate::format::{Calibration, SegmentFormat, TILE_TOKENS};
use crate::plan::{AttendPlan, ElementType, QueryRun, StorePart, TokenRange};
use crate::{Backend, Result};

/// Filled stores with several copies of a batch. Steps that cycle through the copies find cold caches.
pub struct Workload<B: Backend> {
    /// The step over each copy.
    pub plans: Vec<AttendPlan>,
    /// Bytes that one step must read: codes and ranges of all tokens.
    pub step_bytes: u64,
    /// The stores of all copies, one for each part of the format.
    stores: FilledStores<B>,
    /// The spans of the first copy, then those of the next.
    spans: Vec<Vec<FilledSpan>>,
}

impl<B: Backend> Workload<B> {
    /// Stores the batch in `format` as many times as it takes to reach at least `bytes` bytes, and plans a step over
    /// each copy.
    ///
    /// # Errors
    /// When the copies do not fit the device.
    pub async fn new(backend: &B, data: &DecodeData<B>, format: BatchFormat, bytes: u64) -> Result<Self> {
        let decode = &data.decode;
        let copies = usize::try_from(bytes.div_ceil(decode.code_bytes(&format)).max(1)).unwrap_or(usize::MAX);
        let formats: Vec<SegmentFormat> = format.parts().iter().map(|part| part.format).collect();
        let batch = batch_spans(decode, &format)?;
        let mut all: Vec<NewSpan> = reserved("spans of a workload", copies.saturating_mul(batch.len()))?;
        all.extend((0..copies).flat_map(|_| &batch).copied());
        let mut stores = FilledStores::new(backend, decode.shape, &formats)?;
        let mut placed = stores.place(backend, &all).await?;
        let mut spans = Vec::with_capacity(copies);
        for copy in 0..copies {
            let rest = placed.split_off(batch.len());
            let mut of_copy = std::mem::replace(&mut placed, rest);
            if decode.pages == PageOrder::Shuffled {
                (0..formats.len()).for_each(|store| shuffle_pages(&mut of_copy, store, copy as u64));
            }
            for span in &of_copy {
                let NewSpan { start, tokens, .. } = span.span;
                let tokens = TokenRange::new(start, start + tokens)?.into();
                let (rows, keys, values) = (data.host.rows, &data.keys, &data.values);
                stores.quantize(backend, span, SpanSource { rows, tokens, keys, values })?;
            }
            spans.push(of_copy);
        }
        let runs = QueryRun::decode_batch(decode.sequences);
        let plans = spans.iter().map(|spans| stores.plan(&runs, spans.iter(), &[])).collect::<Result<_>>()?;
        let step_bytes = format.parts().iter().enumerate().map(|(store, part)| part_bytes(part, decode, &batch, store));
        Ok(Self { plans, step_bytes: step_bytes.sum(), stores, spans })
    }

    /// Plans the decode step with separate passes for scores and for weighted values, as in Cocktail's algorithm 1,
    /// instead of the fused one. Through wgpu and on the CPU scores go through memory; on CUDA they are computed twice.
    ///
    /// # Errors
    /// As [`FilledStores::plan`].
    pub fn plan_unfused(&mut self) -> Result<()> {
        let runs: Vec<QueryRun> = self.plans[0].runs().iter().map(|planned| planned.run.clone()).collect();
        let calibrations = vec![Some(Calibration::IDENTITY); self.stores().len()];
        let plan = |spans: &Vec<FilledSpan>| self.stores.plan(&runs, spans.iter(), &calibrations);
        self.plans = self.spans.iter().map(plan).collect::<Result<_>>()?;
        Ok(())
    }

    /// Plans a causal run of the newest `queries` tokens of sequence 0 over each copy, instead of the decode step.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when the sequence has fewer tokens.
    pub fn plan_causal(&mut self, queries: usize) -> Result<()> {
        let runs = [QueryRun::causal(0, queries)];
        let of_first = |span: &&FilledSpan| span.span.sequence == 0;
        let plan = |spans: &Vec<FilledSpan>| self.stores.plan(&runs, spans.iter().filter(of_first), &[]);
        self.plans = self.spans.iter().map(plan).collect::<Result<_>>()?;
        Ok(())
    }

    /// Plans the same queries as single decode steps, each over a sequence of its own that holds the tokens that the
    /// query sees.
    ///
    /// # Errors
    /// As [`Workload::plan_causal`].
    pub fn plan_causal_apart(&mut self, queries: usize) -> Result<()> {
        self.plan_causal(queries)?;
        let runs = QueryRun::decode_batch(queries);
        let seen: Vec<usize> = (0..queries).map(|query| self.plans[0].runs()[0].limits(query).to as usize).collect();
        let plan = |spans: &Vec<FilledSpan>| {
            let of = |(query, &tokens): (usize, &usize)| {
                let first = spans.iter().filter(|span| span.span.sequence == 0);
                first.filter_map(move |span| seen_of(span, query, tokens)).collect::<Vec<_>>()
            };
            let apart: Vec<FilledSpan> = seen.iter().enumerate().flat_map(of).collect();
            self.stores.plan(&runs, apart.iter(), &[])
        };
        self.plans = self.spans.iter().map(plan).collect::<Result<_>>()?;
        Ok(())
    }

    /// The stores, in the order in which the plans name them.
    pub fn stores(&self) -> Vec<&B::Store> {
        self.stores.stores()
    }

    /// Runs every copy once and compares all outputs with an f64 attention over the stored data. The outputs are in
    /// f32, whatever the options request.
    ///
    /// # Errors
    /// Errors of the backend. A wrong result is not an error: it gives a [`Report`] that did not pass.
    pub async fn check(&self, backend: &B, data: &DecodeData<B>, options: AttendOptions) -> Result<Report> {
        // Sequences of the same length have the same data.
        let mut expected: BTreeMap<usize, Expected> = BTreeMap::new();
        for sequence in 0..data.decode.sequences {
            let tokens = data.decode.length(sequence);
            if let Entry::Vacant(entry) = expected.entry(tokens) {
                entry.insert(self.expected(backend, data, sequence).await?);
            }
        }
        let head_dim = data.decode.shape.head_dim();
        let formats = self.plans.iter().flat_map(AttendPlan::segments).map(StorePart::format);
        let limits = Limits::of_step(backend, options.query, formats)?;
        let (mut worst, mut failures) = (OutputError::default(), Vec::new());
        let options = AttendOptions { output: ElementType::F32, ..options };
        let stores = self.stores();
        for plan in &self.plans {
            let output = backend.attend(plan, &stores, &data.queries, options).await?;
            let output = backend.download(&output).await?;
            if let Some(failure) = Failure::of_length("output", output.len(), plan.elements()) {
                failures.push(failure);
                continue;
            }
            for (index, sequence) in output.chunks(data.decode.shape.query_heads() * head_dim).enumerate() {
                let expected = &expected[&data.decode.length(index)];
                let error = expected.error_of(sequence, head_dim);
                failures.extend(expected.failures("output", sequence, &error, &limits));
                if error.nmse >= worst.nmse {
                    worst = error;
                }
            }
        }
        failures.dedup();
        Ok(Report { check: data.decode.name.clone(), accuracy: Some(Accuracy { error: worst, limits }), failures })
    }

    /// The expected outputs of a sequence of the first copy.
    async fn expected(&self, backend: &B, data: &DecodeData<B>, sequence: usize) -> Result<Expected> {
        let mut dense = Vec::new();
        for span in self.spans[0].iter().filter(|span| span.span.sequence == sequence) {
            let (keys, values) = self.stores.read(backend, span).await?;
            dense.push((keys, values, span.span.tokens));
        }
        let segments: Vec<DenseSegment<'_>> = dense
            .iter()
            .map(|(keys, values, tokens)| DenseSegment { keys, values, tokens: *tokens, calibration: None })
            .collect();
        exact_decode(&data.decode.shape, &segments, &data.host.queries)
    }
}

/// The part of a span that a sequence of its own holds if its query sees the first `seen` tokens.
fn seen_of(span: &FilledSpan, query: usize, seen: usize) -> Option<FilledSpan> {
    let tokens = span.span.tokens.min(seen.saturating_sub(span.span.start));
    let pages = span.pages[..tokens.div_ceil(TILE_TOKENS)].to_vec();
    let of_query = NewSpan { sequence: query, tokens, ..span.span };
    (tokens > 0).then_some(FilledSpan { span: of_query, pages, range_slot: span.range_slot })
}

/// The spans of one copy of the batch, part after part.
fn batch_spans(decode: &DecodeShape, format: &BatchFormat) -> Result<Vec<NewSpan>> {
    let mut spans = Vec::new();
    for (store, part) in format.parts().iter().enumerate() {
        for sequence in 0..decode.sequences {
            let of_sequence = decode.spans(part, sequence)?;
            spans.extend(of_sequence.into_iter().map(|tokens| NewSpan {
                store,
                sequence,
                start: tokens.start(),
                tokens: tokens.len(),
            }));
        }
    }
    Ok(spans)
}

/// Shuffles the pages of the spans of one store.
fn shuffle_pages(spans: &mut [FilledSpan], store: usize, seed: u64) {
    let of_store = || spans.iter().filter(|span| span.span.store == store);
    let mut pages: Vec<_> = of_store().flat_map(|span| span.pages.clone()).collect();
    Random::new(seed).shuffle(&mut pages);
    let mut pages = pages.into_iter();
    for span in spans.iter_mut().filter(|span| span.span.store == store) {
        span.pages.iter_mut().zip(&mut pages).for_each(|(page, shuffled)| *page = shuffled);
    }
}

/// Bytes of a part of one copy: codes and ranges of its tokens, and ranges of its spans.
fn part_bytes(part: &BatchPart, decode: &DecodeShape, batch: &[NewSpan], store: usize) -> u64 {
    let of_part = || batch.iter().filter(|span| span.store == store);
    let tokens: usize = of_part().map(|span| span.tokens).sum();
    let pages = part.format.page_bytes(&decode.shape) * tokens / TILE_TOKENS;
    (pages + part.format.range_slot_bytes(&decode.shape) * of_part().count()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bits;
    use crate::backend::QueryBytes;
    use crate::conformance::{BatchLengths, decode_mixes};
    use crate::cpu::Cpu;
    use crate::format::{AttentionShape, SegmentFormat};

    /// A step that leaves an eighth of its tiles out does not pass, whichever precision queries have.
    #[test]
    fn missing_tiles_show() {
        let (shape, tokens) = (AttentionShape::new(2, 1, 64).unwrap(), 256 * TILE_TOKENS);
        let decode = DecodeShape::even("long", shape, 1, tokens);
        let data = pollster::block_on(DecodeData::generated(&Cpu::new(), decode)).unwrap();
        let (keys, values) = (data.host.keys.to_f32(), data.host.values.to_f32());
        let exact = |parts: &[std::ops::Range<usize>]| {
            let part = |tokens: &std::ops::Range<usize>| DenseSegment {
                keys: &keys[tokens.start * 64..tokens.end * 64],
                values: &values[tokens.start * 64..tokens.end * 64],
                tokens: tokens.len(),
                calibration: None,
            };
            exact_decode(&shape, &parts.iter().map(part).collect::<Vec<_>>(), &data.host.queries).unwrap()
        };
        let (all, part) = (exact(std::slice::from_ref(&(0..tokens))), tokens / 8);
        for eighth in 1..7 {
            let less = exact(&[0..eighth * part, (eighth + 1) * part..tokens]);
            let got: Vec<f32> = less.outputs.iter().map(|&x| x as f32).collect();
            let (error, limits) = (all.error_of(&got, 64), Limits::new(QueryBytes::One));
            assert!(!all.failures("output", &got, &error, &limits).is_empty(), "{eighth}: {error:?}");
        }
    }

    /// The place of a batch's pages does not change the result. Shuffled pages are those of the copy, each exactly
    /// once.
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
            let pages = |spans: &Vec<FilledSpan>| -> Vec<u32> {
                spans.iter().flat_map(|span| span.pages.iter().map(|page| page.index)).collect()
            };
            workload.spans.iter().map(pages).collect::<Vec<_>>()
        };
        let (consecutive, shuffled) = (workload(PageOrder::Consecutive), workload(PageOrder::Shuffled));
        assert_eq!(consecutive.len(), 2, "two copies");
        assert_ne!(consecutive, shuffled);
        for (consecutive, shuffled) in consecutive.iter().zip(&shuffled) {
            let sorted = |pages: &[u32]| {
                let mut pages = pages.to_vec();
                pages.sort_unstable();
                pages
            };
            assert_eq!(sorted(consecutive), sorted(shuffled));
        }
    }

    /// Segments of several formats give the result of the f64 attention over all of them.
    #[test]
    fn mixes_are_checked_as_a_whole() {
        let cpu = Cpu::new();
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let decode = DecodeShape { lengths: BatchLengths::Ragged, ..DecodeShape::even("small", shape, 9, 1500) };
        let data = pollster::block_on(DecodeData::generated(&cpu, decode)).unwrap();
        for format in decode_mixes() {
            let parts = format.parts().len();
            let workload = pollster::block_on(Workload::new(&cpu, &data, format, 1)).unwrap();
            assert_eq!((workload.stores().len(), workload.plans[0].segments().len()), (parts, parts));
            let report = pollster::block_on(workload.check(&cpu, &data, AttendOptions::default())).unwrap();
            assert!(report.passed(), "{}", report.reason());
        }
    }
}
