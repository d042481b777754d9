//! What a backend does: the floor on which [`KvCache`](crate::KvCache) stands.
//!
//! The CPU and wgpu implement it. Everything that decides (which page, which span, which split) is decided above, in
//! [`plan`](crate::plan) and the cache; a backend stores and computes.

use std::future::Future;

use crate::Result;
use crate::format::{AttentionShape, KeyOrValue, SegmentFormat, TILE_TOKENS};
use crate::plan::{DecodePlan, ElementType, Elements, Page, RowLayout, Rows, TokenIndices, TokenRange};

/// Writes tokens of dense tensors into pages as one span; `I` is the index tensor of the backend.
#[derive(Debug)]
pub struct SpanWrite<'a, I> {
    /// Where keys and values lie in their tensors; the same for both.
    pub rows: RowLayout,
    /// The tokens of the tensors to write.
    pub tokens: Rows<'a, I>,
    /// Pages to fill from their first slot on, `tokens / 128` rounded up.
    pub pages: &'a [Page],
    /// Slot for the span's ranges, where the format has them.
    pub range_slot: usize,
}

impl<I> Clone for SpanWrite<'_, I> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<I> Copy for SpanWrite<'_, I> {}

/// Reads a span back as dense f32 rows `[kv_heads, tokens, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct SpanRead<'a> {
    /// Pages of the span.
    pub pages: &'a [Page],
    /// Tokens of the span.
    pub tokens: usize,
    /// Slot of the span's ranges, where the format has them.
    pub range_slot: usize,
}

/// Puts one token into a page of a store whose format takes single tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenWrite {
    /// Token of the dense tensors.
    pub token: usize,
    /// The page.
    pub page: Page,
    /// The slot within the page, 0..128.
    pub slot: usize,
}

/// A full page that becomes a span of its own in another store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowMove {
    /// The page in the store that holds it.
    pub from: Page,
    /// The page that it is packed into.
    pub to: Page,
    /// Slot for the span's ranges, where the format has them.
    pub range_slot: usize,
}

/// An element that cannot be stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NonFinite {
    /// Token of the tensor.
    pub token: usize,
    /// KV head.
    pub kv_head: usize,
    /// Channel.
    pub channel: usize,
    /// The element.
    pub value: f32,
}

/// How the query enters the products with packed keys, and the weights those with packed values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum QueryPrecision {
    /// Two byte planes each, 16 bits: their error stays far below that of f16 keys.
    #[default]
    Int16,
    /// One byte per channel of the query, and, through wgpu and where values have one range per channel, one byte per weight,
    /// relative to the largest of its block of 32 tokens: about half the arithmetic, at an error of about 1 % of the
    /// informative part of the output. Nearly all of it is the query's: on the shipped data bytes in place of 16-bit weights
    /// raise the mean square error by 0.3 to 9 %. Where cooperative matrices take f16 keys, an f32 query is rounded to f16.
    /// An option, never a default.
    ///
    /// Through wgpu the ranges of groups of tokens (keys), and of groups of channels that are a multiple of 32 (values, at
    /// `head_dim` 64, 128 and 256), go into the query and the weights before they become bytes. With 16 bits they are
    /// multiplied as floats, and so they are beside a tensor of other groups, or of none, but for keys where a KV head has
    /// one query head. As the query is rounded anew for every group, errors of different groups do not cancel: on the
    /// shipped data KIVI at 2 bits has a mean square error of 0.07 %, where ranges per channel have 0.01 %.
    Int8,
}

/// Options of one attend call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendOptions {
    /// Precision of query and weights where keys and values are packed and multiplied as integers. The CPU backend always
    /// uses the f32 query and f32 weights, CUDA the 16-bit query and f16 weights.
    pub query: QueryPrecision,
    /// Element type of the output.
    pub output: ElementType,
}

impl Default for AttendOptions {
    fn default() -> Self {
        Self { query: QueryPrecision::Int16, output: ElementType::F32 }
    }
}

/// A device that stores packed keys and values and attends to them.
///
/// A method that returns an error has changed nothing that a later call could see.
pub trait Backend {
    /// A dense array of f32 or f16 elements on the device.
    type Tensor;
    /// Pages and ranges of one segment format, in shards.
    type Store;
    /// Token numbers `[kv_heads, count]` on the device, that a [gather](Rows::Gather) reads. Cheap to clone.
    type Indices: TokenIndices + Clone;

    /// The device, for people.
    fn name(&self) -> String;

    /// Copies elements to the device.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory) or [`Limit`](crate::Error::Limit) when they do not fit.
    fn upload(&self, elements: Elements<'_>) -> impl Future<Output = Result<Self::Tensor>>;

    /// Copies a tensor to the host as f32, waiting for the work that writes it.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::Error::DeviceLost).
    fn download(&self, tensor: &Self::Tensor) -> impl Future<Output = Result<Vec<f32>>>;

    /// Copies token numbers, `[kv_heads, count]`, to the device.
    ///
    /// # Errors
    /// [`Plan`](crate::Error::Plan) when one is not below `below`, [`Elements`](crate::Error::Elements) when they are not as
    /// many for every KV head, [`NoTokens`](crate::Error::NoTokens), [`OutOfMemory`](crate::Error::OutOfMemory).
    fn upload_indices(
        &self,
        tokens: &[u32],
        kv_heads: usize,
        below: u32,
    ) -> impl Future<Output = Result<Self::Indices>>;

    /// Copies token numbers to the host, waiting for the work that writes them.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::Error::DeviceLost).
    fn download_indices(&self, indices: &Self::Indices) -> impl Future<Output = Result<Vec<u32>>>;

    /// Elements of a tensor.
    fn elements(&self, tensor: &Self::Tensor) -> usize;

    /// An empty store: no shards, no range slots.
    ///
    /// # Errors
    /// When the format does not fit the shape or the device.
    fn create_store(&self, shape: AttentionShape, format: SegmentFormat) -> Result<Self::Store>;

    /// Most pages that one shard of such a store can hold on this device.
    fn max_shard_pages(&self, shape: &AttentionShape, format: &SegmentFormat) -> u32;

    /// Adds a shard of `pages` zeroed pages.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory); the store is as it was.
    fn add_shard(&self, store: &mut Self::Store, pages: u32) -> impl Future<Output = Result<()>>;

    /// Grows the span ranges to at least `slots` slots and keeps those there are.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory); the store is as it was.
    fn reserve_ranges(&self, store: &mut Self::Store, slots: usize) -> impl Future<Output = Result<()>>;

    /// Bytes that the store holds on the device: tiles, tile ranges and span ranges.
    fn store_bytes(&self, store: &Self::Store) -> u64;

    /// The first key or value, in token order, that is NaN, infinite or beyond ±65504.
    ///
    /// # Errors
    /// [`Elements`](crate::Error::Elements) when the tensor is shorter than its layout says.
    fn first_non_finite(
        &self,
        which: KeyOrValue,
        tensor: &Self::Tensor,
        rows: &RowLayout,
        shape: &AttentionShape,
    ) -> impl Future<Output = Result<Option<NonFinite>>>;

    /// Kernel `quantize`: ranges, codes and ranges' storage of one span. The input must be finite.
    ///
    /// # Errors
    /// When tensors, pages or slots do not fit the call.
    fn quantize(
        &self,
        store: &mut Self::Store,
        keys: &Self::Tensor,
        values: &Self::Tensor,
        write: SpanWrite<'_, Self::Indices>,
    ) -> Result<()>;

    /// Packs full pages of one store, of a format without ranges of spans, into pages of another: what
    /// [`dequantize`](Backend::dequantize) and [`quantize`](Backend::quantize) do one page after the other.
    ///
    /// # Errors
    /// When pages or slots do not exist. Pages that were to be written may have been.
    fn pack_windows(
        &self,
        shape: &AttentionShape,
        from: &Self::Store,
        to: &mut Self::Store,
        windows: &[WindowMove],
    ) -> Result<()> {
        for window in windows {
            let read = SpanRead { pages: &[window.from], tokens: TILE_TOKENS, range_slot: 0 };
            let (keys, values) = self.dequantize(from, read)?;
            let (rows, tokens) = (RowLayout::head_major(TILE_TOKENS, shape), TokenRange::new(0, TILE_TOKENS)?.into());
            let write = SpanWrite { rows, tokens, pages: &[window.to], range_slot: window.range_slot };
            self.quantize(to, &keys, &values, write)?;
        }
        Ok(())
    }

    /// Kernel `append`: puts single tokens into open pages of a store whose format
    /// [takes them](SegmentFormat::takes_single_tokens), as `quantize` would store them. The input must be finite.
    ///
    /// # Errors
    /// When tensors, pages or slots do not fit the call, or the format takes no single tokens.
    fn append(
        &self,
        store: &mut Self::Store,
        keys: &Self::Tensor,
        values: &Self::Tensor,
        rows: RowLayout,
        writes: &[TokenWrite],
    ) -> Result<()>;

    /// Copies a page to another of the same store, bit for bit: tiles and tile ranges.
    ///
    /// # Errors
    /// When a page does not exist.
    fn copy_page(&self, store: &mut Self::Store, from: Page, to: Page) -> Result<()>;

    /// Kernel `dequantize`: the stored keys and the stored values of a span as dense f32 rows
    /// `[kv_heads, tokens, head_dim]`.
    ///
    /// # Errors
    /// When pages or slots do not exist.
    fn dequantize(&self, store: &Self::Store, read: SpanRead<'_>) -> Result<(Self::Tensor, Self::Tensor)>;

    /// One decode step: `prepare_query`, `attend` (or `scores` and `weighted_values` where scores are calibrated) over
    /// every segment, `merge_states`. Queries and output are `[sequences, query_heads, head_dim]`; scores are
    /// `q·k / √head_dim`.
    ///
    /// `stores[i]` is the store that a segment plan names as `i`.
    ///
    /// # Errors
    /// When the queries do not fit the plan or the device has no room for the output.
    fn attend(
        &self,
        plan: &DecodePlan,
        stores: &[&Self::Store],
        queries: &Self::Tensor,
        options: AttendOptions,
    ) -> impl Future<Output = Result<Self::Tensor>>;
}
