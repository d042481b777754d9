//! The conformance run must find what it is there to find: a backend that is right but for one mistake has to fail.

use std::sync::atomic::{AtomicU32, Ordering};

use kvpack::Result;
use kvpack::backend::{AttendOptions, Attention, Forward, Forwarding, NonFinite, Packing, SpanRead};
use kvpack::conformance::{self, Failure, Report};
use kvpack::cpu::{Cpu, CpuStore, CpuTensor};
use kvpack::format::{AttentionShape, KeyOrValue, SegmentFormat, TILE_TOKENS};
use kvpack::plan::{AttendPlan, PlannedSpan, QueryRun, RowLayout, SpanView, StoreView};

/// A mistake that kernels make.
#[derive(Clone, Copy, PartialEq)]
enum Mistake {
    /// One token too few is attended to.
    DropsLastToken,
    /// Segments after the first are forgotten.
    DropsSegments,
    /// Weights are 16-bit integers relative to the largest of all, so that a sink makes the others coarse or nothing.
    CoarseWeights,
    /// Query heads read the wrong KV heads.
    WrongGroups,
    /// Scores are not calibrated.
    IgnoresCalibration,
    /// The search for non-finite elements looks at no values.
    OverlooksValues,
    /// Stored values are off by one code.
    OffByOneCode,
    /// The output is NaN.
    YieldsNan,
    /// Every second output has another last bit.
    Wavers,
}

struct Mistaken {
    cpu: Cpu,
    mistake: Mistake,
    /// Steps so far.
    steps: AtomicU32,
}

impl Forward for Mistaken {
    type Inner = Cpu;

    fn inner(&self) -> &Cpu {
        &self.cpu
    }

    async fn first_non_finite(
        &self,
        which: KeyOrValue,
        tensor: &CpuTensor,
        rows: &RowLayout,
        shape: &AttentionShape,
        largest: f32,
    ) -> Result<Option<NonFinite>> {
        if self.mistake == Mistake::OverlooksValues && which == KeyOrValue::Value {
            return Ok(None);
        }
        self.cpu.first_non_finite(which, tensor, rows, shape, largest).await
    }

    fn dequantize(&self, store: &CpuStore, read: SpanRead<'_>) -> Result<(CpuTensor, CpuTensor)> {
        let (keys, values) = self.cpu.dequantize(store, read)?;
        if self.mistake != Mistake::OffByOneCode {
            return Ok((keys, values));
        }
        let mut values = values.to_f32();
        values[read.tokens / 2] += 0.01;
        Ok((keys, CpuTensor::F32(values)))
    }

    async fn attend(
        &self,
        plan: &AttendPlan,
        stores: &[&CpuStore],
        queries: &CpuTensor,
        options: AttendOptions,
    ) -> Result<CpuTensor> {
        if self.mistake == Mistake::CoarseWeights {
            return self.attend_coarsely(plan, stores[0], queries);
        }
        let queries = self.mistaken_queries(plan, queries);
        let output = self.cpu.attend(&self.mistaken_plan(plan)?, stores, &queries, options).await?;
        Ok(match self.mistake {
            Mistake::YieldsNan => CpuTensor::F32(vec![f32::NAN; output.elements().len()]),
            Mistake::Wavers => {
                let mut outputs = output.to_f32();
                outputs[7] = f32::from_bits(outputs[7].to_bits() ^ (self.steps.fetch_add(1, Ordering::Relaxed) % 2));
                CpuTensor::F32(outputs)
            }
            _ => output,
        })
    }
}

impl Mistaken {
    /// The plan over spans that are not those of the cache.
    fn mistaken_plan(&self, plan: &AttendPlan) -> Result<AttendPlan> {
        let mut views: Vec<StoreView<'_>> = Vec::new();
        for (index, segment) in plan.segments().iter().enumerate() {
            views.resize_with(segment.store(), || StoreView {
                format: SegmentFormat::F16,
                calibration: None,
                spans: Vec::new(),
            });
            let span = |span: &PlannedSpan| {
                let tokens = match self.mistake {
                    Mistake::DropsLastToken => (span.tokens - 1).max(1),
                    // The spans stay, so that every query sees something, but each is one token only.
                    Mistake::DropsSegments if index > 0 => 1,
                    _ => span.tokens,
                };
                let sequence = plan.runs()[span.run].run.sequence;
                let pages = &segment.pages_of(span)[..tokens.div_ceil(TILE_TOKENS)];
                SpanView { sequence, start: span.start, tokens, pages, range_slot: span.range_slot }
            };
            let calibration = segment.calibration().filter(|_| self.mistake != Mistake::IgnoresCalibration).copied();
            let spans = segment.spans().iter().map(span).collect();
            views.push(StoreView { format: *segment.format(), calibration, spans });
        }
        let runs: Vec<QueryRun> = plan.runs().iter().map(|planned| planned.run).collect();
        AttendPlan::new(*plan.shape(), &runs, &views)
    }

    /// Attention with coarse weights, for plans of one segment.
    fn attend_coarsely(&self, plan: &AttendPlan, store: &CpuStore, queries: &CpuTensor) -> Result<CpuTensor> {
        let (shape, segment) = (plan.shape(), &plan.segments()[0]);
        let head_dim = shape.head_dim();
        let mut output = Vec::new();
        for (span, queries) in segment.spans().iter().zip(queries.to_f32().chunks(shape.query_heads() * head_dim)) {
            let tokens = span.tokens;
            let read = SpanRead { pages: segment.pages_of(span), tokens, range_slot: span.range_slot };
            let (keys, values) = self.cpu.dequantize(store, read)?;
            let (keys, values) = (keys.to_f32(), values.to_f32());
            for (head, query) in queries.chunks(head_dim).enumerate() {
                let rows = head / shape.group() * tokens * head_dim..(head / shape.group() + 1) * tokens * head_dim;
                let scores: Vec<f32> = keys[rows.clone()].chunks(head_dim).map(|key| score(query, key)).collect();
                let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weights: Vec<f32> = scores.iter().map(|s| (65535.0 * (s - largest).exp()).round()).collect();
                let sum: f32 = weights.iter().sum();
                let mut out = vec![0.0; head_dim];
                for (weight, value) in weights.iter().zip(values[rows].chunks(head_dim)) {
                    out.iter_mut().zip(value).for_each(|(out, v)| *out += weight / sum * v);
                }
                output.extend(out);
            }
        }
        Ok(CpuTensor::F32(output))
    }

    fn mistaken_queries(&self, plan: &AttendPlan, queries: &CpuTensor) -> CpuTensor {
        let queries = queries.to_f32();
        if self.mistake != Mistake::WrongGroups {
            return CpuTensor::F32(queries);
        }
        let mut heads: Vec<&[f32]> = queries.chunks(plan.shape().head_dim()).collect();
        heads.chunks_mut(plan.shape().query_heads()).for_each(|sequence| sequence.reverse());
        CpuTensor::F32(heads.concat())
    }
}

fn score(query: &[f32], key: &[f32]) -> f32 {
    query.iter().zip(key).map(|(q, k)| q * k).sum::<f32>() / (query.len() as f32).sqrt()
}

fn run(case: &str, mistake: Mistake) -> Report {
    let case = conformance::cases().into_iter().find(|known| known.name == case).expect("the case is in the registry");
    let backend = Forwarding(Mistaken { cpu: Cpu::new(), mistake, steps: AtomicU32::new(0) });
    pollster::block_on(conformance::run_case(&backend, &case)).expect("the mistake is no error")
}

fn is_inaccurate(case: &str, mistake: Mistake) {
    let report = run(case, mistake);
    assert!(report.failures.iter().any(|f| matches!(f, Failure::Inaccurate { .. })), "{case}: {:?}", report.error);
}

#[test]
fn a_dropped_token_is_found() {
    is_inaccurate("format-2bit", Mistake::DropsLastToken);
    is_inaccurate("length-steps-f16", Mistake::DropsLastToken);
}

#[test]
fn a_dropped_segment_is_found() {
    is_inaccurate("segments-prompt-visual-recent", Mistake::DropsSegments);
}

#[test]
fn what_a_sink_drowns_is_found() {
    is_inaccurate("sink-long-4bit", Mistake::CoarseWeights);
    is_inaccurate("sink-long-f16", Mistake::CoarseWeights);
}

#[test]
fn wrong_groups_are_found() {
    is_inaccurate("shape-g3-d64-8bit", Mistake::WrongGroups);
}

#[test]
fn missing_calibration_is_found() {
    is_inaccurate("calibrated-1bit-t0-3", Mistake::IgnoresCalibration);
}

#[test]
fn an_overlooked_infinity_is_found() {
    let report = run("format-f16", Mistake::OverlooksValues);
    assert!(matches!(report.failures.as_slice(), [Failure::NonFinite { .. }]), "{}", report.reason());
}

#[test]
fn a_wrong_code_is_found() {
    let report = run("format-4bit-token", Mistake::OffByOneCode);
    let [Failure::Stored { tensor: "values", .. }, ..] = report.failures.as_slice() else {
        panic!("{}", report.reason());
    };
}

#[test]
fn nan_is_found() {
    let report = run("format-f16", Mistake::YieldsNan);
    assert_eq!(report.failures, [Failure::OutputNotFinite { index: 0 }]);
}

#[test]
fn outputs_that_waver_are_found() {
    let report = run("format-f16", Mistake::Wavers);
    assert_eq!(report.failures, [Failure::Unrepeated { elements: 1, index: 7 }]);
}
