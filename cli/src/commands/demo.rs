//! `kvpack demo`: in a minute, what packing costs, what it gains, and where to look further.

use std::path::{Path, PathBuf};

use anyhow::Result;
use kvpack::SegmentFormat;
use kvpack::backend::QueryPrecision;
use kvpack::format::Bits;
use kvpack_report::family::Named;
use kvpack_report::page::of_eval;
use kvpack_report::{BenchRow, EvalReport, RowOutcome, Run, ShapeReport, SummaryRow};

use super::bench::output::unsteady;
use super::bench::{BenchPlan, NotWatched, Subject, Timed, UNSTEADY_PERCENT, dumped, run_plan};
use super::eval::dump::Task;
use super::eval::layer::Calibrations;
use super::eval::page;
use super::eval::stored::KeptInF16;
use crate::backend::{BackendArgs, Chosen};
use crate::dump::{self, NamedDump};
use crate::outcome::Outcome;
use crate::print::{self, one_line, say};
use crate::provenance;

/// Show in a minute what packing costs on real keys and values, and how fast this device is with them.
///
/// The demo evaluates every format on a dump and prints the best recipe of each size. The first and last 128 tokens
/// stay in f16, as people use it; `kvpack eval --keep-first 128 --keep-last 128` prints every row of the same figures.
/// Then one decode step is timed in f16 and in 4 bits, checked against f64 first.
#[derive(clap::Args)]
pub struct DemoArgs {
    /// A dump, see `kvpack eval --help` [default: the bundled one, three layers of SmolLM2-135M].
    file: Option<PathBuf>,
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
    page::try_files(&args.report, args.file.as_deref())?;
    let dump = dump::open(args.file.as_deref())?;
    let backend = args.backend.open()?;
    let run = provenance::run(backend.driver(), None);
    let demo = Demo { file: args.file.as_deref(), dump, report: &args.report };
    match &backend {
        Chosen::Cpu(backend) => demo.show(backend, run),
        Chosen::Wgpu(backend) => demo.show(backend, run),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => demo.show(backend, run),
    }
}

struct Demo<'a> {
    /// Where the dump is from; none where it is the bundled one.
    file: Option<&'a Path>,
    dump: NamedDump,
    report: &'a Path,
}

impl Demo<'_> {
    fn show<B: Timed>(self, backend: &B, run: Run) -> Result<Outcome> {
        let NamedDump { name, dump } = &self.dump;
        let task = Task { name, dump, format: None, kept: KEPT, calibrations: Calibrations::None };
        let report = task.evaluate(run.clone(), backend)?;
        page::write(self.report, &report, &of_eval(&report))?;
        let what = report.model.as_deref().map_or_else(|| name.clone(), |model| one_line(model).into_owned());
        say!("What packing costs: attention over keys and values of {what}\n")?;
        say!("{}", table(&report))?;
        say!(
            "\nerror: relative L2 error of the attention outputs. bits: per element of the packed tokens, ranges included."
        )?;
        say!("The first {} and last {} tokens stay in f16.\n", KEPT.first, KEPT.last)?;
        let (file, page) = (self.file, page::with_ending(self.report, ".html"));
        let outcome = decode_step(self.dump, backend, run)?;
        further(backend, file, &page)?;
        Ok(outcome)
    }
}

/// One decode timing, checked first.
fn decode_step<B: Timed>(dump: NamedDump, backend: &B, run: Run) -> Result<Outcome> {
    let (decode, data) = dumped::data(dump);
    let formats = [SegmentFormat::F16, SegmentFormat::per_channel(Bits::Four)].map(Into::into).into();
    let plan = BenchPlan {
        subjects: vec![Subject { decode, data: Some(data), formats }],
        footprint: FOOTPRINT,
        query: QueryPrecision::ByFormat,
        not_default: Vec::new(),
        seconds: SECONDS,
    };
    let mut report = plan.report(backend, run);
    pollster::block_on(run_plan(backend, &plan, &mut report, &mut NotWatched))?;
    report.shapes.iter().try_for_each(print_step)?;
    let wrong = |row: &BenchRow| matches!(row.outcome, RowOutcome::Wrong { .. });
    let failed = report.shapes.iter().flat_map(|shape| &shape.rows).any(wrong);
    Ok(if failed { Outcome::Failed } else { Outcome::Passed })
}

fn further<B: Timed>(backend: &B, file: Option<&Path>, page: &Path) -> Result<()> {
    let file = file.map_or(String::new(), |file| format!(" {}", file.display()));
    say!("This device: {}. `kvpack list` shows which kernels serve which recipe on it.", backend.name())?;
    say!("Is it right, and how fast? `kvpack check` and `kvpack bench`.")?;
    let KeptInF16 { first, last } = KEPT;
    say!("Every format: `kvpack eval{file} --keep-first {first} --keep-last {last}`.")?;
    Ok(say!("The page with plots: {}", page.display())?)
}

/// The recipe with the least error of each size.
fn table(report: &EvalReport) -> comfy_table::Table {
    let mut table = print::results(&["size", "best recipe", "error", "bits", "times smaller", "format"], 2);
    for size in SIZES {
        // What no recipe names, nobody can use as it is.
        let of_size = |row: &&SummaryRow| {
            row.recipe.is_some() && Named::format(&row.format).is_some_and(|named| named.width == size)
        };
        let rows = report.summary.iter().filter(of_size);
        let Some(best) = rows.min_by(|a, b| a.mean_error.total_cmp(&b.mean_error)) else { continue };
        table.add_row([
            if size == 16 { "f16".into() } else { format!("{size} bit{}", if size == 1 { "" } else { "s" }) },
            best.name().to_owned(),
            print::percent(best.mean_error),
            format!("{:.2}", best.packed_bits),
            format!("{:.1}", 16.0 / best.packed_bits),
            if size == 16 { String::new() } else { best.format.clone() },
        ]);
    }
    if let Some(column) = table.column_mut(5) {
        column.set_cell_alignment(comfy_table::CellAlignment::Left);
    }
    table
}

fn print_step(shape: &ShapeReport) -> Result<()> {
    for row in &shape.rows {
        let name = row.name();
        if let RowOutcome::Wrong { reason } = &row.outcome {
            say!("A decode step, {name}: WRONG, {reason}")?;
            continue;
        }
        let Some(figures) = row.outcome.figures() else {
            say!("A decode step, {name}: not timed on this device; `kvpack bench` says why")?;
            continue;
        };
        let spread = figures.spread.map_or(String::new(), |spread| {
            format!(" ± {:.1} % (n = {})", spread.percent_of(figures.step_us), spread.samples)
        });
        let times = figures.times_f16.filter(|_| row.format != "f16");
        let times = times.map_or(String::new(), |times| format!(", {times:.2} times as fast as f16"));
        let checked = row.nmse.map_or(String::new(), |nmse| format!(", NMSE {nmse:.0e} against f64"));
        say!("A decode step, {name}: {:.1} µs{spread}{times}{checked}", figures.step_us)?;
        if figures.guard_low_percent > UNSTEADY_PERCENT {
            say!("{}", unsteady(name, figures))?;
        }
    }
    Ok(say!("({})\n", shape.described())?)
}
