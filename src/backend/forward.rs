//! A backend derived from another.

use std::future::Future;

use super::{
    AttendArithmetic, AttendOptions, Attention, AttentionStates, Backend, Device, FlaggedToken, KeptAndEvicted,
    MeasuredAttention, MergedTokens, NewCentre, NewQueries, NonFinite, Packing, QueriesAndKeys, QueryPrecision,
    RowCentres, RowStatistics, ScoredTokens, SpanBytes, SpanPlace, SpanRead, SpanWrite, StateParts, Storage,
    TensorRows, TokenSelection, WriteInput,
};
use crate::Result;
use crate::format::{AttentionShape, KeyOrValue, SegmentFormat};
use crate::plan::{AttendPlan, Elements, Page, RowLayout, TokenWrite, WindowMove, WriteTable};
use crate::policy::{ColumnRequest, Merging, ScoreRequest, StatsRequest};

/// The differences from another backend. Every method calls that of [`Forward::inner`] unless it is overridden.
/// [`Forwarding`](super::Forwarding) is the backend.
///
/// ```
/// use std::cell::Cell;
/// use kvpack::backend::{Forward, Forwarding, Storage};
/// use kvpack::cpu::{Cpu, CpuStore};
/// use kvpack::{AttentionShape, Result, SegmentFormat};
///
/// /// A CPU that counts the shards that are asked of it.
/// struct Counting(Cpu, Cell<usize>);
/// impl Forward for Counting {
///     type Inner = Cpu;
///     fn inner(&self) -> &Cpu {
///         &self.0
///     }
///     async fn add_shard(&self, store: &mut CpuStore, pages: u32) -> Result<()> {
///         self.1.set(self.1.get() + 1);
///         self.0.add_shard(store, pages).await
///     }
/// }
///
/// # futures::executor::block_on(async {
/// let backend = Forwarding(Counting(Cpu::new(), Cell::new(0)));
/// let mut store = backend.create_store(AttentionShape::new(2, 1, 64)?, SegmentFormat::F16)?;
/// backend.add_shard(&mut store, 4).await?;
/// assert_eq!(backend.0.1.get(), 1);
/// # Ok::<(), kvpack::Error>(())
/// # }).unwrap();
/// ```
#[expect(missing_docs, reason = "every method is that of the families, where it is documented")]
pub trait Forward {
    /// The type of the other backend.
    type Inner: Backend;

    /// The other backend.
    fn inner(&self) -> &Self::Inner;

    fn name(&self) -> String {
        self.inner().name()
    }

    fn upload(&self, elements: Elements<'_>) -> impl Future<Output = Result<Tensor<Self>>> {
        self.inner().upload(elements)
    }

    fn download(&self, tensor: &Tensor<Self>) -> impl Future<Output = Result<Vec<f32>>> {
        self.inner().download(tensor)
    }

    fn upload_indices(
        &self,
        tokens: &[u32],
        kv_heads: usize,
        below: u32,
    ) -> impl Future<Output = Result<Indices<Self>>> {
        self.inner().upload_indices(tokens, kv_heads, below)
    }

    fn download_indices(&self, indices: &Indices<Self>) -> impl Future<Output = Result<Vec<u32>>> {
        self.inner().download_indices(indices)
    }

    fn elements(&self, tensor: &Tensor<Self>) -> usize {
        self.inner().elements(tensor)
    }

    fn create_store(&self, shape: AttentionShape, format: SegmentFormat) -> Result<Store<Self>> {
        self.inner().create_store(shape, format)
    }

    fn max_shard_pages(&self, shape: &AttentionShape, format: &SegmentFormat) -> u32 {
        self.inner().max_shard_pages(shape, format)
    }

    fn add_shard(&self, store: &mut Store<Self>, pages: u32) -> impl Future<Output = Result<()>> {
        self.inner().add_shard(store, pages)
    }

    fn drop_shard(&self, store: &mut Store<Self>) {
        self.inner().drop_shard(store);
    }

    fn available_bytes(&self) -> Option<u64> {
        self.inner().available_bytes()
    }

    fn reserve_ranges(&self, store: &mut Store<Self>, slots: usize) -> impl Future<Output = Result<()>> {
        self.inner().reserve_ranges(store, slots)
    }

    fn reserve_centres(&self, store: &mut Store<Self>, slots: usize) -> impl Future<Output = Result<()>> {
        self.inner().reserve_centres(store, slots)
    }

    fn read_spans(&self, places: &[(&Store<Self>, SpanPlace<'_>)]) -> impl Future<Output = Result<Vec<SpanBytes>>> {
        self.inner().read_spans(places)
    }

    fn begin_reads(&self, places: &[(&Store<Self>, SpanPlace<'_>)]) -> Result<SpanReads<Self>> {
        self.inner().begin_reads(places)
    }

    fn have_arrived(&self, reads: &SpanReads<Self>) -> Result<bool> {
        self.inner().have_arrived(reads)
    }

    fn finish_reads(&self, reads: SpanReads<Self>) -> impl Future<Output = Result<Vec<SpanBytes>>> {
        self.inner().finish_reads(reads)
    }

    fn write_span(&self, store: &mut Store<Self>, bytes: &SpanBytes, place: SpanPlace<'_>) -> Result<()> {
        self.inner().write_span(store, bytes, place)
    }

    fn span_layout(&self) -> &'static str {
        self.inner().span_layout()
    }

    fn store_bytes(&self, store: &Store<Self>) -> u64 {
        self.inner().store_bytes(store)
    }

    fn first_non_finite(
        &self,
        which: KeyOrValue,
        tensor: &Tensor<Self>,
        rows: &RowLayout,
        shape: &AttentionShape,
        largest: f32,
    ) -> impl Future<Output = Result<Option<NonFinite>>> {
        self.inner().first_non_finite(which, tensor, rows, shape, largest)
    }

    fn key_mean(&self, store: &mut Store<Self>, keys: &Tensor<Self>, centre: NewCentre) -> Result<()> {
        self.inner().key_mean(store, keys, centre)
    }

    fn quantize(
        &self,
        store: &mut Store<Self>,
        keys: &Tensor<Self>,
        values: &Tensor<Self>,
        write: SpanWrite<'_, Indices<Self>>,
    ) -> Result<()> {
        self.inner().quantize(store, keys, values, write)
    }

    fn pack_windows(
        &self,
        shape: &AttentionShape,
        from: &Store<Self>,
        to: &mut Store<Self>,
        windows: &[WindowMove],
    ) -> Result<()> {
        self.inner().pack_windows(shape, from, to, windows)
    }

    fn append(
        &self,
        store: &mut Store<Self>,
        keys: &Tensor<Self>,
        values: &Tensor<Self>,
        rows: RowLayout,
        writes: &[TokenWrite],
    ) -> Result<()> {
        self.inner().append(store, keys, values, rows, writes)
    }

    fn copy_page(&self, store: &mut Store<Self>, from: Page, to: Page) -> Result<()> {
        self.inner().copy_page(store, from, to)
    }

    fn write_step(
        &self,
        stores: &mut [&mut Store<Self>],
        input: Option<WriteInput<'_, Tensor<Self>, Flags<Self>>>,
        table: &WriteTable,
    ) -> Result<()> {
        self.inner().write_step(stores, input, table)
    }

    fn create_non_finite_flags(&self, layers: usize) -> Result<Flags<Self>> {
        self.inner().create_non_finite_flags(layers)
    }

    fn read_non_finite_flags(&self, flags: &Flags<Self>) -> impl Future<Output = Result<Vec<FlaggedToken>>> {
        self.inner().read_non_finite_flags(flags)
    }

    fn clear_non_finite_flags(&self, flags: &Flags<Self>) -> Result<()> {
        self.inner().clear_non_finite_flags(flags)
    }

    fn dequantize(&self, store: &Store<Self>, read: SpanRead<'_>) -> Result<(Tensor<Self>, Tensor<Self>)> {
        self.inner().dequantize(store, read)
    }

    fn dequantize_with(
        &self,
        store: &Store<Self>,
        read: SpanRead<'_>,
        rows: &mut Option<(Tensor<Self>, Tensor<Self>)>,
    ) -> Result<()> {
        self.inner().dequantize_with(store, read, rows)
    }

    fn arithmetic(
        &self,
        shape: &AttentionShape,
        format: &SegmentFormat,
        query: QueryPrecision,
    ) -> Result<AttendArithmetic> {
        self.inner().arithmetic(shape, format, query)
    }

    fn attend(
        &self,
        plan: &AttendPlan,
        stores: &[&Store<Self>],
        queries: &Tensor<Self>,
        options: AttendOptions,
    ) -> impl Future<Output = Result<Tensor<Self>>> {
        self.inner().attend(plan, stores, queries, options)
    }

    fn attend_into(
        &self,
        plan: &AttendPlan,
        stores: &[&Store<Self>],
        queries: &Tensor<Self>,
        output: &mut Tensor<Self>,
        options: AttendOptions,
    ) -> impl Future<Output = Result<()>> {
        self.inner().attend_into(plan, stores, queries, output, options)
    }

    fn attend_states(
        &self,
        plan: &AttendPlan,
        stores: &[&Store<Self>],
        queries: &Tensor<Self>,
        options: AttendOptions,
    ) -> impl Future<Output = Result<States<Self>>> {
        self.inner().attend_states(plan, stores, queries, options)
    }

    fn uncentre_lse(
        &self,
        store: &Store<Self>,
        queries: &Tensor<Self>,
        centres: RowCentres<'_>,
        states: States<Self>,
    ) -> impl Future<Output = Result<States<Self>>> {
        self.inner().uncentre_lse(store, queries, centres, states)
    }

    fn merge(
        &self,
        shape: &AttentionShape,
        first: &States<Self>,
        second: &States<Self>,
    ) -> impl Future<Output = Result<States<Self>>> {
        self.inner().merge(shape, first, second)
    }

    fn merge_parts(
        &self,
        shape: &AttentionShape,
        parts: StateParts<'_, Tensor<Self>>,
        output: &mut Tensor<Self>,
        lse: Option<&mut Tensor<Self>>,
    ) -> Result<()> {
        self.inner().merge_parts(shape, parts, output, lse)
    }

    fn download_words(&self, words: &Words<Self>) -> impl Future<Output = Result<Vec<u32>>> {
        self.inner().download_words(words)
    }

    fn measure_attention(
        &self,
        input: QueriesAndKeys<'_, Tensor<Self>>,
        request: StatsRequest,
        known_lse: Option<&Tensor<Self>>,
    ) -> Result<Measured<Self>> {
        self.inner().measure_attention(input, request, known_lse)
    }

    fn measure_rows(&self, input: QueriesAndKeys<'_, Tensor<Self>>) -> Result<RowStatistics<Tensor<Self>>> {
        self.inner().measure_rows(input)
    }

    fn measure_columns(
        &self,
        input: QueriesAndKeys<'_, Tensor<Self>>,
        columns: ColumnRequest,
        rows: &RowStatistics<Tensor<Self>>,
    ) -> Result<Measured<Self>> {
        self.inner().measure_columns(input, columns, rows)
    }

    fn add_attention(
        &self,
        input: NewQueries<'_, Tensor<Self>>,
        columns: ColumnRequest,
        sums: &mut Option<Tensor<Self>>,
    ) -> Result<Option<Words<Self>>> {
        self.inner().add_attention(input, columns, sums)
    }

    fn begin_word_reads(&self, words: &[&Words<Self>], stores: &[&Store<Self>]) -> Result<SpanReads<Self>> {
        self.inner().begin_word_reads(words, stores)
    }

    fn token_scores(&self, sums: &Tensor<Self>, kv_heads: usize, request: &ScoreRequest<'_>) -> Result<Scored<Self>> {
        self.inner().token_scores(sums, kv_heads, request)
    }

    fn evicted(&self, kept: &Indices<Self>) -> Result<Indices<Self>> {
        self.inner().evicted(kept)
    }

    fn top_k(&self, scores: &Tensor<Self>, kv_heads: usize, k: usize) -> Result<Indices<Self>> {
        self.inner().top_k(scores, kv_heads, k)
    }

    fn gather(
        &self,
        shape: &AttentionShape,
        rows: TensorRows<'_, Tensor<Self>>,
        kept: &Indices<Self>,
    ) -> Result<Tensor<Self>> {
        self.inner().gather(shape, rows, kept)
    }

    fn merge_tokens(
        &self,
        input: KeptAndEvicted<'_, Tensor<Self>, Indices<Self>>,
        merging: Merging,
    ) -> Result<Merged<Self>> {
        self.inner().merge_tokens(input, merging)
    }

    fn chunk_similarity(&self, query: &Tensor<Self>, chunks: &Tensor<Self>) -> Result<Tensor<Self>> {
        self.inner().chunk_similarity(query, chunks)
    }

    fn reorder_chunks(
        &self,
        shape: &AttentionShape,
        rows: TensorRows<'_, Tensor<Self>>,
        chunk_tokens: usize,
        order: &[u32],
    ) -> Result<Tensor<Self>> {
        self.inner().reorder_chunks(shape, rows, chunk_tokens, order)
    }
}

pub(super) type Tensor<F> = <<F as Forward>::Inner as Device>::Tensor;
pub(super) type Indices<F> = <<F as Forward>::Inner as Device>::Indices;
pub(super) type Store<F> = <<F as Forward>::Inner as Storage>::Store;
pub(super) type SpanReads<F> = <<F as Forward>::Inner as Storage>::SpanReads;
pub(super) type Flags<F> = <<F as Forward>::Inner as Packing>::NonFiniteFlags;
pub(super) type States<F> = AttentionStates<Tensor<F>>;
pub(super) type Words<F> = <<F as Forward>::Inner as TokenSelection>::Words;
pub(super) type Measured<F> = MeasuredAttention<Tensor<F>, Words<F>>;
pub(super) type Scored<F> = ScoredTokens<Tensor<F>, Words<F>>;
pub(super) type Merged<F> = MergedTokens<Tensor<F>, Words<F>>;
