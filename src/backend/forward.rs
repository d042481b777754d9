//! A backend derived from another: every signature is written once, in the list of its family.

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

/// The methods of `Device`, as `$emit` is to have them of a forwarding type.
macro_rules! device_methods {
    ($emit:ident, $F:ty) => {
        $emit! {
            fn name(&self) -> String;
            fn upload(&self, elements: Elements<'_>) -> impl Future<Output = Result<Tensor<$F>>>;
            fn download(&self, tensor: &Tensor<$F>) -> impl Future<Output = Result<Vec<f32>>>;
            fn upload_indices(
                &self,
                tokens: &[u32],
                kv_heads: usize,
                below: u32,
            ) -> impl Future<Output = Result<Indices<$F>>>;
            fn download_indices(&self, indices: &Indices<$F>) -> impl Future<Output = Result<Vec<u32>>>;
            fn elements(&self, tensor: &Tensor<$F>) -> usize;
        }
    };
}

/// The methods of `Storage`, as `$emit` is to have them of a forwarding type.
macro_rules! storage_methods {
    ($emit:ident, $F:ty) => {
        $emit! {
            fn create_store(&self, shape: AttentionShape, format: SegmentFormat) -> Result<Store<$F>>;
            fn max_shard_pages(&self, shape: &AttentionShape, format: &SegmentFormat) -> u32;
            fn add_shard(&self, store: &mut Store<$F>, pages: u32) -> impl Future<Output = Result<()>>;
            fn shards_at_once(&self) -> usize;
            fn larger_shard(&self, store: &Store<$F>, pages: u32) -> impl Future<Output = Result<Shard<$F>>>;
            fn replace_shard(&self, store: &mut Store<$F>, shard: Shard<$F>) -> Result<()>;
            fn drop_shard(&self, store: &mut Store<$F>);
            fn available_bytes(&self) -> Option<u64>;
            fn reserve_ranges(&self, store: &mut Store<$F>, slots: usize) -> impl Future<Output = Result<()>>;
            fn reserve_centres(&self, store: &mut Store<$F>, slots: usize) -> impl Future<Output = Result<()>>;
            fn read_spans(
                &self,
                places: &[(&Store<$F>, SpanPlace<'_>)],
            ) -> impl Future<Output = Result<Vec<SpanBytes>>>;
            fn begin_reads(&self, places: &[(&Store<$F>, SpanPlace<'_>)]) -> Result<SpanReads<$F>>;
            fn check_submitted(&self, what: &'static str, stores: &[&Store<$F>]) -> Result<()>;
            fn have_arrived(&self, reads: &SpanReads<$F>) -> Result<bool>;
            fn finish_reads(&self, reads: SpanReads<$F>) -> impl Future<Output = Result<Vec<SpanBytes>>>;
            fn write_span(&self, store: &mut Store<$F>, bytes: &SpanBytes, place: SpanPlace<'_>) -> Result<()>;
            fn span_layout(&self) -> &'static str;
            fn store_bytes(&self, store: &Store<$F>) -> u64;
        }
    };
}

/// The methods of `Packing`, as `$emit` is to have them of a forwarding type.
macro_rules! packing_methods {
    ($emit:ident, $F:ty) => {
        $emit! {
            fn first_non_finite(
                &self,
                which: KeyOrValue,
                tensor: &Tensor<$F>,
                rows: &RowLayout,
                shape: &AttentionShape,
                largest: f32,
            ) -> impl Future<Output = Result<Option<NonFinite>>>;
            fn key_mean(&self, store: &mut Store<$F>, keys: &Tensor<$F>, centre: NewCentre) -> Result<()>;
            fn quantize(
                &self,
                store: &mut Store<$F>,
                keys: &Tensor<$F>,
                values: &Tensor<$F>,
                write: SpanWrite<'_, Indices<$F>>,
            ) -> Result<()>;
            fn pack_windows(
                &self,
                shape: &AttentionShape,
                from: &Store<$F>,
                to: &mut Store<$F>,
                windows: &[WindowMove],
            ) -> Result<()>;
            fn append(
                &self,
                store: &mut Store<$F>,
                keys: &Tensor<$F>,
                values: &Tensor<$F>,
                rows: RowLayout,
                writes: &[TokenWrite],
            ) -> Result<()>;
            fn copy_page(&self, store: &mut Store<$F>, from: Page, to: Page) -> Result<()>;
            fn write_step(
                &self,
                stores: &mut [&mut Store<$F>],
                input: Option<WriteInput<'_, Tensor<$F>, Flags<$F>>>,
                table: &WriteTable,
            ) -> Result<()>;
            fn create_non_finite_flags(&self, layers: usize) -> Result<Flags<$F>>;
            fn read_non_finite_flags(&self, flags: &Flags<$F>) -> impl Future<Output = Result<Vec<FlaggedToken>>>;
            fn clear_non_finite_flags(&self, flags: &Flags<$F>) -> Result<()>;
            fn dequantize(&self, store: &Store<$F>, read: SpanRead<'_>) -> Result<(Tensor<$F>, Tensor<$F>)>;
            fn dequantize_with(
                &self,
                store: &Store<$F>,
                read: SpanRead<'_>,
                rows: &mut Option<(Tensor<$F>, Tensor<$F>)>,
            ) -> Result<()>;
        }
    };
}

/// The methods of `Attention`, as `$emit` is to have them of a forwarding type.
macro_rules! attention_methods {
    ($emit:ident, $F:ty) => {
        $emit! {
            fn arithmetic(
                &self,
                shape: &AttentionShape,
                format: &SegmentFormat,
                query: QueryPrecision,
            ) -> Result<AttendArithmetic>;
            fn attend(
                &self,
                plan: &AttendPlan,
                stores: &[&Store<$F>],
                queries: &Tensor<$F>,
                options: AttendOptions,
            ) -> impl Future<Output = Result<Tensor<$F>>>;
            fn attend_into(
                &self,
                plan: &AttendPlan,
                stores: &[&Store<$F>],
                queries: &Tensor<$F>,
                output: &mut Tensor<$F>,
                options: AttendOptions,
            ) -> impl Future<Output = Result<()>>;
            fn attend_states(
                &self,
                plan: &AttendPlan,
                stores: &[&Store<$F>],
                queries: &Tensor<$F>,
                options: AttendOptions,
            ) -> impl Future<Output = Result<States<$F>>>;
            fn uncentre_lse(
                &self,
                store: &Store<$F>,
                queries: &Tensor<$F>,
                centres: RowCentres<'_>,
                states: States<$F>,
            ) -> impl Future<Output = Result<States<$F>>>;
            fn merge(
                &self,
                shape: &AttentionShape,
                first: &States<$F>,
                second: &States<$F>,
            ) -> impl Future<Output = Result<States<$F>>>;
            fn merge_parts(
                &self,
                shape: &AttentionShape,
                parts: StateParts<'_, Tensor<$F>>,
                output: &mut Tensor<$F>,
                lse: Option<&mut Tensor<$F>>,
            ) -> Result<()>;
        }
    };
}

/// The methods of `TokenSelection`, as `$emit` is to have them of a forwarding type.
macro_rules! selection_methods {
    ($emit:ident, $F:ty) => {
        $emit! {
            fn download_words(&self, words: &Words<$F>) -> impl Future<Output = Result<Vec<u32>>>;
            fn measure_attention(
                &self,
                input: QueriesAndKeys<'_, Tensor<$F>>,
                request: StatsRequest,
                known_lse: Option<&Tensor<$F>>,
            ) -> Result<Measured<$F>>;
            fn measure_rows(&self, input: QueriesAndKeys<'_, Tensor<$F>>) -> Result<RowStatistics<Tensor<$F>>>;
            fn measure_columns(
                &self,
                input: QueriesAndKeys<'_, Tensor<$F>>,
                columns: ColumnRequest,
                rows: &RowStatistics<Tensor<$F>>,
            ) -> Result<Measured<$F>>;
            fn add_attention(
                &self,
                input: NewQueries<'_, Tensor<$F>>,
                columns: ColumnRequest,
                sums: &mut Option<Tensor<$F>>,
            ) -> Result<Option<Words<$F>>>;
            fn begin_word_reads(&self, words: &[&Words<$F>], stores: &[&Store<$F>]) -> Result<SpanReads<$F>>;
            fn token_scores(
                &self,
                sums: &Tensor<$F>,
                kv_heads: usize,
                request: &ScoreRequest<'_>,
            ) -> Result<Scored<$F>>;
            fn evicted(&self, kept: &Indices<$F>) -> Result<Indices<$F>>;
            fn top_k(&self, scores: &Tensor<$F>, kv_heads: usize, k: usize) -> Result<Indices<$F>>;
            fn gather(
                &self,
                shape: &AttentionShape,
                rows: TensorRows<'_, Tensor<$F>>,
                kept: &Indices<$F>,
            ) -> Result<Tensor<$F>>;
            fn merge_tokens(
                &self,
                input: KeptAndEvicted<'_, Tensor<$F>, Indices<$F>>,
                merging: Merging,
            ) -> Result<Merged<$F>>;
            fn chunk_similarity(&self, query: &Tensor<$F>, chunks: &Tensor<$F>) -> Result<Tensor<$F>>;
            fn reorder_chunks(
                &self,
                shape: &AttentionShape,
                rows: TensorRows<'_, Tensor<$F>>,
                chunk_tokens: usize,
                order: &[u32],
            ) -> Result<Tensor<$F>>;
        }
    };
}

/// Default methods that call those of the other backend.
macro_rules! to_inner {
    ($(fn $name:ident(&self $(, $arg:ident: $type:ty)* $(,)?) $(-> $ret:ty)?;)*) => {
        $(
            fn $name(&self $(, $arg: $type)*) $(-> $ret)? {
                self.inner().$name($($arg),*)
            }
        )*
    };
}

/// Methods of a family that call those of [`Forward`].
macro_rules! to_forward {
    ($(fn $name:ident(&self $(, $arg:ident: $type:ty)* $(,)?) $(-> $ret:ty)?;)*) => {
        $(
            fn $name(&self $(, $arg: $type)*) $(-> $ret)? {
                self.0.$name($($arg),*)
            }
        )*
    };
}

/// The differences from another backend. Every method calls that of [`Forward::inner`] unless it is overridden.
/// [`Forwarding`] is the backend.
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

    device_methods!(to_inner, Self);
    storage_methods!(to_inner, Self);
    packing_methods!(to_inner, Self);
    attention_methods!(to_inner, Self);
    selection_methods!(to_inner, Self);
}

/// The backend that a [`Forward`] describes: it forwards every call to another, except for the methods that are
/// overridden.
#[derive(Clone, Copy, Debug, Default)]
pub struct Forwarding<F>(pub F);

impl<F: Forward> Device for Forwarding<F> {
    type Tensor = <F::Inner as Device>::Tensor;
    type Indices = Indices<F>;

    device_methods!(to_forward, F);
}

impl<F: Forward> Storage for Forwarding<F> {
    type Store = <F::Inner as Storage>::Store;
    type Shard = <F::Inner as Storage>::Shard;
    type SpanReads = <F::Inner as Storage>::SpanReads;

    storage_methods!(to_forward, F);
}

impl<F: Forward> Packing for Forwarding<F> {
    type NonFiniteFlags = Flags<F>;

    packing_methods!(to_forward, F);
}

impl<F: Forward> Attention for Forwarding<F> {
    attention_methods!(to_forward, F);
}

impl<F: Forward> TokenSelection for Forwarding<F> {
    type Words = <F::Inner as TokenSelection>::Words;

    selection_methods!(to_forward, F);
}

pub(super) type Tensor<F> = <<F as Forward>::Inner as Device>::Tensor;
pub(super) type Indices<F> = <<F as Forward>::Inner as Device>::Indices;
pub(super) type Store<F> = <<F as Forward>::Inner as Storage>::Store;
pub(super) type Shard<F> = <<F as Forward>::Inner as Storage>::Shard;
pub(super) type SpanReads<F> = <<F as Forward>::Inner as Storage>::SpanReads;
pub(super) type Flags<F> = <<F as Forward>::Inner as Packing>::NonFiniteFlags;
pub(super) type States<F> = AttentionStates<Tensor<F>>;
pub(super) type Words<F> = <<F as Forward>::Inner as TokenSelection>::Words;
pub(super) type Measured<F> = MeasuredAttention<Tensor<F>, Words<F>>;
pub(super) type Scored<F> = ScoredTokens<Tensor<F>, Words<F>>;
pub(super) type Merged<F> = MergedTokens<Tensor<F>, Words<F>>;
