//! Kernels `attention_row_stats`, `attention_column_stats` and `sum_partials`.

use super::stats_matrix::{self, MatrixCall, MatrixCut};
use super::words::Words;
use super::{aggregation_constant, check_index, check_reach, queries_file, upload_call};
use crate::backend::{NewQueries, RowStatistics};
use crate::format::{AttentionShape, HEAD_DIMS};
use crate::plan::{ElementType, RowLayout};
use crate::policy::{ColumnRequest, HeadAggregation, QueryPositions, RowStatsSource, StatsRequest};
use crate::wgpu::device::launch::{Launches, flat_grid};
use crate::wgpu::device::{Capabilities, ElementBinding, Kernels, Launch, Tensor, Variant};
use crate::wgpu::pack::rows_file;
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use crate::{Error, Result};

/// Keys of a tile, `RESIDENT` in `resident_rows.wgsl`.
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

/// `StatsCall` of `select/stats_call.wgsl`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct StatsCall {
    first_key: u32,
    key_token_stride: u32,
    key_head_stride: u32,
    first_query: u32,
    query_token_stride: u32,
    query_head_stride: u32,
    tokens: u32,
    rows: u32,
    kv_heads: u32,
    group: u32,
    part_tiles: u32,
    first_lse: u32,
    lse_row_stride: u32,
    lse_head_stride: u32,
    sum_stride: u32,
    scale: f32,
    log_threshold: f32,
}

/// `SumCall` of `select/sum_partials.wgsl`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct SumCall {
    rows: u32,
    parts: u32,
}

/// What both passes read.
struct StatsTensors<'a> {
    query_rows: ElementBinding<'a>,
    key_rows: ElementBinding<'a>,
    /// Of queries and keys.
    types: [ElementType; 2],
    cut: Option<MatrixCut>,
    call: wgpu::Buffer,
    sum_call: wgpu::Buffer,
    prepared: Option<(Tensor, Tensor)>,
    parts: usize,
    grid: [u32; 3],
}

impl StatsTensors<'_> {
    /// The buffers that both measuring kernels read.
    fn buffers(&self) -> Vec<(&'static str, wgpu::BufferBinding<'_>)> {
        let call = ("call", self.call.as_entire_buffer_binding());
        match &self.prepared {
            Some((rows, units)) => {
                vec![
                    call,
                    ("keys", self.key_rows.buffer.clone()),
                    ("prepared", rows.binding()),
                    ("units", units.binding()),
                ]
            }
            None => vec![call, ("rows", self.key_rows.buffer.clone()), ("queries", self.query_rows.buffer.clone())],
        }
    }
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
        Ok(Self { shape: *shape, rows, queries, keys, request, log_threshold, part_tiles, parts, matrices, adding })
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
        let plan = Self { adding: Some(Adding { first_row, tokens: new.tokens }), ..plan };
        let first = new.queries.layout.row(new.first_row, 0);
        let queries = new.queries.tensor.slice(first, new.queries.tensor.elements() - first)?;
        let mut launches = Vec::new();
        let input = plan.input(kernels, [&queries, new.keys.tensor], &mut launches)?;
        let all = match sums {
            Some(sums) => {
                let limits = kernels.device().limits();
                super::check_output("sums of a prompt", sums, new.sums(&columns), ElementType::F32, &limits)?;
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
        super::check_output(what, rows, self.head_rows(), ElementType::F32, &kernels.device().limits())
    }

    /// What both passes read: the call and the tensors. Adds the launch that prepares query rows for matrices.
    fn input<'a>(
        &self,
        kernels: &Kernels,
        [queries, keys]: [&'a Tensor; 2],
        launches: &mut Vec<Launch>,
    ) -> Result<StatsTensors<'a>> {
        let (shape, device) = (&self.shape, kernels.device());
        let limits = device.limits();
        let query_shape = AttentionShape::new(shape.query_heads(), shape.query_heads(), shape.head_dim())?;
        self.queries.check("query rows", queries.elements(), &query_shape)?;
        self.keys.check("keys", keys.elements(), shape)?;
        let (query_rows, key_rows) = (queries.element_binding(&limits)?, keys.element_binding(&limits)?);
        let types = [queries.element_type(), keys.element_type()];
        let cut = self.uses_matrices(types[1]).filter(|_| stats_matrix::begins_at_vector(&key_rows));
        let call = match &cut {
            Some(cut) => upload_call(device, &self.matrix_call(cut, &key_rows, &query_rows), self.rows.positions())?,
            None => upload_call(device, &self.call(&key_rows, &query_rows), self.rows.positions())?,
        };
        let (parts, grid) = match &cut {
            Some(cut) => (cut.parts, cut.grid()),
            None => (self.parts, [self.parts as u32, shape.kv_heads() as u32, 1]),
        };
        let sum_call = SumCall { rows: self.head_rows() as u32, parts: parts as u32 };
        let sum_call = upload_call(device, &sum_call, &[])?;
        let prepared = cut.map(|cut| cut.prepared(device, types[0])).transpose()?;
        let input = StatsTensors { query_rows, key_rows, types, cut, call, sum_call, prepared, parts, grid };
        if let (Some(cut), Some((rows, units))) = (&input.cut, &input.prepared) {
            let buffers = [
                ("call", input.call.as_entire_buffer_binding()),
                ("queries", input.query_rows.buffer.clone()),
                ("prepared", rows.binding()),
                ("units", units.binding()),
            ];
            launches.push(planned(kernels, &cut.prepare_variant(types[0]), &buffers, cut.prepare_grid())?);
        }
        Ok(input)
    }

    /// Adds the launches that measure rows, and returns their results.
    fn measure_rows(
        &self,
        kernels: &Kernels,
        input: &StatsTensors<'_>,
        launches: &mut Vec<Launch>,
    ) -> Result<RowStatistics<Tensor>> {
        let (device, head_rows) = (kernels.device(), self.head_rows());
        let f32s = |elements| Tensor::zeroed(device, elements, ElementType::F32);
        let partials = f32s(input.parts * head_rows * 2)?;
        let (max, lse) = (f32s(head_rows)?, f32s(head_rows)?);
        let [queries, keys] = input.types;
        let variant = self.row_variant(input.cut.as_ref(), queries, keys);
        let buffers = [input.buffers().as_slice(), &[("partials", partials.binding())]].concat();
        launches.push(planned(kernels, &variant, &buffers, input.grid)?);
        let buffers = [
            ("call", input.sum_call.as_entire_buffer_binding()),
            ("partials", partials.binding()),
            ("row_max", max.binding()),
            ("row_lse", lse.binding()),
        ];
        let grid = flat_grid(head_rows as u64, &device.limits())?;
        launches.push(planned(kernels, &Variant::new(&SHADERS, "sum_partials"), &buffers, grid)?);
        Ok(RowStatistics { max, lse })
    }

    /// Adds the launches that measure columns, and returns their results: sums, and counts where they are requested.
    fn measure_columns(
        &self,
        kernels: &Kernels,
        input: &StatsTensors<'_>,
        (lse, max): (&Tensor, Option<&Tensor>),
        sums: Option<&Tensor>,
        launches: &mut Vec<Launch>,
    ) -> Result<(Tensor, Option<Words>)> {
        let (shape, device, head_rows) = (&self.shape, kernels.device(), self.head_rows());
        let rows = self.request.columns.aggregation.rows(shape.query_heads(), shape.kv_heads());
        let column_sums = match sums {
            Some(sums) => sums.clone(),
            None => Tensor::zeroed(device, rows * self.rows.tokens(), ElementType::F32)?,
        };
        let counted = match (self.log_threshold, max) {
            (Some(_), Some(max)) => {
                let partials = Words::zeroed(device, "counts of parts", input.parts * head_rows)?;
                Some((max, partials, Words::zeroed(device, "counts of rows", head_rows)?))
            }
            _ => None,
        };
        let mut buffers = input.buffers();
        buffers.extend([("row_lse", lse.binding()), ("column_sums", column_sums.binding())]);
        if let Some((max, partials, _)) = &counted {
            buffers.extend([("row_max", max.binding()), ("count_partials", partials.binding())]);
        }
        let [queries, keys] = input.types;
        let variant = self.column_variant(input.cut.as_ref(), queries, keys);
        launches.push(planned(kernels, &variant, &buffers, input.grid)?);
        let Some((_, partials, counts)) = counted else { return Ok((column_sums, None)) };
        let buffers = [
            ("call", input.sum_call.as_entire_buffer_binding()),
            ("partials", partials.binding()),
            ("counts", counts.binding()),
        ];
        let grid = flat_grid(head_rows as u64, &device.limits())?;
        launches.push(planned(kernels, &Variant::new(&SHADERS, "sum_counts"), &buffers, grid)?);
        Ok((column_sums, Some(counts)))
    }

    /// The cut with which cooperative matrices read keys of this type, if they can.
    fn uses_matrices(&self, keys: ElementType) -> Option<MatrixCut> {
        self.matrices.filter(|_| stats_matrix::reads_keys(keys, &self.keys))
    }

    fn matrix_call(&self, cut: &MatrixCut, keys: &ElementBinding<'_>, queries: &ElementBinding<'_>) -> MatrixCall {
        let call = self.call(keys, queries);
        MatrixCall {
            first_key: stats_matrix::in_vectors(call.first_key),
            key_token_stride: stats_matrix::in_vectors(call.key_token_stride),
            key_head_stride: stats_matrix::in_vectors(call.key_head_stride),
            first_query: call.first_query,
            query_token_stride: call.query_token_stride,
            query_head_stride: call.query_head_stride,
            tokens: call.tokens,
            rows: call.rows,
            kv_heads: call.kv_heads,
            group: call.group,
            chunk_heads: cut.chunk_heads as u32,
            chunk_rows: cut.chunk_rows as u32,
            row_chunks: cut.row_chunks as u32,
            chunks: cut.chunks as u32,
            part_tiles: cut.part_tiles as u32,
            scale: call.scale,
            log_threshold: call.log_threshold,
        }
    }

    fn call(&self, keys: &ElementBinding<'_>, queries: &ElementBinding<'_>) -> StatsCall {
        let heads = self.shape.query_heads();
        // Steps write [row][query_head], and `sum_partials` [query_head][row].
        let (first_lse, lse_row_stride, lse_head_stride) = match (self.adding, self.request.rows) {
            (Some(adding), RowStatsSource::KnownLse) => (adding.first_row * heads, heads, 1),
            _ => (0, 1, self.rows.len()),
        };
        StatsCall {
            first_key: keys.first_element,
            key_token_stride: self.keys.token_stride as u32,
            key_head_stride: self.keys.head_stride as u32,
            first_query: queries.first_element,
            query_token_stride: self.queries.token_stride as u32,
            query_head_stride: self.queries.head_stride as u32,
            tokens: self.rows.tokens() as u32,
            rows: self.rows.len() as u32,
            kv_heads: self.shape.kv_heads() as u32,
            group: self.shape.group() as u32,
            part_tiles: self.part_tiles as u32,
            first_lse: first_lse as u32,
            lse_row_stride: lse_row_stride as u32,
            lse_head_stride: lse_head_stride as u32,
            sum_stride: self.adding.map_or(self.rows.tokens(), |adding| adding.tokens) as u32,
            scale: 1.0 / (self.shape.head_dim() as f32).sqrt(),
            log_threshold: self.log_threshold.unwrap_or(0.0),
        }
    }

    fn row_variant(&self, cut: Option<&MatrixCut>, queries: ElementType, keys: ElementType) -> Variant {
        match cut {
            Some(cut) => cut.row_variant(queries),
            None => row_variant(self.shape.head_dim(), queries, keys),
        }
    }

    fn column_variant(&self, cut: Option<&MatrixCut>, queries: ElementType, keys: ElementType) -> Variant {
        let (aggregation, counting) = (self.request.columns.aggregation, self.log_threshold.is_some());
        match cut {
            Some(cut) => cut.column_variant(queries, aggregation, counting),
            None => {
                let variant = column_variant(self.shape.head_dim(), aggregation, counting, queries, keys);
                if self.adding.is_some() { adding(variant) } else { variant }
            }
        }
    }
}

/// Maximum number of parts of the keys.
fn most_parts(shape: &AttentionShape, rows: &QueryPositions) -> usize {
    PARTIAL_BYTES / (8 * rows.len() * shape.query_heads())
}

fn row_variant(head_dim: usize, queries: ElementType, keys: ElementType) -> Variant {
    typed(Variant::new(&SHADERS, "attention_row_stats"), head_dim, queries, keys)
}

fn column_variant(
    head_dim: usize,
    aggregation: HeadAggregation,
    counting: bool,
    queries: ElementType,
    keys: ElementType,
) -> Variant {
    let variant = typed(Variant::new(&SHADERS, "attention_column_stats"), head_dim, queries, keys);
    let variant = variant.constant("AGGREGATION", aggregation_constant(aggregation));
    if counting { variant.import("counting", "select/counting/rows.wgsl") } else { variant }
}

/// The same that adds to what is there.
fn adding(variant: Variant) -> Variant {
    variant.constant("ADDS", 1)
}

fn typed(variant: Variant, head_dim: usize, queries: ElementType, keys: ElementType) -> Variant {
    variant.constant("HEAD_DIM", head_dim).import("rows", rows_file(keys)).import("queries", queries_file(queries))
}

/// Every variant that a plan uses.
pub(super) fn variants() -> Vec<Variant> {
    let mut found = vec![Variant::new(&SHADERS, "sum_partials"), Variant::new(&SHADERS, "sum_counts")];
    for (i, head_dim) in HEAD_DIMS.into_iter().enumerate() {
        for (j, keys) in ElementType::ALL.into_iter().enumerate() {
            let queries = ElementType::ALL[(i + j) % 3];
            found.push(row_variant(head_dim, queries, keys));
            for (k, aggregation) in HeadAggregation::ALL.into_iter().enumerate() {
                let counting = (i + j + k) % 2 == 0;
                let variant = column_variant(head_dim, aggregation, counting, queries, keys);
                if keys == ElementType::F32 {
                    found.push(adding(variant.clone()));
                }
                found.push(variant);
            }
        }
    }
    found
}
