//! The conformance run must find what it is there to find: a backend that is right but for one mistake has to fail.

use std::sync::atomic::{AtomicU32, Ordering};

use kvpack::Result;
use kvpack::backend::{
    AttendOptions, Attention, AttentionStates, Forward, Forwarding, MeasuredAttention, NonFinite, Packing,
    QueriesAndKeys, RowStatistics, ScoredTokens, SpanRead, SpanWrite, StateParts, TokenSelection,
};
use kvpack::conformance::{self, Failure, Report};
use kvpack::cpu::{Cpu, CpuIndices, CpuStore, CpuTensor};
use kvpack::format::{AttentionShape, KeyOrValue, SegmentFormat, TILE_TOKENS};
use kvpack::plan::{
    AttendPlan, ElementType, Page, PlannedSpan, QueryRun, RowLayout, Scoring, SpanView, StoreView, TokenRange, Visible,
};
use kvpack::policy::{ColumnRequest, ScoreRequest, StatsRequest};

use any_backend::exact::dot;

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
    /// The output lacks the last head.
    YieldsLess,
    /// Every second output has another last bit.
    Wavers,
    /// A span's last token is written once more, into the page behind its last.
    WritesAPageTooFar,
    /// A span's ranges are written once more, into the slot before its own.
    WritesASlotTooLow,
    /// The log-sum-exps are in bits instead of nats.
    BinaryLogarithms,
    /// Of equal scores the last are taken.
    TakesTheLast,
    /// Recent tokens are scored like all others.
    ForgetsRecent,
    /// Column sums lack the last query row.
    DropsLastRow,
    /// Sums of two blocks of columns are exchanged.
    ExchangesColumns,
    /// The largest entry of a row is all that counts.
    CountsTheLargest,
    /// Columns are measured with the statistics of the rows over the part alone.
    ForgetsOtherParts,
    /// The last part of merged states is left out.
    DropsLastPart,
    /// Outputs of bf16 are cut off in place of being rounded.
    CutsBf16,
    /// A window begins one position too early.
    WidensWindow,
    /// A mask is applied one tile too early.
    ShiftsMask,
    /// Products are capped before they are scaled.
    CapsBeforeScale,
    /// A sink counts in two parts of what is merged.
    CountsSinkTwice,
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

    fn quantize(
        &self,
        store: &mut CpuStore,
        keys: &CpuTensor,
        values: &CpuTensor,
        write: SpanWrite<'_, CpuIndices>,
    ) -> Result<()> {
        self.cpu.quantize(store, keys, values, write)?;
        let last = write.pages[write.pages.len() - 1];
        let (page, range_slot) = match self.mistake {
            Mistake::WritesAPageTooFar => (Page { index: last.index + 1, ..last }, write.range_slot),
            Mistake::WritesASlotTooLow if write.range_slot > 0 => (last, write.range_slot - 1),
            _ => return Ok(()),
        };
        let tokens = TokenRange::new(0, 1)?.into();
        // There may be no page behind.
        let _ = self.cpu.quantize(store, keys, values, SpanWrite { tokens, pages: &[page], range_slot, ..write });
        self.cpu.quantize(store, keys, values, write)
    }

    async fn attend_states(
        &self,
        plan: &AttendPlan,
        stores: &[&CpuStore],
        queries: &CpuTensor,
        options: AttendOptions,
    ) -> Result<AttentionStates<CpuTensor>> {
        let mut states = self.cpu.attend_states(plan, stores, queries, options).await?;
        if self.mistake == Mistake::BinaryLogarithms {
            let lse = states.lse.to_f32().into_iter().map(|lse| lse * std::f32::consts::LOG2_E).collect();
            states.lse = CpuTensor::F32(lse);
        }
        Ok(states)
    }

    fn token_scores(
        &self,
        sums: &CpuTensor,
        kv_heads: usize,
        request: &ScoreRequest<'_>,
    ) -> Result<ScoredTokens<CpuTensor, Vec<u32>>> {
        let recent = if self.mistake == Mistake::ForgetsRecent { 0 } else { request.recent };
        self.cpu.token_scores(sums, kv_heads, &ScoreRequest { recent, ..*request })
    }

    fn top_k(&self, scores: &CpuTensor, kv_heads: usize, k: usize) -> Result<CpuIndices> {
        if self.mistake != Mistake::TakesTheLast {
            return self.cpu.top_k(scores, kv_heads, k);
        }
        let mut scores = scores.to_f32();
        let n = scores.len() / kv_heads;
        scores.chunks_mut(n).for_each(<[f32]>::reverse);
        let chosen = self.cpu.top_k(&CpuTensor::F32(scores), kv_heads, k)?;
        let chosen: Vec<u32> =
            chosen.tokens().chunks(k).flat_map(|chosen| chosen.iter().rev().map(|&i| n as u32 - 1 - i)).collect();
        CpuIndices::new(&chosen, kv_heads, n as u32)
    }

    fn measure_attention(
        &self,
        input: QueriesAndKeys<'_, CpuTensor>,
        request: StatsRequest,
        known_lse: Option<&CpuTensor>,
    ) -> Result<MeasuredAttention<CpuTensor, Vec<u32>>> {
        let mut measured = self.cpu.measure_attention(input, request, known_lse)?;
        if self.mistake == Mistake::DropsLastRow {
            let rows = input.rows.len() as f32;
            let sums = measured.column_sums.to_f32().into_iter().map(|sum| sum * (rows - 1.0) / rows).collect();
            measured.column_sums = CpuTensor::F32(sums);
        }
        if self.mistake == Mistake::ExchangesColumns {
            let mut sums = measured.column_sums.to_f32();
            for of_head in sums.chunks_mut(input.rows.tokens()) {
                let (first, second) = of_head.split_at_mut(32);
                first[16..].swap_with_slice(&mut second[..16]);
            }
            measured.column_sums = CpuTensor::F32(sums);
        }
        if let (Mistake::CountsTheLargest, Some(counts)) = (self.mistake, &mut measured.counts) {
            counts.iter_mut().for_each(|count| *count = (*count).min(1));
        }
        Ok(measured)
    }

    fn measure_columns(
        &self,
        input: QueriesAndKeys<'_, CpuTensor>,
        columns: ColumnRequest,
        rows: &RowStatistics<CpuTensor>,
    ) -> Result<MeasuredAttention<CpuTensor, Vec<u32>>> {
        if self.mistake == Mistake::ForgetsOtherParts {
            return self.cpu.measure_columns(input, columns, &self.cpu.measure_rows(input)?);
        }
        self.cpu.measure_columns(input, columns, rows)
    }

    fn merge_parts(
        &self,
        shape: &AttentionShape,
        parts: StateParts<'_, CpuTensor>,
        output: &mut CpuTensor,
        lse: Option<&mut CpuTensor>,
    ) -> Result<()> {
        let fewer = if self.mistake == Mistake::DropsLastPart { parts.parts - 1 } else { parts.parts };
        self.cpu.merge_parts(shape, StateParts { parts: fewer.max(1), ..parts }, output, lse)
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
            Mistake::YieldsLess => {
                let mut outputs = output.to_f32();
                outputs.truncate(outputs.len() - plan.shape().head_dim());
                CpuTensor::F32(outputs)
            }
            Mistake::YieldsNan => CpuTensor::F32(vec![f32::NAN; output.elements().len()]),
            Mistake::Wavers => {
                let mut outputs = output.to_f32();
                outputs[7] = f32::from_bits(outputs[7].to_bits() ^ (self.steps.fetch_add(1, Ordering::Relaxed) % 2));
                CpuTensor::F32(outputs)
            }
            Mistake::CutsBf16 if options.output == ElementType::Bf16 => {
                let in_f32 = AttendOptions { output: ElementType::F32, ..options };
                let whole = self.cpu.attend(plan, stores, &queries, in_f32).await?.to_f32();
                CpuTensor::F32(whole.into_iter().map(|x| f32::from_bits(x.to_bits() & 0xffff_0000)).collect())
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
                SpanView {
                    sequence,
                    start: span.start,
                    tokens,
                    gathered: span.gathered,
                    pages,
                    range_slot: span.range_slot,
                }
            };
            let calibration = segment.calibration().filter(|_| self.mistake != Mistake::IgnoresCalibration).copied();
            let spans = segment.spans().iter().map(span).collect();
            views.push(StoreView { format: *segment.format(), calibration, spans });
        }
        let runs: Vec<QueryRun> = plan.runs().iter().map(|planned| planned.run.clone()).collect();
        let runs: Vec<QueryRun> = runs.into_iter().map(|run| self.mistaken_run(run)).collect();
        AttendPlan::new(*plan.shape(), &runs, &views)?.with_scoring(self.mistaken_scoring(plan.scoring())?)
    }

    fn mistaken_run(&self, run: QueryRun) -> QueryRun {
        let wider = match self.mistake {
            Mistake::WidensWindow => 1,
            Mistake::ShiftsMask => TILE_TOKENS,
            _ => return run,
        };
        let visible = match run.visible {
            Visible::Window { left } => Visible::Window { left: left + wider },
            other => other,
        };
        QueryRun { visible, ..run }
    }

    fn mistaken_scoring(&self, scoring: &Scoring) -> Result<Scoring> {
        let mistaken = scoring.clone();
        match (self.mistake, scoring.soft_cap(), scoring.sinks()) {
            // scale · cap · tanh(q · k / cap)
            (Mistake::CapsBeforeScale, Some(cap), _) => mistaken.with_soft_cap(cap * scoring.scale()),
            (Mistake::CountsSinkTwice, _, Some(sinks)) => {
                mistaken.with_sinks(&sinks.iter().map(|sink| sink + 2f32.ln()).collect::<Vec<_>>())
            }
            _ => Ok(mistaken),
        }
    }

    /// Attention with coarse weights, for plans of one segment.
    fn attend_coarsely(&self, plan: &AttendPlan, store: &CpuStore, queries: &CpuTensor) -> Result<CpuTensor> {
        let (shape, segment) = (plan.shape(), &plan.segments()[0]);
        let head_dim = shape.head_dim();
        let mut output = Vec::new();
        for (span, queries) in segment.spans().iter().zip(queries.to_f32().chunks(shape.query_heads() * head_dim)) {
            let tokens = span.tokens;
            let read = SpanRead { pages: segment.pages_of(span), tokens, range_slot: span.range_slot, centre: None };
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
    dot(query, key) as f32 / (query.len() as f32).sqrt()
}

fn run(name: &str, mistake: Mistake) -> Report {
    let check =
        conformance::checks().into_iter().find(|known| known.name() == name).expect("the check is in the registry");
    let backend = Forwarding(Mistaken { cpu: Cpu::new(), mistake, steps: AtomicU32::new(0) });
    pollster::block_on(check.run(&backend)).expect("the mistake is no error")
}

fn is_inaccurate(case: &str, mistake: Mistake) {
    let report = run(case, mistake);
    assert!(report.failures.iter().any(|f| matches!(f, Failure::Inaccurate { .. })), "{case}: {}", report.reason());
}

/// Every check of the read path whose name holds `kind` fails.
fn all_are_inaccurate(kind: &str, mistake: Mistake) {
    let checks = conformance::checks();
    let names: Vec<&str> = checks
        .iter()
        .map(|check| check.name())
        .filter(|name| name.starts_with("read-") && name.contains(kind) && !name.contains("nothing"))
        .collect();
    assert!(names.len() >= 3, "{names:?}");
    names.into_iter().for_each(|name| is_inaccurate(name, mistake));
}

#[test]
fn a_window_off_by_one_and_a_shifted_mask_are_found() {
    all_are_inaccurate("read-window-", Mistake::WidensWindow);
    all_are_inaccurate("read-window-", Mistake::ShiftsMask);
}

#[test]
fn a_cap_before_the_scale_is_found() {
    all_are_inaccurate("capped", Mistake::CapsBeforeScale);
}

#[test]
fn a_sink_that_counts_twice_is_found() {
    all_are_inaccurate("sinks", Mistake::CountsSinkTwice);
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

/// Whatever a sink leaves to the other tokens, their sums and counts are told apart.
#[test]
fn exchanged_columns_and_missing_counts_are_found() {
    let names = conformance::checks().into_iter().map(|check| check.name().to_owned());
    let of_statistics = names.filter(|name| name.starts_with("stats-") && !name.contains("one-token"));
    let of_statistics: Vec<String> = of_statistics.filter(|name| !name.contains("equal-scores")).collect();
    assert!(of_statistics.len() >= 14, "{of_statistics:?}");
    of_statistics.iter().for_each(|name| is_inaccurate(name, Mistake::ExchangesColumns));
    let weak: Vec<&String> = of_statistics.iter().filter(|name| name.contains("weak-sink")).collect();
    assert_eq!(weak.len(), 4);
    for name in weak {
        let report = run(name, Mistake::CountsTheLargest);
        let wrong = |failure: &Failure| matches!(failure, Failure::Differs { what, .. } if what == "counts of rows");
        assert!(report.failures.iter().any(wrong), "{name}: {}", report.reason());
    }
}

#[test]
fn nan_is_found() {
    let report = run("format-f16", Mistake::YieldsNan);
    assert_eq!(report.failures, [Failure::OutputNotFinite { index: 0 }]);
}

#[test]
fn elements_that_are_missing_are_found() {
    for check in ["format-f16", "bf16-output-f16"] {
        let report = run(check, Mistake::YieldsLess);
        let missing =
            |failure: &Failure| matches!(failure, Failure::Differs { what, .. } if what == "length of output");
        assert!(report.failures.iter().any(missing), "{check}: {}", report.reason());
    }
}

#[test]
fn outputs_that_waver_are_found() {
    let report = run("format-f16", Mistake::Wavers);
    assert_eq!(report.failures, [Failure::Unrepeated { elements: 1, index: 7 }]);
}

#[test]
fn outputs_that_are_cut_off_are_found() {
    for name in ["bf16-output-f16", "bf16-output-4bit"] {
        let report = run(name, Mistake::CutsBf16);
        assert!(matches!(report.failures.as_slice(), [Failure::Misrounded { .. }]), "{name}: {}", report.reason());
    }
}

/// What is written beside the pages of a span is found, though no output changes.
#[test]
fn a_page_too_many_is_found() {
    for name in
        ["format-f16", "length-one-token-f16", "data-outliers-8bit-token-32channels", "states-f16", "pack-8bit-token"]
    {
        let report = run(name, Mistake::WritesAPageTooFar);
        assert!(report.failures.iter().any(|f| matches!(f, Failure::Guard { .. })), "{name}: {}", report.reason());
    }
}

#[test]
fn a_slot_too_low_is_found() {
    for name in ["format-4bit", "pack-4bit-channel"] {
        let report = run(name, Mistake::WritesASlotTooLow);
        assert!(report.failures.iter().any(|f| matches!(f, Failure::Guard { .. })), "{name}: {}", report.reason());
    }
}

#[test]
fn recent_tokens_scored_like_others_are_found() {
    let report = run("token-scores-recent", Mistake::ForgetsRecent);
    assert!(report.failures.iter().any(|f| matches!(f, Failure::Inaccurate { .. })), "{}", report.reason());
}

#[test]
fn logarithms_of_another_base_are_found() {
    is_inaccurate("states-4bit", Mistake::BinaryLogarithms);
}

#[test]
fn ties_that_go_to_the_wrong_index_are_found() {
    for name in ["top-k-ties", "top-k-equal"] {
        let report = run(name, Mistake::TakesTheLast);
        assert!(matches!(report.failures.as_slice(), [Failure::Differs { .. }]), "{name}: {}", report.reason());
    }
    assert!(run("top-k-budget-100", Mistake::TakesTheLast).passed(), "where all are taken there is nothing to choose");
}

#[test]
fn a_query_row_that_is_not_counted_is_found() {
    is_inaccurate("stats-last-50", Mistake::DropsLastRow);
}

#[test]
fn statistics_of_a_part_alone_are_found() {
    is_inaccurate("stats-last-50", Mistake::ForgetsOtherParts);
}

#[test]
fn a_part_that_is_not_merged_is_found() {
    for name in ["merge-two-parts", "merge-three-parts", "merge-many-parts"] {
        let report = run(name, Mistake::DropsLastPart);
        assert!(report.failures.iter().any(|f| matches!(f, Failure::Inaccurate { .. })), "{name}: {}", report.reason());
    }
}
