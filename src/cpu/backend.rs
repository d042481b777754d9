//! The CPU as a backend.

use super::dense::{CpuIndices, CpuTensor, first_non_finite};
use super::memory::{MemoryLimit, MemoryShare};
use super::merge_states::merge_parts;
use super::states::States;
use super::store::{CpuStore, ShardMemory};
use super::{DenseRows, KeptTokens, StatsInput, attention_column_stats, attention_row_stats};
use super::{
    NonFiniteFlags, append, attend, dequantize, key_mean, merge_pair, merge_states, pack_windows, quantize, scores,
    uncentre_lse, weighted_values, write_step,
};
use crate::backend::{
    AttendArithmetic, AttendOptions, Attention, AttentionStates, Device, FlaggedToken, KeptAndEvicted,
    MeasuredAttention, MergedTokens, NewCentre, NewQueries, NonFinite, Packing, QueriesAndKeys, QueryPrecision,
    RowCentres, RowStatistics, ScoredTokens, SpanBytes, SpanPlace, SpanRead, SpanWrite, StateParts, Storage,
    TensorRows, TokenSelection, WriteInput,
};
use crate::counts::in_32_bits;
use crate::format::{AttentionShape, KeyOrValue, SegmentFormat};
use crate::plan::{
    AttendPlan, Elements, LargerShard, Page, PageCopy, RowLayout, Split, TokenIndices, TokenRange, TokenWrite,
    WindowMove, Work, WriteTable, copy_table,
};
use crate::policy::{self, ColumnRequest, Merging, RowStatsSource, ScoreRequest, StatsRequest};
use crate::{Error, Result};

/// The CPU backend: every kernel in f32, with rayon's threads.
///
/// It runs everywhere. It is the reference for the other backends, and the default where there is no GPU.
///
/// ```
/// use kvpack::cpu::Cpu;
/// use kvpack::backend::Storage;
/// use kvpack::{AttentionShape, SegmentFormat};
/// let shape = AttentionShape::new(8, 2, 128)?;
/// let store = Cpu::new().create_store(shape, SegmentFormat::F16)?;
/// assert_eq!(Cpu::new().store_bytes(&store), 0);
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Cpu {
    max_shard_bytes: u64,
    memory: MemoryLimit,
}

impl Cpu {
    /// A backend limited only by the machine.
    pub fn new() -> Self {
        Self { max_shard_bytes: 1 << 30, memory: MemoryLimit::new(u64::MAX) }
    }

    /// Limits the bytes of keys, and those of values, in one shard (1 GiB if not set).
    #[must_use]
    pub fn with_max_shard_bytes(self, bytes: u64) -> Self {
        Self { max_shard_bytes: bytes, ..self }
    }

    /// Limits the total bytes of all stores that this backend and its clones create.
    #[must_use]
    pub fn with_memory_limit(self, bytes: u64) -> Self {
        Self { memory: MemoryLimit::new(bytes), ..self }
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Device for Cpu {
    type Tensor = CpuTensor;
    type Indices = CpuIndices;

    fn name(&self) -> String {
        format!("CPU, {} threads", rayon::current_num_threads())
    }

    async fn upload(&self, elements: Elements<'_>) -> Result<CpuTensor> {
        Ok(CpuTensor::new(elements))
    }

    async fn download(&self, tensor: &CpuTensor) -> Result<Vec<f32>> {
        Ok(tensor.to_f32())
    }

    async fn upload_indices(&self, tokens: &[u32], kv_heads: usize, below: u32) -> Result<CpuIndices> {
        CpuIndices::new(tokens, kv_heads, below)
    }

    async fn download_indices(&self, indices: &CpuIndices) -> Result<Vec<u32>> {
        Ok(indices.tokens().to_vec())
    }

    fn elements(&self, tensor: &CpuTensor) -> usize {
        tensor.elements().len()
    }
}

impl Storage for Cpu {
    type Store = CpuStore;
    type Shard = LargerShard<ShardMemory>;
    type SpanReads = Vec<SpanBytes>;

    fn create_store(&self, shape: AttentionShape, format: SegmentFormat) -> Result<CpuStore> {
        CpuStore::within(shape, format, MemoryShare::of(self.memory.clone()))
    }

    fn max_shard_pages(&self, shape: &AttentionShape, format: &SegmentFormat) -> u32 {
        let key = format.tensor_page_bytes(KeyOrValue::Key, shape);
        let value = format.tensor_page_bytes(KeyOrValue::Value, shape);
        (self.max_shard_bytes / key.max(value) as u64).try_into().unwrap_or(u32::MAX)
    }

    async fn add_shard(&self, store: &mut CpuStore, pages: u32) -> Result<()> {
        store.add_shard(pages)
    }

    /// As many as through wgpu, so that caches of both have their tokens in the same pages.
    fn shards_at_once(&self) -> usize {
        4
    }

    async fn larger_shard(&self, store: &CpuStore, pages: u32) -> Result<Self::Shard> {
        store.larger_shard(pages)
    }

    fn replace_shard(&self, store: &mut CpuStore, shard: Self::Shard) -> Result<()> {
        store.replace_shard(shard)
    }

    fn drop_shard(&self, store: &mut CpuStore) {
        store.drop_shard();
    }

    fn available_bytes(&self) -> Option<u64> {
        Some(self.memory.available())
    }

    async fn reserve_ranges(&self, store: &mut CpuStore, slots: usize) -> Result<()> {
        store.reserve_ranges(slots)
    }

    async fn reserve_centres(&self, store: &mut CpuStore, slots: usize) -> Result<()> {
        store.reserve_centres(slots)
    }

    async fn read_spans(&self, places: &[(&CpuStore, SpanPlace<'_>)]) -> Result<Vec<SpanBytes>> {
        self.begin_reads(places)
    }

    fn begin_reads(&self, places: &[(&CpuStore, SpanPlace<'_>)]) -> Result<Vec<SpanBytes>> {
        places.iter().map(|&(store, place)| store.read_span(place)).collect()
    }

    fn check_submitted(&self, _: &'static str, _: &[&Self::Store]) -> Result<()> {
        Ok(())
    }

    fn have_arrived(&self, _: &Vec<SpanBytes>) -> Result<bool> {
        Ok(true)
    }

    async fn finish_reads(&self, reads: Vec<SpanBytes>) -> Result<Vec<SpanBytes>> {
        Ok(reads)
    }

    fn write_span(&self, store: &mut CpuStore, bytes: &SpanBytes, place: SpanPlace<'_>) -> Result<()> {
        store.write_span(bytes, place)
    }

    fn span_layout(&self) -> &'static str {
        "cpu"
    }

    fn store_bytes(&self, store: &CpuStore) -> u64 {
        store.bytes()
    }
}

impl Packing for Cpu {
    type NonFiniteFlags = NonFiniteFlags;

    async fn first_non_finite(
        &self,
        which: KeyOrValue,
        tensor: &CpuTensor,
        rows: &RowLayout,
        shape: &AttentionShape,
        largest: f32,
    ) -> Result<Option<NonFinite>> {
        let what = match which {
            KeyOrValue::Key => "keys",
            KeyOrValue::Value => "values",
        };
        first_non_finite(what, tensor.elements(), rows, shape, largest)
    }

    fn key_mean(&self, store: &mut CpuStore, keys: &CpuTensor, centre: NewCentre) -> Result<()> {
        key_mean(store, keys.elements(), centre)
    }

    fn quantize(
        &self,
        store: &mut CpuStore,
        keys: &CpuTensor,
        values: &CpuTensor,
        write: SpanWrite<'_, CpuIndices>,
    ) -> Result<()> {
        quantize(store, keys.elements(), values.elements(), write)
    }

    fn append(
        &self,
        store: &mut CpuStore,
        keys: &CpuTensor,
        values: &CpuTensor,
        rows: RowLayout,
        writes: &[TokenWrite],
    ) -> Result<()> {
        append(store, keys.elements(), values.elements(), rows, writes)
    }

    fn copy_page(&self, store: &mut CpuStore, from: Page, to: Page) -> Result<()> {
        let table = copy_table(store.shape(), store.step_capacity(0, 1), PageCopy { from, to })?;
        write_step(&mut [store], None, &table)
    }

    fn pack_windows(
        &self,
        shape: &AttentionShape,
        from: &CpuStore,
        to: &mut CpuStore,
        windows: &[WindowMove],
    ) -> Result<()> {
        if to.shape() != shape {
            let reason = format!("the store has the shape {:?}, not {shape:?}", to.shape());
            return Err(Error::Plan { what: "pack windows", reason });
        }
        pack_windows(from, to, windows)
    }

    fn write_step(
        &self,
        stores: &mut [&mut CpuStore],
        input: Option<WriteInput<'_, CpuTensor, NonFiniteFlags>>,
        table: &WriteTable,
    ) -> Result<()> {
        let Some(WriteInput { keys, values, rows, flags, layer }) = input else {
            return write_step(stores, None, table);
        };
        let (keys, values) = (&keys.elements(), &values.elements());
        write_step(stores, Some(WriteInput { keys, values, rows, flags, layer }), table)
    }

    fn create_non_finite_flags(&self, layers: usize) -> Result<NonFiniteFlags> {
        NonFiniteFlags::new(layers)
    }

    async fn read_non_finite_flags(&self, flags: &NonFiniteFlags) -> Result<Vec<FlaggedToken>> {
        Ok(flags.read())
    }

    fn clear_non_finite_flags(&self, flags: &NonFiniteFlags) -> Result<()> {
        flags.clear();
        Ok(())
    }

    fn dequantize(&self, store: &CpuStore, read: SpanRead<'_>) -> Result<(CpuTensor, CpuTensor)> {
        let keys = dequantize(store, KeyOrValue::Key, read)?;
        let values = dequantize(store, KeyOrValue::Value, read)?;
        Ok((CpuTensor::F32(keys), CpuTensor::F32(values)))
    }
}

impl Attention for Cpu {
    fn arithmetic(
        &self,
        shape: &AttentionShape,
        format: &SegmentFormat,
        _: QueryPrecision,
    ) -> Result<AttendArithmetic> {
        format.check(shape)?;
        Ok(AttendArithmetic::FLOATS)
    }

    async fn attend(
        &self,
        plan: &AttendPlan,
        stores: &[&CpuStore],
        queries: &CpuTensor,
        options: AttendOptions,
    ) -> Result<CpuTensor> {
        let states = attend_plan(plan, stores, queries.elements(), options.split)?;
        Ok(CpuTensor::from_f32(states.into_outputs(), options.output))
    }

    async fn attend_into(
        &self,
        plan: &AttendPlan,
        stores: &[&CpuStore],
        queries: &CpuTensor,
        output: &mut CpuTensor,
        options: AttendOptions,
    ) -> Result<()> {
        plan.check_elements("output", output.elements().len())?;
        let states = attend_plan(plan, stores, queries.elements(), options.split)?;
        output.elements_mut().write_f32(0, &states.into_outputs());
        Ok(())
    }

    async fn attend_states(
        &self,
        plan: &AttendPlan,
        stores: &[&CpuStore],
        queries: &CpuTensor,
        options: AttendOptions,
    ) -> Result<AttentionStates<CpuTensor>> {
        Ok(attend_plan(plan, stores, queries.elements(), options.split)?.into())
    }

    async fn uncentre_lse(
        &self,
        store: &CpuStore,
        queries: &CpuTensor,
        centres: RowCentres<'_>,
        states: AttentionStates<CpuTensor>,
    ) -> Result<AttentionStates<CpuTensor>> {
        let states = States::of(store.shape(), &states)?;
        Ok(uncentre_lse(store, queries.elements(), centres, states)?.into())
    }

    async fn merge(
        &self,
        shape: &AttentionShape,
        first: &AttentionStates<CpuTensor>,
        second: &AttentionStates<CpuTensor>,
    ) -> Result<AttentionStates<CpuTensor>> {
        Ok(merge_pair(&States::of(shape, first)?, &States::of(shape, second)?)?.into())
    }

    fn merge_parts(
        &self,
        shape: &AttentionShape,
        parts: StateParts<'_, CpuTensor>,
        output: &mut CpuTensor,
        lse: Option<&mut CpuTensor>,
    ) -> Result<()> {
        parts.check(self, shape, output, lse.as_deref())?;
        merge_parts(shape, parts, output, lse)
    }
}

impl TokenSelection for Cpu {
    type Words = Vec<u32>;

    async fn download_words(&self, words: &Vec<u32>) -> Result<Vec<u32>> {
        Ok(words.clone())
    }

    fn measure_attention(
        &self,
        input: QueriesAndKeys<'_, CpuTensor>,
        request: StatsRequest,
        known_lse: Option<&CpuTensor>,
    ) -> Result<MeasuredAttention<CpuTensor, Vec<u32>>> {
        request.log_threshold()?;
        let input = stats_input(input);
        let all = TokenRange::new(0, input.rows.tokens())?;
        let columns = |lse: &[f32], max: &[f32]| attention_column_stats(&input, all, request.columns, lse, max);
        let (measured, columns) = match (request.rows, known_lse) {
            (RowStatsSource::KnownLse, Some(lse)) => (None, columns(&lse.to_f32(), &[])?),
            (RowStatsSource::Measured, None) => {
                let rows = attention_row_stats(&input, all)?;
                let columns = columns(&rows.lse, &rows.max)?;
                (Some(rows), columns)
            }
            (source, _) => return Err(source.mismatch()),
        };
        let (row_max, row_lse) = measured.map(|rows| (CpuTensor::F32(rows.max), CpuTensor::F32(rows.lse))).unzip();
        let counts = request.columns.threshold.map(|_| columns.counts);
        Ok(MeasuredAttention { row_max, row_lse, column_sums: CpuTensor::F32(columns.sums), counts })
    }

    fn measure_rows(&self, input: QueriesAndKeys<'_, CpuTensor>) -> Result<RowStatistics<CpuTensor>> {
        let all = TokenRange::new(0, input.rows.tokens())?;
        let rows = attention_row_stats(&stats_input(input), all)?;
        Ok(RowStatistics { max: CpuTensor::F32(rows.max), lse: CpuTensor::F32(rows.lse) })
    }

    fn measure_columns(
        &self,
        input: QueriesAndKeys<'_, CpuTensor>,
        columns: ColumnRequest,
        rows: &RowStatistics<CpuTensor>,
    ) -> Result<MeasuredAttention<CpuTensor, Vec<u32>>> {
        let all = TokenRange::new(0, input.rows.tokens())?;
        let (lse, max) = (rows.lse.to_f32(), rows.max.to_f32());
        let found = attention_column_stats(&stats_input(input), all, columns, &lse, &max)?;
        let counts = columns.threshold.map(|_| found.counts);
        Ok(MeasuredAttention { row_max: None, row_lse: None, column_sums: CpuTensor::F32(found.sums), counts })
    }

    fn add_attention(
        &self,
        input: NewQueries<'_, CpuTensor>,
        columns: ColumnRequest,
        sums: &mut Option<CpuTensor>,
    ) -> Result<Option<Vec<u32>>> {
        super::select::add_attention(input, columns, sums)
    }

    fn begin_word_reads(&self, words: &[&Vec<u32>], _: &[&CpuStore]) -> Result<Vec<SpanBytes>> {
        Ok(words.iter().map(|words| SpanBytes::new(bytemuck::cast_slice(words).to_vec())).collect())
    }

    fn token_scores(
        &self,
        sums: &CpuTensor,
        kv_heads: usize,
        request: &ScoreRequest<'_>,
    ) -> Result<ScoredTokens<CpuTensor, Vec<u32>>> {
        let (scores, not_numbers) = super::token_scores(&sums.to_f32(), kv_heads, request)?;
        Ok(ScoredTokens { scores: CpuTensor::F32(scores), not_numbers })
    }

    fn evicted(&self, kept: &CpuIndices) -> Result<CpuIndices> {
        let (shape, tokens) = (kept.shape(), kept.shape().below() as usize);
        shape.others()?;
        let of_heads = kept.tokens().chunks(shape.count()).map(|kept| policy::evicted(kept, tokens));
        let others = of_heads.collect::<Result<Vec<_>>>()?.concat();
        CpuIndices::new(&others, shape.kv_heads(), shape.below())
    }

    fn top_k(&self, scores: &CpuTensor, kv_heads: usize, k: usize) -> Result<CpuIndices> {
        let scores = scores.to_f32();
        let chosen = super::top_k(&scores, kv_heads, k)?;
        CpuIndices::new(&chosen, kv_heads, in_32_bits("scores of a head", scores.len() / kv_heads)?)
    }

    fn gather(&self, shape: &AttentionShape, rows: TensorRows<'_, CpuTensor>, kept: &CpuIndices) -> Result<CpuTensor> {
        check_heads("indices of kept tokens", kept, shape)?;
        super::gather(shape, dense_rows(rows), kept.tokens())
    }

    fn merge_tokens(
        &self,
        input: KeptAndEvicted<'_, CpuTensor, CpuIndices>,
        merging: Merging,
    ) -> Result<MergedTokens<CpuTensor, Vec<u32>>> {
        let KeptAndEvicted { shape, rows, keys, values, kept, evicted } = input;
        check_heads("positions of kept tokens", kept, &shape)?;
        check_heads("positions of evicted tokens", evicted, &shape)?;
        let dense = |tensor| dense_rows(TensorRows { tensor, layout: rows });
        let tokens = KeptTokens { kept: kept.tokens(), evicted: evicted.tokens() };
        let nearest = super::nearest_kept(&shape, dense(keys), tokens)?;
        let merged = |tensor| super::merge_tokens(&shape, dense(tensor), tokens, &nearest, merging).map(CpuTensor::F32);
        Ok(MergedTokens {
            keys: merged(keys)?,
            values: merged(values)?,
            similarities: CpuTensor::F32(nearest.iter().map(|nearest| nearest.similarity).collect()),
            nearest: nearest.into_iter().map(|nearest| nearest.kept).collect(),
        })
    }

    fn chunk_similarity(&self, query: &CpuTensor, chunks: &CpuTensor) -> Result<CpuTensor> {
        super::chunk_similarity(&query.to_f32(), &chunks.to_f32()).map(CpuTensor::F32)
    }

    fn reorder_chunks(
        &self,
        shape: &AttentionShape,
        rows: TensorRows<'_, CpuTensor>,
        chunk_tokens: usize,
        order: &[u32],
    ) -> Result<CpuTensor> {
        super::reorder_chunks(shape, dense_rows(rows), chunk_tokens, order)
    }
}

fn stats_input(input: QueriesAndKeys<'_, CpuTensor>) -> StatsInput<'_> {
    let (queries, keys) = (dense_rows(input.queries), dense_rows(input.keys));
    StatsInput { shape: input.shape, scale: input.scale, rows: input.rows, queries, keys }
}

fn dense_rows(rows: TensorRows<'_, CpuTensor>) -> DenseRows<'_> {
    DenseRows { elements: rows.tensor.elements(), layout: rows.layout }
}

/// Checks that indices have the KV heads of a shape.
fn check_heads(what: &'static str, indices: &CpuIndices, shape: &AttentionShape) -> Result<()> {
    let given = indices.shape();
    if given.kv_heads() == shape.kv_heads() {
        return Ok(());
    }
    let expected = shape.kv_heads() * given.count();
    let of = format!("[{}, {}]; they are [{}, {}]", shape.kv_heads(), given.count(), given.kv_heads(), given.count());
    Err(Error::Elements { what, given: given.indices(), expected, shape: of })
}

/// The state of every query of a plan over all tokens that it sees, row by row.
///
/// # Errors
/// [`Error::Plan`] or [`Error::Elements`] when stores or queries are not those of the plan.
pub fn attend_plan(plan: &AttendPlan, stores: &[&CpuStore], queries: Elements<'_>, split: Split) -> Result<States> {
    plan.check_elements("queries", queries.len())?;
    let work = Work::new(plan, split, 1)?;
    let mut states = States::for_work(&work)?;
    for segment in work.segments() {
        let store = stores.get(segment.store()).filter(|store| store.shape() == work.shape());
        let store = store.ok_or_else(|| Error::Plan {
            what: "attend",
            reason: format!("store {} is missing or of another shape than {:?}", segment.store(), work.shape()),
        })?;
        match segment.calibration() {
            None => attend(segment, store, queries, &mut states)?,
            Some(calibration) => {
                let scores = scores(segment, store, queries)?;
                weighted_values(segment, store, &scores, &scores.maps(calibration), &mut states)?;
            }
        }
    }
    merge_states(&work, &states)
}
