//! Evaluates the formats on one layer.

use indicatif::ProgressBar;
use kvpack::backend::QueryPrecision;
use kvpack::cache::CENTRE_TOKENS;
use kvpack::cpu::{CalibrationResult, CalibrationSample, DenseSegment, exact_attention};
use kvpack::format::{Calibration, SegmentFormat};
use kvpack::plan::{RowLayout, TokenRange};
use kvpack::{Backend, Result};
use kvpack_report::{CalibratedRow, FormatRow, LayerReport};

use super::formats::NamedFormat;
use super::stored::{KeptInF16, StoredLayer, VisibleQuery};
use crate::dump::Layer;

/// Queries and what exact attention over the original data gives for them.
struct QuerySet<'a> {
    queries: Vec<VisibleQuery<'a>>,
    /// `[queries, query_heads, head_dim]`.
    exact: Vec<f64>,
}

/// Whether a calibration is searched for each layer and format, which takes most of the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calibrations {
    /// It is.
    Searched,
    /// Errors without calibration are all that is asked for.
    None,
}

/// What is evaluated of a dump.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// One of its layers.
    pub layer: &'a Layer,
    /// What stays in f16.
    pub kept: KeptInF16,
    /// Whether calibrations are searched.
    pub calibrations: Calibrations,
}

/// Measures every format on one layer. Every second prompt query is for the search of calibrations, and all others,
/// with the decode queries, are for the errors.
pub async fn evaluate<B: Backend>(
    backend: &B,
    Subject { layer, kept, calibrations }: Subject<'_>,
    formats: &[NamedFormat],
    progress: &ProgressBar,
) -> Result<LayerReport> {
    let (for_search, for_errors) = split_queries(layer);
    let for_errors = QuerySet::new(layer, for_errors)?;
    // Attention over keys less one vector is attention over the keys.
    let less_centre = layer.less_centre();
    let keys = backend.upload(layer.keys.as_slice().into()).await?;
    let centred_keys = backend.upload(less_centre.keys.as_slice().into()).await?;
    let values = backend.upload(layer.values.as_slice().into()).await?;
    let mut rows = Vec::with_capacity(formats.len());
    for named in formats {
        progress.set_message(format!("layer {}, {}", layer.index, named.name));
        let (of, keys) = if named.centred { (&less_centre, &centred_keys) } else { (layer, &keys) };
        let stored = StoredLayer::new(backend, of, named.format, kept, (keys, &values)).await?;
        let plain = error(backend, &stored, &for_errors, None).await?;
        let mut calibrated = None;
        if calibrations == Calibrations::Searched && named.is_packed() && !for_search.is_empty() {
            let found = search(of, named.format, kept, &for_search)?;
            let error = match found == Calibration::IDENTITY {
                true => plain,
                false => error(backend, &stored, &for_errors, Some(found)).await?,
            };
            calibrated = Some(CalibratedRow { tau1: found.tau1(), tau2: found.tau2(), error });
        }
        // Every store has a copy of the centre, f32.
        let centre_bytes = if named.centred { 4 * layer.shape.kv_heads() * layer.shape.head_dim() } else { 0 };
        let bytes = stored.bytes(backend) + (stored.segments.len() * centre_bytes) as u64;
        let bits_per_element = bytes as f64 * 8.0 / (layer.keys.len() + layer.values.len()) as f64;
        rows.push(FormatRow {
            format: named.name.clone(),
            recipe: named.recipe.clone(),
            error: plain,
            row_error: stored.row_error(backend, of, layer).await?,
            calibrated,
            packed_bits: stored.packed_bits(centre_bytes),
            bytes,
            bits_per_element,
            times_smaller: 16.0 / bits_per_element,
        });
        progress.inc(1);
    }
    Ok(LayerReport {
        layer: layer.index,
        query_heads: layer.shape.query_heads(),
        kv_heads: layer.shape.kv_heads(),
        head_dim: layer.shape.head_dim(),
        tokens: layer.tokens,
        calibration_queries: for_search.len(),
        evaluation_queries: for_errors.queries.len(),
        formats: rows,
    })
}

/// Relative L2 error of the outputs of a set of queries.
async fn error<B: Backend>(
    backend: &B,
    stored: &StoredLayer<B>,
    set: &QuerySet<'_>,
    calibration: Option<Calibration>,
) -> Result<f64> {
    Ok(set.error_of(&stored.attend(backend, &set.queries, calibration, QueryPrecision::ByFormat).await?))
}

/// What a calibration must leave of the mean square error: a smaller gain is chance, and need not hold for other
/// queries.
const WORTHWHILE: f64 = 0.98;

/// The calibration of the grid with the least error over some queries, among those that are worth while for the first
/// half of the queries and for the second; the identity if there is none.
fn search(layer: &Layer, format: SegmentFormat, kept: KeptInF16, queries: &[VisibleQuery<'_>]) -> Result<Calibration> {
    let halves = queries.split_at(queries.len().div_ceil(2));
    let first = search_on(layer, format, kept, halves.0)?;
    if halves.1.is_empty() {
        return Ok(first.best);
    }
    let second = search_on(layer, format, kept, halves.1)?;
    let gain = |result: &CalibrationResult, error: f64| error / result.identity_error();
    let mut best = (1.0, Calibration::IDENTITY);
    for (&(candidate, in_first), &(_, in_second)) in first.errors.iter().zip(&second.errors) {
        let (in_first, in_second) = (gain(&first, in_first), gain(&second, in_second));
        let both = (in_first + in_second) / 2.0;
        if in_first.max(in_second) <= WORTHWHILE && both < best.0 {
            best = (both, candidate);
        }
    }
    Ok(best.1)
}

fn search_on(
    layer: &Layer,
    format: SegmentFormat,
    kept: KeptInF16,
    queries: &[VisibleQuery<'_>],
) -> Result<CalibrationResult> {
    let queries: Vec<f32> = queries.iter().flat_map(|query| query.query).copied().collect();
    let sample = CalibrationSample {
        shape: layer.shape,
        keys: layer.keys.as_slice().into(),
        values: layer.values.as_slice().into(),
        rows: RowLayout::head_major(layer.tokens, &layer.shape),
        packed: TokenRange::new(kept.first, layer.tokens - kept.last)?,
        queries: queries.as_slice().into(),
    };
    Calibration::search(&sample, format)
}

/// Queries for the search and queries for the errors.
pub fn split_queries(layer: &Layer) -> (Vec<VisibleQuery<'_>>, Vec<VisibleQuery<'_>>) {
    let (mut for_search, mut for_errors) = (Vec::new(), Vec::new());
    for (i, query) in layer.prompt_queries.iter().enumerate() {
        let visible = VisibleQuery { query, tokens: layer.visible_to(i) };
        // The last one is always for the errors, so that a single query is measured rather than searched on.
        let from_the_end = layer.prompt_queries.len() - 1 - i;
        if from_the_end.is_multiple_of(2) { for_errors.push(visible) } else { for_search.push(visible) }
    }
    for_errors.extend(layer.decode_queries.iter().map(|query| VisibleQuery { query, tokens: layer.tokens }));
    (for_search, for_errors)
}

impl<'a> QuerySet<'a> {
    fn new(layer: &Layer, queries: Vec<VisibleQuery<'a>>) -> Result<Self> {
        let mut exact = Vec::new();
        for query in &queries {
            let (keys, values) =
                (layer.first_tokens(&layer.keys, query.tokens), layer.first_tokens(&layer.values, query.tokens));
            let segment = DenseSegment { keys: &keys, values: &values, tokens: query.tokens, calibration: None };
            exact.extend(exact_attention(&layer.shape, &[segment], query.query)?.outputs);
        }
        Ok(Self { queries, exact })
    }

    /// Relative L2 error of outputs for these queries.
    fn error_of(&self, outputs: &[f32]) -> f64 {
        let error: f64 = outputs.iter().zip(&self.exact).map(|(&got, want)| (f64::from(got) - want).powi(2)).sum();
        let size: f64 = self.exact.iter().map(|want| want * want).sum();
        if error == 0.0 { 0.0 } else { (error / size).sqrt() }
    }
}

impl Layer {
    /// The layer with centred keys: minus the mean of the first [`CENTRE_TOKENS`] of every head.
    fn less_centre(&self) -> Self {
        let head_dim = self.shape.head_dim();
        let mut keys = self.keys.clone();
        for head in keys.chunks_exact_mut(self.tokens * head_dim) {
            let first = CENTRE_TOKENS.min(self.tokens);
            let sum = |channel: usize| head[..first * head_dim].iter().skip(channel).step_by(head_dim).sum::<f32>();
            let centre: Vec<f32> = (0..head_dim).map(|channel| sum(channel) / first as f32).collect();
            head.iter_mut().zip(centre.iter().cycle()).for_each(|(key, mean)| *key -= mean);
        }
        let (values, prompt_queries, decode_queries) =
            (self.values.clone(), self.prompt_queries.clone(), self.decode_queries.clone());
        Self { keys, values, prompt_queries, decode_queries, ..*self }
    }

    /// The first tokens of every head of a `[kv_heads, tokens, head_dim]` tensor.
    pub fn first_tokens(&self, tensor: &[f32], tokens: usize) -> Vec<f32> {
        let head_dim = self.shape.head_dim();
        tensor.chunks(self.tokens * head_dim).flat_map(|head| &head[..tokens * head_dim]).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use kvpack::backend::Device;
    use kvpack::cpu::Cpu;
    use pollster::block_on;

    use super::*;
    use crate::commands::eval::formats;
    use crate::dump;

    fn shipped(name: &str) -> dump::Dump {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
        dump::read(&folder.join(name)).unwrap()
    }

    /// The mean error of a format over the layers of a dump.
    fn mean_error(dump: &dump::Dump, name: &str) -> f64 {
        let backend = Cpu::new();
        let of_layer = |layer: &Layer| {
            let named = formats::matching(&layer.shape, Some(name)).unwrap();
            let named = named.iter().find(|named| named.name == name).unwrap();
            let (mut queries, _) = split_queries(layer);
            queries.truncate(8);
            let queries = QuerySet::new(layer, queries).unwrap();
            let upload = |rows: &[f32]| block_on(backend.upload(rows.into())).unwrap();
            let keys = if named.centred { layer.less_centre().keys } else { layer.keys.clone() };
            let (keys, values) = (upload(&keys), upload(&layer.values));
            let kept = KeptInF16 { first: 0, last: 0 };
            let stored = block_on(StoredLayer::new(&backend, layer, named.format, kept, (&keys, &values))).unwrap();
            block_on(error(&backend, &stored, &queries, None)).unwrap()
        };
        dump.layers.iter().map(of_layer).sum::<f64>() / dump.layers.len() as f64
    }

    /// Keys of Qwen2.5 have a bias, which ranges and norms of single tokens do not survive; those of SmolLM2 have none,
    /// and outputs over them are about as far off with a centre as without (the model itself gains:
    /// lab/centre.md).
    #[test]
    fn a_centre_saves_keys_that_have_a_bias() {
        let (biased, plain) = (shipped("qwen2.5_kv.safetensors"), shipped("smollm2_kv.safetensors"));
        for name in ["4-bit per token", "4-bit per token, keys rotated by 16", "4-bit codebook, renormalised"] {
            let errors = |dump| (mean_error(dump, name), mean_error(dump, &format!("{name}, centred")));
            let (without, with) = errors(&biased);
            assert!(without > 0.3 && with < without / 2.0, "{name}: {without} and {with} of Qwen2.5");
            let (without, with) = errors(&plain);
            assert!(with < 1.2 * without, "{name}: {without} and {with} of SmolLM2");
        }
        // Ranges per channel do not see a bias.
        let per_channel = mean_error(&biased, "4-bit per channel");
        assert!(per_channel < mean_error(&biased, "4-bit per token") / 2.0, "{per_channel}");
    }

    /// The page draws errors of rows with and without a centre into one plot.
    #[test]
    fn errors_of_rows_are_relative_to_the_rows_of_the_dump() {
        let (backend, kept) = (Cpu::new(), KeptInF16 { first: 3, last: 5 });
        let dump = shipped("qwen2.5_kv.safetensors");
        let layer = &dump.layers[0];
        let named = formats::matching(&layer.shape, Some("int8+centre")).unwrap();
        let less_centre = layer.less_centre();
        let upload = |rows: &[f32]| block_on(backend.upload(rows.into())).unwrap();
        let (keys, values) = (upload(&less_centre.keys), upload(&layer.values));
        let stored = StoredLayer::new(&backend, &less_centre, named[1].format, kept, (&keys, &values));
        let alone = block_on(block_on(stored).unwrap().row_error(&backend, &less_centre, &less_centre)).unwrap();
        let squares = |of: &Layer| {
            let (head, tokens) = (of.tokens * of.shape.head_dim(), kept.first..of.tokens - kept.last);
            let rows = [&of.keys, &of.values].into_iter().flat_map(|rows| rows.chunks(head));
            let rows = rows.flat_map(|rows| rows.chunks(of.shape.head_dim()).skip(tokens.start).take(tokens.len()));
            rows.flatten().map(|&x| f64::from(x).powi(2)).sum::<f64>()
        };
        let of = Subject { layer, kept, calibrations: Calibrations::None };
        let report = block_on(evaluate(&backend, of, &named, &ProgressBar::hidden())).unwrap();
        let given = report.formats[1].row_error.unwrap();
        let expected = alone.unwrap() * squares(&less_centre) / squares(layer);
        assert!((given / expected - 1.0).abs() < 1e-9, "{given} and {expected}");
        assert!(squares(layer) > 1.5 * squares(&less_centre), "the keys have a bias");
    }

    /// At equal bits and ranges per token, rotated rows lose less than rows as they are; on real keys and values.
    #[test]
    fn rotation_beats_a_plain_grid() {
        let dump = shipped("smollm2_kv.safetensors");
        let plain = mean_error(&dump, "4-bit per token");
        let keys_rotated = mean_error(&dump, "4-bit per token, keys rotated by 16");
        let rotated = mean_error(&dump, "4-bit per token, rotated by 64");
        assert!(keys_rotated < 0.95 * plain, "{keys_rotated} of {plain}");
        assert!(rotated < 0.85 * plain, "{rotated} of {plain}");
        let (plain, rotated) =
            (mean_error(&dump, "3-bit per token"), mean_error(&dump, "3-bit per token, rotated by 64"));
        assert!(rotated < 0.7 * plain, "{rotated} of {plain}");
    }
}
