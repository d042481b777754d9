//! `kvpack bench`: how fast is this device?

mod append;
mod bandwidth;
mod causal;
mod chunks;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod dumped;
mod evict;
mod run;
mod step;
mod timed;
mod wgpu;

use std::path::PathBuf;

use anyhow::{Result, bail};
use kvpack::SegmentFormat;
use kvpack::backend::QueryPrecision;
use kvpack::conformance::{BatchFormat, DecodeShape, decode_formats, decode_mixes, decode_shapes};
use kvpack_report::{BenchReport, BenchRow, RowOutcome, ShapeReport};

use crate::backend::{BackendArgs, Chosen};
use crate::outcome::Outcome;
use crate::print::{self, say};
use crate::provenance;
use append::TimedStores;
use evict::TimedSelection;
pub use run::BenchPlan;
use run::Subject;
pub use run::run as run_plan;
use step::TimedModel;
pub use timed::Timed;

/// How much of the guard's rate may be missing without a word.
const UNSTEADY_PERCENT: f64 = 10.0;

/// Times decode steps over packed caches, each checked against f64 first.
///
/// A step is everything between the queries and the outputs: query preparation, attention and the merge. Steps go round
/// several copies of the cache so that none finds it in the device's own caches.
#[derive(clap::Args)]
pub struct BenchArgs {
    /// A dump of keys, values and queries (see `kvpack eval`): time its middle layer, stored for a batch of 16, instead
    /// of the shapes of the registry.
    #[arg(conflicts_with = "shape")]
    file: Option<PathBuf>,
    #[command(flatten)]
    backend: BackendArgs,
    /// Two small shapes, the widths of CalibQuant, little memory.
    #[arg(long)]
    quick: bool,
    /// A named choice of shapes and formats. decode: nine steps of head_dim 128 in every format, from one sequence of
    /// 4k tokens to eight of 32k, one of them with its pages in no order, one in spans of 576 tokens (an image each).
    /// append: what storing one more token costs a batch of 64, in every format. mixed: sequences stored in segments of
    /// several precisions, beside each segment alone. causal: the newest 1 to 512 queries of a sequence of 32k tokens
    /// as one run, and as decode steps of as many sequences. step: what an engine pays for a whole decode step of 32
    /// layers, by the wall clock, beside the kernels of it. evict: what it costs to keep a tenth of a prompt of 32k and
    /// 128k tokens, piece by piece, and what decoding gains. chunks: a context in chunks of f16, 4 and 2 bits, brought
    /// together or left apart.
    #[arg(long, value_enum, conflicts_with_all = ["shape", "quick", "file"])]
    suite: Option<SuiteName>,
    /// Only the shape of this name, or the shapes whose name contains this
    /// [default: all on a GPU, those up to 128 MiB of f16 on the CPU, those up to 32 MiB on a software GPU].
    #[arg(long, value_name = "TEXT")]
    shape: Option<String>,
    /// Only f16 and the formats whose name contains this ('4-bit', 'per token'); the suites decode, append and causal
    /// have formats to choose from, the others their own.
    #[arg(long, value_name = "TEXT")]
    format: Option<String>,
    /// Mebibytes of packed keys and values to go round, at least, up to 16384
    /// [default: 1024 on a GPU, 256 on the CPU, 64 on a software GPU, 32 with --quick]. As --query and --seconds it is
    /// for shapes and for the suites decode and mixed; the others time by rules of their own.
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=MOST_FOOTPRINT))]
    footprint: Option<u64>,
    /// Bits of the query, and of the weights of values with a range per channel, in integer dot products
    /// [default: 8 where keys have 4 bits or fewer, 16 where they have 8]. The CPU backend always uses f32.
    #[arg(long, value_enum)]
    query: Option<QueryName>,
    /// Seconds of timed steps for a row, at least [default: 0.1 on a GPU, 0.5 on the CPU]. A load that takes all the
    /// power that a device may draw lowers its clock within a tenth of a second.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    seconds: Option<f64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Most mebibytes to go round: many times the caches of any device.
const MOST_FOOTPRINT: u64 = 16 << 10;

/// Most seconds of timed steps for a row.
const MOST_SECONDS: f64 = 600.0;

fn seconds(text: &str) -> std::result::Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| *seconds > 0.0 && *seconds <= MOST_SECONDS);
    seconds.ok_or_else(|| format!("give seconds above 0, at most {MOST_SECONDS}"))
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum QueryName {
    Int16,
    Int8,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum SuiteName {
    Decode,
    Append,
    Causal,
    Chunks,
    Evict,
    Mixed,
    Step,
}

impl SuiteName {
    /// The name on the command line.
    fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self).map_or(String::new(), |value| value.get_name().to_owned())
    }
}

/// Shapes of the suite `decode`.
const DECODE_SUITE: [&str; 9] = [
    "g4-b8-32k",
    "g4-b8-32k-shuffled",
    "g4-b8-32k-images",
    "g4-b32-8k",
    "g1-b8-8k",
    "g4-b1-4k",
    "g4-b1-128k",
    "g8-b8-32k",
    "g16-b8-32k",
];

/// Shapes of the suite `mixed`.
const MIXED_SUITE: [&str; 2] = ["g4-b8-32k", "g8-b8-32k"];

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<Outcome> {
    args.suite.map_or(Ok(()), |suite| args.refuse_without_effect(suite))?;
    let backend = args.backend.open()?;
    let driver = backend.driver();
    match &backend {
        Chosen::Cpu(backend) => bench(args, backend, driver),
        Chosen::Wgpu(backend) => bench(args, backend, driver),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => bench(args, backend, driver),
    }
}

fn bench<B: TimedStores + TimedModel + TimedSelection>(
    args: &BenchArgs,
    backend: &B,
    driver: String,
) -> Result<Outcome> {
    match args.suite {
        None | Some(SuiteName::Decode | SuiteName::Mixed) => bench_steps(args, backend, driver),
        Some(SuiteName::Append) => {
            append::run(backend, driver, args.segment_formats()?, args.json).map(|()| Outcome::Passed)
        }
        Some(SuiteName::Causal) => causal::run(backend, driver, &args.segment_formats()?, args.json),
        Some(SuiteName::Chunks) => chunks::run(backend, driver, args.json).map(|()| Outcome::Passed),
        Some(SuiteName::Evict) => evict::run(backend, driver, args.json).map(|()| Outcome::Passed),
        Some(SuiteName::Step) => step::run(backend, driver, args.json).map(|()| Outcome::Passed),
    }
}

fn bench_steps<B: Timed>(args: &BenchArgs, backend: &B, driver: String) -> Result<Outcome> {
    let plan = args.plan(backend)?;
    let run = provenance::run(driver, backend.guard_tolerance());
    let report = pollster::block_on(run::run(backend, run, &plan))?;
    if args.json {
        print::json(&report)?;
    } else {
        print_report(&report)?;
    }
    let wrong = |row: &BenchRow| matches!(row.outcome, RowOutcome::Wrong { .. });
    Ok(match report.shapes.iter().flat_map(|shape| &shape.rows).any(wrong) {
        true => Outcome::Failed,
        false => Outcome::Passed,
    })
}

impl BenchArgs {
    /// Refuses the options that have no effect on a suite.
    fn refuse_without_effect(&self, suite: SuiteName) -> Result<()> {
        let name = suite.name();
        if self.format.is_some() && !matches!(suite, SuiteName::Append | SuiteName::Causal | SuiteName::Decode) {
            bail!("--suite {name} has formats of its own; leave --format out");
        }
        let given = [
            (self.footprint.is_some(), "--footprint"),
            (self.query.is_some(), "--query"),
            (self.seconds.is_some(), "--seconds"),
        ];
        match given.into_iter().find(|(given, _)| *given) {
            Some((_, option)) if !matches!(suite, SuiteName::Decode | SuiteName::Mixed) => {
                bail!("--suite {name} times by rules of its own; leave {option} out")
            }
            _ => Ok(()),
        }
    }

    fn plan<B: Timed>(&self, backend: &B) -> Result<BenchPlan> {
        let sizes = backend.sizes();
        let mebibytes = self.footprint.map(|footprint| footprint << 20);
        Ok(BenchPlan {
            subjects: match &self.file {
                Some(file) => vec![dumped::subject(file)?],
                None => {
                    self.shapes(sizes.largest_shape)?.into_iter().map(|decode| Subject { decode, data: None }).collect()
                }
            },
            formats: self.formats()?,
            footprint: mebibytes.unwrap_or(if self.quick { 32 << 20 } else { sizes.footprint }),
            query: match self.query {
                None => QueryPrecision::ByFormat,
                Some(QueryName::Int16) => QueryPrecision::Int16,
                Some(QueryName::Int8) => QueryPrecision::Int8,
            },
            not_default: self.not_default(),
            seconds: self.seconds.unwrap_or(if self.quick { 0.1 } else { sizes.seconds }),
        })
    }

    /// What a row does not show of a user's device who sets nothing.
    fn not_default(&self) -> Vec<String> {
        let query = self.query.map(|query| match query {
            QueryName::Int16 => "query int16".to_owned(),
            QueryName::Int8 => "query int8".to_owned(),
        });
        self.backend.not_default().into_iter().chain(query).collect()
    }

    fn shapes(&self, largest: u64) -> Result<Vec<DecodeShape>> {
        // A name in full is that shape alone.
        let exact = decode_shapes().iter().any(|decode| Some(&decode.name) == self.shape.as_ref());
        let wanted = |decode: &DecodeShape| match &self.shape {
            None if self.suite == Some(SuiteName::Mixed) => MIXED_SUITE.contains(&decode.name.as_str()),
            Some(text) if exact => decode.name == *text,
            None if self.suite.is_some() => DECODE_SUITE.contains(&decode.name.as_str()),
            Some(text) => decode.name.contains(text.as_str()),
            None if self.quick => decode.quick,
            None => decode.code_bytes(&SegmentFormat::F16.into()) <= largest,
        };
        let shapes: Vec<DecodeShape> = decode_shapes().into_iter().filter(wanted).collect();
        if shapes.is_empty() {
            let names: Vec<String> = decode_shapes().into_iter().map(|decode| decode.name).collect();
            bail!(
                "--shape '{}' is part of no shape's name; the shapes are {}",
                self.shape.as_deref().unwrap_or_default(),
                names.join(", ")
            );
        }
        Ok(shapes)
    }

    fn formats(&self) -> Result<Vec<BatchFormat>> {
        if self.suite == Some(SuiteName::Mixed) {
            let mixes = decode_mixes();
            let mut formats: Vec<BatchFormat> = Vec::new();
            for format in mixes.iter().flat_map(BatchFormat::parts_alone).chain(mixes.iter().cloned()) {
                if !formats.contains(&format) {
                    formats.push(format);
                }
            }
            return Ok(formats);
        }
        Ok(self.segment_formats()?.into_iter().map(BatchFormat::from).collect())
    }

    /// The formats of the suites decode, append and causal, and of single shapes.
    fn segment_formats(&self) -> Result<Vec<SegmentFormat>> {
        let all = if self.suite == Some(SuiteName::Causal) { causal::formats().to_vec() } else { decode_formats() };
        let is_f16 = |format: &SegmentFormat| *format == SegmentFormat::F16;
        let wanted = |format: &SegmentFormat| match &self.format {
            Some(text) => is_f16(format) || format.to_string().contains(text.as_str()),
            None if self.quick => is_f16(format) || format.key.has_span_ranges(),
            None => true,
        };
        let formats: Vec<SegmentFormat> = all.iter().copied().filter(wanted).collect();
        match &self.format {
            Some(text) if formats.len() == 1 && !"f16".contains(text.as_str()) => {
                let names: Vec<String> = all.iter().map(SegmentFormat::to_string).collect();
                bail!("--format '{text}' is part of no format's name; the formats are: {}", names.join("; "))
            }
            _ => Ok(formats),
        }
    }
}

fn print_report(report: &BenchReport) -> Result<()> {
    say!("{}", report.backend)?;
    if !report.not_default.is_empty() {
        say!("not the default: {}", report.not_default.join(", "))?;
    }
    for shape in &report.shapes {
        say!(
            "\n{}: {} sequences of {} tokens, {} query heads over {} KV heads × {}",
            shape.shape,
            shape.sequences,
            shape.tokens,
            shape.query_heads,
            shape.kv_heads,
            shape.head_dim
        )?;
        say!("{}", table(shape))?;
        print_sums(shape)?;
        if shape.read_gigabytes_per_second.is_none() && shape.rows.iter().any(|row| row.outcome.figures().is_some()) {
            say!("the read bandwidth is not known: no two readings of it agree; close other programs")?;
        }
        if let Some(plain) = shape.plain_f32_us {
            say!("plain f32 attention with the same threads: {plain:.1} µs")?;
        }
        for row in &shape.rows {
            match &row.outcome {
                RowOutcome::Timed(figures) if figures.guard_low_percent > UNSTEADY_PERCENT => say!(
                    "unsteady {}: the device ran {:.0} % below its best before or after it; close other programs",
                    row.format,
                    figures.guard_low_percent
                )?,
                RowOutcome::Timed(_) => {}
                RowOutcome::Wrong { reason } => say!("WRONG {}: {reason}", row.format)?,
                RowOutcome::Skipped { reason } => say!("skipped {}: {reason}", row.format)?,
                RowOutcome::Discarded { reason, .. } => say!("discarded {}: {reason}", row.format)?,
            }
        }
    }
    say!("\nMB: bytes of codes and ranges that a step must read. % read: of the read bandwidth.")?;
    Ok(())
}

/// Holds batches in several formats against their parts, each timed alone.
fn print_sums(shape: &ShapeReport) -> Result<()> {
    for row in shape.rows.iter().filter(|row| row.parts.len() > 1) {
        let alone = |part: &String| shape.rows.iter().find(|row| row.format == *part)?.outcome.figures();
        let parts: Option<f64> = row.parts.iter().map(|part| Some(alone(part)?.step_us)).sum();
        if let (Some(parts), Some(figures)) = (parts, row.outcome.figures()) {
            let percent = (figures.step_us / parts - 1.0) * 100.0;
            say!("{}: {:.1} µs, its parts {parts:.1} µs in all ({percent:+.1} %)", row.format, figures.step_us)?;
        }
    }
    Ok(())
}

fn table(shape: &ShapeReport) -> comfy_table::Table {
    let header =
        ["format", "NMSE", "MB", "µs", "GB/s", "read GB/s", "% read", "× f16", "× plain f32", "launches", "timer"];
    let mut table = print::results(&header, 1);
    for row in &shape.rows {
        let mut cells = vec![
            row.format.clone(),
            match (row.nmse, row.nmse_int16) {
                (None, _) => "-".into(),
                (Some(nmse), None) => format!("{nmse:.0e}"),
                (Some(nmse), Some(int16)) => format!("{nmse:.0e} (int16: {int16:.0e})"),
            },
            format!("{:.2}", row.bytes as f64 / 1e6),
        ];
        match row.outcome.figures() {
            None => cells.extend(vec!["-".into(); 8]),
            Some(figures) => {
                let times = |times: Option<f64>| times.map_or("-".into(), |times| format!("{times:.2}"));
                cells.push(format!("{:.1}", figures.step_us));
                cells.push(print::rate(figures.gigabytes_per_second));
                cells.push(figures.read_gigabytes_per_second.map_or("-".into(), print::rate));
                cells.push(figures.percent_of_read.map_or("-".into(), |percent| format!("{percent:.0}")));
                cells.push(times(figures.times_f16));
                cells.push(times(figures.times_plain_f32));
                cells.push(if figures.launches.is_empty() { "-".into() } else { figures.launches.len().to_string() });
                cells.push(figures.timer.clone());
            }
        }
        table.add_row(cells);
    }
    table
}
