//! The CUDA backend: [`Backend`](crate::Backend) over a stream.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaStream;

use super::attend::attend_step::{AttendStep, AttendTensors};
use super::attend::merge_pair::merge_pair;
use super::attend::merge_parts::merge_parts;
use super::attend::scratch::SharedScratch;
use super::attend::uncentre_lse::uncentre_lse;
use super::device::driver::{driver_error, open_context};
use super::device::indices::Indices;
use super::device::kernels::Kernels;
use super::device::page_format::{PageFormat, TensorPages};
use super::device::program::KernelCache;
use super::device::span_bytes::SpanReads;
use super::device::store::{self, Store};
use super::device::tensor::Tensor;
use super::pack::non_finite_flags::NonFiniteFlags;
use super::pack::rows::Launcher;
use super::pack::scratch::PackScratch;
use super::pack::store_step::StoreStep;
use super::select::{
    AttentionStatsPlan, ChunkSimilarityPlan, EvictedPlan, GatherPlan, MergePlan, ReorderChunksPlan, TokenScoresPlan,
    TopKPlan, Words,
};
use crate::backend::{
    Arithmetic, AttendArithmetic, AttendOptions, Attention, AttentionStates, Device, FlaggedToken, KeptAndEvicted,
    MeasuredAttention, MergedTokens, NewCentre, NewQueries, NonFinite, Packing, QueriesAndKeys, QueryPrecision,
    RowCentres, RowStatistics, ScoredTokens, SpanBytes, SpanPlace, SpanRead, SpanWrite, StagedSpan, StateParts,
    Storage, TensorRows, TokenSelection, WriteInput,
};
use crate::format::{AttentionShape, KeyOrValue, SegmentFormat};
use crate::plan::{
    AttendPlan, ElementType, Elements, Page, PageCopy, RowLayout, Rows, TokenIndices, TokenWrite, WindowMove,
    WriteTable, append_table, copy_table, windows_table,
};
use crate::policy::{ColumnRequest, HeadAggregation, Merging, RowStatsSource, ScoreRequest, StatsRequest};
use crate::{Error, Result};

/// A CUDA stream with the kernels of its device. Cheap to clone.
///
/// Work is queued on the stream in order. The caller must order writes of other streams before it.
///
/// ```no_run
/// use kvpack::cuda::{Cuda, KernelCache};
/// # fn example(stream: std::sync::Arc<kvpack::cuda::cudarc::driver::CudaStream>) -> kvpack::Result<()> {
/// // The stream of an engine ...
/// let backend = Cuda::new(stream, KernelCache::of_user())?;
/// // ... or a new one of the first device.
/// let backend = Cuda::open(0, KernelCache::of_user())?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Cuda {
    stream: Arc<CudaStream>,
    kernels: Arc<Kernels>,
    scratch: Arc<Mutex<PackScratch>>,
    attend_scratch: Arc<SharedScratch>,
}

impl Cuda {
    /// The backend on an engine's stream. Compiled kernels are kept in `cache`.
    ///
    /// # Errors
    /// [`Error::Adapter`](crate::Error::Adapter) when the device is older than compute capability 8.0, or the driver
    /// than CUDA 11.8.
    pub fn new(stream: Arc<CudaStream>, cache: KernelCache) -> Result<Self> {
        let kernels = Arc::new(Kernels::new(stream.context().clone(), cache)?);
        Ok(Self { stream, kernels, scratch: Arc::default(), attend_scratch: Arc::default() })
    }

    /// The backend on a new stream of a device's primary context.
    ///
    /// # Errors
    /// [`Error::Adapter`](crate::Error::Adapter) when there is no driver or it is older than CUDA 11.8, or there is no
    /// such device or it is older than compute capability 8.0.
    pub fn open(ordinal: usize, cache: KernelCache) -> Result<Self> {
        let context = open_context(ordinal)?;
        Self::new(context.new_stream().map_err(|error| driver_error("a stream", 0, error))?, cache)
    }

    /// The same kernels on another stream of the same device, for caches on that stream: stores and tensors that kvpack
    /// allocates belong to the stream of the backend that created them.
    #[must_use]
    pub fn on_stream(&self, stream: Arc<CudaStream>) -> Self {
        let kernels = self.kernels.clone();
        Self { stream, kernels, scratch: Arc::default(), attend_scratch: Arc::default() }
    }

    /// The stream.
    pub const fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The compiled kernels of the device. Another library that stands on the device layer can share them.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    pub(super) fn attend_scratch(&self) -> &SharedScratch {
        &self.attend_scratch
    }

    fn zeroed_states(&self, shape: &AttentionShape, rows: usize) -> Result<AttentionStates<Tensor>> {
        let heads = rows * shape.query_heads();
        let outputs = heads * shape.head_dim();
        // One after the other, so that ranks can send them at once.
        let both = Tensor::zeroed(&self.stream, outputs + heads, ElementType::F32)?;
        Ok(AttentionStates { outputs: both.slice(0, outputs)?, lse: both.slice(outputs, heads)? })
    }

    /// Memory that the calls of the backend share. No other thread may write to it between this call's writes and the
    /// launches that read them.
    fn scratch(&self) -> MutexGuard<'_, PackScratch> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Packs a part of a prompt that a step stored in f16.
    pub(super) fn pack_staged(&self, stores: &[&Store], span: &StagedSpan) -> Result<()> {
        let (Some(f16), Some(packed)) = (stores.first(), stores.get(span.store)) else {
            let reason = format!("a part of a prompt is packed into store {} of {}", span.store, stores.len());
            return Err(Error::Plan { what: "step", reason });
        };
        let (launcher, mut scratch) = (self.launcher(), self.scratch());
        let [keys, values] = launcher.dequantize(&mut scratch, f16, &span.read())?;
        launcher.quantize(&mut scratch, packed, &keys, &values, &span.write(packed.shape())?)
    }

    /// Uploads the table of a storing step, and launches the step.
    fn run_pack_step(
        &self,
        stores: &[&Store],
        input: Option<WriteInput<'_, Tensor, NonFiniteFlags>>,
        table: &WriteTable,
    ) -> Result<()> {
        let mut scratch = self.scratch();
        let memory = scratch.write_memory(&self.stream, table.layout())?;
        let step = StoreStep::new(table.layout()).bind_for(self, stores, &memory, input, table)?;
        memory.write(&self.stream, table)?;
        step.launch()
    }

    fn launcher(&self) -> Launcher<'_> {
        Launcher { stream: &self.stream, kernels: &self.kernels }
    }

    /// The launcher for a call that uses the store and the tensors. They must belong to the backend's stream.
    fn launcher_for(&self, what: &'static str, store: &Store, tensors: &[&Tensor]) -> Result<Launcher<'_>> {
        store.check_stream(what, &self.stream)?;
        self.check_tensors(what, tensors)?;
        Ok(self.launcher())
    }

    /// Checks that work on the backend's stream may use the tensors.
    fn check_tensors(&self, what: &'static str, tensors: &[&Tensor]) -> Result<()> {
        tensors.iter().try_for_each(|tensor| tensor.memory().check_stream(what, &self.stream))
    }
}

impl Device for Cuda {
    type Tensor = Tensor;
    type Indices = Indices;

    fn name(&self) -> String {
        let name = self.stream.context().name().unwrap_or_else(|_| "unknown device".into());
        format!("{name} (CUDA, {})", self.kernels.facts().architecture())
    }

    async fn upload(&self, elements: Elements<'_>) -> Result<Tensor> {
        Tensor::upload(&self.stream, elements)
    }

    async fn download(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        tensor.download(&self.stream)
    }

    async fn upload_indices(&self, tokens: &[u32], kv_heads: usize, below: u32) -> Result<Indices> {
        Indices::upload(&self.stream, tokens, kv_heads, below)
    }

    async fn download_indices(&self, indices: &Indices) -> Result<Vec<u32>> {
        indices.download(&self.stream)
    }

    fn elements(&self, tensor: &Tensor) -> usize {
        tensor.elements()
    }
}

impl Storage for Cuda {
    type Store = Store;
    type SpanReads = SpanReads;

    fn create_store(&self, shape: AttentionShape, format: SegmentFormat) -> Result<Store> {
        Store::new(&self.stream, shape, format)
    }

    fn max_shard_pages(&self, shape: &AttentionShape, format: &SegmentFormat) -> u32 {
        store::max_shard_pages(shape, format)
    }

    async fn add_shard(&self, store: &mut Store, pages: u32) -> Result<()> {
        store.check_stream("a shard", &self.stream)?;
        store.add_shard(&self.stream, pages)
    }

    fn drop_shard(&self, store: &mut Store) {
        store.drop_shard();
    }

    fn available_bytes(&self) -> Option<u64> {
        None // what the driver calls free leaves out memory that was freed and waits in its pool
    }

    async fn reserve_ranges(&self, store: &mut Store, slots: usize) -> Result<()> {
        store.check_stream("span ranges", &self.stream)?;
        store.reserve_ranges(&self.stream, slots)
    }

    async fn reserve_centres(&self, store: &mut Store, slots: usize) -> Result<()> {
        store.check_stream("centres", &self.stream)?;
        store.reserve_centres(&self.stream, slots)
    }

    async fn read_spans(&self, places: &[(&Store, SpanPlace<'_>)]) -> Result<Vec<SpanBytes>> {
        places.iter().try_for_each(|(store, _)| store.check_stream("a span", &self.stream))?;
        places.iter().map(|&(store, place)| store.read_span(&self.stream, place)).collect()
    }

    fn begin_reads(&self, places: &[(&Store, SpanPlace<'_>)]) -> Result<SpanReads> {
        places.iter().try_for_each(|(store, _)| store.check_stream("a span", &self.stream))?;
        SpanReads::begin(&self.stream, places)
    }

    fn have_arrived(&self, reads: &SpanReads) -> Result<bool> {
        reads.have_arrived()
    }

    async fn finish_reads(&self, reads: SpanReads) -> Result<Vec<SpanBytes>> {
        reads.finish()
    }

    fn write_span(&self, store: &mut Store, bytes: &SpanBytes, place: SpanPlace<'_>) -> Result<()> {
        store.check_stream("a span", &self.stream)?;
        store.write_span(&self.stream, bytes, place)
    }

    fn span_layout(&self) -> &'static str {
        "cuda with matrices of halves"
    }

    fn store_bytes(&self, store: &Store) -> u64 {
        store.bytes()
    }
}

impl Packing for Cuda {
    type NonFiniteFlags = NonFiniteFlags;

    async fn first_non_finite(
        &self,
        which: KeyOrValue,
        tensor: &Tensor,
        rows: &RowLayout,
        shape: &AttentionShape,
        largest: f32,
    ) -> Result<Option<NonFinite>> {
        let what = match which {
            KeyOrValue::Key => "keys",
            KeyOrValue::Value => "values",
        };
        tensor.memory().check_stream(what, &self.stream)?;
        let Some(index) = self.launcher().find_non_finite(what, tensor, rows, shape, largest)? else { return Ok(None) };
        let (row, channel) = (index / shape.head_dim(), index % shape.head_dim());
        let (token, kv_head) = (row / shape.kv_heads(), row % shape.kv_heads());
        let value = tensor.download_part(&self.stream, rows.row(token, kv_head) + channel, 1)?;
        Ok(value.first().map(|&value| NonFinite { token, kv_head, channel, value }))
    }

    fn key_mean(&self, store: &mut Store, keys: &Tensor, centre: NewCentre) -> Result<()> {
        self.launcher_for("key mean", store, &[keys])?.key_mean(store, keys, centre)
    }

    fn quantize(&self, store: &mut Store, keys: &Tensor, values: &Tensor, write: SpanWrite<'_, Indices>) -> Result<()> {
        if let Rows::Gather(indices) = write.tokens {
            indices.memory().check_stream("quantize", &self.stream)?;
        }
        let launcher = self.launcher_for("quantize", store, &[keys, values])?;
        launcher.quantize(&mut self.scratch(), store, keys, values, &write)
    }

    fn pack_windows(&self, shape: &AttentionShape, from: &Store, to: &mut Store, windows: &[WindowMove]) -> Result<()> {
        let stores = [from.step_capacity(0, 0), to.step_capacity(0, 0)];
        self.run_pack_step(&[from, to], None, &windows_table(shape, stores, windows)?)
    }

    fn append(
        &self,
        store: &mut Store,
        keys: &Tensor,
        values: &Tensor,
        rows: RowLayout,
        writes: &[TokenWrite],
    ) -> Result<()> {
        let table = append_table(store.shape(), store.step_capacity(writes.len(), 0), rows.tokens, writes)?;
        let flags = self.scratch().flags(&self.stream)?;
        self.run_pack_step(&[store], Some(WriteInput { keys, values, rows, flags: &flags, layer: 0 }), &table)
    }

    fn copy_page(&self, store: &mut Store, from: Page, to: Page) -> Result<()> {
        let table = copy_table(store.shape(), store.step_capacity(0, 1), PageCopy { from, to })?;
        self.run_pack_step(&[store], None, &table)
    }

    fn write_step(
        &self,
        stores: &mut [&mut Store],
        input: Option<WriteInput<'_, Tensor, NonFiniteFlags>>,
        table: &WriteTable,
    ) -> Result<()> {
        let stores: Vec<&Store> = stores.iter().map(|store| &**store).collect();
        self.run_pack_step(&stores, input, table)
    }

    fn create_non_finite_flags(&self, layers: usize) -> Result<NonFiniteFlags> {
        NonFiniteFlags::new(&self.stream, layers)
    }

    async fn read_non_finite_flags(&self, flags: &NonFiniteFlags) -> Result<Vec<FlaggedToken>> {
        flags.read(&self.stream)
    }

    fn clear_non_finite_flags(&self, flags: &NonFiniteFlags) -> Result<()> {
        flags.clear(&self.stream)
    }

    fn dequantize(&self, store: &Store, read: SpanRead<'_>) -> Result<(Tensor, Tensor)> {
        let [keys, values] =
            self.launcher_for("dequantize", store, &[])?.dequantize(&mut self.scratch(), store, &read)?;
        Ok((keys, values))
    }
}

impl Attention for Cuda {
    fn arithmetic(
        &self,
        shape: &AttentionShape,
        format: &SegmentFormat,
        _: QueryPrecision,
    ) -> Result<AttendArithmetic> {
        format.check(shape)?;
        let pages = PageFormat::new(shape, format)?;
        let of = |tensor: &TensorPages| match tensor.bits == 16 || tensor.is_grouped(pages.head_dim) {
            true => Arithmetic::HalfMatrices,
            false => Arithmetic::ByteMatrices,
        };
        Ok(AttendArithmetic { keys: of(&pages.key), values: of(&pages.value) })
    }

    async fn attend(
        &self,
        plan: &AttendPlan,
        stores: &[&Store],
        queries: &Tensor,
        options: AttendOptions,
    ) -> Result<Tensor> {
        let mut output = Tensor::zeroed(&self.stream, plan.elements(), options.output)?;
        self.attend_into(plan, stores, queries, &mut output, options).await?;
        Ok(output)
    }

    async fn attend_into(
        &self,
        plan: &AttendPlan,
        stores: &[&Store],
        queries: &Tensor,
        output: &mut Tensor,
        _: AttendOptions,
    ) -> Result<()> {
        plan.check_elements("queries", queries.elements())?;
        plan.check_elements("output", output.elements())?;
        AttendStep::new(self, plan)?.run(self, stores, AttendTensors { queries, output, lse: None })
    }

    async fn attend_states(
        &self,
        plan: &AttendPlan,
        stores: &[&Store],
        queries: &Tensor,
        _: AttendOptions,
    ) -> Result<AttentionStates<Tensor>> {
        plan.check_elements("queries", queries.elements())?;
        let step = AttendStep::new(self, plan)?;
        let states = self.zeroed_states(plan.shape(), plan.rows())?;
        let tensors = AttendTensors { queries, output: &states.outputs, lse: Some(&states.lse) };
        step.run(self, stores, tensors)?;
        Ok(states)
    }

    async fn uncentre_lse(
        &self,
        store: &Store,
        queries: &Tensor,
        centres: RowCentres<'_>,
        states: AttentionStates<Tensor>,
    ) -> Result<AttentionStates<Tensor>> {
        store.check_stream("uncentring", &self.stream)?;
        self.check_tensors("uncentring", &[queries, &states.lse])?;
        uncentre_lse(self, store, queries, centres, &states.lse)?;
        Ok(states)
    }

    async fn merge(
        &self,
        shape: &AttentionShape,
        first: &AttentionStates<Tensor>,
        second: &AttentionStates<Tensor>,
    ) -> Result<AttentionStates<Tensor>> {
        let joined = self.zeroed_states(shape, first.lse.elements() / shape.query_heads())?;
        merge_pair(self, shape, [first, second, &joined])?;
        Ok(joined)
    }

    fn merge_parts(
        &self,
        shape: &AttentionShape,
        parts: StateParts<'_, Tensor>,
        output: &mut Tensor,
        lse: Option<&mut Tensor>,
    ) -> Result<()> {
        parts.check(self, shape, output, lse.as_deref())?;
        merge_parts(self, shape, parts, output, lse.as_deref())
    }
}

impl TokenSelection for Cuda {
    type Words = Words;

    async fn download_words(&self, words: &Words) -> Result<Vec<u32>> {
        words.download(&self.stream)
    }

    fn measure_attention(
        &self,
        input: QueriesAndKeys<'_, Tensor>,
        request: StatsRequest,
        known_lse: Option<&Tensor>,
    ) -> Result<MeasuredAttention<Tensor, Words>> {
        self.check_tensors("attention statistics", &[input.queries.tensor, input.keys.tensor])?;
        self.check_tensors("attention statistics", known_lse.as_slice())?;
        let layouts = [input.queries.layout, input.keys.layout];
        let plan = AttentionStatsPlan::new(&input.shape, input.rows.clone(), layouts, request)?;
        let bound = plan.bind(self, input.queries.tensor, input.keys.tensor, known_lse)?;
        bound.launches.launch(&self.stream)?;
        Ok(MeasuredAttention {
            row_max: bound.row_max,
            row_lse: known_lse.is_none().then_some(bound.row_lse),
            column_sums: bound.column_sums,
            counts: bound.counts,
        })
    }

    fn measure_rows(&self, input: QueriesAndKeys<'_, Tensor>) -> Result<RowStatistics<Tensor>> {
        self.check_tensors("row statistics", &[input.queries.tensor, input.keys.tensor])?;
        let columns = ColumnRequest { aggregation: HeadAggregation::Each, threshold: None };
        let request = StatsRequest { columns, rows: RowStatsSource::Measured };
        let layouts = [input.queries.layout, input.keys.layout];
        let plan = AttentionStatsPlan::new(&input.shape, input.rows.clone(), layouts, request)?;
        let (launches, rows) = plan.bind_rows(self, input.queries.tensor, input.keys.tensor)?;
        launches.launch(&self.stream)?;
        Ok(rows)
    }

    fn measure_columns(
        &self,
        input: QueriesAndKeys<'_, Tensor>,
        columns: ColumnRequest,
        rows: &RowStatistics<Tensor>,
    ) -> Result<MeasuredAttention<Tensor, Words>> {
        self.check_tensors("column statistics", &[input.queries.tensor, input.keys.tensor, &rows.max, &rows.lse])?;
        let layouts = [input.queries.layout, input.keys.layout];
        let request = StatsRequest { columns, rows: RowStatsSource::Known };
        let plan = AttentionStatsPlan::new(&input.shape, input.rows.clone(), layouts, request)?;
        let bound = plan.bind_columns(self, input.queries.tensor, input.keys.tensor, rows)?;
        bound.launches.launch(&self.stream)?;
        let (column_sums, counts) = (bound.column_sums, bound.counts);
        Ok(MeasuredAttention { row_max: None, row_lse: None, column_sums, counts })
    }

    fn add_attention(
        &self,
        input: NewQueries<'_, Tensor>,
        columns: ColumnRequest,
        sums: &mut Option<Tensor>,
    ) -> Result<Option<Words>> {
        self.check_tensors("attention statistics", &[input.queries.tensor, input.keys.tensor])?;
        self.check_tensors("attention statistics", input.log_sum_exps.as_slice())?;
        self.check_tensors("attention statistics", sums.as_ref().as_slice())?;
        let (launches, counts) = AttentionStatsPlan::bind_adding(self, input, columns, sums)?;
        launches.launch(&self.stream)?;
        Ok(counts)
    }

    fn begin_word_reads(&self, words: &[&Words], _: &[&Store]) -> Result<SpanReads> {
        let memories: Vec<_> = words.iter().map(|words| (words.memory(), words.len() * size_of::<u32>())).collect();
        memories.iter().try_for_each(|(memory, _)| memory.check_stream("words", &self.stream))?;
        SpanReads::begin_memories(&self.stream, &memories)
    }

    fn token_scores(
        &self,
        sums: &Tensor,
        kv_heads: usize,
        request: &ScoreRequest<'_>,
    ) -> Result<ScoredTokens<Tensor, Words>> {
        self.check_tensors("token_scores", &[sums])?;
        request.check(sums.elements(), kv_heads)?;
        let scores = Tensor::zeroed(&self.stream, sums.elements(), ElementType::F32)?;
        let not_numbers = Words::zeroed(&self.stream, "sums that are not numbers", kv_heads)?;
        let plan = TokenScoresPlan::new(kv_heads, request)?;
        plan.bind(self, sums, &scores, &not_numbers)?.launch(&self.stream)?;
        Ok(ScoredTokens { scores, not_numbers })
    }

    fn evicted(&self, kept: &Indices) -> Result<Indices> {
        kept.memory().check_stream("evicted", &self.stream)?;
        let plan = EvictedPlan::new(kept.shape())?;
        let others = Indices::zeroed(&self.stream, plan.indices())?;
        plan.bind(self, kept, &others)?.launch(&self.stream)?;
        Ok(others)
    }

    fn top_k(&self, scores: &Tensor, kv_heads: usize, k: usize) -> Result<Indices> {
        self.check_tensors("top_k", &[scores])?;
        let plan = TopKPlan::new(kv_heads, scores.elements() / kv_heads.max(1), k)?;
        let chosen = Indices::zeroed(&self.stream, plan.indices())?;
        plan.bind(self, scores, &chosen)?.launch(&self.stream)?;
        Ok(chosen)
    }

    fn gather(&self, shape: &AttentionShape, rows: TensorRows<'_, Tensor>, kept: &Indices) -> Result<Tensor> {
        self.check_tensors("gather", &[rows.tensor])?;
        kept.memory().check_stream("gather", &self.stream)?;
        let plan = GatherPlan::new(shape, rows.layout, kept.shape().count())?;
        let gathered = Tensor::zeroed(&self.stream, plan.elements(), rows.tensor.element_type())?;
        plan.bind(self, rows.tensor, kept, &gathered)?.launch(&self.stream)?;
        Ok(gathered)
    }

    fn merge_tokens(
        &self,
        input: KeptAndEvicted<'_, Tensor, Indices>,
        merging: Merging,
    ) -> Result<MergedTokens<Tensor, Words>> {
        self.check_tensors("merge_tokens", &[input.keys, input.values])?;
        input.kept.memory().check_stream("merge_tokens", &self.stream)?;
        input.evicted.memory().check_stream("merge_tokens", &self.stream)?;
        let counts = [input.kept.shape().count(), input.evicted.shape().count()];
        let plan = MergePlan::new(&input.shape, input.rows, counts, merging)?;
        let bound = plan.bind(self, [input.keys, input.values], input.kept, input.evicted)?;
        bound.launches.launch(&self.stream)?;
        Ok(MergedTokens {
            nearest: bound.nearest,
            similarities: bound.similarities,
            keys: bound.keys,
            values: bound.values,
        })
    }

    fn chunk_similarity(&self, query: &Tensor, chunks: &Tensor) -> Result<Tensor> {
        self.check_tensors("chunk_similarity", &[query, chunks])?;
        let count = chunks.elements() / query.elements().max(1);
        let plan = ChunkSimilarityPlan::new(query.elements(), count)?;
        let similarities = Tensor::zeroed(&self.stream, count, ElementType::F32)?;
        plan.bind(self, query, chunks, &similarities)?.launch(&self.stream)?;
        Ok(similarities)
    }

    fn reorder_chunks(
        &self,
        shape: &AttentionShape,
        rows: TensorRows<'_, Tensor>,
        chunk_tokens: usize,
        order: &[u32],
    ) -> Result<Tensor> {
        self.check_tensors("reorder_chunks", &[rows.tensor])?;
        let plan = ReorderChunksPlan::new(shape, rows.layout, chunk_tokens, order)?;
        let reordered = Tensor::zeroed(&self.stream, plan.elements(), rows.tensor.element_type())?;
        plan.bind(self, rows.tensor, &reordered)?.launch(&self.stream)?;
        Ok(reordered)
    }
}

#[cfg(test)]
mod tests {
    use super::{Cuda, KernelCache};
    use crate::Error;

    #[test]
    fn no_driver_is_an_error_and_no_panic() {
        if crate::cuda::driver_present() {
            return;
        }
        let error = Cuda::open(0, KernelCache::Directory("unused".into())).expect_err("there is no driver");
        assert!(matches!(error, Error::Adapter { .. }), "{error}");
    }
}
