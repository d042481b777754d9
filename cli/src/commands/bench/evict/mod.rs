//! What it costs to keep a tenth of a prompt: measuring attention, choosing, merging and packing, and what
//! decoding gains.

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
use kvpack::conformance::{DecodeData, DecodeShape, Workload};
use kvpack::plan::{Rows, TokenRange};
use kvpack::policy::{
    ColumnRequest, DEFAULT_THRESHOLD, HeadAggregation, Merging, Policy, RowStatsSource, Spans, StatsRequest,
};
use kvpack::{AttentionShape, Bits, SegmentFormat};
use kvpack_report::{Median, Run, Skipped, Spread, StepTimes};
use serde::Serialize;

use super::UNSTEADY_PERCENT;
use super::output::Style;
use super::timed::{Guard, SPREAD, Timed, WALL_CLOCK, figure_or_dash, skipped};
use crate::outcome::Wrong;
use crate::print::{self, say};
use crate::provenance;
pub use kernels::{Call, TimedSelection, time_calls};
pub use prompt::Prompt;

/// Query rows that are measured: the most that VL-Cache measures.
const MEASURED_ROWS: usize = 50;

/// One token in this many stays.
const ONE_OF: usize = 10;

/// Layers of the model whose prompt is compressed.
const LAYERS: usize = 2;

/// How evicted tokens enter kept ones.
const MERGING: Merging = Merging::Pivotal;

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
    skipped: Vec<Skipped>,
}

/// One piece of the work, for one layer.
#[derive(Serialize)]
struct EvictRow {
    tokens: usize,
    what: String,
    /// The kernels that were chosen for it, where a device has a choice.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    kernels: Vec<&'static str>,
    /// Its kernels, by the clock of the device.
    kernels_us: Option<f64>,
    kernels_spread: Option<Spread>,
    /// The call, by the wall clock, with what the host does for it. Decode steps have it where the device has no clock
    /// of its own; the suite `step` has them as an engine runs them.
    call_us: Option<f64>,
    call_spread: Option<Spread>,
    /// How much of the guard's best rate was missing before or after, in percent.
    guard_low_percent: f64,
}

/// Rows, and what the device shows between them.
struct Watched<'a, B> {
    backend: &'a B,
    guard: Guard,
    /// The guard's rate after the last row.
    rate: f64,
    rows: Vec<EvictRow>,
}

impl EvictRow {
    /// A row without figures.
    const fn of(tokens: usize, what: String) -> Self {
        Self {
            tokens,
            what,
            kernels: Vec::new(),
            kernels_us: None,
            kernels_spread: None,
            call_us: None,
            call_spread: None,
            guard_low_percent: 0.0,
        }
    }

    fn with_kernels(self, kernels: Option<Median>) -> Self {
        let (kernels_us, kernels_spread) = (kernels.map(|of| of.us()), kernels.map(|of| of.spread));
        Self { kernels_us, kernels_spread, ..self }
    }

    fn with_call(self, call: Median) -> Self {
        Self { call_us: Some(call.us()), call_spread: Some(call.spread), ..self }
    }

    /// The steps are kernels by the clock of the device, or calls by the wall clock.
    fn with_steps(self, times: &StepTimes) -> Self {
        if times.timer == WALL_CLOCK { self.with_call(times.median()) } else { self.with_kernels(Some(times.median())) }
    }
}

impl<'a, B: Timed> Watched<'a, B> {
    async fn new(backend: &'a B) -> Result<Self> {
        let mut guard = Guard::new(backend).await?;
        let rate = guard.look(backend).await?;
        Ok(Self { backend, guard, rate, rows: Vec::new() })
    }

    /// Looks again after `rows` were timed.
    async fn push(&mut self, rows: impl IntoIterator<Item = EvictRow>) -> Result<()> {
        let rate = self.guard.look(self.backend).await?;
        let guard_low_percent = self.guard.missing(rate.min(self.rate)) * 100.0;
        self.rate = rate;
        self.rows.extend(rows.into_iter().map(|row| EvictRow { guard_low_percent, ..row }));
        Ok(())
    }
}

/// Times all pieces and prints them.
///
/// # Errors
/// When the backend fails; [`Wrong`] when a kernel computes something else than the host does.
pub fn run<B: TimedSelection + Clone>(backend: &B, driver: String, style: Style) -> Result<()> {
    let shape = AttentionShape::new(32, 8, 128)?;
    // A software device gets what it can do in a while.
    let lengths: &[usize] = if backend.sizes().is_gpu() { &[32_768, 131_072] } else { &[256] };
    let run = provenance::run(driver, None);
    let progress = ProgressBar::new(lengths.len() as u64).with_style(print::bar());
    let mut watched = pollster::block_on(Watched::new(backend))?;
    let mut skips = Vec::new();
    let done = lengths.iter().try_for_each(|&tokens| {
        let what = format!("the other rows of {tokens} tokens");
        progress.set_message(format!("{tokens} tokens"));
        if let Err(error) = pollster::block_on(time_rows(&mut watched, shape, tokens)) {
            skips.push(progress.suspend(|| skipped(what, error))?);
        }
        progress.inc(1);
        Ok(())
    });
    progress.finish_and_clear();
    let report = EvictReport {
        backend: backend.name(),
        run,
        query_heads: shape.query_heads(),
        kv_heads: shape.kv_heads(),
        head_dim: shape.head_dim(),
        rows: watched.rows,
        skipped: skips,
    };
    style.print(&report, print_report)?;
    done
}

async fn time_rows<B: TimedSelection + Clone>(
    watched: &mut Watched<'_, B>,
    shape: AttentionShape,
    tokens: usize,
) -> Result<()> {
    let backend = watched.backend;
    let prompt = Prompt::new(backend, shape, tokens, MEASURED_ROWS).await?;
    // The device is awake after it, whatever the host has computed meanwhile.
    watched.push([]).await?;
    measure_rows(watched, &prompt).await?;
    let k = tokens / ONE_OF;
    let (scores, kept, evicted) = prompt.choose(backend, k).await?;
    let scores = [scores];
    let top_k: Vec<Call<'_, B>> =
        scores.iter().map(|scores| Call::TopK { scores, kv_heads: shape.kv_heads(), k }).collect();
    watched.push([call_row(backend, &prompt, format!("top_k, {k} of each KV head"), &top_k).await?]).await?;

    let merging = MERGING;
    let (kept, evicted) = (&kept, &evicted);
    let inputs = prompt.copies.iter();
    let inputs: Vec<KeptAndEvicted<'_, _, _>> =
        inputs.map(|[keys, values]| KeptAndEvicted { shape, rows: prompt.rows, keys, values, kept, evicted }).collect();
    prompt.check_merge(backend, inputs[0], merging).await?;
    let merges: Vec<Call<'_, B>> = inputs.into_iter().map(|input| Call::Merge { input, merging }).collect();
    watched.push([call_row(backend, &prompt, format!("nearest_kept, merge_tokens into {k}"), &merges).await?]).await?;

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
        watched.push([EvictRow::of(tokens, what.clone()).with_call(call)]).await?;
        let (keys, values) = stores.read(backend, &span[0]).await?;
        prompt.check_stored(&format, [&keys, &values], &backend.download_indices(kept).await?)?;
    }
    let rows = compress_rows(backend, &prompt).await?;
    watched.push(rows).await?;
    for (tokens, format) in [
        (tokens, SegmentFormat::F16),
        (k, SegmentFormat::F16),
        (tokens, SegmentFormat::calibquant(Bits::Four)),
        (k, SegmentFormat::calibquant(Bits::Four)),
        (k, SegmentFormat::calibquant(Bits::Two)),
    ] {
        let row = decode_row(backend, shape, tokens, format).await?;
        watched.push([row]).await?;
    }
    Ok(())
}

/// Statistics of the last rows of the prompt: with the log-sum-exp known, without it, and with counts.
async fn measure_rows<B: TimedSelection>(watched: &mut Watched<'_, B>, prompt: &Prompt<B>) -> Result<()> {
    let backend = watched.backend;
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
        let what = format!("statistics of {MEASURED_ROWS} rows, {what}");
        watched.push([call_row(backend, prompt, what, &calls).await?]).await?;
    }
    Ok(())
}

async fn call_row<B: TimedSelection>(
    backend: &B,
    prompt: &Prompt<B>,
    what: String,
    calls: &[Call<'_, B>],
) -> Result<EvictRow> {
    let names = calls.first().map_or(Ok(Vec::new()), |call| backend.kernel_names(call))?;
    let kernels = backend.time_kernels(calls).await?;
    let call = time_calls(backend, &prompt.lse, |at| calls[at % calls.len()].make(backend)).await?;
    let row = EvictRow::of(prompt.rows.tokens, what).with_kernels(kernels).with_call(call);
    Ok(EvictRow { kernels: names, ..row })
}

/// A prompt observed, and compressed in all layers of a model: per layer, by the wall clock.
async fn compress_rows<B: TimedSelection + Clone>(backend: &B, prompt: &Prompt<B>) -> Result<Vec<EvictRow>> {
    let (shape, tokens) = (prompt.shape, prompt.rows.tokens);
    let policy = Policy { merging: Some(MERGING), ..Policy::vlcache(1.0 / ONE_OF as f64)? };
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
        ensure!(selection.layers().len() == LAYERS, Wrong("a layer was not selected of".into()));
        let start = Instant::now();
        let kept = cache.compress(0, &observed).await?;
        backend.download(&prompt.lse).await?;
        let compressed = start.elapsed();
        if round > 0 {
            for (times, time) in times.iter_mut().zip([measured, selected, compressed]) {
                times.push(time.as_secs_f64() / LAYERS as f64);
            }
        }
        if round == rounds {
            prompt.check_compressed(backend, &cache, &kept.layers()[0], MERGING).await?;
        }
    }
    let names = ["ModelCache::observe, a layer", "ObservedPrompt::select, a layer", "ModelCache::compress, a layer"];
    let row = |(name, times): (&str, Vec<f64>)| {
        EvictRow::of(tokens, format!("{name} (vlcache, merged, calibquant:4)")).with_call(Median::of(times))
    };
    Ok(names.into_iter().zip(times).map(row).collect())
}

/// A decode step over the given number of tokens.
async fn decode_row<B: Timed>(
    backend: &B,
    shape: AttentionShape,
    tokens: usize,
    format: SegmentFormat,
) -> Result<EvictRow> {
    let data = DecodeData::generated(backend, DecodeShape::even("evicted", shape, 1, tokens)).await?;
    let workload = Workload::new(backend, &data, format.into(), backend.sizes().suite_footprint()).await?;
    let checked = workload.check(backend, &data, AttendOptions::default()).await?;
    ensure!(checked.passed(), Wrong(format!("{format}: {}", checked.reason())));
    let times = backend.time_steps(&workload, &data, AttendOptions::default(), SECONDS).await?;
    let what = format!("decode step, {format}");
    Ok(EvictRow::of(tokens, what).with_steps(&times))
}

fn print_report(report: &EvictReport) -> Result<()> {
    say!("{}", report.backend)?;
    say!("\nOne layer, {} query heads over {} KV heads × {}", report.query_heads, report.kv_heads, report.head_dim)?;
    let mut table = print::results(&["tokens", "what", "kernels µs", "call µs"], 2);
    for row in &report.rows {
        let kernels = figure_or_dash(row.kernels_us, row.kernels_spread, 1);
        let call = figure_or_dash(row.call_us, row.call_spread, 1);
        table.add_row([row.tokens.to_string(), row.what.clone(), kernels, call]);
    }
    say!("{table}")?;
    for row in report.rows.iter().filter(|row| !row.kernels.is_empty()) {
        say!("{} tokens, {}: {}", row.tokens, row.what, row.kernels.join(", "))?;
    }
    for row in report.rows.iter().filter(|row| row.guard_low_percent > UNSTEADY_PERCENT) {
        let EvictRow { tokens, what, guard_low_percent, .. } = row;
        say!("{tokens} tokens, {what}: the device ran {guard_low_percent:.0} % below its best before or after it")?;
    }
    say!("kernels: by the clock of the device. call: by the wall clock, on a GPU eight queued before a wait.")?;
    say!("{SPREAD}")?;
    Ok(())
}
