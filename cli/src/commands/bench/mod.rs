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
mod linear;
pub mod output;
mod prefill;
#[cfg(feature = "cuda")]
mod ranks;
mod run;
mod sizes;
mod step;
mod timed;
mod wgpu;

use std::path::PathBuf;

use anyhow::{Result, bail};
use kvpack::backend::QueryPrecision;
use kvpack::conformance::{
    BatchFormat, DecodeShape, SequenceData, decode_formats_of, decode_mixes, decode_shapes, rounds_queries,
};
use kvpack::{AttentionShape, SegmentFormat};
use kvpack_report::{BenchRow, RowOutcome, recipes};

use super::eval::page;
#[cfg(feature = "cuda")]
use crate::backend::nvidia_driver;
use crate::backend::{BackendArgs, Chosen};
use crate::dump;
use crate::outcome::Outcome;
use crate::print::{self, say};
use crate::provenance;
use append::TimedStores;
use evict::TimedSelection;
use linear::TimedLinear;
use output::{Output, Style};
pub use run::run as run_plan;
pub use run::{BenchPlan, NotWatched, Subject};
use sizes::SizeArgs;
use step::TimedModel;
pub use timed::Timed;

/// How much of the guard's rate may be missing before a figure gets a warning.
pub const UNSTEADY_PERCENT: f64 = 10.0;

/// Time decode steps over packed caches, whose outputs are checked.
///
/// A step is everything between the queries and the outputs: query preparation, attention and the merge. Each step uses
/// the next of several copies of the cache, so that no step finds its data in a cache of the device.
///
/// Steps of shapes, of a dump and of the suites decode and mixed are compared with f64 before they are timed. So are
/// those of chunks and prefill. causal compares every run with the same queries one by one, linear the products that it
/// timed with f64, append what it stored with quantize, evict with the host, ranks with one GPU. step compares a timed
/// step with the calls of the cache, and what it stored with what it was given. Planted tokens, and values that differ
/// from tile to tile, show what a kernel leaves out; kvpack check has every mask at its edges.
///
/// Rows are printed as they end, and --report rewrites its files after each, so that an interrupted run loses nothing.
/// µs is the median of n samples; ± is half of the distance between their quartiles. × f16 is the speed-up over
/// kvpack's own f16 step, % read the share of the read bandwidth measured in the same run, MB the bytes of codes and
/// ranges that a step must read.
///
/// Without options, named shapes are timed. --batch, --tokens, --heads and --head-dim take your own sizes, also as
/// lists: kvpack bench --batch 1,8 --tokens 4k,32k --heads 32/8
#[derive(clap::Args)]
pub struct BenchArgs {
    /// A dump of keys, values and queries (see `kvpack eval --help`): time its middle layer, stored for a batch of 16,
    /// instead of named shapes.
    #[arg(conflicts_with = "shape")]
    file: Option<PathBuf>,
    #[command(flatten)]
    backend: BackendArgs,
    /// Two small shapes, the widths of CalibQuant, little memory.
    #[arg(long)]
    quick: bool,
    /// A named choice of shapes and formats.
    #[arg(long, value_enum, conflicts_with_all = ["quick", "file"])]
    suite: Option<SuiteName>,
    /// Only the shape of this name, or all shapes whose name contains it; of the suites, prefill takes it
    /// [default: all on a GPU, those up to 128 MiB of f16 on the CPU, those up to 32 MiB on a software GPU].
    #[arg(long, value_name = "TEXT")]
    shape: Option<String>,
    #[command(flatten)]
    sizes: SizeArgs,
    /// Only f16 and this recipe (kivi:4), or the formats whose name contains this text ('4-bit', 'per token'). The
    /// suites decode, append and causal take it, prefill a recipe; the others have formats of their own.
    #[arg(long, value_name = "RECIPE|TEXT")]
    format: Option<String>,
    /// Minimum size of the copies that steps alternate between, in MiB, up to 16384
    /// [default: 1024 on a GPU, 256 on the CPU, 64 on a software GPU, 32 with --quick]. Like --query and --seconds it
    /// applies to shapes and to the suites decode and mixed.
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=MOST_FOOTPRINT))]
    footprint: Option<u64>,
    /// Precision of queries, and of weights of values with a range per channel, in integer dot products
    /// [default: int8 where keys have 4 bits or fewer, int16 where they have 8]. Only wgpu takes it: the CPU always
    /// uses f32, and CUDA int16.
    #[arg(long, value_enum)]
    query: Option<QueryName>,
    /// Minimum seconds of timed steps per row [default: 0.1 on a GPU, 0.5 on the CPU]. Longer runs may lower the clock
    /// of a device that reaches its power limit.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    seconds: Option<f64>,
    /// GPUs that share a sequence, for the suite ranks: 1, 2, 4 or 8 [default: 2].
    #[cfg(feature = "cuda")]
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// The rank of this process, which another process has started.
    #[cfg(feature = "cuda")]
    #[arg(long, hide = true, requires = "ranks")]
    rank: Option<usize>,
    /// Print JSON when all rows are there.
    #[arg(long)]
    json: bool,
    /// Print comma-separated values, shape by shape; for shapes and the suites decode and mixed.
    #[arg(long, conflicts_with_all = ["json", "markdown"])]
    csv: bool,
    /// Print a Markdown table, shape by shape; for shapes and the suites decode and mixed.
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    /// Write PATH.json and a page with plots to PATH.html, after every row; for shapes and the suites decode and mixed.
    #[arg(long, value_name = "PATH")]
    report: Option<PathBuf>,
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
    /// Nine steps of head_dim 128 in every format, from one sequence of 4k tokens to eight of 32k; one has its pages in
    /// random order, one has spans of 576 tokens, an image each
    Decode,
    /// Storing one more token for each sequence of a batch of 64, in every format; pages that are packed are always the
    /// same and fit a cache of 34 MB
    Append,
    /// The newest 1 to 512 queries of a sequence of 32k tokens, in one run and as decode steps of as many sequences
    Causal,
    /// A context in chunks of f16, 4 and 2 bits, stored together by precision or left in order
    Chunks,
    /// Keeping a tenth of a prompt of 32k and 128k tokens: the cost of each part, and what decoding gains
    Evict,
    /// Products of 1 to 4096 rows of activations with weights in 2, 3, 4 and 8 bits
    Linear,
    /// Sequences stored in segments of several precisions, and each segment alone
    Mixed,
    /// Prompts, a chunk over a long context and drafts: many queries for each sequence, by the wall clock
    Prefill,
    /// One sequence of 64k to 4M tokens over several NVIDIA GPUs (--ranks), a process for each
    #[cfg(feature = "cuda")]
    Ranks,
    /// A whole decode step of 32 layers by the wall clock, as an engine pays it, next to its kernels
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

/// Channels of heads whose rotations divide those of all suites.
const OF_SUITES: usize = 64;

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<Outcome> {
    args.suite.map_or(Ok(()), |suite| args.refuse_without_effect(suite))?;
    if args.sizes.given() && (args.suite.is_some() || args.shape.is_some() || args.file.is_some() || args.quick) {
        bail!("--batch, --tokens, --heads and --head-dim take the place of --shape, --suite, --quick and of a dump");
    }
    if let Some(path) = &args.report {
        page::try_files(path, args.file.as_deref())?;
    }
    #[cfg(feature = "cuda")]
    if args.suite == Some(SuiteName::Ranks) {
        args.backend.refuse_other_than_cuda("--suite ranks")?;
        return ranks::run(args.ranks.unwrap_or(2), args.rank, nvidia_driver(), args.style());
    }
    #[cfg(feature = "cuda")]
    if args.ranks.is_some() {
        bail!("--ranks belongs to --suite ranks; leave it out");
    }
    let backend = args.backend.open()?;
    let driver = backend.driver();
    match &backend {
        Chosen::Cpu(backend) => bench(args, backend, driver),
        Chosen::Wgpu(backend) => bench(args, backend, driver),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => bench(args, backend, driver),
    }
}

fn bench<B: TimedStores + TimedModel + TimedSelection + TimedLinear>(
    args: &BenchArgs,
    backend: &B,
    driver: String,
) -> Result<Outcome> {
    match args.suite {
        None | Some(SuiteName::Decode | SuiteName::Mixed) => bench_steps(args, backend, driver),
        Some(SuiteName::Append) => {
            append::run(backend, driver, args.segment_formats(OF_SUITES)?, args.style()).map(|()| Outcome::Passed)
        }
        Some(SuiteName::Causal) => causal::run(backend, driver, &args.segment_formats(causal::HEAD_DIM)?, args.style()),
        Some(SuiteName::Chunks) => chunks::run(backend, driver, args.style()).map(|()| Outcome::Passed),
        Some(SuiteName::Evict) => evict::run(backend, driver, args.style()).map(|()| Outcome::Passed),
        Some(SuiteName::Linear) => linear::run(backend, driver, args.style()).map(|()| Outcome::Passed),
        Some(SuiteName::Prefill) => prefill::run(backend, driver, prefill::Chosen::of(args), args.style()),
        #[cfg(feature = "cuda")]
        Some(SuiteName::Ranks) => bail!("--suite ranks opens GPUs of its own"),
        Some(SuiteName::Step) => step::run(backend, driver, args.style()).map(|()| Outcome::Passed),
    }
}

fn bench_steps<B: Timed>(args: &BenchArgs, backend: &B, driver: String) -> Result<Outcome> {
    if args.query.is_some() && !rounds_queries(backend)? {
        bail!(
            "--query has no effect on {}, which always multiplies with the same precision; leave --query out, or give \
             --backend wgpu",
            backend.name()
        );
    }
    let plan = args.plan(backend)?;
    let mut report = plan.report(backend, provenance::run(driver, backend.guard_tolerance()));
    let style = args.style();
    let mut output = Output::new(style, args.report.as_deref(), plan.longest_name());
    let done = pollster::block_on(run::run(backend, &plan, &mut report, &mut output));
    // What was measured is printed, whatever came after it.
    match style {
        Style::Json => print::json(&report)?,
        Style::Table => {
            say!(
                "\n± is half of the distance between the quartiles of n samples; `kvpack bench --help` has the rest."
            )?;
        }
        Style::Csv | Style::Markdown => {}
    }
    done?;
    let wrong = |row: &BenchRow| matches!(row.outcome, RowOutcome::Wrong { .. });
    Ok(match report.shapes.iter().flat_map(|shape| &shape.rows).any(wrong) {
        true => Outcome::Failed,
        false => Outcome::Passed,
    })
}

impl BenchArgs {
    fn style(&self) -> Style {
        match (self.json, self.csv, self.markdown) {
            (true, ..) => Style::Json,
            (_, true, _) => Style::Csv,
            (.., true) => Style::Markdown,
            _ => Style::Table,
        }
    }

    /// Refuses the options that have no effect on a suite.
    fn refuse_without_effect(&self, suite: SuiteName) -> Result<()> {
        let name = suite.name();
        if self.format.is_some()
            && !matches!(suite, SuiteName::Append | SuiteName::Causal | SuiteName::Decode | SuiteName::Prefill)
        {
            bail!("--suite {name} chooses its own formats; leave --format out");
        }
        if self.shape.is_some() && suite != SuiteName::Prefill {
            bail!("--suite {name} chooses its own shapes; leave --shape out");
        }
        let given = [
            (self.footprint.is_some(), "--footprint"),
            (self.query.is_some(), "--query"),
            (self.seconds.is_some(), "--seconds"),
            (self.csv, "--csv"),
            (self.markdown, "--markdown"),
            (self.report.is_some(), "--report"),
        ];
        match given.into_iter().find(|(given, _)| *given) {
            Some((_, option)) if !matches!(suite, SuiteName::Decode | SuiteName::Mixed) => {
                bail!("--suite {name} does not take {option}; leave {option} out")
            }
            _ => Ok(()),
        }
    }

    fn plan<B: Timed>(&self, backend: &B) -> Result<BenchPlan> {
        let sizes = backend.sizes();
        let mebibytes = self.footprint.map(|footprint| footprint << 20);
        Ok(BenchPlan {
            subjects: match &self.file {
                Some(file) => {
                    let (decode, data) = dumped::data(dump::open(Some(file))?);
                    vec![self.subject(decode, Some(data))?]
                }
                None => {
                    let shapes = self.shapes(sizes.largest_shape)?.into_iter();
                    shapes.map(|decode| self.subject(decode, None)).collect::<Result<_>>()?
                }
            },
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
        if self.sizes.given() {
            return self.sizes.steps();
        }
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

    fn subject(&self, decode: DecodeShape, data: Option<SequenceData>) -> Result<Subject> {
        let head_dim = decode.shape.head_dim();
        // Rows of all heads of which this divides the channels are compared with each other.
        let head_dim = if head_dim.is_multiple_of(OF_SUITES) { OF_SUITES } else { head_dim };
        Ok(Subject { formats: self.formats(head_dim)?, decode, data })
    }

    /// The formats of heads of as many channels.
    fn formats(&self, head_dim: usize) -> Result<Vec<BatchFormat>> {
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
        Ok(self.segment_formats(head_dim)?.into_iter().map(BatchFormat::from).collect())
    }

    /// The formats of the suites decode, append and causal, and of single shapes.
    fn segment_formats(&self, head_dim: usize) -> Result<Vec<SegmentFormat>> {
        let all = match self.suite {
            Some(SuiteName::Causal) => causal::formats().to_vec(),
            _ => decode_formats_of(head_dim),
        };
        let is_f16 = |format: &SegmentFormat| *format == SegmentFormat::F16;
        // A recipe is itself, and not every format whose name happens to contain it.
        if let Some(text) = &self.format
            && let Ok(named) = recipes::format_of(text, &AttentionShape::new(1, 1, head_dim)?)
        {
            let formats = [SegmentFormat::F16, named];
            return Ok(formats[usize::from(is_f16(&named))..].to_vec());
        }
        let wanted = |format: &SegmentFormat| match &self.format {
            Some(text) => is_f16(format) || format.to_string().contains(text.as_str()),
            None if self.quick => is_f16(format) || format.key.has_span_ranges(),
            None => true,
        };
        let formats: Vec<SegmentFormat> = all.iter().copied().filter(wanted).collect();
        match &self.format {
            Some(text) if formats.len() == 1 && !"f16".contains(text.as_str()) => {
                let names: Vec<String> = all.iter().map(SegmentFormat::to_string).collect();
                bail!(
                    "--format '{text}' is no recipe{} and part of no format's name; the formats are: {}",
                    recipes::reason(text),
                    names.join("; ")
                )
            }
            _ => Ok(formats),
        }
    }
}
