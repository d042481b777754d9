//! Attention statistics of a context whose keys lie on several ranks: every rank measures the keys that it holds.

use super::context_parallel::ContextParallel;
use super::purpose::Purpose;
use super::transport::{TensorOf, Transport};
use crate::backend::{Backend, QueriesAndKeys, RowStatistics, TensorRows, TokenSelection};
use crate::cache::MeasuredQueries;
use crate::counts::{filled, saturated, whole};
use crate::cpu::{RowStats, sum_counts, sum_partials};
use crate::format::AttentionShape;
use crate::plan::{Elements, RowLayout};
use crate::policy::{ColumnRequest, QueryPositions, RowStatsSource, StatsRequest};
use crate::{Error, Result};

/// What a rank measures of a layer: its keys, and the query rows of all ranks.
pub(super) struct KeysOfRank<'a, T> {
    pub(super) shape: AttentionShape,
    /// Factor on `q·k`.
    pub(super) scale: f32,
    /// Query rows of the context.
    pub(super) rows: usize,
    /// How many of them come before the first that sees a key of this rank, and the others; `None` if no row sees any.
    pub(super) seeing: Option<(usize, QueryPositions)>,
    pub(super) queries: MeasuredQueries<'a, T>,
    /// The keys of this rank, in the order of their positions. Not read if no row sees any.
    pub(super) keys: TensorRows<'a, T>,
    pub(super) columns: ColumnRequest,
}

/// The statistics of a layer over the keys of all ranks, on the host.
pub(super) struct SharedStatistics {
    /// Of every rank, in order: the column sums of its keys, `[heads, keys]`.
    pub(super) column_sums: Vec<Vec<f32>>,
    /// `[query_heads, rows]`: the number of keys at or above the threshold; `None` if no count was requested.
    pub(super) counts: Option<Vec<u32>>,
}

impl<T: Transport> ContextParallel<T>
where
    T::Backend: Backend,
{
    /// Measures a layer on all ranks. `keys` is the number of keys on each. Two exchanges: of the statistics of rows,
    /// unless their log-sum-exp is known, then of those of columns. A rank that could not come so far tells the others.
    ///
    /// # Errors
    /// The error of `part`; as [`TokenSelection::measure_attention`]; [`Error::NotANumber`] when a score is NaN;
    /// [`Error::Plan`] when another rank failed; [`Error::Transport`].
    pub(super) async fn measure_shared(
        &mut self,
        part: Result<KeysOfRank<'_, TensorOf<T>>>,
        size: SharedSize,
        keys: &[usize],
    ) -> Result<SharedStatistics> {
        let head_rows = size.query_heads.saturating_mul(size.rows);
        let rows = match (&part, size.knows_lse) {
            (Ok(part), false) => part.measure_rows(self.transport.backend()).await,
            (Ok(part), true) => part.known_rows(self.transport.backend()).await,
            (Err(error), _) => Err(error.clone()),
        };
        let rows = match size.knows_lse {
            true => rows,
            false => {
                let mine = rows.map(|rows| [rows.max, rows.lse].concat());
                let of_ranks = self.gather_floats(Purpose::Statistics, mine, head_rows.saturating_mul(2)).await?;
                let of_rank = |of: &Vec<f32>| RowStats { max: of[..head_rows].to_vec(), lse: of[head_rows..].to_vec() };
                sum_partials(&of_ranks.iter().map(of_rank).collect::<Vec<_>>())
            }
        };
        let most = keys.iter().copied().max().unwrap_or(0);
        let sums = size.column_rows.saturating_mul(most);
        let counts = if size.counts { head_rows } else { 0 };
        let mine = match (&part, &rows) {
            (Ok(part), Ok(rows)) => part.measure_columns(self.transport.backend(), rows, [sums, counts]).await,
            (Err(error), _) | (_, Err(error)) => Err(error.clone()),
        };
        let of_ranks =
            self.gather_floats(Purpose::Statistics, mine, sums.saturating_add(counts.saturating_mul(2))).await?;
        let sums_of = |(of, &keys): (&Vec<f32>, &usize)| of[..size.column_rows * keys].to_vec();
        let column_sums = of_ranks.iter().zip(keys).map(sums_of).collect();
        let counts_of = |of: &Vec<f32>| of[sums..].as_chunks::<2>().0.iter().map(from_halves).collect::<Vec<u32>>();
        let counts = size.counts.then(|| sum_counts(&of_ranks.iter().map(counts_of).collect::<Vec<_>>()));
        Ok(SharedStatistics { column_sums, counts: counts.transpose()? })
    }
}

/// What all ranks know of statistics before they measure them.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedSize {
    pub(super) query_heads: usize,
    /// Query rows.
    pub(super) rows: usize,
    /// Rows of column sums: one for each KV head, or query head.
    pub(super) column_rows: usize,
    pub(super) counts: bool,
    /// Whether the caller knows the log-sum-exps of the rows.
    pub(super) knows_lse: bool,
}

impl SharedSize {
    pub(super) const fn new(shape: &AttentionShape, rows: usize, columns: &ColumnRequest, knows_lse: bool) -> Self {
        let (query_heads, kv_heads) = (shape.query_heads(), shape.kv_heads());
        let column_rows = columns.aggregation.rows(query_heads, kv_heads);
        Self { query_heads, rows, column_rows, counts: columns.threshold.is_some(), knows_lse }
    }
}

impl<T> KeysOfRank<'_, T> {
    /// Statistics of all rows over the keys of this rank; −∞ for a row that sees none of them.
    async fn measure_rows<B: TokenSelection<Tensor = T>>(&self, backend: &B) -> Result<RowStats> {
        let head_rows = self.shape.query_heads() * self.rows;
        let none = || filled("statistics of rows", head_rows, f32::NEG_INFINITY);
        let mut all = RowStats { max: none()?, lse: none()? };
        let Some((unseeing, rows)) = &self.seeing else { return Ok(all) };
        let queries = self.queries_from(backend, *unseeing).await?;
        let measured = backend.measure_rows(self.input(rows, queries.as_ref()))?;
        for (all, measured) in [(&mut all.max, &measured.max), (&mut all.lse, &measured.lse)] {
            let measured = backend.download(measured).await?;
            let of_heads = all.chunks_mut(self.rows).zip(measured.chunks(rows.len()));
            of_heads.for_each(|(all, measured)| all[*unseeing..].copy_from_slice(measured));
        }
        Ok(all)
    }

    /// The log-sum-exps that the caller knows.
    async fn known_rows<B: TokenSelection<Tensor = T>>(&self, backend: &B) -> Result<RowStats> {
        StatsRequest { columns: self.columns, rows: RowStatsSource::KnownLse }.log_threshold()?;
        let Some(known) = self.queries.known_lse else { return Err(RowStatsSource::KnownLse.mismatch()) };
        let lse = backend.download(known).await?;
        let (heads, given) = (self.shape.query_heads(), lse.len());
        if given != heads * self.rows {
            let (expected, shape) = (heads * self.rows, format!("[{heads}, {}]", self.rows));
            return Err(Error::Elements { what: "log-sum-exps of rows", given, expected, shape });
        }
        // No count is requested, so that the maxima are not read.
        Ok(RowStats { max: lse.clone(), lse })
    }

    /// The column sums of the keys of this rank, `[heads, keys]`, filled up to `sums`, and `counts` counts in halves.
    async fn measure_columns<B: TokenSelection<Tensor = T>>(
        &self,
        backend: &B,
        stats: &RowStats,
        [sums, counts]: [usize; 2],
    ) -> Result<Vec<f32>> {
        let mut found = filled("statistics of columns", sums + counts * 2, 0.0f32)?;
        let Some((unseeing, rows)) = &self.seeing else { return Ok(found) };
        let seeing = |all: &[f32]| -> Vec<f32> {
            all.chunks(self.rows).flat_map(|of_head| of_head[*unseeing..].iter().copied()).collect()
        };
        let max = backend.upload(Elements::F32(&seeing(&stats.max))).await?;
        let lse = backend.upload(Elements::F32(&seeing(&stats.lse))).await?;
        let queries = self.queries_from(backend, *unseeing).await?;
        let input = self.input(rows, queries.as_ref());
        let measured = backend.measure_columns(input, self.columns, &RowStatistics { max, lse })?;
        let of_keys = backend.download(&measured.column_sums).await?;
        found[..of_keys.len()].copy_from_slice(&of_keys);
        if let Some(of_rows) = measured.counts.filter(|_| counts > 0) {
            let of_rows = backend.download_words(&of_rows).await?;
            let halves = found[sums..].as_chunks_mut::<2>().0;
            for (all, of_head) in halves.chunks_mut(self.rows).zip(of_rows.chunks(rows.len())) {
                all[*unseeing..].iter_mut().zip(of_head).for_each(|(all, &count)| *all = to_halves(count));
            }
        }
        Ok(found)
    }

    /// The query rows from one on; none where they are those of the caller.
    async fn queries_from<B: TokenSelection<Tensor = T>>(&self, backend: &B, first: usize) -> Result<Option<T>> {
        if first == 0 {
            return Ok(None);
        }
        let heads = self.shape.query_heads();
        let of_head: Vec<u32> = (first..self.rows).map(saturated).collect();
        let rows = backend.upload_indices(&of_head.repeat(heads), heads, saturated(self.rows)).await?;
        let shape = AttentionShape::new(heads, heads, self.shape.head_dim())?;
        backend.gather(&shape, self.queries.queries, &rows).map(Some)
    }

    fn input<'a>(&'a self, rows: &'a QueryPositions, gathered: Option<&'a T>) -> QueriesAndKeys<'a, T> {
        let queries = match gathered {
            None => self.queries.queries,
            Some(tensor) => TensorRows { tensor, layout: RowLayout::head_major(rows.len(), &self.shape) },
        };
        QueriesAndKeys { shape: self.shape, scale: self.scale, rows, queries, keys: self.keys }
    }
}

/// A count as two numbers below 2^16, which f32 elements hold exactly.
pub(super) fn to_halves(count: u32) -> [f32; 2] {
    let [a, b, c, d] = count.to_le_bytes();
    [[a, b], [c, d]].map(|half| f32::from(u16::from_le_bytes(half)))
}

pub(super) fn from_halves([low, high]: &[f32; 2]) -> u32 {
    saturated(whole(f64::from(*high) * 65_536.0 + f64::from(*low)))
}
