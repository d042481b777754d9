//! What rounding the query and the weights adds to the error of a format.

use anyhow::{Context, Result, ensure};
use indicatif::ProgressBar;
use kvpack::backend::{QueryBytes, QueryPrecision};
use kvpack::cpu::{DenseSegment, exact_attention};
use kvpack::{Backend, SegmentFormat};
use serde::Serialize;

use super::Destination;
use super::formats::{self, NamedFormat};
use super::layer;
use super::stored::{KeptInF16, StoredLayer, VisibleQuery};
use crate::dump::{Dump, Layer};
use crate::outcome::Outcome;
use crate::print::{self, say};

/// Everything that was measured.
#[derive(Serialize)]
struct PrecisionReport {
    backend: String,
    layers: Vec<LayerPrecision>,
}

#[derive(Serialize)]
struct LayerPrecision {
    layer: u32,
    queries: usize,
    formats: Vec<FormatPrecision>,
}

/// Errors of the outputs of one format: relative L2 against exact attention over the dump, and what a precision adds,
/// as the normalised mean square of its difference from exact attention over what is stored.
#[derive(Serialize)]
struct FormatPrecision {
    format: String,
    /// Of the format alone: exact attention over what is stored.
    own_error: f64,
    /// With a query and weights of 16 bits.
    int16: Added,
    /// With 8 bits.
    int8: Added,
    /// Which of them a user gets who sets nothing.
    default: &'static str,
}

#[derive(Clone, Copy, Serialize)]
struct Added {
    nmse: f64,
    error: f64,
}

/// Most queries of a layer: the error varies little over more.
const MOST_QUERIES: usize = 12;

/// Measures every format of the dump with both precisions.
pub fn run<B: Backend>(backend: &B, dump: &Dump, format: Option<&str>, to: Destination<'_>) -> Result<Outcome> {
    let progress = ProgressBar::new(dump.layers.len() as u64).with_style(print::bar());
    let mut layers = Vec::new();
    for layer in &dump.layers {
        // A centre changes nothing that a precision of the query would show.
        let named = formats::matching(&layer.shape, format)?.into_iter().filter(|named| !named.centred);
        let named: Vec<NamedFormat> = named.collect();
        if let (Some(text), true) = (format, named.iter().all(|named| named.format == SegmentFormat::F16)) {
            ensure!(
                "f16".contains(text),
                "--format {text}: it has no format whose queries are rounded; leave a centre out"
            );
        }
        let measured = pollster::block_on(of_layer(backend, layer, &named));
        layers.push(measured.with_context(|| format!("layer {}", layer.index))?);
        progress.inc(1);
    }
    progress.finish_and_clear();
    to.print(&PrecisionReport { backend: backend.name(), layers }, print_report)?;
    Ok(Outcome::Passed)
}

async fn of_layer<B: Backend>(backend: &B, layer: &Layer, named: &[NamedFormat]) -> kvpack::Result<LayerPrecision> {
    let (_, mut queries) = layer::split_queries(layer);
    queries.drain(..queries.len().saturating_sub(MOST_QUERIES));
    let exact = outputs(layer, &layer.keys, &layer.values, &queries)?;
    let keys = backend.upload(layer.keys.as_slice().into()).await?;
    let values = backend.upload(layer.values.as_slice().into()).await?;
    let mut formats = Vec::with_capacity(named.len());
    for NamedFormat { name, format, .. } in named {
        let nothing = KeptInF16 { first: 0, last: 0 };
        let stored = StoredLayer::new(backend, layer, *format, nothing, (&keys, &values)).await?;
        let (stored_keys, stored_values) = stored.read_back(backend).await?;
        let own = outputs(layer, &stored_keys, &stored_values, &queries)?;
        let mut added = [Added { nmse: 0.0, error: 0.0 }; 2];
        for (added, precision) in added.iter_mut().zip([QueryPrecision::Int16, QueryPrecision::Int8]) {
            let got = stored.attend(backend, &queries, None, precision).await?;
            let got: Vec<f64> = got.into_iter().map(f64::from).collect();
            *added = Added { nmse: relative(&got, &own).powi(2), error: relative(&got, &exact) };
        }
        formats.push(FormatPrecision {
            format: name.clone(),
            own_error: relative(&own, &exact),
            int16: added[0],
            int8: added[1],
            default: match QueryBytes::of(format) {
                QueryBytes::One => "int8",
                QueryBytes::Two => "int16",
            },
        });
    }
    Ok(LayerPrecision { layer: layer.index, queries: queries.len(), formats })
}

/// Exact attention of all queries over keys and values, `[kv_heads, tokens, head_dim]`.
fn outputs(layer: &Layer, keys: &[f32], values: &[f32], queries: &[VisibleQuery<'_>]) -> kvpack::Result<Vec<f64>> {
    let mut all = Vec::new();
    for query in queries {
        let (keys, values) = (layer.first_tokens(keys, query.tokens), layer.first_tokens(values, query.tokens));
        let segment = DenseSegment { keys: &keys, values: &values, tokens: query.tokens, calibration: None };
        all.extend(exact_attention(&layer.shape, &[segment], query.query)?.outputs);
    }
    Ok(all)
}

/// Relative L2 difference.
fn relative(got: &[f64], want: &[f64]) -> f64 {
    let difference: f64 = got.iter().zip(want).map(|(got, want)| (got - want).powi(2)).sum();
    let size: f64 = want.iter().map(|want| want * want).sum();
    if difference == 0.0 { 0.0 } else { (difference / size).sqrt() }
}

fn print_report(report: &PrecisionReport) -> Result<()> {
    say!("{}", report.backend)?;
    for layer in &report.layers {
        say!("\nLayer {}, {} queries", layer.layer, layer.queries)?;
        let header = ["format", "own error", "16 bits add", "error", "8 bits add", "error", "more", "default"];
        let mut table = print::results(&header, 1);
        for row in &layer.formats {
            let more = if row.own_error > 0.0 { row.int8.error / row.own_error - 1.0 } else { 0.0 };
            table.add_row([
                row.format.clone(),
                print::percent(row.own_error),
                format!("{:.1e}", row.int16.nmse),
                print::percent(row.int16.error),
                format!("{:.1e}", row.int8.nmse),
                print::percent(row.int8.error),
                format!("{:+.1} %", more * 100.0),
                row.default.into(),
            ]);
        }
        say!("{table}")?;
    }
    say!(
        "\nerrors: relative L2 against exact attention over the dump; what a precision adds: the normalised mean square of its"
    )?;
    say!("difference from exact attention over what is stored; more: the error with 8 bits against the format's own.")?;
    Ok(())
}

impl<B: Backend> StoredLayer<B> {
    /// Keys and values as they are stored, `[kv_heads, tokens, head_dim]`, of a layer in one format.
    async fn read_back(&self, backend: &B) -> kvpack::Result<(Vec<f32>, Vec<f32>)> {
        self.stores.read(backend, &self.segments[0].span).await
    }
}
