//! What it costs to keep a tenth of a prompt: measuring attention, choosing, merging and packing, and what decoding gains.

#[cfg(feature = "cuda")]
mod cuda;
mod kernels;
mod prompt;
mod wgpu;

use std::time::Instant;

use anyhow::{Result, ensure};
use indicatif::ProgressBar;
use kvpack::backend::{AttendOptions, FilledStores, KeptAndEvicted, NewSpan, QueriesAndKeys, SpanSource};
use kvpack::cache::{DenseLayer, MeasuredQueries, ModelCache, Recipe};
use kvpack::conformance::{BatchLengths, DecodeData, DecodeShape, PageOrder, Workload};
use kvpack::plan::{Rows, TokenRange};
use kvpack::policy::{
    ColumnRequest, DEFAULT_THRESHOLD, HeadAggregation, Merging, Policy, RowStatsSource, Spans, StatsRequest,
};
use kvpack::{AttentionShape, Bits, SegmentFormat};
use kvpack_report::Run;
use serde::Serialize;

use super::timed::Timed;
use crate::print::{self, say};
use crate::provenance;
pub use kernels::{Call, TimedSelection, time_calls};
pub use prompt::Prompt;

/// Query rows that are measured, as VL-Cache measures at most.
const MEASURED_ROWS: usize = 50;

/// One token of so many stays.
const ONE_OF: usize = 10;

/// Layers of the model whose prompt is compressed.
const LAYERS: usize = 2;

/// Seconds of timed steps for a row of decoding, at least.
const SECONDS: f64 = 0.05;

/// What was found, as it is printed in JSON.
#[derive(Serialize)]
#[serde(tag = "kind", rename = "evict")]
struct EvictReport {
    backend: String,
    run: Run,
    query_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rows: Vec<EvictRow>,
}

/// One piece of the work, for one layer.
#[derive(Serialize)]
struct EvictRow {
    tokens: usize,
    what: String,
    /// Its kernels, by the clock of the device.
    kernels_us: Option<f64>,
    /// The call, by the wall clock, with what the host does for it; nothing of decode steps, which the suite `step` has.
    call_us: Option<f64>,
}

/// Times all pieces and prints them.
///
/// # Errors
/// When the backend fails, or a kernel computes something else than the host does.
pub fn run<B: TimedSelection + Clone>(backend: &B, driver: String, json: bool) -> Result<()> {
    let shape = AttentionShape::new(32, 8, 128)?;
    // A software device gets what it can do in a while.
    let lengths: &[usize] = if backend.sizes().is_gpu() { &[32_768, 131_072] } else { &[256] };
    let run = provenance::run(driver, backend.guard_tolerance());
    let progress = ProgressBar::new(lengths.len() as u64).with_style(print::bar());
    let mut rows = Vec::new();
    for &tokens in lengths {
        progress.set_message(format!("{tokens} tokens"));
        // The device is awake after it.
        pollster::block_on(backend.guard_rate())?;
        rows.extend(pollster::block_on(rows_of(backend, shape, tokens))?);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let report = EvictReport {
        backend: backend.name(),
        run,
        query_heads: shape.query_heads(),
        kv_heads: shape.kv_heads(),
        head_dim: shape.head_dim(),
        rows,
    };
    if json { print::json(&report) } else { print_report(&report) }
}

async fn rows_of<B: TimedSelection + Clone>(
    backend: &B,
    shape: AttentionShape,
    tokens: usize,
) -> Result<Vec<EvictRow>> {
    let prompt = Prompt::new(backend, shape, tokens, MEASURED_ROWS).await?;
    let mut rows = measure_rows(backend, &prompt).await?;
    let k = tokens / ONE_OF;
    let (scores, kept, evicted) = prompt.choose(backend, k).await?;
    let scores = [scores];
    let top_k: Vec<Call<'_, B>> =
        scores.iter().map(|scores| Call::TopK { scores, kv_heads: shape.kv_heads(), k }).collect();
    rows.push(call_row(backend, &prompt, format!("top_k, {k} of each KV head"), &top_k).await?);

    let merging = Merging::Pivotal;
    let (kept, evicted) = (&kept, &evicted);
    let inputs = prompt.copies.iter();
    let inputs: Vec<KeptAndEvicted<'_, _, _>> =
        inputs.map(|[keys, values]| KeptAndEvicted { shape, rows: prompt.rows, keys, values, kept, evicted }).collect();
    prompt.check_merge(backend, inputs[0], merging).await?;
    let merges: Vec<Call<'_, B>> = inputs.into_iter().map(|input| Call::Merge { input, merging }).collect();
    rows.push(call_row(backend, &prompt, format!("nearest_kept, merge_tokens into {k}"), &merges).await?);

    for format in [SegmentFormat::F16, SegmentFormat::calibquant(Bits::Four), SegmentFormat::saw_int4()] {
        let mut stores = FilledStores::new(backend, shape, &[format])?;
        let span = stores.place(backend, &[NewSpan { store: 0, sequence: 0, start: 0, tokens: k }]).await?;
        let pack = |at: usize| {
            let [keys, values] = &prompt.copies[at % prompt.copies.len()];
            let source = SpanSource { rows: prompt.rows, tokens: Rows::Gather(kept), keys, values };
            stores.quantize(backend, &span[0], source)
        };
        let call = time_calls(backend, &scores[0], pack).await?;
        let what = format!("gather and pack {k} tokens, {format}");
        rows.push(EvictRow { tokens, what, kernels_us: None, call_us: Some(call * 1e6) });
    }
    rows.extend(compress_rows(backend, &prompt).await?);
    for (tokens, format) in [
        (tokens, SegmentFormat::F16),
        (k, SegmentFormat::F16),
        (tokens, SegmentFormat::calibquant(Bits::Four)),
        (k, SegmentFormat::calibquant(Bits::Four)),
        (k, SegmentFormat::calibquant(Bits::Two)),
    ] {
        rows.push(decode_row(backend, shape, tokens, format).await?);
    }
    Ok(rows)
}

/// Statistics of the last rows of the prompt: with the log-sum-exp known, without it, and with counts.
async fn measure_rows<B: TimedSelection>(backend: &B, prompt: &Prompt<B>) -> Result<Vec<EvictRow>> {
    let mut rows = Vec::new();
    for (what, threshold, source) in [
        ("log-sum-exp known", None, RowStatsSource::KnownLse),
        ("log-sum-exp measured", None, RowStatsSource::Measured),
        ("and entries counted", Some(DEFAULT_THRESHOLD), RowStatsSource::Measured),
    ] {
        let columns = ColumnRequest { aggregation: HeadAggregation::Each, threshold };
        let request = StatsRequest { columns, rows: source };
        let known_lse = (source == RowStatsSource::KnownLse).then_some(&prompt.lse);
        let inputs: Vec<QueriesAndKeys<'_, _>> = prompt.copies.iter().map(|[keys, _]| prompt.input(keys)).collect();
        prompt.check_columns(backend, inputs[0], request, known_lse).await?;
        let calls: Vec<Call<'_, B>> =
            inputs.into_iter().map(|input| Call::Measure { input, request, known_lse }).collect();
        rows.push(call_row(backend, prompt, format!("statistics of {MEASURED_ROWS} rows, {what}"), &calls).await?);
    }
    Ok(rows)
}

async fn call_row<B: TimedSelection>(
    backend: &B,
    prompt: &Prompt<B>,
    what: String,
    calls: &[Call<'_, B>],
) -> Result<EvictRow> {
    let kernels = backend.time_kernels(calls).await?;
    let call = time_calls(backend, &prompt.lse, |at| calls[at % calls.len()].make(backend)).await?;
    let us = |seconds: f64| seconds * 1e6;
    Ok(EvictRow { tokens: prompt.rows.tokens, what, kernels_us: kernels.map(us), call_us: Some(us(call)) })
}

/// A prompt observed, and compressed in all layers of a model: per layer, by the wall clock.
async fn compress_rows<B: TimedSelection + Clone>(backend: &B, prompt: &Prompt<B>) -> Result<Vec<EvictRow>> {
    let (shape, tokens) = (prompt.shape, prompt.rows.tokens);
    let policy = Policy { merging: Some(Merging::Pivotal), ..Policy::vlcache(1.0 / ONE_OF as f64)? };
    let layer = (shape, Recipe::calibquant(Bits::Four));
    let image = TokenRange::new(0, tokens - MEASURED_ROWS)?;
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    let rounds = if backend.sizes().is_gpu() { 3 } else { 1 };
    // The first round compiles kernels.
    for round in 0..=rounds {
        let mut cache = ModelCache::new(backend, &vec![layer.clone(); LAYERS], 1)?;
        let mut layers = Vec::with_capacity(LAYERS);
        for _ in 0..LAYERS {
            layers.push(prompt.upload(backend).await?);
        }
        backend.download(&prompt.lse).await?;
        let start = Instant::now();
        let mut observed = cache.observe(policy.clone(), Spans::new(tokens, &[image])?)?;
        for (index, [keys, values]) in layers.into_iter().enumerate() {
            let queries = MeasuredQueries { queries: prompt.queries(), known_lse: None };
            observed.observe(index, DenseLayer { rows: prompt.rows, keys, values }, Some(queries))?;
        }
        backend.download(&prompt.lse).await?;
        let measured = start.elapsed();
        let selection = observed.select().await?;
        let selected = start.elapsed() - measured;
        ensure!(selection.layers().len() == LAYERS, "a layer was not selected of");
        let start = Instant::now();
        cache.compress(0, &observed).await?;
        backend.download(&prompt.lse).await?;
        if round > 0 {
            for (times, time) in times.iter_mut().zip([measured, selected, start.elapsed()]) {
                times.push(time.as_secs_f64() / LAYERS as f64 * 1e6);
            }
        }
    }
    let names = ["ModelCache::observe, a layer", "ObservedPrompt::select, a layer", "ModelCache::compress, a layer"];
    let row = |(name, times): (&str, Vec<f64>)| {
        let call_us = Some(super::timed::median(times));
        EvictRow { tokens, what: format!("{name} (vlcache, merged, calibquant:4)"), kernels_us: None, call_us }
    };
    Ok(names.into_iter().zip(times).map(row).collect())
}

/// A decode step over so many tokens.
async fn decode_row<B: Timed>(
    backend: &B,
    shape: AttentionShape,
    tokens: usize,
    format: SegmentFormat,
) -> Result<EvictRow> {
    let decode = DecodeShape {
        name: "evicted".into(),
        shape,
        sequences: 1,
        tokens,
        lengths: BatchLengths::Even,
        pages: PageOrder::Consecutive,
        span_tokens: usize::MAX,
        quick: false,
    };
    let data = DecodeData::generated(backend, decode).await?;
    let workload = Workload::new(backend, &data, format.into(), backend.sizes().suite_footprint()).await?;
    let checked = workload.check(backend, &data, AttendOptions::default()).await?;
    ensure!(checked.passed(), "{format}: {}", checked.reason());
    let times = backend.time_steps(&workload, &data, AttendOptions::default(), SECONDS).await?;
    let what = format!("decode step, {format}");
    Ok(EvictRow { tokens, what, kernels_us: Some(times.seconds * 1e6), call_us: None })
}

fn print_report(report: &EvictReport) -> Result<()> {
    say!("{}", report.backend)?;
    say!("\nOne layer, {} query heads over {} KV heads × {}", report.query_heads, report.kv_heads, report.head_dim)?;
    let mut table = print::results(&["tokens", "what", "kernels µs", "call µs"], 2);
    let time = |time: Option<f64>| time.map_or("-".into(), |time| format!("{time:.1}"));
    for row in &report.rows {
        table.add_row([row.tokens.to_string(), row.what.clone(), time(row.kernels_us), time(row.call_us)]);
    }
    say!("{table}")?;
    say!("kernels: by the clock of the device. call: by the wall clock, on a GPU eight queued before a wait.")?;
    Ok(())
}
