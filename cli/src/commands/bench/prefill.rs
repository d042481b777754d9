//! Prompts and drafts: many new queries per sequence, through `KvCache::attend_into`, by the wall clock.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use indicatif::ProgressBar;
use kvpack::backend::QueryPrecision;
use kvpack::cache::{KvCache, PromptSpan, Recipe};
use kvpack::conformance::Limits;
use kvpack::cpu::nmse;
use kvpack::format::{AffineFormat, Grouping, TILE_TOKENS, TensorFormat};
use kvpack::plan::{ElementType, Elements, QueryRun, RowLayout, TokenRange, Visible};
use kvpack::{AttentionShape, Backend, Bits, SegmentFormat};
use kvpack_report::{Run, Skipped, Spread, StepTimes, recipes};
use serde::Serialize;

use super::output::Style;
use super::timed::{Guard, OFFSET, OFFSET_CHANNEL, Timed, WALL_CLOCK, random_rows, skipped};
use super::{BenchArgs, UNSTEADY_PERCENT};
use crate::outcome::{Outcome, Wrong};
use crate::print::{self, note, say};
use crate::provenance;

/// Samples of a row.
const SAMPLES: usize = 7;

/// Seconds of a sample, at least: many calls are queued, then the device is waited for once. The wait takes as long as
/// a hundredth of a prompt of 16k tokens. With samples of this length it is a thousandth.
const SECONDS: f64 = 0.15;

/// Queries of a checked sequence that are compared with f64: the first, the middle and the last.
const CHECKED: usize = 3;

/// What was found, as it is printed in JSON.
#[derive(Serialize)]
#[serde(tag = "kind", rename = "prefill")]
struct PrefillReport {
    backend: String,
    run: Run,
    rows: Vec<PrefillRow>,
    skipped: Vec<Skipped>,
}

/// One batch of prompts in one format.
#[derive(Serialize)]
struct PrefillRow {
    /// The batch in words.
    batch: String,
    query_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// The recipe that stores in this format, or the format.
    format: String,
    /// A call of `KvCache::attend_into`, in microseconds, the median of the samples.
    wall_us: f64,
    #[serde(flatten)]
    spread: Spread,
    /// 4 · head_dim · query_heads · (pairs of a query and a token that it sees) in 10^12 per second.
    tflops: f64,
    /// Of the checked outputs against f64 over the stored data.
    nmse: f64,
    /// How much of the guard's best rate was missing before or after, in percent.
    guard_low_percent: f64,
}

/// Sequences of a batch: tokens that each holds, and how many of the newest have queries.
struct Batch {
    name: String,
    shape: AttentionShape,
    sequences: Vec<(usize, usize)>,
}

impl Batch {
    fn new(name: &str, (kv_heads, head_dim): (usize, usize), sequences: Vec<(usize, usize)>) -> Result<Self> {
        let shape = AttentionShape::new(32, kv_heads, head_dim)?;
        Ok(Self { name: name.into(), shape, sequences })
    }

    /// Its name and its heads, which no two batches share.
    fn label(&self) -> String {
        let shape = &self.shape;
        format!("{}, {}/{}×{}", self.name, shape.query_heads(), shape.kv_heads(), shape.head_dim())
    }

    fn runs(&self) -> Vec<QueryRun> {
        let run =
            |(sequence, &(_, queries)): (usize, &(usize, usize))| QueryRun::new(sequence, queries, Visible::Causal);
        self.sequences.iter().enumerate().map(run).collect()
    }

    fn queries(&self) -> usize {
        self.sequences.iter().map(|(_, queries)| queries).sum()
    }

    /// Floating-point operations of exact attention: a product with a key and one with a value for every pair.
    fn operations(&self) -> f64 {
        let pairs = |&(tokens, queries): &(usize, usize)| {
            (queries * (tokens - queries)) as f64 + (queries * (queries + 1)) as f64 / 2.0
        };
        let pairs: f64 = self.sequences.iter().map(pairs).sum();
        4.0 * (self.shape.head_dim() * self.shape.query_heads()) as f64 * pairs
    }
}

/// What of the suite to time: all without a choice.
pub struct Chosen<'a> {
    recipe: Option<&'a str>,
    shape: Option<&'a str>,
}

impl<'a> Chosen<'a> {
    pub fn of(args: &'a BenchArgs) -> Self {
        Self { recipe: args.format.as_deref(), shape: args.shape.as_deref() }
    }

    fn batches(&self, is_gpu: bool) -> Result<Vec<Batch>> {
        let all = all_batches(is_gpu)?;
        let Some(text) = self.shape else { return Ok(all) };
        let names = all.iter().map(|batch| format!("'{}'", batch.label())).collect::<Vec<_>>().join(", ");
        let chosen: Vec<Batch> = all.into_iter().filter(|batch| batch.label().contains(text)).collect();
        if chosen.is_empty() {
            bail!("no prompts have a name that contains '{text}'; --suite prefill has {names}");
        }
        Ok(chosen)
    }
}

/// The batches of the suite. Software computes small ones.
fn all_batches(is_gpu: bool) -> Result<Vec<Batch>> {
    let whole = |count: usize, tokens: usize| vec![(tokens, tokens); count];
    let drafts = |queries: usize, tokens: usize| vec![(tokens, queries); 8];
    if !is_gpu {
        return Ok(vec![
            Batch::new("1 × 128", (8, 64), whole(1, 128))?,
            Batch::new("ragged", (8, 64), vec![(150, 40), (130, 5), (64, 1)])?,
            Batch::new("8 drafts of 4 over 128", (8, 64), drafts(4, 128))?,
        ]);
    }
    let mut batches = vec![
        Batch::new("1 × 16k", (8, 128), whole(1, 16_384))?,
        Batch::new("4 × 4k", (8, 128), whole(4, 4096))?,
        Batch::new("16 × 1k", (8, 128), whole(16, 1024))?,
        Batch::new("1 × 16k", (8, 64), whole(1, 16_384))?,
        Batch::new("1 × 16k", (8, 256), whole(1, 16_384))?,
        Batch::new("2k over 34k", (8, 128), vec![(34_816, 2048)])?,
        Batch::new(
            "ragged: 9k, 4k, 1k, 100, 8 over 32k, 1 over 8k",
            (8, 128),
            vec![(9000, 9000), (4096, 4096), (1000, 1000), (100, 100), (32_768, 8), (8192, 1)],
        )?,
    ];
    for queries in [1, 2, 4, 8, 16] {
        batches.push(Batch::new(&format!("8 drafts of {queries} over 32k"), (8, 128), drafts(queries, 32_768))?);
    }
    Ok(batches)
}

/// f16 and the format of a recipe, or f16 and every way to pack.
fn formats(shape: &AttentionShape, recipe: Option<&str>) -> Result<Vec<SegmentFormat>> {
    let token = TensorFormat::Affine(AffineFormat::new(Bits::Eight, Grouping::Token));
    let packed = match recipe {
        Some(text) => match recipes::format_of(text, shape) {
            Ok(format) => vec![format],
            Err(_) => bail!("--format '{text}' is no recipe{}; --suite prefill takes one", recipes::reason(text)),
        },
        None => vec![
            SegmentFormat { key: token, value: token },
            SegmentFormat::calibquant(Bits::Four),
            SegmentFormat::saw_int4(),
            SegmentFormat::turboquant(Bits::Four, shape.head_dim()),
            SegmentFormat::kivi(Bits::Four),
            SegmentFormat::calibquant(Bits::Two),
            SegmentFormat::calibquant(Bits::One),
        ],
    };
    let others = packed.into_iter().filter(|format| *format != SegmentFormat::F16);
    Ok(std::iter::once(SegmentFormat::F16).chain(others).collect())
}

/// Times all rows and prints them as they end.
///
/// # Errors
/// When the backend fails; [`Wrong`] when an output differs from f64.
pub fn run<B: Timed + Clone>(backend: &B, driver: String, chosen: Chosen<'_>, style: Style) -> Result<Outcome> {
    let batches = chosen.batches(backend.sizes().is_gpu())?;
    let run = provenance::run(driver, None);
    let mut report = PrefillReport { backend: backend.name(), run, rows: Vec::new(), skipped: Vec::new() };
    let done = time_rows(backend, (&batches, chosen.recipe), style, &mut report);
    // What was measured is printed, whatever came after it.
    if style == Style::Json {
        print::json(&report)?;
    } else {
        say!("\n{}: KvCache::attend_into by the wall clock, median of {SAMPLES} samples.", report.backend)?;
        say!("TFLOP/s: 4 · head_dim · query heads · pairs of a query and a token that it sees.")?;
        say!(
            "NMSE: of {CHECKED} queries of every sequence against f64; of sequences alike, the first and the last of all."
        )?;
    }
    done.map(|()| Outcome::Passed)
}

/// Times all rows, and prints them as they end unless they are printed as JSON.
fn time_rows<B: Timed + Clone>(
    backend: &B,
    (batches, recipe): (&[Batch], Option<&str>),
    style: Style,
    report: &mut PrefillReport,
) -> Result<()> {
    let formats = batches.iter().map(|batch| formats(&batch.shape, recipe)).collect::<Result<Vec<_>>>()?;
    let progress = ProgressBar::new(formats.iter().map(Vec::len).sum::<usize>() as u64).with_style(print::bar());
    let mut guard = pollster::block_on(Guard::new(backend))?;
    for (batch, formats) in batches.iter().zip(formats) {
        for format in formats {
            let what = format!("{}, {format}", batch.label());
            progress.set_message(what.clone());
            match pollster::block_on(row(backend, &mut guard, batch, format)) {
                Ok(row) => {
                    if style != Style::Json {
                        progress.suspend(|| print_row(&row, report.rows.is_empty()))?;
                    }
                    report.rows.push(row);
                }
                Err(error) => report.skipped.push(progress.suspend(|| skipped(what, error))?),
            }
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    Ok(())
}

async fn row<B: Timed + Clone>(
    backend: &B,
    guard: &mut Guard,
    batch: &Batch,
    format: SegmentFormat,
) -> Result<PrefillRow> {
    let shape = batch.shape;
    let mut cache = KvCache::new(backend.clone(), shape, batch.sequences.len(), recipe(format))?;
    fill(backend, &mut cache, batch).await?;
    let row = shape.query_heads() * shape.head_dim();
    let host = random_rows(batch.queries() * row, shape.head_dim(), 3);
    let queries = backend.upload(Elements::F16(&host)).await?;
    let runs = batch.runs();
    let mut output = cache.attend_runs(&runs, &queries, ElementType::F16).await?;
    let nmse = check(backend, &cache, batch, (&host, &output)).await?;
    let most = Limits::of_step(backend, QueryPrecision::ByFormat, [&format])?.nmse;
    ensure!(nmse <= most, Wrong(format!("{}, {format}: NMSE {nmse:.1e} against f64", batch.label())));

    // A download waits for all that was queued before it.
    let mark = backend.upload(Elements::F16(&host[..row])).await?;
    let (times, guard_low_percent) = guard
        .watch(backend, async || {
            time(&cache, (&runs, &queries, &mut output), async || backend.download(&mark).await.map(drop)).await
        })
        .await?;
    Ok(PrefillRow {
        batch: batch.name.clone(),
        query_heads: shape.query_heads(),
        kv_heads: shape.kv_heads(),
        head_dim: shape.head_dim(),
        format: recipes::of_format(&format, &shape).unwrap_or_else(|| format.to_string()),
        wall_us: times.seconds * 1e6,
        spread: times.spread,
        tflops: batch.operations() / times.seconds / 1e12,
        nmse,
        guard_low_percent,
    })
}

/// Seconds of a call, in samples of many calls each.
async fn time<B: Backend>(
    cache: &KvCache<B>,
    (runs, queries, output): (&[QueryRun], &B::Tensor, &mut B::Tensor),
    wait: impl AsyncFn() -> kvpack::Result<()>,
) -> Result<StepTimes> {
    let mut calls = async |count: usize| -> kvpack::Result<f64> {
        wait().await?;
        let start = Instant::now();
        for _ in 0..count {
            cache.attend_into(runs, queries, output).await?;
        }
        wait().await?;
        Ok(start.elapsed().as_secs_f64() / count as f64)
    };
    let first = calls(1).await?;
    let once = calls(1).await?.min(first);
    let count = (SECONDS / once.max(1e-7)).ceil().clamp(1.0, 1000.0) as usize;
    let mut samples = Vec::with_capacity(SAMPLES);
    for _ in 0..SAMPLES {
        samples.push(calls(count).await?);
    }
    Ok(StepTimes::new(WALL_CLOCK, Vec::new(), samples))
}

fn recipe(format: SegmentFormat) -> Recipe {
    match format {
        SegmentFormat::F16 => Recipe::f16(),
        packed => Recipe::pack_all(packed),
    }
}

/// Stores the tokens of every sequence. Sequences of one length hold the same, each in pages of its own.
async fn fill<B: Timed>(backend: &B, cache: &mut KvCache<B>, batch: &Batch) -> Result<()> {
    let shape = batch.shape;
    let mut uploaded: Option<(usize, B::Tensor, B::Tensor)> = None;
    for (sequence, &(tokens, _)) in batch.sequences.iter().enumerate() {
        let (keys, values) = match &uploaded {
            Some((length, keys, values)) if *length == tokens => (keys, values),
            _ => {
                let elements = tokens * shape.kv_heads() * shape.head_dim();
                let [keys, values] = [4, 5].map(|seed| random_rows(elements, shape.head_dim(), seed));
                let (keys, values) = told_apart(keys, values, &shape);
                let (keys, values) =
                    (backend.upload(Elements::F16(&keys)).await?, backend.upload(Elements::F16(&values)).await?);
                let (_, keys, values) = uploaded.insert((tokens, keys, values));
                (&*keys, &*values)
            }
        };
        let range = TokenRange::new(0, tokens)?;
        let span = if cache.recipe().packs() { PromptSpan::packed(range) } else { PromptSpan::f16(range) };
        cache.prefill(sequence, RowLayout::token_major(tokens, &shape), keys, values, &[span]).await?;
    }
    Ok(())
}

/// Weight of the newest token, in comparison with all others of its sequence.
const NEWEST: f32 = 0.03;

/// Keys and values that show what a kernel leaves out or sees too much of: all queries look for the newest token, which
/// the last of them alone sees, and the means of values differ from tile to tile.
fn told_apart(
    mut keys: Vec<half::f16>,
    mut values: Vec<half::f16>,
    shape: &AttentionShape,
) -> (Vec<half::f16>, Vec<half::f16>) {
    let dim = shape.head_dim();
    let token = shape.kv_heads() * dim;
    let add = |to: &mut half::f16, more: f32| *to = half::f16::from_f32(to.to_f32() + more);
    let newest = keys.len() - token;
    let nats = (NEWEST * (keys.len() / token) as f32).ln().max(0.0);
    for row in keys[newest..].chunks_exact_mut(dim) {
        add(&mut row[OFFSET_CHANNEL], nats * (dim as f32).sqrt() / OFFSET);
    }
    let mut random = fastrand::Rng::with_seed(6);
    for tile in values.chunks_mut(TILE_TOKENS * token) {
        for kv_head in 0..shape.kv_heads() {
            let mean = 24.0 * (random.f32() - 0.5);
            tile.chunks_exact_mut(token).for_each(|row| add(&mut row[kv_head * dim], mean));
        }
    }
    (keys, values)
}

/// The error of some queries of every sequence against f64 over the stored data.
async fn check<B: Timed>(
    backend: &B,
    cache: &KvCache<B>,
    batch: &Batch,
    (queries, output): (&[half::f16], &B::Tensor),
) -> Result<f64> {
    let (row, output) = (batch.shape.query_heads() * batch.shape.head_dim(), backend.download(output).await?);
    let (mut got, mut want, mut first) = (Vec::new(), Vec::new(), 0);
    let last = batch.sequences.len() - 1;
    for (sequence, &(tokens, count)) in batch.sequences.iter().enumerate() {
        // Of sequences alike the first is checked, and the last of all.
        if sequence != last && sequence > 0 && batch.sequences[sequence - 1] == (tokens, count) {
            first += count;
            continue;
        }
        let stored = Stored::read(backend, cache, sequence).await?;
        for checked in 0..CHECKED {
            let query = checked * (count - 1) / (CHECKED - 1);
            let at = (first + query) * row..(first + query + 1) * row;
            got.extend_from_slice(&output[at.clone()]);
            want.extend(stored.attend(&batch.shape, &queries[at], tokens - count + query + 1));
        }
        first += count;
    }
    Ok(nmse(&got, &want))
}

/// The decoded keys and values of a sequence, span by span: `[kv_heads, tokens, head_dim]`.
struct Stored {
    spans: Vec<(usize, Vec<f32>, Vec<f32>)>,
}

impl Stored {
    async fn read<B: Timed>(backend: &B, cache: &KvCache<B>, sequence: usize) -> Result<Self> {
        let mut spans = Vec::new();
        for span in cache.dequantize(sequence)? {
            spans.push((span.tokens, backend.download(&span.keys).await?, backend.download(&span.values).await?));
        }
        Ok(Self { spans })
    }

    /// One query of every head over the first `visible` tokens.
    fn attend(&self, shape: &AttentionShape, query: &[half::f16], visible: usize) -> Vec<f64> {
        let dim = shape.head_dim();
        let group = shape.query_heads() / shape.kv_heads();
        let head = |head: usize| {
            let query = &query[head * dim..(head + 1) * dim];
            let dot = |key: &[f32]| -> f64 { key.iter().zip(query).map(|(k, q)| f64::from(*k) * q.to_f64()).sum() };
            let rows: Vec<(f64, &[f32])> = self
                .rows(head / group, dim)
                .take(visible)
                .map(|(key, value)| (dot(key) / (dim as f64).sqrt(), value))
                .collect();
            let largest = rows.iter().fold(f64::NEG_INFINITY, |largest, (score, _)| largest.max(*score));
            let (mut sum, mut output) = (0.0, vec![0.0; dim]);
            for (score, value) in rows {
                let weight = (score - largest).exp();
                sum += weight;
                output.iter_mut().zip(value).for_each(|(out, v)| *out += weight * f64::from(*v));
            }
            output.iter_mut().for_each(|out| *out /= sum);
            output
        };
        (0..shape.query_heads()).flat_map(head).collect()
    }

    /// The keys and values of one KV head, token by token.
    fn rows(&self, kv_head: usize, dim: usize) -> impl Iterator<Item = (&[f32], &[f32])> {
        self.spans.iter().flat_map(move |(tokens, keys, values)| {
            let of_head = kv_head * tokens * dim..(kv_head + 1) * tokens * dim;
            keys[of_head.clone()].chunks_exact(dim).zip(values[of_head].chunks_exact(dim))
        })
    }
}

fn print_row(row: &PrefillRow, first: bool) -> Result<()> {
    if first {
        say!(
            "{:<46} {:>9} {:<14} {:>10} {:>7} {:>8} {:>6}",
            "batch",
            "heads",
            "recipe",
            "wall µs",
            "±",
            "TFLOP/s",
            "NMSE"
        )?;
    }
    let PrefillRow { batch, query_heads, kv_heads, head_dim, format, wall_us, spread, tflops, nmse, .. } = row;
    let (heads, percent) = (format!("{query_heads}/{kv_heads}×{head_dim}"), spread.percent_of(*wall_us));
    say!("{batch:<46} {heads:>9} {format:<14} {wall_us:>10.1} {percent:>5.1} % {tflops:>8.3} {nmse:>6.0e}")?;
    if row.guard_low_percent > UNSTEADY_PERCENT {
        note!("the device ran {:.0} % below its best around that row", row.guard_low_percent);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kvpack::backend::Device;
    use kvpack::cpu::Cpu;
    use pollster::block_on;

    use super::*;

    /// The check before the timing tells a kernel that sees too much or leaves tiles out.
    #[test]
    fn masks_and_missing_tiles_show() {
        let (backend, tokens, queries) = (Cpu::new(), 64 * TILE_TOKENS, 8);
        let shape = AttentionShape::new(2, 1, 64).unwrap();
        let batch = Batch { name: "drafts".into(), shape, sequences: vec![(tokens, queries)] };
        let host = random_rows(queries * 2 * 64, 64, 3);
        let at = |cache: &KvCache<Cpu>, visible: Visible| {
            let rows = block_on(backend.upload(Elements::F16(&host))).unwrap();
            let run = QueryRun::new(0, queries, visible);
            block_on(cache.attend_runs(&[run], &rows, ElementType::F32)).unwrap()
        };
        let of = |format, bytes: f64| {
            let mut cache = KvCache::new(backend.clone(), shape, 1, recipe(format)).unwrap();
            block_on(fill(&backend, &mut cache, &batch)).unwrap();
            let error = |output| block_on(check(&backend, &cache, &batch, (&host, &output))).unwrap();
            assert!(error(at(&cache, Visible::Causal)) < 1e-6);
            assert!(error(at(&cache, Visible::All)) > bytes, "no mask: {}", error(at(&cache, Visible::All)));
            let without = |tokens| error(at(&cache, Visible::Window { left: tokens }));
            let eighth = without(tokens - tokens / 8);
            assert!(eighth > bytes, "an eighth is missing: {eighth}");
        };
        // The limit of queries of one byte is 1e-4.
        of(SegmentFormat::F16, 1e-3);
        of(SegmentFormat::calibquant(Bits::Four), 1e-3);
    }
}
