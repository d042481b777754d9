//! Kernels `attention_row_stats`, `attention_column_stats` and `sum_partials`.

use std::sync::Arc;

use super::key_tile::{GroupWarps, KeyTile};
use super::launch::{Kernel, Launch, Launches};
use super::words::Words;
use super::{check_index, check_output};
use crate::backend::{NewQueries, RowStatistics};
use crate::cuda::Cuda;
use crate::cuda::device::driver::DeviceFacts;
use crate::cuda::device::memory::Memory;
use crate::cuda::device::program::Program;
use crate::cuda::device::tensor::Tensor;
use crate::cuda::sources::SOURCES;
use crate::format::AttentionShape;
use crate::plan::{ElementType, RowLayout, Scoring};
use crate::policy::{ColumnRequest, HeadAggregation, QueryPositions, RowStatsSource, StatsRequest};
use crate::{Error, Result};

/// Threads of a block of `sum_partials`.
const SUM_THREADS: u32 = 128;

/// Maximum size of the partial results of all parts of the keys in bytes. With many query rows, a part has more tiles.
const PARTIAL_BYTES: usize = 64 << 20;

static SUMS: Program = Program { sources: &SOURCES, files: &["select/sum_partials.cu"], defines: Vec::new() };

/// Maximum shared memory of a block in bytes. The query rows of a group of four heads with 50 rows each fit into it.
const SHARED_BYTES: usize = 100 << 10;

/// Attention statistics of query rows against all keys of a context. The plan decides everything except the memory.
///
/// A warp owns tiles of 32 keys of a KV head (16 where they take more registers). They stay in registers as MMA
/// operands while the query rows of the head's group stream through. Scores and weights never reach memory, values are
/// not read, and everything is summed in a fixed order. 16-bit elements are multiplied directly, by warpgroups on
/// compute capability 9.0. An f32 element is multiplied as two halves.
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
    /// Tokens of the prompt to whose sums those of a part are added.
    adding: Option<usize>,
}

/// Statistics bound to their tensors. [`AttentionStats::launches`] writes the results to the other fields.
#[derive(Clone, Debug)]
pub struct AttentionStats {
    /// The launches to run.
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
    staged: u32,
    lse_row_stride: u32,
    lse_head_stride: u32,
    sum_stride: u32,
    unused: u32,
    scale: f32,
    log_threshold: f32,
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

/// What statistics are measured of.
struct StatsTensors<'a> {
    backend: &'a Cuda,
    queries: &'a Tensor,
    keys: &'a Tensor,
    positions: Arc<Memory>,
}

/// How keys and query rows are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    tile: KeyTile,
    /// Tiles per part of the keys, and number of parts.
    part_tiles: usize,
    parts: usize,
    /// Groups of eight query rows that are in shared memory at once.
    staged: usize,
}

/// The statistics that a pass measures.
#[derive(Clone, Copy)]
enum Pass {
    Rows,
    Columns,
}

impl Pass {
    /// The shape of warpgroups. Measured: rows take 54.9 µs with `Wide` and 68.9 µs with `Many`; columns take 46.3 and
    /// 43.5 µs.
    const fn groups(self) -> GroupWarps {
        match self {
            Self::Rows => GroupWarps::Wide,
            Self::Columns => GroupWarps::Many,
        }
    }

    /// Bytes of shared memory that eight query rows take in addition to the rows themselves: positions, log-sum-exps,
    /// thresholds, and each warp's measurements or counts of them.
    const fn bytes(self, tile: &KeyTile) -> usize {
        8 * match self {
            Self::Rows => 4 + 8 * tile.warps(),
            Self::Columns => 12 + 4 * tile.warps(),
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
    /// [`Error::Limit`] when there are more column sums than a 32-bit index can count.
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
        check_index("column sums", shape.query_heads().saturating_mul(rows.tokens()) as u64)?;
        let (shape, scale) = (*shape, Scoring::of(shape).scale());
        Ok(Self { shape, scale, rows, queries, keys, request, log_threshold, adding: None })
    }

    /// The same statistics with another factor on `q·k` than `1/√head_dim`.
    #[must_use]
    pub fn with_scale(self, scale: f32) -> Self {
        Self { scale, ..self }
    }

    /// Binds the tensors to read, and creates those to write. `known_lse`, `[query_heads, rows]`, is given if the plan
    /// expects it.
    ///
    /// # Errors
    /// [`Error::Elements`] when a tensor is too short; [`Error::Plan`] when the log-sum-exp is given or missing
    /// contrary to the plan; [`Error::OutOfMemory`] or another error of the driver.
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
        let input = self.input(backend, queries, keys)?;
        let mut launches = Vec::new();
        let (row_max, row_lse) = match (self.request.rows, known_lse) {
            (RowStatsSource::KnownLse, Some(lse)) => {
                check_output("log-sum-exps of rows", lse, self.head_rows(), ElementType::F32)?;
                (None, lse.clone())
            }
            (RowStatsSource::Measured, None) => {
                let rows = self.measure_rows(&input, &mut launches)?;
                (Some(rows.max), rows.lse)
            }
            (source, _) => return Err(source.mismatch()),
        };
        let lse = row_lse.address();
        let rows = (lse, row_lse.memory(), row_max.as_ref());
        let (column_sums, counts) = self.measure_columns(&input, rows, None, &mut launches)?;
        Ok(AttentionStats { launches: Launches::new(launches), row_max, row_lse, column_sums, counts })
    }

    /// Binds statistics of rows of a step that are added to the sums of their prompt, and counts if they are requested.
    ///
    /// # Errors
    /// Those of [`NewQueries::check`] and of [`AttentionStatsPlan::bind`].
    pub(in crate::cuda) fn bind_adding(
        backend: &Cuda,
        new: NewQueries<'_, Tensor>,
        columns: ColumnRequest,
        sums: &mut Option<Tensor>,
    ) -> Result<(Launches, Option<Words>)> {
        new.check(&columns, Tensor::elements)?;
        let source = if new.log_sum_exps.is_some() { RowStatsSource::KnownLse } else { RowStatsSource::Measured };
        let queries = RowLayout { tokens: new.rows.len(), ..new.queries.layout };
        let request = StatsRequest { columns, rows: source };
        let plan = Self::new(&new.shape, new.rows.clone(), [queries, new.keys.layout], request)?;
        check_index("the sums of a prompt", new.sums(&columns) as u64)?;
        check_index("the log-sum-exps of a step", ((new.first_row + new.rows.len()) * new.shape.query_heads()) as u64)?;
        let plan = Self { scale: new.scale, adding: Some(new.tokens), ..plan };
        let first = new.queries.layout.row(new.first_row, 0);
        let queries = new.queries.tensor.slice(first, new.queries.tensor.elements() - first)?;
        let input = plan.input(backend, &queries, new.keys.tensor)?;
        let all = match sums {
            Some(sums) => {
                check_output("sums of a prompt", sums, new.sums(&columns), ElementType::F32)?;
                sums.clone()
            }
            None => Tensor::zeroed(backend.stream(), new.sums(&columns), ElementType::F32)?,
        };
        let mut launches = Vec::new();
        let counts = match new.log_sum_exps {
            Some(lse) if lse.element_type() == ElementType::F32 => {
                let first = lse.address() + (new.first_row * new.shape.query_heads() * size_of::<f32>()) as u64;
                plan.measure_columns(&input, (first, lse.memory(), None), Some(&all), &mut launches)?.1
            }
            Some(lse) => {
                let reason = format!("they are {:?}; they are to be f32", lse.element_type());
                return Err(Error::Buffer { what: "log-sum-exps of a step", reason });
            }
            None => {
                let rows = plan.measure_rows(&input, &mut launches)?;
                let of_rows = (rows.lse.address(), rows.lse.memory(), Some(&rows.max));
                plan.measure_columns(&input, of_rows, Some(&all), &mut launches)?.1
            }
        };
        *sums = Some(all);
        Ok((Launches::new(launches), counts))
    }

    /// The statistics of rows alone.
    ///
    /// # Errors
    /// As [`AttentionStatsPlan::bind`].
    pub fn bind_rows(
        &self,
        backend: &Cuda,
        queries: &Tensor,
        keys: &Tensor,
    ) -> Result<(Launches, RowStatistics<Tensor>)> {
        let input = self.input(backend, queries, keys)?;
        let mut launches = Vec::new();
        let rows = self.measure_rows(&input, &mut launches)?;
        Ok((Launches::new(launches), rows))
    }

    /// The statistics of columns, with those of rows that the caller knows.
    ///
    /// # Errors
    /// As [`AttentionStatsPlan::bind`].
    pub fn bind_columns(
        &self,
        backend: &Cuda,
        queries: &Tensor,
        keys: &Tensor,
        rows: &RowStatistics<Tensor>,
    ) -> Result<AttentionStats> {
        let input = self.input(backend, queries, keys)?;
        check_output("log-sum-exps of rows", &rows.lse, self.head_rows(), ElementType::F32)?;
        check_output("maxima of rows", &rows.max, self.head_rows(), ElementType::F32)?;
        let mut launches = Vec::new();
        let of_rows = (rows.lse.address(), rows.lse.memory(), Some(&rows.max));
        let (column_sums, counts) = self.measure_columns(&input, of_rows, None, &mut launches)?;
        let (row_max, row_lse) = (Some(rows.max.clone()), rows.lse.clone());
        Ok(AttentionStats { launches: Launches::new(launches), row_max, row_lse, column_sums, counts })
    }

    /// Rows of all query heads.
    fn head_rows(&self) -> usize {
        self.shape.query_heads() * self.rows.len()
    }

    fn input<'a>(&self, backend: &'a Cuda, queries: &'a Tensor, keys: &'a Tensor) -> Result<StatsTensors<'a>> {
        let shape = &self.shape;
        let query_shape = AttentionShape::new(shape.query_heads(), shape.query_heads(), shape.head_dim())?;
        self.queries.check("query rows", queries.elements(), &query_shape)?;
        self.keys.check("keys", keys.elements(), shape)?;
        let positions = bytemuck::cast_slice(self.rows.positions());
        let positions = Memory::upload(backend.stream(), "positions of query rows", positions)?;
        Ok(StatsTensors { backend, queries, keys, positions })
    }

    fn cut_of(&self, input: &StatsTensors<'_>, pass: Pass) -> Cut {
        let types = [input.keys.element_type(), input.queries.element_type()];
        self.cut(input.backend.kernels().facts(), types, pass)
    }

    /// Launches that measure rows, and their results.
    fn measure_rows(&self, input: &StatsTensors<'_>, launches: &mut Vec<Launch>) -> Result<RowStatistics<Tensor>> {
        let StatsTensors { backend, queries, keys, positions } = input;
        let (head_rows, cut) = (self.head_rows(), self.cut_of(input, Pass::Rows));
        let f32s = |elements| Tensor::zeroed(backend.stream(), elements, ElementType::F32);
        let partials = f32s(cut.parts * head_rows * 2)?;
        let (max, lse) = (f32s(head_rows)?, f32s(head_rows)?);
        let call = StatsCall { row_partials: partials.memory().address(), ..self.call(&cut, queries, keys, positions) };
        let program = self.program(&["select/attention_row_stats.cu"], &cut, [queries, keys], &[]);
        let kernel = self.kernel(&program, "attention_row_stats", &cut, Pass::Rows);
        let memory = [queries.memory(), keys.memory(), positions, partials.memory()];
        launches.push(Launch::new(backend, kernel, &call, &memory)?);
        let sums = SumCall {
            partials: partials.memory().address(),
            row_max: max.memory().address(),
            row_lse: lse.memory().address(),
            ..self.sums(&cut)
        };
        let memory = [partials.memory(), max.memory(), lse.memory()];
        launches.push(Launch::new(backend, self.sum_kernel(&SUMS, "sum_partials"), &sums, &memory)?);
        Ok(RowStatistics { max, lse })
    }

    /// Launches that measure columns, and their results: sums, and counts where they are requested.
    fn measure_columns(
        &self,
        input: &StatsTensors<'_>,
        (lse, lse_memory, max): (u64, &Arc<Memory>, Option<&Tensor>),
        sums: Option<&Tensor>,
        launches: &mut Vec<Launch>,
    ) -> Result<(Tensor, Option<Words>)> {
        let StatsTensors { backend, queries, keys, positions } = input;
        let (shape, stream) = (&self.shape, backend.stream());
        let (head_rows, cut) = (self.head_rows(), self.cut_of(input, Pass::Columns));
        let aggregation = self.request.columns.aggregation;
        let elements = aggregation.rows(shape.query_heads(), shape.kv_heads()) * self.rows.tokens();
        let column_sums = match sums {
            Some(sums) => sums.clone(),
            None => Tensor::zeroed(stream, elements, ElementType::F32)?,
        };
        let mut call = self.call(&cut, queries, keys, positions);
        call.row_lse = lse;
        call.column_sums = column_sums.address();
        let mut memory = vec![queries.memory(), keys.memory(), positions, lse_memory, column_sums.memory()];
        let counted = match (self.log_threshold, max) {
            (Some(_), Some(max)) => {
                let partials = Words::zeroed(stream, "counts of parts", cut.parts * head_rows)?;
                Some((max, partials, Words::zeroed(stream, "counts of rows", head_rows)?))
            }
            _ => None,
        };
        if let Some((max, partials, _)) = &counted {
            call.row_max = max.address();
            call.count_partials = partials.memory().address();
            memory.extend([max.memory(), partials.memory()]);
        }
        let aggregation = match aggregation {
            HeadAggregation::Each => 0,
            HeadAggregation::Sum => 1,
            HeadAggregation::Mean => 2,
            HeadAggregation::Max => 3,
        };
        let defines = [
            ("AGGREGATION", aggregation),
            ("COUNTING", usize::from(counted.is_some())),
            ("ADDS", usize::from(self.adding.is_some())),
        ];
        let program = self.program(&["select/attention_column_stats.cu"], &cut, [queries, keys], &defines);
        let kernel = self.kernel(&program, "attention_column_stats", &cut, Pass::Columns);
        launches.push(Launch::new(backend, kernel, &call, &memory)?);
        let Some((_, partials, counts)) = counted else { return Ok((column_sums, None)) };
        let (partials_at, counts_at) = (partials.memory().address(), counts.memory().address());
        let sums = SumCall { partials: partials_at, counts: counts_at, ..self.sums(&cut) };
        let memory = [partials.memory(), counts.memory()];
        launches.push(Launch::new(backend, self.sum_kernel(&SUMS, "sum_counts"), &sums, &memory)?);
        Ok((column_sums, Some(counts)))
    }

    fn sums(&self, cut: &Cut) -> SumCall {
        SumCall { rows: self.head_rows() as u32, parts: cut.parts as u32, ..SumCall::default() }
    }

    fn sum_kernel<'a>(&self, program: &'a Program, name: &'static str) -> Kernel<'a> {
        let grid = [self.head_rows().div_ceil(SUM_THREADS as usize), 1];
        Kernel { program, name, grid, block: SUM_THREADS, shared: 0 }
    }

    fn cut(&self, facts: &DeviceFacts, types: [ElementType; 2], pass: Pass) -> Cut {
        let (kv_heads, head_rows) = (self.shape.kv_heads(), self.shape.query_heads() * self.rows.len());
        let tile = KeyTile::new(facts, self.shape.head_dim(), types, pass.groups());
        let (at_once, eights) = (tile.at_once(), self.shape.group() * self.rows.len().div_ceil(8));
        let most = SHARED_BYTES.min(facts.shared_bytes) / (tile.eight_bytes() + pass.bytes(&tile));
        let staged = eights.next_multiple_of(at_once).min(most / at_once * at_once).max(at_once);
        // One block for each that can run at once. If query rows stream through in chunks there are more, since more of
        // them see the early keys.
        let tiles = self.rows.tokens().div_ceil(tile.warp_rows());
        let blocks = if eights <= staged { facts.multiprocessors / kv_heads } else { tiles.div_ceil(tile.warps()) };
        let most = PARTIAL_BYTES / (8 * head_rows);
        let part_tiles = tiles.div_ceil(blocks.min(most).max(1)).next_multiple_of(tile.group_warps());
        Cut { tile, part_tiles, parts: tiles.div_ceil(part_tiles), staged }
    }

    fn call(&self, cut: &Cut, queries: &Tensor, keys: &Tensor, positions: &Memory) -> StatsCall {
        // Steps write [row][query_head], and `sum_partials` [query_head][row].
        let (lse_row_stride, lse_head_stride) = match (self.adding, self.request.rows) {
            (Some(_), RowStatsSource::KnownLse) => (self.shape.query_heads(), 1),
            _ => (1, self.rows.len()),
        };
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
            part_tiles: cut.part_tiles as u32,
            staged: cut.staged as u32,
            lse_row_stride: lse_row_stride as u32,
            lse_head_stride: lse_head_stride as u32,
            sum_stride: self.adding.unwrap_or(self.rows.tokens()) as u32,
            scale: self.scale,
            log_threshold: self.log_threshold.unwrap_or(0.0),
            ..StatsCall::default()
        }
    }

    fn program(
        &self,
        files: &'static [&'static str],
        cut: &Cut,
        [queries, keys]: [&Tensor; 2],
        defines: &[(&'static str, usize)],
    ) -> Program {
        let mut all = cut.tile.defines([(queries, &self.queries), (keys, &self.keys)]);
        all.extend(defines);
        Program { sources: &SOURCES, files, defines: all }
    }

    fn kernel<'a>(&self, program: &'a Program, name: &'static str, cut: &Cut, pass: Pass) -> Kernel<'a> {
        let shared = cut.staged * (cut.tile.eight_bytes() + pass.bytes(&cut.tile));
        Kernel { program, name, grid: [cut.parts, self.shape.kv_heads()], block: cut.tile.threads(), shared }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The structs have the same size on both sides: `stats_call.cuh` and `sum_partials.cu` have no padding either.
    #[test]
    fn calls_have_no_padding() {
        assert_eq!(size_of::<StatsCall>(), 12 * 8 + 12 * 4);
        assert_eq!(size_of::<SumCall>(), 4 * 8 + 2 * 4);
    }

    #[test]
    fn parts_cover_the_keys_within_their_memory() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        let queries = AttentionShape::new(32, 32, 128).unwrap();
        let columns = ColumnRequest { aggregation: HeadAggregation::Each, threshold: None };
        for (rows, tokens) in [(1, 1), (50, 32768), (32768, 32768), (4096, 1 << 20)] {
            let layouts = [RowLayout::token_major(rows, &queries), RowLayout::token_major(tokens, &shape)];
            let positions = QueryPositions::last(rows, tokens).unwrap();
            let request = StatsRequest { columns, rows: RowStatsSource::Measured };
            let plan = AttentionStatsPlan::new(&shape, positions, layouts, request).unwrap();
            for (element_type, capability) in ElementType::ALL.into_iter().flat_map(|e| [(e, (8, 0)), (e, (9, 0))]) {
                let facts = DeviceFacts { capability, multiprocessors: 132, shared_bytes: 101_376 };
                for pass in [Pass::Rows, Pass::Columns] {
                    let cut = plan.cut(&facts, [element_type; 2], pass);
                    assert!(cut.part_tiles * cut.parts * cut.tile.warp_rows() >= tokens);
                    assert!((cut.parts - 1) * cut.part_tiles * cut.tile.warp_rows() < tokens);
                    assert!(cut.parts == 1 || cut.parts * rows * 32 * 8 <= PARTIAL_BYTES);
                    assert_eq!((cut.staged % cut.tile.at_once(), cut.part_tiles % cut.tile.group_warps()), (0, 0));
                    let kernel = plan.kernel(&SUMS, "", &cut, pass);
                    assert!(kernel.shared <= facts.shared_bytes, "{element_type:?} {capability:?}: {}", kernel.shared);
                }
            }
        }
    }
}
