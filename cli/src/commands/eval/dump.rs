//! What a format does to the attention outputs of a dump.

use std::path::Path;

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use kvpack::Backend;

use super::report::{self, EvalReport, FormatRow, LayerReport, SummaryRow};
use super::stored::KeptInF16;
use super::{Destination, dump_page, formats, layer};
use crate::backend::{BackendArgs, Chosen};
use crate::dump::{self, Dump};
use crate::outcome::Outcome;
use crate::print::{self, one_line, say};

/// Options about dumps.
#[derive(clap::Args)]
pub struct DumpArgs {
    /// Of a dump: only f16 and the formats whose name contains this ('4-bit', 'per token').
    #[arg(long, value_name = "TEXT", conflicts_with = "model")]
    format: Option<String>,
    #[command(flatten)]
    kept: KeptInF16,
}

/// Evaluates a dump.
pub fn run(file: &Path, args: &DumpArgs, backend: &BackendArgs, to: Destination<'_>) -> Result<Outcome> {
    let dump = dump::read(file).with_context(|| file.display().to_string())?;
    leave_something_to_pack(&dump, args.kept)?;
    let report = match backend.open()? {
        Chosen::Cpu(backend) => evaluate(file, args, &backend, &dump),
        Chosen::Wgpu(backend) => evaluate(file, args, &backend, &dump),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => evaluate(file, args, &backend, &dump),
    }?;
    // Where one way is closed, the report still goes the other.
    let written = to.files.map_or(Ok(()), |path| dump_page::write(&report, path));
    let printed = to.print(&report, print_report);
    written.and(printed).map(|()| Outcome::Passed)
}

fn leave_something_to_pack(dump: &Dump, kept: KeptInF16) -> Result<()> {
    let shortest = dump.layers.iter().map(|layer| layer.tokens).min().unwrap_or_default();
    if kept.first.saturating_add(kept.last) >= shortest {
        bail!(
            "--keep-first {} and --keep-last {} leave no token to pack of {shortest}; keep fewer",
            kept.first,
            kept.last
        );
    }
    Ok(())
}

fn evaluate<B: Backend>(file: &Path, args: &DumpArgs, backend: &B, dump: &Dump) -> Result<EvalReport> {
    let layers = evaluate_layers(args, backend, dump)?;
    Ok(EvalReport {
        file: file.display().to_string(),
        model: dump.model.clone(),
        text: dump.text.clone(),
        backend: backend.name(),
        kept_first: args.kept.first,
        kept_last: args.kept.last,
        summary: report::summarize(&layers),
        layers,
    })
}

fn evaluate_layers<B: Backend>(args: &DumpArgs, backend: &B, dump: &Dump) -> Result<Vec<LayerReport>> {
    let progress = ProgressBar::new(dump.layers.len() as u64).with_style(print::bar());
    let mut reports = Vec::with_capacity(dump.layers.len());
    for layer in &dump.layers {
        progress.set_message(format!("layer {}", layer.index));
        let formats = formats::matching(&layer.shape, args.format.as_deref())?;
        let evaluated = pollster::block_on(layer::evaluate(backend, layer, &formats, args.kept));
        reports.push(evaluated.with_context(|| format!("layer {}", layer.index))?);
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(reports)
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
    say!("\nerror: relative L2 error of the attention outputs against exact attention over the dump, in percent.")?;
    say!("bits: per element of keys and values, with all ranges and padding.")?;
    Ok(())
}

fn layer_table(rows: &[FormatRow]) -> comfy_table::Table {
    let mut table = print::results(&["format", "error", "calibrated", "(τ1, τ2)", "bits", "bytes", "f16 /"], 1);
    for row in rows {
        let calibrated = row.calibrated.as_ref();
        table.add_row([
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
    let header = ["format", "mean error", "worst error", "calibrated", "layers improved", "bits", "bytes", "f16 /"];
    let mut table = print::results(&header, 1);
    for row in rows {
        table.add_row([
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
