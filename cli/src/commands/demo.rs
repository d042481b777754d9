//! `kvpack demo`: in a minute, what packing costs, what it gains, and where to look further.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kvpack::SegmentFormat;
use kvpack::backend::QueryPrecision;
use kvpack::cpu::Cpu;
use kvpack::format::Bits;
use kvpack_report::family::Named;
use kvpack_report::page::of_eval;
use kvpack_report::{BenchRow, EvalReport, RowOutcome, Run, ShapeReport, SummaryRow};

use super::bench::{BenchPlan, Timed, dumped, run_plan};
use super::eval::dump::Task;
use super::eval::layer::Calibrations;
use super::eval::page;
use super::eval::stored::KeptInF16;
use crate::backend::{BackendArgs, Chosen};
use crate::dump::{self, Dump};
use crate::outcome::Outcome;
use crate::print::{self, say};
use crate::provenance;

/// Shows in a minute what packing costs on real keys and values, and what this device can do.
///
/// Every format is evaluated, without a search for calibrations, and the best of each size printed; `kvpack eval` has
/// the long tables. On a machine without a GPU it runs on the CPU backend, which is faster than a software driver.
#[derive(clap::Args)]
pub struct DemoArgs {
    /// The dump (see `kvpack eval`).
    file: PathBuf,
    /// Write PATH.json and a page with plots to PATH.html.
    #[arg(long, value_name = "PATH", default_value = "kvpack-demo")]
    report: PathBuf,
    #[command(flatten)]
    backend: BackendArgs,
}

/// The first and the last tile stay in f16, as people use it.
const KEPT: KeptInF16 = KeptInF16 { first: 128, last: 128 };

/// Sizes of which the best format is shown.
const SIZES: [u32; 6] = [16, 8, 4, 3, 2, 1];

/// Seconds of timed steps of a row, and bytes that they go round.
const SECONDS: f64 = 0.1;
const FOOTPRINT: u64 = 32 << 20;

/// Runs the command.
pub fn run(args: &DemoArgs) -> Result<Outcome> {
    page::try_files(&args.report, [args.file.as_path()])?;
    let dump = dump::read(&args.file).with_context(|| args.file.display().to_string())?;
    let backend = args.backend.open()?.or_cpu_for_software();
    let run = provenance::run(backend.driver(), None);
    let demo = Demo { file: &args.file, dump: &dump, report: &args.report };
    match &backend {
        Chosen::Cpu(backend) => demo.show(backend, run),
        Chosen::Wgpu(backend) => demo.show(backend, run),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => demo.show(backend, run),
    }
}

impl Chosen {
    /// The CPU backend in place of a software driver, which computes the same on the same processor, only slower.
    fn or_cpu_for_software(self) -> Self {
        match self {
            Self::Wgpu(backend) if backend.device().adapter_info().device_type == wgpu::DeviceType::Cpu => {
                Self::Cpu(Cpu::new())
            }
            other => other,
        }
    }
}

struct Demo<'a> {
    file: &'a Path,
    dump: &'a Dump,
    report: &'a Path,
}

impl Demo<'_> {
    fn show<B: Timed>(&self, backend: &B, run: Run) -> Result<Outcome> {
        let calibrations = Calibrations::None;
        let task = Task { file: self.file, dump: self.dump, format: None, kept: KEPT, calibrations };
        let report = task.evaluate(run.clone(), backend)?;
        page::write(self.report, &report, &of_eval(&report))?;
        say!("What packing costs: attention over the keys and values in {}\n", self.file.display())?;
        say!("{}", table(&report))?;
        say!(
            "\nerror: of the attention outputs, relative (L2). bits: of an element of the packed tokens, with all ranges.\n"
        )?;
        let outcome = self.decode_step(backend, run)?;
        self.further(backend)?;
        Ok(outcome)
    }

    /// One decode timing, checked first.
    fn decode_step<B: Timed>(&self, backend: &B, run: Run) -> Result<Outcome> {
        let subject = dumped::subject(self.file)?;
        let plan = BenchPlan {
            subjects: vec![subject],
            formats: [SegmentFormat::F16, SegmentFormat::per_channel(Bits::Four)].map(Into::into).into(),
            footprint: FOOTPRINT,
            query: QueryPrecision::ByFormat,
            not_default: Vec::new(),
            seconds: SECONDS,
        };
        let report = pollster::block_on(run_plan(backend, run, &plan))?;
        report.shapes.iter().try_for_each(print_step)?;
        let wrong = |row: &BenchRow| matches!(row.outcome, RowOutcome::Wrong { .. });
        let failed = report.shapes.iter().flat_map(|shape| &shape.rows).any(wrong);
        Ok(if failed { Outcome::Failed } else { Outcome::Passed })
    }

    fn further<B: Timed>(&self, backend: &B) -> Result<()> {
        say!("This device: {}. `kvpack list` says which kernels serve which format on it.", backend.name())?;
        say!(
            "Is it right, and how fast? `kvpack check` and `kvpack bench`. All formats: `kvpack eval {}`.",
            self.file.display()
        )?;
        Ok(say!("The page with plots: {}", page::with_ending(self.report, ".html").display())?)
    }
}

/// The format with the least error of each size.
fn table(report: &EvalReport) -> comfy_table::Table {
    let mut table = print::results(&["size", "best format", "error", "bits", "times smaller"], 2);
    for size in SIZES {
        let of_size = |row: &&SummaryRow| Named::format(&row.format).is_some_and(|named| named.width == size);
        let rows = report.summary.iter().filter(of_size);
        let Some(best) = rows.min_by(|a, b| a.mean_error.total_cmp(&b.mean_error)) else { continue };
        table.add_row([
            if size == 16 { "f16".into() } else { format!("{size} bit{}", if size == 1 { "" } else { "s" }) },
            if size == 16 { String::new() } else { best.format.clone() },
            print::percent(best.mean_error),
            format!("{:.2}", best.packed_bits),
            format!("{:.1}", 16.0 / best.packed_bits),
        ]);
    }
    table
}

fn print_step(shape: &ShapeReport) -> Result<()> {
    let step = format!(
        "{} sequences of {} tokens, {} query heads over {} KV heads × {}",
        shape.sequences, shape.tokens, shape.query_heads, shape.kv_heads, shape.head_dim
    );
    for row in &shape.rows {
        if let RowOutcome::Wrong { reason } = &row.outcome {
            say!("A decode step, {}: WRONG, {reason}", row.format)?;
            continue;
        }
        match row.outcome.figures() {
            Some(figures) => {
                let times = figures.times_f16.filter(|_| row.format != "f16");
                let times = times.map_or(String::new(), |times| format!(", {times:.2} times as fast as f16"));
                let checked = row.nmse.map_or(String::new(), |nmse| format!(", NMSE {nmse:.0e} against f64"));
                say!("A decode step, {}: {:.1} µs{times}{checked}", row.format, figures.step_us)?;
            }
            None => say!("A decode step, {}: not timed on this device; `kvpack bench` says why", row.format)?,
        }
    }
    Ok(say!("({step})\n")?)
}
