//! The paper's grid search for CalibQuant's (τ1, τ2) (arXiv 2502.14882, §4.1).

use super::backend::attend_plan;
use super::dense::read_row;
use super::exact_attention::{DenseSegment, exact_attention};
use super::quantize::quantize;
use super::store::CpuStore;
use crate::backend::SpanWrite;
use crate::counts::in_32_bits;
use crate::format::{AttentionShape, Calibration, SegmentFormat};
use crate::plan::{AttendPlan, Elements, Page, QueryRun, RowLayout, SpanView, Split, StoreView, TokenRange, Visible};
use crate::{Error, Result};

/// Queries that are attended to at a time, to limit the memory of their scores.
const QUERIES_PER_STEP: usize = 16;

/// Keys, values and queries for calibration, for example those of one prompt.
#[derive(Clone, Copy, Debug)]
pub struct CalibrationSample<'a> {
    /// Shape of the layer.
    pub shape: AttentionShape,
    /// Keys of one sequence.
    pub keys: Elements<'a>,
    /// Values of the sequence.
    pub values: Elements<'a>,
    /// Layout of keys and values.
    pub rows: RowLayout,
    /// The tokens to pack. The others stay in f16, like the text around an image.
    pub packed: TokenRange,
    /// `[queries, query_heads, head_dim]`; every query attends to all tokens.
    pub queries: Elements<'a>,
}

/// The result of the search.
#[derive(Clone, Debug, PartialEq)]
pub struct CalibrationResult {
    /// The calibration with the smallest error; the identity if none is better than it.
    pub best: Calibration,
    /// Every candidate with the normalised mean squared error of its outputs, the identity first.
    pub errors: Vec<(Calibration, f64)>,
}

impl CalibrationResult {
    /// The error of the best candidate.
    pub fn best_error(&self) -> f64 {
        self.errors.iter().map(|&(_, error)| error).fold(f64::INFINITY, f64::min)
    }

    /// The error without calibration.
    pub fn identity_error(&self) -> f64 {
        self.errors.first().map_or(f64::INFINITY, |&(_, error)| error)
    }
}

impl Calibration {
    /// Tries {0, 1, 2, 3}² for (τ1, τ2). The best candidate is the one with which attention over the packed sample is
    /// nearest to exact attention over the given sample (`Σ (got − exact)² / Σ exact²` over all queries and heads).
    ///
    /// ```
    /// use kvpack::cpu::CalibrationSample;
    /// use kvpack::plan::{Elements, RowLayout, TokenRange};
    /// use kvpack::{AttentionShape, Bits, Calibration, SegmentFormat};
    /// let shape = AttentionShape::new(1, 1, 64)?;
    /// let rows: Vec<f32> = (0..200 * 64).map(|i| (i as f32 * 0.7).sin()).collect();
    /// let sample = CalibrationSample {
    ///     shape,
    ///     keys: Elements::F32(&rows),
    ///     values: Elements::F32(&rows),
    ///     rows: RowLayout::head_major(200, &shape),
    ///     packed: TokenRange::new(10, 190)?,
    ///     queries: Elements::F32(&rows[..2 * 64]),
    /// };
    /// let found = Calibration::search(&sample, SegmentFormat::calibquant(Bits::One))?;
    /// assert!(found.best_error() <= found.identity_error());
    /// # Ok::<(), kvpack::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Elements`] when a tensor does not fit its shape, [`Error::NoTokens`] without queries, [`Error::Plan`]
    /// when the packed tokens lie outside the sample or an element is not finite, [`Error::Format`] when the format does not fit the shape.
    pub fn search(sample: &CalibrationSample<'_>, format: SegmentFormat) -> Result<CalibrationResult> {
        let stored = StoredSample::new(sample, format)?;
        let exact = exact_outputs(sample)?;
        let mut errors = Vec::new();
        for calibration in Self::grid() {
            errors.push((calibration, stored.error(sample, calibration, &exact)?));
        }
        let mut best = (Self::IDENTITY, f64::INFINITY);
        for &(calibration, error) in &errors {
            if error < best.1 {
                best = (calibration, error);
            }
        }
        Ok(CalibrationResult { best: best.0, errors })
    }
}

/// The sample, stored in an f16 and a packed store.
struct StoredSample {
    f16: CpuStore,
    packed: CpuStore,
    /// Tokens and pages of the spans in the f16 store.
    f16_spans: Vec<(TokenRange, Vec<Page>)>,
    packed_pages: Vec<Page>,
}

impl StoredSample {
    fn new(sample: &CalibrationSample<'_>, format: SegmentFormat) -> Result<Self> {
        check(sample)?;
        let mut packed = CpuStore::new(sample.shape, format)?;
        packed.reserve_ranges(1)?;
        let packed_pages = store_span(&mut packed, sample, sample.packed)?;
        let mut f16 = CpuStore::new(sample.shape, SegmentFormat::F16)?;
        let before = TokenRange::new(0, sample.packed.start()).ok();
        let after = TokenRange::new(sample.packed.end(), sample.rows.tokens).ok();
        let mut f16_spans = Vec::new();
        for tokens in before.into_iter().chain(after) {
            f16_spans.push((tokens, store_span(&mut f16, sample, tokens)?));
        }
        Ok(Self { f16, packed, f16_spans, packed_pages })
    }

    /// The error of one candidate over all queries.
    fn error(&self, sample: &CalibrationSample<'_>, calibration: Calibration, exact: &[Vec<f64>]) -> Result<f64> {
        let (mut error, mut power) = (0.0, 0.0);
        for (step, exact) in exact.chunks(QUERIES_PER_STEP).enumerate() {
            let span = |tokens: &TokenRange, pages| SpanView {
                sequence: 0,
                start: tokens.start(),
                tokens: tokens.len(),
                gathered: None,
                pages,
                range_slot: 0,
            };
            let views = [
                StoreView {
                    format: *self.packed.format(),
                    calibration: Some(calibration),
                    spans: vec![span(&sample.packed, &self.packed_pages)],
                },
                StoreView {
                    format: SegmentFormat::F16,
                    calibration: None,
                    spans: self.f16_spans.iter().map(|(tokens, pages)| span(tokens, pages.as_slice())).collect(),
                },
            ];
            let run = QueryRun::new(0, exact.len(), Visible::All);
            let plan = AttendPlan::new(sample.shape, &[run], &views)?;
            let queries: Vec<f32> = (0..exact.len()).flat_map(|i| query(sample, step * QUERIES_PER_STEP + i)).collect();
            let got = attend_plan(&plan, &[&self.packed, &self.f16], Elements::F32(&queries), Split::default())?;
            for (&got, want) in got.outputs().iter().zip(exact.iter().flatten()) {
                error += (f64::from(got) - want).powi(2);
                power += want * want;
            }
        }
        Ok(if error == 0.0 { 0.0 } else { error / power })
    }
}

/// Writes tokens of the sample into a shard of their own.
fn store_span(store: &mut CpuStore, sample: &CalibrationSample<'_>, tokens: TokenRange) -> Result<Vec<Page>> {
    let shard = in_32_bits("shards of a store", store.shards())?;
    let pages = in_32_bits("pages of a span", tokens.len().div_ceil(crate::TILE_TOKENS))?;
    store.add_shard(pages)?;
    let pages: Vec<Page> = (0..pages).map(|index| Page { shard, index }).collect();
    let write = SpanWrite { rows: sample.rows, tokens: tokens.into(), pages: &pages, range_slot: 0, centre: None };
    quantize(store, sample.keys, sample.values, write)?;
    Ok(pages)
}

/// Exact outputs of every query over the given sample.
fn exact_outputs(sample: &CalibrationSample<'_>) -> Result<Vec<Vec<f64>>> {
    use rayon::prelude::*;
    let (keys, values) = (head_major(sample, sample.keys), head_major(sample, sample.values));
    let segment = DenseSegment { keys: &keys, values: &values, tokens: sample.rows.tokens, calibration: None };
    let exact = |i| exact_attention(&sample.shape, &[segment], &query(sample, i)).map(|state| state.outputs);
    (0..queries(sample)).into_par_iter().map(exact).collect()
}

/// Rows as `[kv_heads, tokens, head_dim]` in f32.
fn head_major(sample: &CalibrationSample<'_>, elements: Elements<'_>) -> Vec<f32> {
    let (tokens, head_dim) = (sample.rows.tokens, sample.shape.head_dim());
    let mut dense = vec![0.0; sample.shape.kv_heads() * tokens * head_dim];
    for (i, row) in dense.chunks_exact_mut(head_dim).enumerate() {
        read_row(elements, sample.rows.row(i % tokens, i / tokens), row);
    }
    dense
}

fn query(sample: &CalibrationSample<'_>, index: usize) -> Vec<f32> {
    let mut query = vec![0.0; sample.shape.query_heads() * sample.shape.head_dim()];
    let start = index * query.len();
    read_row(sample.queries, start, &mut query);
    query
}

fn queries(sample: &CalibrationSample<'_>) -> usize {
    sample.queries.len() / (sample.shape.query_heads() * sample.shape.head_dim())
}

fn check(sample: &CalibrationSample<'_>) -> Result<()> {
    sample.rows.check("keys", sample.keys.len(), &sample.shape)?;
    sample.rows.check("values", sample.values.len(), &sample.shape)?;
    if sample.packed.end() > sample.rows.tokens {
        let reason = format!("packed tokens end at {} of {}", sample.packed.end(), sample.rows.tokens);
        return Err(Error::Plan { what: "calibration search", reason });
    }
    for (what, elements) in [("keys", &sample.keys), ("values", &sample.values), ("queries", &sample.queries)] {
        if let Some(index) = (0..elements.len()).find(|&index| !elements.get(index).is_finite()) {
            let value = elements.get(index);
            let reason = format!("element {index} of the {what} is {value}; all must be finite");
            return Err(Error::Plan { what: "calibration search", reason });
        }
    }
    let per_query = sample.shape.query_heads() * sample.shape.head_dim();
    if queries(sample) == 0 {
        return Err(Error::NoTokens { what: "calibration search", hint: "pass at least one query" });
    }
    if !sample.queries.len().is_multiple_of(per_query) {
        return Err(Error::Elements {
            what: "queries",
            given: sample.queries.len(),
            expected: queries(sample) * per_query,
            shape: format!(
                "whole queries of {} heads × {} channels",
                sample.shape.query_heads(),
                sample.shape.head_dim()
            ),
        });
    }
    Ok(())
}
