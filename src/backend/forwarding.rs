//! The backend that forwards every call to another, except for the methods that a [`Forward`] overrides.

use std::future::Future;

use super::forward::{Flags, Forward, Indices, Measured, Merged, Scored, SpanReads, States, Store, Tensor, Words};
use super::{
    AttendArithmetic, AttendOptions, Attention, Device, FlaggedToken, KeptAndEvicted, NewCentre, NewQueries, NonFinite,
    Packing, QueriesAndKeys, QueryPrecision, RowCentres, RowStatistics, SpanBytes, SpanPlace, SpanRead, SpanWrite,
    StateParts, Storage, TensorRows, TokenSelection, WriteInput,
};
use crate::Result;
use crate::format::{AttentionShape, KeyOrValue, SegmentFormat};
use crate::plan::{AttendPlan, Elements, Page, RowLayout, TokenWrite, WindowMove, WriteTable};
use crate::policy::{ColumnRequest, Merging, ScoreRequest, StatsRequest};

/// The backend that a [`Forward`] describes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Forwarding<F>(pub F);

impl<F: Forward> Device for Forwarding<F> {
    type Tensor = <F::Inner as Device>::Tensor;
    type Indices = Indices<F>;

    fn name(&self) -> String {
        self.0.name()
    }

    fn upload(&self, elements: Elements<'_>) -> impl Future<Output = Result<Tensor<F>>> {
        self.0.upload(elements)
    }

    fn download(&self, tensor: &Tensor<F>) -> impl Future<Output = Result<Vec<f32>>> {
        self.0.download(tensor)
    }

    fn upload_indices(&self, tokens: &[u32], kv_heads: usize, below: u32) -> impl Future<Output = Result<Indices<F>>> {
        self.0.upload_indices(tokens, kv_heads, below)
    }

    fn download_indices(&self, indices: &Indices<F>) -> impl Future<Output = Result<Vec<u32>>> {
        self.0.download_indices(indices)
    }

    fn elements(&self, tensor: &Tensor<F>) -> usize {
        self.0.elements(tensor)
    }
}

impl<F: Forward> Storage for Forwarding<F> {
    type Store = <F::Inner as Storage>::Store;
    type SpanReads = <F::Inner as Storage>::SpanReads;

    fn create_store(&self, shape: AttentionShape, format: SegmentFormat) -> Result<Store<F>> {
        self.0.create_store(shape, format)
    }

    fn max_shard_pages(&self, shape: &AttentionShape, format: &SegmentFormat) -> u32 {
        self.0.max_shard_pages(shape, format)
    }

    fn add_shard(&self, store: &mut Store<F>, pages: u32) -> impl Future<Output = Result<()>> {
        self.0.add_shard(store, pages)
    }

    fn drop_shard(&self, store: &mut Store<F>) {
        self.0.drop_shard(store);
    }

    fn available_bytes(&self) -> Option<u64> {
        self.0.available_bytes()
    }

    fn reserve_ranges(&self, store: &mut Store<F>, slots: usize) -> impl Future<Output = Result<()>> {
        self.0.reserve_ranges(store, slots)
    }

    fn reserve_centres(&self, store: &mut Store<F>, slots: usize) -> impl Future<Output = Result<()>> {
        self.0.reserve_centres(store, slots)
    }

    fn read_spans(&self, places: &[(&Store<F>, SpanPlace<'_>)]) -> impl Future<Output = Result<Vec<SpanBytes>>> {
        self.0.read_spans(places)
    }

    fn begin_reads(&self, places: &[(&Store<F>, SpanPlace<'_>)]) -> Result<Self::SpanReads> {
        self.0.begin_reads(places)
    }

    fn have_arrived(&self, reads: &Self::SpanReads) -> Result<bool> {
        self.0.have_arrived(reads)
    }

    fn finish_reads(&self, reads: Self::SpanReads) -> impl Future<Output = Result<Vec<SpanBytes>>> {
        self.0.finish_reads(reads)
    }

    fn write_span(&self, store: &mut Store<F>, bytes: &SpanBytes, place: SpanPlace<'_>) -> Result<()> {
        self.0.write_span(store, bytes, place)
    }

    fn span_layout(&self) -> &'static str {
        self.0.span_layout()
    }

    fn store_bytes(&self, store: &Store<F>) -> u64 {
        self.0.store_bytes(store)
    }
}

impl<F: Forward> Packing for Forwarding<F> {
    type NonFiniteFlags = Flags<F>;

    fn first_non_finite(
        &self,
        which: KeyOrValue,
        tensor: &Tensor<F>,
        rows: &RowLayout,
        shape: &AttentionShape,
        largest: f32,
    ) -> impl Future<Output = Result<Option<NonFinite>>> {
        self.0.first_non_finite(which, tensor, rows, shape, largest)
    }

    fn key_mean(&self, store: &mut Store<F>, keys: &Tensor<F>, centre: NewCentre) -> Result<()> {
        self.0.key_mean(store, keys, centre)
    }

    fn quantize(
        &self,
        store: &mut Store<F>,
        keys: &Tensor<F>,
        values: &Tensor<F>,
        write: SpanWrite<'_, Indices<F>>,
    ) -> Result<()> {
        self.0.quantize(store, keys, values, write)
    }

    fn pack_windows(
        &self,
        shape: &AttentionShape,
        from: &Store<F>,
        to: &mut Store<F>,
        windows: &[WindowMove],
    ) -> Result<()> {
        self.0.pack_windows(shape, from, to, windows)
    }

    fn append(
        &self,
        store: &mut Store<F>,
        keys: &Tensor<F>,
        values: &Tensor<F>,
        rows: RowLayout,
        writes: &[TokenWrite],
    ) -> Result<()> {
        self.0.append(store, keys, values, rows, writes)
    }

    fn copy_page(&self, store: &mut Store<F>, from: Page, to: Page) -> Result<()> {
        self.0.copy_page(store, from, to)
    }

    fn write_step(
        &self,
        stores: &mut [&mut Store<F>],
        input: Option<WriteInput<'_, Tensor<F>, Flags<F>>>,
        table: &WriteTable,
    ) -> Result<()> {
        self.0.write_step(stores, input, table)
    }

    fn create_non_finite_flags(&self, layers: usize) -> Result<Flags<F>> {
        self.0.create_non_finite_flags(layers)
    }

    fn read_non_finite_flags(&self, flags: &Flags<F>) -> impl Future<Output = Result<Vec<FlaggedToken>>> {
        self.0.read_non_finite_flags(flags)
    }

    fn clear_non_finite_flags(&self, flags: &Flags<F>) -> Result<()> {
        self.0.clear_non_finite_flags(flags)
    }

    fn dequantize(&self, store: &Store<F>, read: SpanRead<'_>) -> Result<(Tensor<F>, Tensor<F>)> {
        self.0.dequantize(store, read)
    }

    fn dequantize_with(
        &self,
        store: &Store<F>,
        read: SpanRead<'_>,
        rows: &mut Option<(Tensor<F>, Tensor<F>)>,
    ) -> Result<()> {
        self.0.dequantize_with(store, read, rows)
    }
}

impl<F: Forward> Attention for Forwarding<F> {
    fn arithmetic(
        &self,
        shape: &AttentionShape,
        format: &SegmentFormat,
        query: QueryPrecision,
    ) -> Result<AttendArithmetic> {
        self.0.arithmetic(shape, format, query)
    }

    fn attend(
        &self,
        plan: &AttendPlan,
        stores: &[&Store<F>],
        queries: &Tensor<F>,
        options: AttendOptions,
    ) -> impl Future<Output = Result<Tensor<F>>> {
        self.0.attend(plan, stores, queries, options)
    }

    fn attend_into(
        &self,
        plan: &AttendPlan,
        stores: &[&Store<F>],
        queries: &Tensor<F>,
        output: &mut Tensor<F>,
        options: AttendOptions,
    ) -> impl Future<Output = Result<()>> {
        self.0.attend_into(plan, stores, queries, output, options)
    }

    fn attend_states(
        &self,
        plan: &AttendPlan,
        stores: &[&Store<F>],
        queries: &Tensor<F>,
        options: AttendOptions,
    ) -> impl Future<Output = Result<States<F>>> {
        self.0.attend_states(plan, stores, queries, options)
    }

    fn uncentre_lse(
        &self,
        store: &Store<F>,
        queries: &Tensor<F>,
        centres: RowCentres<'_>,
        states: States<F>,
    ) -> impl Future<Output = Result<States<F>>> {
        self.0.uncentre_lse(store, queries, centres, states)
    }

    fn merge(
        &self,
        shape: &AttentionShape,
        first: &States<F>,
        second: &States<F>,
    ) -> impl Future<Output = Result<States<F>>> {
        self.0.merge(shape, first, second)
    }

    fn merge_parts(
        &self,
        shape: &AttentionShape,
        parts: StateParts<'_, Tensor<F>>,
        output: &mut Tensor<F>,
        lse: Option<&mut Tensor<F>>,
    ) -> Result<()> {
        self.0.merge_parts(shape, parts, output, lse)
    }
}

impl<F: Forward> TokenSelection for Forwarding<F> {
    type Words = <F::Inner as TokenSelection>::Words;

    fn download_words(&self, words: &Words<F>) -> impl Future<Output = Result<Vec<u32>>> {
        self.0.download_words(words)
    }

    fn measure_attention(
        &self,
        input: QueriesAndKeys<'_, Tensor<F>>,
        request: StatsRequest,
        known_lse: Option<&Tensor<F>>,
    ) -> Result<Measured<F>> {
        self.0.measure_attention(input, request, known_lse)
    }

    fn measure_rows(&self, input: QueriesAndKeys<'_, Tensor<F>>) -> Result<RowStatistics<Tensor<F>>> {
        self.0.measure_rows(input)
    }

    fn measure_columns(
        &self,
        input: QueriesAndKeys<'_, Tensor<F>>,
        columns: ColumnRequest,
        rows: &RowStatistics<Tensor<F>>,
    ) -> Result<Measured<F>> {
        self.0.measure_columns(input, columns, rows)
    }

    fn add_attention(
        &self,
        input: NewQueries<'_, Tensor<F>>,
        columns: ColumnRequest,
        sums: &mut Option<Tensor<F>>,
    ) -> Result<Option<Words<F>>> {
        self.0.add_attention(input, columns, sums)
    }

    fn begin_word_reads(&self, words: &[&Words<F>], stores: &[&Store<F>]) -> Result<SpanReads<F>> {
        self.0.begin_word_reads(words, stores)
    }

    fn token_scores(&self, sums: &Tensor<F>, kv_heads: usize, request: &ScoreRequest<'_>) -> Result<Scored<F>> {
        self.0.token_scores(sums, kv_heads, request)
    }

    fn evicted(&self, kept: &Indices<F>) -> Result<Indices<F>> {
        self.0.evicted(kept)
    }

    fn top_k(&self, scores: &Tensor<F>, kv_heads: usize, k: usize) -> Result<Indices<F>> {
        self.0.top_k(scores, kv_heads, k)
    }

    fn gather(&self, shape: &AttentionShape, rows: TensorRows<'_, Tensor<F>>, kept: &Indices<F>) -> Result<Tensor<F>> {
        self.0.gather(shape, rows, kept)
    }

    fn merge_tokens(&self, input: KeptAndEvicted<'_, Tensor<F>, Indices<F>>, merging: Merging) -> Result<Merged<F>> {
        self.0.merge_tokens(input, merging)
    }

    fn chunk_similarity(&self, query: &Tensor<F>, chunks: &Tensor<F>) -> Result<Tensor<F>> {
        self.0.chunk_similarity(query, chunks)
    }

    fn reorder_chunks(
        &self,
        shape: &AttentionShape,
        rows: TensorRows<'_, Tensor<F>>,
        chunk_tokens: usize,
        order: &[u32],
    ) -> Result<Tensor<F>> {
        self.0.reorder_chunks(shape, rows, chunk_tokens, order)
    }
}
