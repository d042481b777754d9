//! What a format does to the attention outputs of a dump.

use std::path::Path;

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use kvpack::Backend;
use kvpack_report::page::of_eval;
use kvpack_report::{EvalReport, FormatRow, LayerReport, Run, SummaryRow, summarize};

use super::layer::Calibrations;
use super::stored::KeptInF16;
use super::{Destination, formats, layer, page, precision};
use crate::backend::{BackendArgs, Chosen};
use crate::dump::{self, Dump, NamedDump};
use crate::outcome::Outcome;
use crate::print::{self, one_line, say};
use crate::provenance;

/// Heading of the options about dumps.
pub const DUMP: &str = "Dump";

/// Options about dumps.
#[derive(clap::Args)]
pub struct DumpArgs {
    /// Only f16 and this recipe (kivi:4), or the formats whose name contains this text ('4-bit', 'per token').
    #[arg(long, value_name = "RECIPE|TEXT", conflicts_with = "model", help_heading = DUMP)]
    format: Option<String>,
    /// Only the layer of this index in the model.
    #[arg(long, value_name = "INDEX", conflicts_with = "model", help_heading = DUMP)]
    layer: Option<u32>,
    #[command(flatten)]
    kept: KeptInF16,
    /// Measure what queries and weights of 16 and of 8 bits add to the error of each format, on a GPU.
    #[arg(long, conflicts_with_all = ["model", "report", "first", "last"], help_heading = DUMP)]
    precision: bool,
}

/// Evaluates a dump.
pub(super) fn run(file: Option<&Path>, args: &DumpArgs, backend: &BackendArgs, to: Destination<'_>) -> Result<Outcome> {
    let NamedDump { name, mut dump } = dump::open(file)?;
    if let Some(index) = args.layer {
        leave_layer(&mut dump, index)?;
    }
    if args.precision {
        return precision(args, backend, &dump, to);
    }
    let backend = backend.open()?;
    let run = provenance::run(backend.driver(), None);
    let task = Task {
        name: &name,
        dump: &dump,
        format: args.format.as_deref(),
        kept: args.kept,
        calibrations: Calibrations::Searched,
    };
    let report = match &backend {
        Chosen::Cpu(backend) => task.evaluate(run, backend),
        Chosen::Wgpu(backend) => task.evaluate(run, backend),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => task.evaluate(run, backend),
    }?;
    // Where one way is closed, the report still goes the other.
    let written = to.files.map_or(Ok(()), |path| page::write(path, &report, &of_eval(&report)));
    let printed = to.print(&report, print_report);
    written.and(printed).map(|()| Outcome::Passed)
}

fn precision(args: &DumpArgs, backend: &BackendArgs, dump: &Dump, to: Destination<'_>) -> Result<Outcome> {
    match backend.open()? {
        Chosen::Wgpu(backend) => precision::run(&backend, dump, args.format.as_deref(), to),
        _ => bail!(
            "--precision is about the kernels of wgpu, which multiply integers; the other backends have one precision"
        ),
    }
}

fn leave_layer(dump: &mut Dump, index: u32) -> Result<()> {
    let there: Vec<String> = dump.layers.iter().map(|layer| layer.index.to_string()).collect();
    dump.layers.retain(|layer| layer.index == index);
    if dump.layers.is_empty() {
        bail!("the dump has no layer {index}; it has {}", there.join(", "));
    }
    Ok(())
}

/// Refuses a dump of which nothing but what stays in f16 is left.
fn leave_something_to_pack(dump: &Dump, kept: KeptInF16) -> Result<()> {
    let shortest = dump.layers.iter().map(|layer| layer.tokens).min().unwrap_or_default();
    if kept.first.saturating_add(kept.last) >= shortest {
        bail!(
            "the first {} and the last {} tokens stay in f16 and leave none to pack of {shortest}; take a longer dump, \
             or keep fewer (`kvpack eval --keep-first, --keep-last`)",
            kept.first,
            kept.last
        );
    }
    Ok(())
}

/// What is evaluated.
pub struct Task<'a> {
    /// What to call the dump.
    pub name: &'a str,
    /// The dump.
    pub dump: &'a Dump,
    /// Part of the formats' names; every format where there is none.
    pub format: Option<&'a str>,
    /// What stays in f16.
    pub kept: KeptInF16,
    /// Whether calibrations are searched.
    pub calibrations: Calibrations,
}

impl Task<'_> {
    /// Evaluates every format on every layer.
    ///
    /// # Errors
    /// When nothing is left to pack, when no format fits, and whatever the backend reports.
    pub fn evaluate<B: Backend>(&self, run: Run, backend: &B) -> Result<EvalReport> {
        leave_something_to_pack(self.dump, self.kept)?;
        let layers = self.layers(backend)?;
        Ok(EvalReport {
            run: Some(run),
            file: self.name.to_owned(),
            model: self.dump.model.clone(),
            text: self.dump.text.clone(),
            backend: backend.name(),
            kept_first: self.kept.first,
            kept_last: self.kept.last,
            summary: summarize(&layers),
            layers,
        })
    }

    fn layers<B: Backend>(&self, backend: &B) -> Result<Vec<LayerReport>> {
        let layers = &self.dump.layers;
        let formats = layers.iter().map(|layer| formats::matching(&layer.shape, self.format));
        let formats = formats.collect::<Result<Vec<_>>>()?;
        let rows = formats.iter().map(Vec::len).sum::<usize>();
        let progress = ProgressBar::new(rows as u64).with_style(print::bar());
        let mut reports = Vec::with_capacity(layers.len());
        for (layer, formats) in layers.iter().zip(&formats) {
            let subject = layer::Subject { layer, kept: self.kept, calibrations: self.calibrations };
            let evaluated = pollster::block_on(layer::evaluate(backend, subject, formats, &progress));
            reports.push(evaluated.with_context(|| format!("layer {}", layer.index))?);
        }
        progress.finish_and_clear();
        Ok(reports)
    }
}

fn print_report(report: &EvalReport) -> Result<()> {
    say!("{} on {}", report.file, report.backend)?;
    if let Some(model) = &report.model {
        say!("model: {}", one_line(model))?;
    }
    if let Some(text) = &report.text {
        say!("text: {}", one_line(text))?;
    }
    if report.kept_first + report.kept_last > 0 {
        say!("kept in f16: the first {} and the last {} tokens", report.kept_first, report.kept_last)?;
    }
    for layer in &report.layers {
        say!(
            "\nLayer {}: {} tokens, {} KV heads × {}, {} query heads; errors over {} queries, calibration searched on {}",
            layer.layer,
            layer.tokens,
            layer.kv_heads,
            layer.head_dim,
            layer.query_heads,
            layer.evaluation_queries,
            layer.calibration_queries
        )?;
        say!("{}", layer_table(&layer.formats))?;
    }
    say!("\nAll {} layers", report.layers.len())?;
    say!("{}", summary_table(&report.summary))?;
    say!("\nerror: relative L2 error of the attention outputs against exact attention over the dump.")?;
    say!(
        "bits: per element of keys and values, including all ranges and padding; × smaller: than f16 without padding."
    )?;
    if report.kept_first + report.kept_last == 0 {
        say!(
            "Every token is packed. `kvpack demo` keeps the first and last 128 in f16: --keep-first 128 --keep-last 128."
        )?;
    }
    Ok(())
}

fn layer_table(rows: &[FormatRow]) -> comfy_table::Table {
    let header = ["recipe", "format", "error", "calibrated", "(τ1, τ2)", "bits", "bytes", "× smaller"];
    let mut table = print::results(&header, 2);
    for row in rows {
        let calibrated = row.calibrated.as_ref();
        table.add_row([
            row.recipe.clone().unwrap_or_else(|| "-".into()),
            row.format.clone(),
            print::percent(row.error),
            calibrated.map_or("-".into(), |calibrated| print::percent(calibrated.error)),
            calibrated.map_or("-".into(), |calibrated| format!("({}, {})", calibrated.tau1, calibrated.tau2)),
            format!("{:.3}", row.bits_per_element),
            row.bytes.to_string(),
            format!("{:.2}", row.times_smaller),
        ]);
    }
    table
}

fn summary_table(rows: &[SummaryRow]) -> comfy_table::Table {
    let header = [
        "recipe",
        "format",
        "mean error",
        "worst error",
        "calibrated",
        "layers improved",
        "bits",
        "bytes",
        "× smaller",
    ];
    let mut table = print::results(&header, 2);
    for row in rows {
        table.add_row([
            row.recipe.clone().unwrap_or_else(|| "-".into()),
            row.format.clone(),
            print::percent(row.mean_error),
            print::percent(row.worst_error),
            row.mean_calibrated_error.map_or("-".into(), print::percent),
            row.layers_improved.map_or("-".into(), |[improved, of]| format!("{improved} of {of}")),
            format!("{:.3}", row.bits_per_element),
            row.bytes.to_string(),
            format!("{:.2}", row.times_smaller),
        ]);
    }
    table
}
