//! Kernels `attention_row_stats`, `attention_column_stats` and `sum_partials`.

use super::launch::{Kernel, Launch, Launches};
use super::words::Words;
use super::{aligned, check_index, check_output};
use crate::Result;
use crate::cuda::Cuda;
use crate::cuda::device::memory::Memory;
use crate::cuda::device::program::Program;
use crate::cuda::device::tensor::Tensor;
use crate::format::AttentionShape;
use crate::plan::{ElementType, RowLayout};
use crate::policy::{HeadAggregation, QueryRows, RowStatsSource, StatsRequest};

/// Threads of a block, `32 * WARPS` in `key_tile.cuh`.
pub(super) const TILE_THREADS: u32 = 256;

/// Threads of a block of `sum_partials`.
const SUM_THREADS: u32 = 128;

/// Bytes of what parts of the keys measured, at most: where there are many query rows, a part has more tiles.
const PARTIAL_BYTES: usize = 64 << 20;

const SUM_PROGRAM: &[&str] = &["select/sum_partials.cu"];

/// Resident rows of a block, `TILE_ROWS` in `key_tile.cuh`.
pub(super) const fn tile_rows(element_type: ElementType) -> usize {
    match element_type {
        ElementType::F32 => 128,
        ElementType::F16 | ElementType::Bf16 => 256,
    }
}

/// Attention statistics of query rows against all keys of a context: decided, but for the memory.
///
/// A block owns some tiles of 256 keys (128 of f32) of a KV head, which stay in registers as MMA operands while the query
/// rows pass by; scores and weights never reach memory, values are not read, and everything is summed in a fixed order.
/// Elements of 16 bits are multiplied as they are; f32 ones as two halves each.
#[derive(Clone, Debug)]
pub struct AttentionStatsPlan {
    shape: AttentionShape,
    rows: QueryRows,
    queries: RowLayout,
    keys: RowLayout,
    request: StatsRequest,
    log_threshold: Option<f32>,
}

/// Statistics bound to their tensors: what [`AttentionStats::launches`] measures lies in the other fields.
#[derive(Clone, Debug)]
pub struct AttentionStats {
    /// To launch.
    pub launches: Launches,
    /// The largest score of each row, `[query_heads, rows]`; `None` where the log-sum-exp was known.
    pub row_max: Option<Tensor>,
    /// The natural log-sum-exp of each row, `[query_heads, rows]`: measured, or the caller's.
    pub row_lse: Tensor,
    /// `[query_heads, tokens]` or `[kv_heads, tokens]`, as the aggregation says.
    pub column_sums: Tensor,
    /// `[query_heads, rows]`: keys at or above the threshold; `None` where none was asked for.
    pub counts: Option<Words>,
}

/// `StatsCall` of `select/stats_call.cuh`.
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct StatsCall {
    keys: u64,
    key_token_stride: u64,
    key_head_stride: u64,
    queries: u64,
    query_token_stride: u64,
    query_head_stride: u64,
    positions: u64,
    row_partials: u64,
    row_lse: u64,
    row_max: u64,
    column_sums: u64,
    count_partials: u64,
    tokens: u32,
    rows: u32,
    kv_heads: u32,
    group: u32,
    part_tiles: u32,
    scale: f32,
    log_threshold: f32,
    unused: u32,
}

/// `SumCall` of `select/sum_partials.cu`.
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct SumCall {
    partials: u64,
    row_max: u64,
    row_lse: u64,
    counts: u64,
    rows: u32,
    parts: u32,
}

/// How the keys are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parts {
    tiles: usize,
    count: usize,
}

impl AttentionStatsPlan {
    /// Plans statistics of query rows, `[rows, query_heads, head_dim]`, against keys, `[tokens, kv_heads, head_dim]`;
    /// `layouts` are theirs, in this order.
    ///
    /// # Errors
    /// [`Error::Selection`] when layouts and positions are of other numbers of rows or keys; [`Error::Budget`] when the
    /// threshold is not in 0 ..= 1; [`Error::Plan`] when counts are asked for and only the log-sum-exp is known;
    /// [`Error::Limit`] when a 32-bit index does not count the column sums.
    ///
    /// [`Error::Selection`]: crate::Error::Selection
    /// [`Error::Budget`]: crate::Error::Budget
    /// [`Error::Plan`]: crate::Error::Plan
    /// [`Error::Limit`]: crate::Error::Limit
    pub fn new(
        shape: &AttentionShape,
        rows: QueryRows,
        layouts: [RowLayout; 2],
        request: StatsRequest,
    ) -> Result<Self> {
        let [queries, keys] = layouts;
        rows.check_tensors(queries.tokens, keys.tokens)?;
        let log_threshold = request.log_threshold()?;
        check_index("column sums", shape.query_heads() * rows.tokens())?;
        Ok(Self { shape: *shape, rows, queries, keys, request, log_threshold })
    }

    /// Binds the tensors to read, and makes those to write. `known_lse`, `[query_heads, rows]`, is given where the plan
    /// says so.
    ///
    /// # Errors
    /// [`Error::Elements`] when a tensor is too short; [`Error::Plan`] when the log-sum-exp is given or missing against
    /// the plan; [`Error::OutOfMemory`] or what else the driver reports.
    ///
    /// [`Error::Elements`]: crate::Error::Elements
    /// [`Error::Plan`]: crate::Error::Plan
    /// [`Error::OutOfMemory`]: crate::Error::OutOfMemory
    pub fn bind(
        &self,
        backend: &Cuda,
        queries: &Tensor,
        keys: &Tensor,
        known_lse: Option<&Tensor>,
    ) -> Result<AttentionStats> {
        let (shape, stream) = (&self.shape, backend.stream());
        let query_shape = AttentionShape::new(shape.query_heads(), shape.query_heads(), shape.head_dim())?;
        self.queries.check("query rows", queries.elements(), &query_shape)?;
        self.keys.check("keys", keys.elements(), shape)?;
        let head_rows = shape.query_heads() * self.rows.len();
        let parts = self.parts(keys.element_type());
        let positions = bytemuck::cast_slice(self.rows.positions());
        let positions = Memory::upload(stream, "positions of query rows", positions)?;
        let f32s = |elements| Tensor::zeroed(stream, elements, ElementType::F32);
        let sum_grid = [head_rows.div_ceil(SUM_THREADS as usize), 1];
        let sums = SumCall { rows: head_rows as u32, parts: parts.count as u32, ..SumCall::default() };
        let sum_program = Program { files: SUM_PROGRAM, defines: Vec::new() };
        let mut call = self.call(parts, queries, keys, &positions);
        let mut launches = Vec::new();

        let (row_max, row_lse) = match (self.request.rows, known_lse) {
            (RowStatsSource::KnownLse, Some(lse)) => {
                check_output("log-sum-exps of rows", lse, head_rows, ElementType::F32)?;
                (None, lse.clone())
            }
            (RowStatsSource::Measured, None) => {
                let partials = f32s(parts.count * head_rows * 2)?;
                let (max, lse) = (f32s(head_rows)?, f32s(head_rows)?);
                call.row_partials = partials.memory().address();
                let program = self.program(&["select/attention_row_stats.cu"], queries, keys, &[]);
                let kernel = self.kernel(&program, "attention_row_stats", parts);
                let memory = [queries.memory(), keys.memory(), &positions, partials.memory()];
                launches.push(Launch::new(backend, kernel, &call, &memory)?);
                let sums = SumCall {
                    partials: partials.memory().address(),
                    row_max: max.memory().address(),
                    row_lse: lse.memory().address(),
                    ..sums
                };
                let kernel = Kernel { program: &sum_program, name: "sum_partials", grid: sum_grid, block: SUM_THREADS };
                let memory = [partials.memory(), max.memory(), lse.memory()];
                launches.push(Launch::new(backend, kernel, &sums, &memory)?);
                (Some(max), lse)
            }
            (source, _) => return Err(source.mismatch()),
        };

        let aggregation = self.request.columns.aggregation;
        let column_sums = f32s(aggregation.rows(shape.query_heads(), shape.kv_heads()) * self.rows.tokens())?;
        call.row_lse = row_lse.address();
        call.column_sums = column_sums.memory().address();
        let mut memory = vec![queries.memory(), keys.memory(), &positions, row_lse.memory(), column_sums.memory()];
        let counted = match (self.log_threshold, &row_max) {
            (Some(_), Some(max)) => {
                let partials = Words::zeroed(stream, "counts of parts", parts.count * head_rows)?;
                Some((max, partials, Words::zeroed(stream, "counts of rows", head_rows)?))
            }
            _ => None,
        };
        if let Some((max, partials, _)) = &counted {
            call.row_max = max.memory().address();
            call.count_partials = partials.memory().address();
            memory.extend([max.memory(), partials.memory()]);
        }
        let aggregation = match aggregation {
            HeadAggregation::Each => 0,
            HeadAggregation::Sum => 1,
            HeadAggregation::Mean => 2,
            HeadAggregation::Max => 3,
        };
        let defines = [("AGGREGATION", aggregation), ("COUNTING", usize::from(counted.is_some()))];
        let program = self.program(&["select/attention_column_stats.cu"], queries, keys, &defines);
        let kernel = self.kernel(&program, "attention_column_stats", parts);
        launches.push(Launch::new(backend, kernel, &call, &memory)?);
        let counts = match counted {
            None => None,
            Some((_, partials, counts)) => {
                let sums = SumCall { partials: partials.memory().address(), counts: counts.memory().address(), ..sums };
                let kernel = Kernel { program: &sum_program, name: "sum_counts", grid: sum_grid, block: SUM_THREADS };
                launches.push(Launch::new(backend, kernel, &sums, &[partials.memory(), counts.memory()])?);
                Some(counts)
            }
        };
        Ok(AttentionStats { launches: Launches::new(launches), row_max, row_lse, column_sums, counts })
    }

    fn parts(&self, keys: ElementType) -> Parts {
        let tiles = self.rows.tokens().div_ceil(tile_rows(keys));
        let most = PARTIAL_BYTES / (8 * self.rows.len() * self.shape.query_heads());
        let part_tiles = tiles.div_ceil(most.max(1));
        Parts { tiles: part_tiles, count: tiles.div_ceil(part_tiles) }
    }

    fn call(&self, parts: Parts, queries: &Tensor, keys: &Tensor, positions: &Memory) -> StatsCall {
        StatsCall {
            keys: keys.address(),
            key_token_stride: self.keys.token_stride as u64,
            key_head_stride: self.keys.head_stride as u64,
            queries: queries.address(),
            query_token_stride: self.queries.token_stride as u64,
            query_head_stride: self.queries.head_stride as u64,
            positions: positions.address(),
            tokens: self.rows.tokens() as u32,
            rows: self.rows.len() as u32,
            kv_heads: self.shape.kv_heads() as u32,
            group: self.shape.group() as u32,
            part_tiles: parts.tiles as u32,
            scale: 1.0 / (self.shape.head_dim() as f32).sqrt(),
            log_threshold: self.log_threshold.unwrap_or(0.0),
            ..StatsCall::default()
        }
    }

    fn program(
        &self,
        files: &'static [&'static str],
        queries: &Tensor,
        keys: &Tensor,
        defines: &[(&'static str, usize)],
    ) -> Program {
        let mut all = tile_defines(self.shape.head_dim(), [(queries, &self.queries), (keys, &self.keys)]);
        all.extend(defines);
        Program { files, defines: all }
    }

    fn kernel<'a>(&self, program: &'a Program, name: &'static str, parts: Parts) -> Kernel<'a> {
        Kernel { program, name, grid: [parts.count, self.shape.kv_heads()], block: TILE_THREADS }
    }
}

/// The macros of `key_tile.cuh`, for the tensors and layouts of the passing and of the resident rows.
pub(super) fn tile_defines(
    head_dim: usize,
    [passing, resident]: [(&Tensor, &RowLayout); 2],
) -> Vec<(&'static str, usize)> {
    vec![
        ("HEAD_DIM", head_dim),
        ("QUERY_TYPE", passing.0.type_code() as usize),
        ("KEY_TYPE", resident.0.type_code() as usize),
        ("QUERIES_ALIGNED", aligned(passing.0, passing.1)),
        ("KEYS_ALIGNED", aligned(resident.0, resident.1)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::ColumnRequest;

    /// The structs of both sides have the same size: `stats_call.cuh` and `sum_partials.cu` have no padding either.
    #[test]
    fn calls_have_no_padding() {
        assert_eq!(size_of::<StatsCall>(), 12 * 8 + 8 * 4);
        assert_eq!(size_of::<SumCall>(), 4 * 8 + 2 * 4);
    }

    #[test]
    fn parts_cover_the_keys_within_their_memory() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        let queries = AttentionShape::new(32, 32, 128).unwrap();
        let columns = ColumnRequest { aggregation: HeadAggregation::Each, threshold: None };
        for (rows, tokens) in [(1, 1), (50, 32768), (32768, 32768), (4096, 1 << 20)] {
            let layouts = [RowLayout::token_major(rows, &queries), RowLayout::token_major(tokens, &shape)];
            let positions = QueryRows::last(rows, tokens).unwrap();
            let request = StatsRequest { columns, rows: RowStatsSource::Measured };
            let plan = AttentionStatsPlan::new(&shape, positions, layouts, request).unwrap();
            for element_type in ElementType::ALL {
                let parts = plan.parts(element_type);
                assert!(parts.tiles * parts.count * tile_rows(element_type) >= tokens);
                assert!(parts.count == 1 || parts.count * rows * 32 * 8 <= PARTIAL_BYTES);
            }
        }
    }
}
