//! A context in chunks of three precisions (Cocktail). Decode steps over the mixture, with chunks brought together or
//! left in place, are compared with steps over one format. The suite also times bringing chunks together while a prompt
//! is packed.

use anyhow::{Result, ensure};
use indicatif::ProgressBar;
use kvpack::backend::{AttendOptions, FilledSpan, FilledStores, NewSpan, SpanSource, TensorRows};
use kvpack::conformance::{BatchFormat, BatchPart, DecodeData, DecodeShape, Workload};
use kvpack::plan::{Rows, TokenRange};
use kvpack::{AttentionShape, SegmentFormat};
use kvpack_report::{Median, Run, Skipped, Spread};
use serde::Serialize;

use super::UNSTEADY_PERCENT;
use super::evict::{Call, Prompt, TimedSelection, time_calls};
use super::output::Style;
use super::timed::{Guard, SPREAD, Timed, figure, figure_or_dash, skipped};
use crate::outcome::Wrong;
use crate::print::{self, say};
use crate::provenance;

/// Tokens of a chunk.
const CHUNK: usize = 32;

/// Seconds of timed steps for a row, at least.
const SECONDS: f64 = 0.05;

/// What was found, as it is printed in JSON.
#[derive(Serialize)]
#[serde(tag = "kind", rename = "chunks")]
struct ChunksReport {
    backend: String,
    run: Run,
    query_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    sequences: usize,
    tokens: usize,
    read_gigabytes_per_second: f64,
    steps: Vec<StepRow>,
    packing: Vec<PackRow>,
    skipped: Vec<Skipped>,
}

/// A decode step.
#[derive(Serialize)]
struct StepRow {
    what: String,
    us: f64,
    spread: Spread,
    /// Of the read bandwidth, by the bytes of codes and ranges.
    bandwidth_percent: f64,
    launches: usize,
    /// How much of the guard's best rate was missing before or after, in percent.
    guard_low_percent: f64,
}

/// A decode step that is to be timed.
struct Step {
    what: String,
    format: BatchFormat,
    /// Tokens of a span; chunks are brought together where they are without end.
    span_tokens: usize,
    /// Scores, softmax and weighted values in one pass, or scores in one of their own.
    fused: bool,
}

impl Step {
    fn fused(what: String, format: BatchFormat, span_tokens: usize) -> Self {
        Self { what, format, span_tokens, fused: true }
    }
}

/// A piece of packing a prompt of one sequence.
#[derive(Serialize)]
struct PackRow {
    what: &'static str,
    /// Its kernels, by the clock of the device.
    kernels_us: Option<f64>,
    kernels_spread: Option<Spread>,
    /// The calls, by the wall clock.
    call_us: f64,
    call_spread: Spread,
    /// How much of the guard's best rate was missing before or after, in percent.
    guard_low_percent: f64,
}

impl PackRow {
    /// Of its kernels and of a call.
    fn new(what: &'static str, ((kernels, call), guard_low_percent): ((Option<Median>, Median), f64)) -> Self {
        Self {
            what,
            kernels_us: kernels.map(|kernels| kernels.us()),
            kernels_spread: kernels.map(|kernels| kernels.spread),
            call_us: call.us(),
            call_spread: call.spread,
            guard_low_percent,
        }
    }
}

/// Times all rows and prints them.
///
/// # Errors
/// When the backend fails; [`Wrong`] when a step differs from f64 attention over the stored data.
pub fn run<B: TimedSelection>(backend: &B, driver: String, style: Style) -> Result<()> {
    let shape = AttentionShape::new(32, 8, 128)?;
    // A software device gets what it can do in a while.
    let (sequences, tokens) = if backend.sizes().is_gpu() { (8, 32_768) } else { (1, 1024) };
    let mut guard = pollster::block_on(Guard::new(backend))?;
    let bandwidth = pollster::block_on(backend.read_bandwidth())?;
    let mut report = ChunksReport {
        backend: backend.name(),
        run: provenance::run(driver, None),
        query_heads: shape.query_heads(),
        kv_heads: shape.kv_heads(),
        head_dim: shape.head_dim(),
        sequences,
        tokens,
        read_gigabytes_per_second: bandwidth / 1e9,
        steps: Vec::new(),
        packing: Vec::new(),
        skipped: Vec::new(),
    };
    let done = pollster::block_on(time_rows(backend, &mut guard, shape, &mut report));
    style.print(&report, print_report)?;
    done
}

/// The steps that are timed: each format alone, and the mixture in several ways.
fn wanted_steps(mixture: &BatchFormat) -> Vec<Step> {
    let alone = |part: &BatchPart| Step::fused(format!("{} alone", part.format), part.format.into(), usize::MAX);
    let mut wanted: Vec<Step> = mixture.parts().iter().map(alone).collect();
    let together = "mixture, chunks brought together";
    wanted.push(Step::fused(together.into(), mixture.clone(), usize::MAX));
    let what = format!("{together}, scores in a pass of their own");
    wanted.push(Step { fused: false, ..Step::fused(what, mixture.clone(), usize::MAX) });
    for span in [4 * CHUNK, CHUNK] {
        wanted.push(Step::fused(format!("mixture, chunks of {span} tokens left apart"), mixture.clone(), span));
    }
    wanted
}

async fn time_rows<B: TimedSelection>(
    backend: &B,
    guard: &mut Guard,
    shape: AttentionShape,
    report: &mut ChunksReport,
) -> Result<()> {
    let (sequences, tokens, bandwidth) = (report.sequences, report.tokens, report.read_gigabytes_per_second * 1e9);
    let mixture = BatchFormat::cocktail();
    let wanted = wanted_steps(&mixture);
    let progress = ProgressBar::new(wanted.len() as u64 + 1).with_style(print::bar());
    for Step { what, format, span_tokens, fused } in wanted {
        progress.set_message(what.clone());
        let decode = DecodeShape { span_tokens, ..DecodeShape::even("chunks", shape, sequences, tokens) };
        match step_row(backend, guard, decode, (what.clone(), format, fused), bandwidth).await {
            Ok(row) => report.steps.push(row),
            Err(error) => report.skipped.push(progress.suspend(|| skipped(what, error))?),
        }
        progress.inc(1);
    }
    progress.set_message("packing");
    if let Err(error) = pack_rows(backend, guard, (shape, tokens, &mixture), &mut report.packing).await {
        report.skipped.push(progress.suspend(|| skipped(format!("packing {tokens} tokens"), error))?);
    }
    progress.finish_and_clear();
    Ok(())
}

async fn step_row<B: Timed>(
    backend: &B,
    guard: &mut Guard,
    decode: DecodeShape,
    (what, format, fused): (String, BatchFormat, bool),
    bandwidth: f64,
) -> Result<StepRow> {
    let data = DecodeData::generated(backend, decode).await?;
    let mut workload = Workload::new(backend, &data, format, backend.sizes().suite_footprint()).await?;
    if !fused {
        workload.plan_unfused()?;
    }
    let checked = workload.check(backend, &data, AttendOptions::default()).await?;
    ensure!(checked.passed(), Wrong(format!("{what}: {}", checked.reason())));
    let time = async || Ok(backend.time_steps(&workload, &data, AttendOptions::default(), SECONDS).await?);
    let (times, guard_low_percent) = guard.watch(backend, time).await?;
    let bandwidth_percent = workload.step_bytes as f64 / times.seconds / bandwidth * 100.0;
    let (launches, us, spread) = (times.launches.len(), times.seconds * 1e6, times.spread);
    Ok(StepRow { what, us, spread, bandwidth_percent, launches, guard_low_percent })
}

/// Packs a prompt whose chunks go to three stores in turn, by several ways. `rows` has those that were timed, whatever
/// comes after them.
async fn pack_rows<B: TimedSelection>(
    backend: &B,
    guard: &mut Guard,
    (shape, tokens, mixture): (AttentionShape, usize, &BatchFormat),
    rows: &mut Vec<PackRow>,
) -> Result<()> {
    let prompt = Prompt::new(backend, shape, tokens, 1).await?;
    let formats: Vec<SegmentFormat> = mixture.parts().iter().map(|part| part.format).collect();
    let stores_of = stores_of_chunks(mixture, tokens);
    let chunks_of = |store: usize| -> Vec<u32> {
        (0..stores_of.len() as u32).filter(|&chunk| stores_of[chunk as usize] == store).collect()
    };
    let order: Vec<u32> = (0..formats.len()).flat_map(chunks_of).collect();
    let mut packed = FilledStores::new(backend, shape, &formats)?;
    let lengths: Vec<usize> = (0..formats.len()).map(|store| chunks_of(store).len() * CHUNK).collect();
    let span = |(store, &tokens): (usize, &usize)| NewSpan { store, sequence: 0, start: 0, tokens };
    let spans: Vec<NewSpan> = lengths.iter().enumerate().map(span).collect();
    let (gathered, ordered) = (packed.place(backend, &spans).await?, packed.place(backend, &spans).await?);
    let mut indices = Vec::new();
    for store in 0..formats.len() {
        let tokens_of =
            chunks_of(store).into_iter().flat_map(|chunk| (0..CHUNK as u32).map(move |i| chunk * CHUNK as u32 + i));
        let of_head: Vec<u32> = tokens_of.collect();
        indices.push(backend.upload_indices(&of_head.repeat(shape.kv_heads()), shape.kv_heads(), tokens as u32).await?);
    }
    let copy_of = |at: usize| &prompt.copies[at % prompt.copies.len()];
    let rows_of = |tensor| TensorRows { tensor, layout: prompt.rows };
    let [keys, values] = copy_of(0);
    let reordered = [
        backend.reorder_chunks(&shape, rows_of(keys), CHUNK, &order)?,
        backend.reorder_chunks(&shape, rows_of(values), CHUNK, &order)?,
    ];
    let head_major = kvpack::plan::RowLayout::head_major(tokens, &shape);

    let fused = |packed: &mut FilledStores<B>, at: usize| {
        let [keys, values] = copy_of(at);
        let mut spans = gathered.iter().zip(&indices);
        spans.try_for_each(|(span, indices)| {
            let source = SpanSource { rows: prompt.rows, tokens: Rows::Gather(indices), keys, values };
            packed.quantize(backend, span, source)
        })
    };
    let in_order = |packed: &mut FilledStores<B>| {
        let mut first = 0;
        ordered.iter().try_for_each(|span| {
            let tokens = TokenRange::new(first, first + span.span.tokens)?.into();
            first += span.span.tokens;
            let [keys, values] = &reordered;
            packed.quantize(backend, span, SpanSource { rows: head_major, tokens, keys, values })
        })
    };
    fused(&mut packed, 0)?;
    in_order(&mut packed)?;
    check_stored_alike(backend, &packed, &gathered, &ordered).await?;

    let identity: Vec<u32> = (0..tokens as u32).collect();
    let identity = backend.upload_indices(&identity.repeat(shape.kv_heads()), shape.kv_heads(), tokens as u32).await?;
    let copies: Vec<Call<'_, B>> =
        prompt.copies.iter().map(|[keys, _]| Call::Gather { shape, rows: rows_of(keys), kept: &identity }).collect();
    let reorders: Vec<Call<'_, B>> = prompt
        .copies
        .iter()
        .map(|[keys, _]| Call::Reorder { shape, rows: rows_of(keys), chunk_tokens: CHUNK, order: &order })
        .collect();
    for (what, calls) in [("copy the keys in f16", &copies), ("reorder_chunks of the keys in f16", &reorders)] {
        let time = async || {
            let kernels = backend.time_kernels(calls).await?;
            let call = time_calls(backend, &prompt.lse, |at| calls[at % calls.len()].make(backend)).await?;
            Ok((kernels, call))
        };
        rows.push(PackRow::new(what, guard.watch(backend, time).await?));
    }
    let time = async || Ok((None, time_calls(backend, &prompt.lse, |_| in_order(&mut packed)).await?));
    rows.push(PackRow::new("pack keys and values that are in order", guard.watch(backend, time).await?));
    let time = async || Ok((None, time_calls(backend, &prompt.lse, |at| fused(&mut packed, at)).await?));
    rows.push(PackRow::new("pack them while they are gathered", guard.watch(backend, time).await?));
    Ok(())
}

/// The store of every chunk, shuffled: as many chunks of each store as its part of the mixture has tokens.
fn stores_of_chunks(mixture: &BatchFormat, tokens: usize) -> Vec<usize> {
    let parts = mixture.parts().iter().enumerate();
    let mut all: Vec<usize> = parts.flat_map(|(store, part)| vec![store; part.tokens(tokens).len() / CHUNK]).collect();
    fastrand::Rng::with_seed(8).shuffle(&mut all);
    all
}

/// Chunks that were gathered while they were packed are stored as those that were reordered first.
async fn check_stored_alike<B: TimedSelection>(
    backend: &B,
    packed: &FilledStores<B>,
    gathered: &[FilledSpan],
    ordered: &[FilledSpan],
) -> Result<()> {
    for (gathered, ordered) in gathered.iter().zip(ordered) {
        let (gathered, ordered) = (packed.read(backend, gathered).await?, packed.read(backend, ordered).await?);
        let right = gathered == ordered && gathered.0.iter().any(|&x| x != 0.0);
        ensure!(right, Wrong("reordered and gathered chunks are stored differently".into()));
    }
    Ok(())
}

fn print_report(report: &ChunksReport) -> Result<()> {
    say!("{}", report.backend)?;
    let ChunksReport { sequences, tokens, query_heads, kv_heads, head_dim, .. } = report;
    say!("\nDecode, {sequences} × {tokens} tokens, {query_heads} query heads over {kv_heads} KV heads × {head_dim}")?;
    let mut table = print::results(&["stored as", "µs", "% of read bandwidth", "launches"], 1);
    for row in &report.steps {
        let (us, percent) = (figure(row.us, row.spread, 1), format!("{:.0}", row.bandwidth_percent));
        table.add_row([row.what.clone(), us, percent, row.launches.to_string()]);
    }
    say!("{table}")?;
    say!("\nA prompt of {tokens} tokens, one layer, chunks of {CHUNK}")?;
    let mut table = print::results(&["what", "kernels µs", "call µs"], 1);
    for row in &report.packing {
        let kernels = figure_or_dash(row.kernels_us, row.kernels_spread, 1);
        table.add_row([row.what.into(), kernels, figure(row.call_us, row.call_spread, 1)]);
    }
    say!("{table}\n{SPREAD}")?;
    let steps = report.steps.iter().map(|row| (row.what.as_str(), row.guard_low_percent));
    let packing = report.packing.iter().map(|row| (row.what, row.guard_low_percent));
    for (what, low) in steps.chain(packing).filter(|&(_, low)| low > UNSTEADY_PERCENT) {
        say!("{what}: the device ran {low:.0} % below its best before or after it")?;
    }
    Ok(())
}
