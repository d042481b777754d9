//! Causal runs: the newest queries of one long sequence, which share their reads, compared with the same queries as
//! decode steps of separate sequences.

use anyhow::{Result, ensure};
use indicatif::ProgressBar;
use kvpack::backend::AttendOptions;
use kvpack::conformance::{DecodeData, DecodeShape, Workload};
use kvpack::cpu::nmse;
use kvpack::format::{AffineFormat, Grouping, TensorFormat};
use kvpack::{AttentionShape, Bits, SegmentFormat};
use kvpack_report::{Run, Skipped, Spread};
use serde::Serialize;

use super::UNSTEADY_PERCENT;
use super::output::Style;
use super::timed::{Guard, SPREAD, Timed, figure, skipped};
use crate::outcome::{Outcome, Wrong};
use crate::print::{self, note, say};
use crate::provenance;

pub(super) const HEAD_DIM: usize = 128;

/// Queries of a run.
const QUERIES: [usize; 5] = [1, 2, 8, 64, 512];

/// What runs and single queries may differ by: both round, and weights of one byte do so in other blocks.
const MOST_NMSE: f64 = 1e-4;

/// Seconds of timed steps for a row, at least.
const SECONDS: f64 = 0.05;

/// What was found, as it is printed in JSON.
#[derive(Serialize)]
#[serde(tag = "kind", rename = "causal")]
struct CausalReport {
    backend: String,
    run: Run,
    query_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    tokens: usize,
    rows: Vec<CausalRow>,
    skipped: Vec<Skipped>,
}

/// One format and length of run.
#[derive(Serialize)]
struct CausalRow {
    format: String,
    queries: usize,
    /// The queries as one causal run.
    run_us: f64,
    run_spread: Spread,
    /// The same queries as decode steps of sequences of their own.
    apart_us: f64,
    apart_spread: Spread,
    /// Of the run's outputs against those of single queries.
    nmse: f64,
    timer: &'static str,
    /// How much of the guard's best rate was missing before or after, in percent.
    guard_low_percent: f64,
}

/// Times all rows and prints them.
///
/// # Errors
/// When the backend fails; [`Wrong`] when a run differs from its queries one by one.
pub fn run<B: Timed>(backend: &B, driver: String, formats: &[SegmentFormat], style: Style) -> Result<Outcome> {
    let run = provenance::run(driver, None);
    pollster::block_on(run_rows(backend, run, formats, style))
}

/// The formats of the suite.
pub fn formats() -> [SegmentFormat; 6] {
    let token = TensorFormat::Affine(AffineFormat::new(Bits::Eight, Grouping::Token));
    [
        SegmentFormat::F16,
        SegmentFormat { key: token, value: token },
        SegmentFormat::calibquant(Bits::Four),
        SegmentFormat::saw_int4(),
        SegmentFormat::turboquant(Bits::Four, HEAD_DIM),
        SegmentFormat::calibquant(Bits::One),
    ]
}

async fn run_rows<B: Timed>(backend: &B, run: Run, formats: &[SegmentFormat], style: Style) -> Result<Outcome> {
    let sizes = backend.sizes();
    let shape = AttentionShape::new(32, 8, HEAD_DIM)?;
    // A software device gets what it can do in a while.
    let tokens = if sizes.is_gpu() { 32_768 } else { 2048 };
    let mut report = CausalReport {
        backend: backend.name(),
        run,
        query_heads: shape.query_heads(),
        kv_heads: shape.kv_heads(),
        head_dim: shape.head_dim(),
        tokens,
        rows: Vec::new(),
        skipped: Vec::new(),
    };
    let done = time_rows(backend, shape, formats, &mut report).await;
    style.print(&report, print_report)?;
    done.map(|()| Outcome::Passed)
}

async fn time_rows<B: Timed>(
    backend: &B,
    shape: AttentionShape,
    formats: &[SegmentFormat],
    report: &mut CausalReport,
) -> Result<()> {
    let progress = ProgressBar::new((formats.len() * QUERIES.len()) as u64).with_style(print::bar());
    let mut guard = Guard::new(backend).await?;
    for &format in formats {
        progress.set_message(format.to_string());
        let mut stored = match Stored::new(backend, (shape, report.tokens), format).await {
            Ok(stored) => stored,
            Err(error) => {
                report.skipped.push(progress.suspend(|| skipped(format.to_string(), error))?);
                progress.inc(QUERIES.len() as u64);
                continue;
            }
        };
        for queries in QUERIES {
            let what = format!("{queries} queries, {format}");
            progress.set_message(what.clone());
            match stored.row(backend, &mut guard, queries).await {
                Ok(row) => report.rows.push(row),
                Err(error) => report.skipped.push(progress.suspend(|| skipped(what, error))?),
            }
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    Ok(())
}

/// A sequence in one format, checked against f64.
struct Stored<B: Timed> {
    format: SegmentFormat,
    shape: AttentionShape,
    workload: Workload<B>,
    data: DecodeData<B>,
}

impl<B: Timed> Stored<B> {
    async fn new(backend: &B, (shape, tokens): (AttentionShape, usize), format: SegmentFormat) -> Result<Self> {
        let data = DecodeData::generated(backend, DecodeShape::even("causal", shape, 1, tokens)).await?;
        let footprint = backend.sizes().footprint;
        let workload = Workload::new(backend, &data, format.into(), footprint).await?;
        // The outputs of single queries are compared with f64 first.
        let checked = workload.check(backend, &data, AttendOptions::default()).await?;
        ensure!(checked.passed(), Wrong(format!("{format}: {}", checked.reason())));
        Ok(Self { format, shape, workload, data })
    }

    /// Times the newest `queries` tokens' queries, as a run and apart.
    async fn row(&mut self, backend: &B, guard: &mut Guard, queries: usize) -> Result<CausalRow> {
        let (format, row) = (self.format, self.shape.query_heads() * self.shape.head_dim());
        // All look for the newest token, which the last of them alone sees.
        let nearly = |(i, x): (usize, f32)| x * (1.0 + 0.02 * (i as f32 * 0.7).sin());
        let rows = self.data.host().queries[..row].repeat(queries).into_iter().enumerate().map(nearly);
        let rows: Vec<f32> = rows.collect();
        self.data.set_queries(backend, &rows).await?;

        let options = AttendOptions::default();
        let before = guard.look(backend).await?;
        self.workload.plan_causal_apart(queries)?;
        let single = self.output(backend, options).await?;
        let apart = backend.time_steps(&self.workload, &self.data, options, SECONDS).await?;
        self.workload.plan_causal(queries)?;
        let together = self.output(backend, options).await?;
        let run = backend.time_steps(&self.workload, &self.data, options, SECONDS).await?;
        let after = guard.look(backend).await?;

        let single: Vec<f64> = single.into_iter().map(f64::from).collect();
        let nmse = nmse(&together, &single);
        let wrong = || Wrong(format!("{queries} queries, {format}: NMSE {nmse:.1e} against single queries"));
        ensure!(nmse <= MOST_NMSE, wrong());
        let (run_us, apart_us) = (run.seconds * 1e6, apart.seconds * 1e6);
        let guard_low_percent = guard.missing(before.min(after)) * 100.0;
        Ok(CausalRow {
            format: format.to_string(),
            queries,
            run_us,
            run_spread: run.spread,
            apart_us,
            apart_spread: apart.spread,
            nmse,
            timer: run.timer,
            guard_low_percent,
        })
    }

    async fn output(&self, backend: &B, options: AttendOptions) -> Result<Vec<f32>> {
        let (plan, stores) = (&self.workload.plans[0], self.workload.stores());
        let output = backend.attend(plan, &stores, self.data.queries(), options).await?;
        Ok(backend.download(&output).await?)
    }
}

fn print_report(report: &CausalReport) -> Result<()> {
    let CausalReport { backend, query_heads, kv_heads, head_dim, tokens, .. } = report;
    say!("{backend}\n")?;
    say!("{query_heads} query over {kv_heads} KV heads of {head_dim}, one sequence of {tokens} tokens\n")?;
    say!("{:<44} {:>7} {:>23} {:>23} {:>7} {:>8}", "format", "queries", "run µs", "apart µs", "times", "NMSE")?;
    for row in &report.rows {
        let CausalRow { format, queries, run_us, apart_us, nmse, guard_low_percent, .. } = row;
        let times = apart_us / run_us;
        let (run, apart) = (figure(*run_us, row.run_spread, 1), figure(*apart_us, row.apart_spread, 1));
        say!("{format:<44} {queries:>7} {run:>23} {apart:>23} {times:>7.2} {nmse:>8.0e}")?;
        if *guard_low_percent > UNSTEADY_PERCENT {
            note!("the device ran {guard_low_percent:.0} % below its best around that row");
        }
    }
    say!("{SPREAD}")?;
    Ok(())
}
