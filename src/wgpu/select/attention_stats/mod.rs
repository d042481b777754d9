//! Kernels `attention_row_stats`, `attention_column_stats` and `sum_partials`.

mod passes;
mod variants;

pub(super) use variants::variants;

use super::stats_matrix::MatrixCut;
use super::words::Words;
use super::{check_index, check_output, check_reach};
use crate::backend::{NewQueries, RowStatistics};
use crate::format::AttentionShape;
use crate::plan::{ElementType, RowLayout, Scoring};
use crate::policy::{ColumnRequest, QueryPositions, RowStatsSource, StatsRequest};
use crate::wgpu::device::launch::Launches;
use crate::wgpu::device::{Capabilities, Kernels, Tensor, Variant};
use crate::wgpu::sources::SHADERS;
use crate::{Error, Result};

/// Keys of a tile, `RESIDENT` in `select/rows.wgsl#resident_rows`.
const TILE_KEYS: usize = 128;

/// Maximum size of the partial results of all parts of the keys in bytes. With many query rows, a part has more tiles.
const PARTIAL_BYTES: usize = 64 << 20;

/// A buffer that [`AttentionStatsPlan::bind`] makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatsBuffer {
    /// Its purpose.
    pub what: &'static str,
    /// Its size.
    pub bytes: usize,
}

/// Attention statistics of query rows against all keys of a context. The plan decides everything except the buffers.
///
/// A workgroup owns some tiles of 128 keys of a KV head. They stay in registers while the query rows stream through.
/// Scores and weights never reach memory, values are not read, and everything is summed in a fixed order. On a device
/// with cooperative matrices ([`for_device`](Self::for_device)) the query rows stay instead, as halves, and f16 keys
/// stream through.
///
/// ```
/// use kvpack::plan::RowLayout;
/// use kvpack::policy::{ColumnRequest, DEFAULT_THRESHOLD, HeadAggregation, QueryPositions, RowStatsSource, StatsRequest};
/// use kvpack::wgpu::AttentionStatsPlan;
/// use kvpack::AttentionShape;
///
/// // The last 50 rows of a context of 32k tokens, for VL-Cache.
/// let (shape, queries) = (AttentionShape::new(32, 8, 128)?, AttentionShape::new(32, 32, 128)?);
/// let columns = ColumnRequest { aggregation: HeadAggregation::Mean, threshold: Some(DEFAULT_THRESHOLD) };
/// let plan = AttentionStatsPlan::new(
///     &shape,
///     QueryPositions::last(50, 32768)?,
///     [RowLayout::token_major(50, &queries), RowLayout::token_major(32768, &shape)],
///     StatsRequest { columns, rows: RowStatsSource::Measured },
/// )?;
/// let bytes: usize = plan.buffers().iter().map(|buffer| buffer.bytes).sum();
/// assert!(bytes < 10 << 20); // the scores would be 210 MB
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct AttentionStatsPlan {
    shape: AttentionShape,
    /// Factor on `q·k`.
    scale: f32,
    rows: QueryPositions,
    queries: RowLayout,
    keys: RowLayout,
    request: StatsRequest,
    log_threshold: Option<f32>,
    part_tiles: usize,
    parts: usize,
    matrices: Option<MatrixCut>,
    /// Where the sums of a prompt are to be added to.
    adding: Option<Adding>,
}

/// How sums are added to those of a whole prompt.
#[derive(Clone, Copy, Debug)]
struct Adding {
    /// The first of the query rows among the log-sum-exps of a step.
    first_row: usize,
    /// Tokens of the prompt.
    tokens: usize,
}

/// Statistics bound to their tensors. [`AttentionStats::launches`] writes the results to the other fields.
#[derive(Clone, Debug)]
pub struct AttentionStats {
    /// The dispatches to encode.
    pub launches: Launches,
    /// The largest score of each row, `[query_heads, rows]`; `None` if the log-sum-exp was given.
    pub row_max: Option<Tensor>,
    /// The natural log-sum-exp of each row, `[query_heads, rows]`: measured, or the caller's tensor.
    pub row_lse: Tensor,
    /// `[query_heads, tokens]` or `[kv_heads, tokens]`, depending on the aggregation.
    pub column_sums: Tensor,
    /// `[query_heads, rows]`: the number of keys at or above the threshold; `None` if no count was requested.
    pub counts: Option<Words>,
}

impl AttentionStatsPlan {
    /// Plans statistics of query rows, `[rows, query_heads, head_dim]`, against keys, `[tokens, kv_heads, head_dim]`.
    /// `layouts` are their layouts, in this order.
    ///
    /// # Errors
    /// [`Error::Selection`] when layouts and positions disagree on the number of rows or keys; [`Error::Budget`] when
    /// the threshold is not in 0 ..= 1; [`Error::Plan`] when counts are requested and only the log-sum-exp is known;
    /// [`Error::Limit`] when 32-bit indices cannot address all elements.
    ///
    /// [`Error::Selection`]: crate::Error::Selection
    /// [`Error::Budget`]: crate::Error::Budget
    /// [`Error::Plan`]: crate::Error::Plan
    /// [`Error::Limit`]: crate::Error::Limit
    pub fn new(
        shape: &AttentionShape,
        rows: QueryPositions,
        layouts: [RowLayout; 2],
        request: StatsRequest,
    ) -> Result<Self> {
        let [queries, keys] = layouts;
        rows.check_tensors(queries.tokens, keys.tokens)?;
        let log_threshold = request.log_threshold()?;
        check_reach(&queries, shape.query_heads(), shape.head_dim())?;
        check_reach(&keys, shape.kv_heads(), shape.head_dim())?;
        check_index("column sums", shape.query_heads().saturating_mul(rows.tokens()) as u64)?;
        let tiles = rows.tokens().div_ceil(TILE_KEYS);
        let part_tiles = tiles.div_ceil(most_parts(shape, &rows).clamp(1, u16::MAX.into()));
        let parts = tiles.div_ceil(part_tiles);
        let (matrices, adding) = (None, None);
        let (shape, scale) = (*shape, Scoring::of(shape).scale());
        Ok(Self { shape, scale, rows, queries, keys, request, log_threshold, part_tiles, parts, matrices, adding })
    }

    /// The same statistics with another factor on `q·k` than `1/√head_dim`.
    #[must_use]
    pub fn with_scale(self, scale: f32) -> Self {
        Self { scale, ..self }
    }

    /// The same statistics on a device with these capabilities. Cooperative matrices read f16 keys if the device has
    /// them and there are kernels for the shape.
    pub fn for_device(self, capabilities: &Capabilities) -> Self {
        let (size, aggregation) = ([self.rows.len(), self.rows.tokens()], self.request.columns.aggregation);
        let matrices =
            MatrixCut::new(&self.shape, size, aggregation, most_parts(&self.shape, &self.rows), capabilities);
        Self { matrices, ..self }
    }

    /// The buffers that [`AttentionStatsPlan::bind`] creates: all memory that the kernels write.
    pub fn buffers(&self) -> Vec<StatsBuffer> {
        let (heads, tokens) = (self.shape.query_heads(), self.rows.tokens());
        let head_rows = heads * self.rows.len();
        let sums = self.request.columns.aggregation.rows(heads, self.shape.kv_heads()) * tokens;
        let mut buffers = vec![StatsBuffer { what: "column sums", bytes: sums * 4 }];
        let parts = self.parts.max(self.matrices.map_or(0, |cut| cut.parts));
        if let Some(cut) = &self.matrices {
            // A row of f32 elements has two halves per element.
            buffers.push(StatsBuffer { what: "query rows in halves", bytes: cut.prepared_elements(2) * 2 });
            buffers.push(StatsBuffer { what: "units of query rows", bytes: cut.columns() * 4 });
        }
        if self.request.rows == RowStatsSource::Measured {
            buffers.push(StatsBuffer { what: "row statistics of parts", bytes: parts * head_rows * 8 });
            buffers.push(StatsBuffer { what: "maxima of rows", bytes: head_rows * 4 });
            buffers.push(StatsBuffer { what: "log-sum-exps of rows", bytes: head_rows * 4 });
        }
        if self.log_threshold.is_some() {
            buffers.push(StatsBuffer { what: "counts of parts", bytes: parts * head_rows * 4 });
            buffers.push(StatsBuffer { what: "counts of rows", bytes: head_rows * 4 });
        }
        buffers
    }

    /// The kernel variants for tensors of these types, for [`Kernels::prepare`].
    pub fn variants(&self, queries: ElementType, keys: ElementType) -> Vec<Variant> {
        let cut = self.uses_matrices(keys);
        let mut variants: Vec<Variant> = cut.iter().map(|cut| cut.prepare_variant(queries)).collect();
        if self.request.rows == RowStatsSource::Measured {
            variants.extend([self.row_variant(cut.as_ref(), queries, keys), Variant::new(&SHADERS, "sum_partials")]);
        }
        variants.push(self.column_variant(cut.as_ref(), queries, keys));
        if self.log_threshold.is_some() {
            variants.push(Variant::new(&SHADERS, "sum_counts"));
        }
        variants
    }

    /// Binds the tensors to read, and creates those to write. `known_lse`, `[query_heads, rows]`, is given if the plan
    /// expects it.
    ///
    /// # Errors
    /// [`Error::Elements`] when a tensor is too short; [`Error::Plan`] when the log-sum-exp is given or missing
    /// contrary to the plan; [`Error::Limit`], [`Error::OutOfMemory`] or [`Error::DeviceLost`].
    ///
    /// [`Error::Elements`]: crate::Error::Elements
    /// [`Error::Plan`]: crate::Error::Plan
    /// [`Error::Limit`]: crate::Error::Limit
    /// [`Error::OutOfMemory`]: crate::Error::OutOfMemory
    /// [`Error::DeviceLost`]: crate::Error::DeviceLost
    pub fn bind(
        &self,
        kernels: &Kernels,
        queries: &Tensor,
        keys: &Tensor,
        known_lse: Option<&Tensor>,
    ) -> Result<AttentionStats> {
        let mut launches = Vec::new();
        let input = self.input(kernels, [queries, keys], &mut launches)?;
        let (row_max, row_lse) = match (self.request.rows, known_lse) {
            (RowStatsSource::KnownLse, Some(lse)) => {
                self.check_rows(kernels, "log-sum-exps of rows", lse)?;
                (None, lse.clone())
            }
            (RowStatsSource::Measured, None) => {
                let rows = self.measure_rows(kernels, &input, &mut launches)?;
                (Some(rows.max), rows.lse)
            }
            (source, _) => return Err(source.mismatch()),
        };
        let rows = (&row_lse, row_max.as_ref());
        let (column_sums, counts) = self.measure_columns(kernels, &input, rows, None, &mut launches)?;
        Ok(AttentionStats { launches: launches.into_iter().collect(), row_max, row_lse, column_sums, counts })
    }

    /// Binds statistics of rows of a step that are added to the sums of their prompt, and counts if they are requested.
    /// Cooperative matrices have no part in it, since decoded keys are f32.
    ///
    /// # Errors
    /// Those of [`NewQueries::check`] and of [`AttentionStatsPlan::bind`].
    pub(in crate::wgpu) fn bind_adding(
        kernels: &Kernels,
        new: NewQueries<'_, Tensor>,
        columns: ColumnRequest,
        sums: &mut Option<Tensor>,
    ) -> Result<(Launches, Option<Words>)> {
        new.check(&columns, Tensor::elements)?;
        let heads = new.shape.query_heads();
        let source = if new.log_sum_exps.is_some() { RowStatsSource::KnownLse } else { RowStatsSource::Measured };
        let queries = RowLayout { tokens: new.rows.len(), ..new.queries.layout };
        let request = StatsRequest { columns, rows: source };
        let plan = Self::new(&new.shape, new.rows.clone(), [queries, new.keys.layout], request)?;
        // Measured log-sum-exps are those of the rows alone.
        let first_row = if new.log_sum_exps.is_some() { new.first_row } else { 0 };
        check_index("the sums of a prompt", new.sums(&columns) as u64)?;
        check_index("the log-sum-exps of a step", ((new.first_row + new.rows.len()) * heads) as u64)?;
        let adding = Some(Adding { first_row, tokens: new.tokens });
        let plan = Self { scale: new.scale, adding, ..plan };
        let first = new.queries.layout.row(new.first_row, 0);
        let queries = new.queries.tensor.slice(first, new.queries.tensor.elements() - first)?;
        let mut launches = Vec::new();
        let input = plan.input(kernels, [&queries, new.keys.tensor], &mut launches)?;
        let all = match sums {
            Some(sums) => {
                let limits = kernels.device().limits();
                check_output("sums of a prompt", sums, new.sums(&columns), ElementType::F32, &limits)?;
                sums.clone()
            }
            None => Tensor::zeroed(kernels.device(), new.sums(&columns), ElementType::F32)?,
        };
        let counts = match new.log_sum_exps {
            Some(lse) if lse.element_type() == ElementType::F32 => {
                lse.check_aligned("log-sum-exps of a step", &kernels.device().limits())?;
                plan.measure_columns(kernels, &input, (lse, None), Some(&all), &mut launches)?.1
            }
            Some(lse) => {
                let reason = format!("they are {:?}; they are to be f32", lse.element_type());
                return Err(Error::Buffer { what: "log-sum-exps of a step", reason });
            }
            None => {
                let rows = plan.measure_rows(kernels, &input, &mut launches)?;
                let rows = (&rows.lse, Some(&rows.max));
                plan.measure_columns(kernels, &input, rows, Some(&all), &mut launches)?.1
            }
        };
        *sums = Some(all);
        Ok((launches.into_iter().collect(), counts))
    }

    /// The statistics of rows alone.
    ///
    /// # Errors
    /// As [`AttentionStatsPlan::bind`].
    pub fn bind_rows(
        &self,
        kernels: &Kernels,
        queries: &Tensor,
        keys: &Tensor,
    ) -> Result<(Launches, RowStatistics<Tensor>)> {
        let mut launches = Vec::new();
        let input = self.input(kernels, [queries, keys], &mut launches)?;
        let rows = self.measure_rows(kernels, &input, &mut launches)?;
        Ok((launches.into_iter().collect(), rows))
    }

    /// The statistics of columns, with those of rows that the caller knows.
    ///
    /// # Errors
    /// As [`AttentionStatsPlan::bind`].
    pub fn bind_columns(
        &self,
        kernels: &Kernels,
        queries: &Tensor,
        keys: &Tensor,
        rows: &RowStatistics<Tensor>,
    ) -> Result<AttentionStats> {
        let mut launches = Vec::new();
        let input = self.input(kernels, [queries, keys], &mut launches)?;
        self.check_rows(kernels, "log-sum-exps of rows", &rows.lse)?;
        self.check_rows(kernels, "maxima of rows", &rows.max)?;
        let of_rows = (&rows.lse, Some(&rows.max));
        let (column_sums, counts) = self.measure_columns(kernels, &input, of_rows, None, &mut launches)?;
        let (row_max, row_lse) = (Some(rows.max.clone()), rows.lse.clone());
        Ok(AttentionStats { launches: launches.into_iter().collect(), row_max, row_lse, column_sums, counts })
    }

    /// Rows of all query heads.
    fn head_rows(&self) -> usize {
        self.shape.query_heads() * self.rows.len()
    }

    fn check_rows(&self, kernels: &Kernels, what: &'static str, rows: &Tensor) -> Result<()> {
        check_output(what, rows, self.head_rows(), ElementType::F32, &kernels.device().limits())
    }
}

/// Maximum number of parts of the keys.
fn most_parts(shape: &AttentionShape, rows: &QueryPositions) -> usize {
    PARTIAL_BYTES / (8 * rows.len() * shape.query_heads())
}
