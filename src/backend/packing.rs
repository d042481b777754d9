//! What writes and reads pages.

use std::future::Future;

use super::Storage;
use crate::Result;
use crate::format::{AttentionShape, KeyOrValue};
use crate::plan::{Page, RowLayout, Rows, TokenRange, TokenWrite, WindowMove, WriteTable};

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
    /// Slot of the centre that is taken from every key, where keys are stored so ([`Packing::key_mean`]).
    pub centre: Option<usize>,
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
    /// Slot of the centre that is added to every key, where keys are stored without it.
    pub centre: Option<usize>,
}

/// The keys that a centre is the mean of, and where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewCentre {
    /// Where keys lie in their tensor.
    pub rows: RowLayout,
    /// The tokens whose mean the centre is.
    pub tokens: TokenRange,
    /// Its slot.
    pub slot: usize,
}

/// The largest key that counts in a centre: larger ones, which are flagged or refused wherever they are stored, count
/// as 0, as do those that are not finite.
pub const LARGEST_CENTRED_KEY: f32 = 32752.0;

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

/// The dense keys and values of a step, and where the kernels flag what of them cannot be stored; `T` and `F` are the
/// tensors and the flags of the backend.
#[derive(Debug)]
pub struct WriteInput<'a, T, F> {
    /// Keys, after rotary embedding.
    pub keys: &'a T,
    /// Values.
    pub values: &'a T,
    /// Where both lie in their tensors, with at least the tokens that the step names.
    pub rows: RowLayout,
    /// Flags with at least `layer + 1` layers.
    pub flags: &'a F,
    /// The layer whose flags are set.
    pub layer: usize,
}

impl<T, F> Clone for WriteInput<'_, T, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, F> Copy for WriteInput<'_, T, F> {}

/// A token that a step could not store as it was: an element of its keys or values is NaN, infinite or larger than the
/// formats of its store take ([`WriteLayout::largest_element`](crate::plan::WriteLayout::largest_element)). Zero was
/// stored in place of every such element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlaggedToken {
    /// The layer.
    pub layer: usize,
    /// Keys or values.
    pub tensor: KeyOrValue,
    /// The first such token of the dense tensors, over all steps since the flags were cleared.
    pub token: usize,
}

/// A device whose kernels move rows of dense tensors into pages and back.
///
/// A method that returns an error has changed nothing that a later call could see.
pub trait Packing: Storage {
    /// Sticky flags on the device, for keys and values of every layer: which tokens a step could not
    /// store as they were.
    type NonFiniteFlags;

    /// The first key or value, in token order, that is NaN, infinite or beyond ±`largest`.
    ///
    /// # Errors
    /// [`Elements`](crate::Error::Elements) when the tensor is shorter than its layout says.
    fn first_non_finite(
        &self,
        which: KeyOrValue,
        tensor: &Self::Tensor,
        rows: &RowLayout,
        shape: &AttentionShape,
        largest: f32,
    ) -> impl Future<Output = Result<Option<NonFinite>>>;

    /// Kernel `key_mean`: puts the mean of some keys into a slot of the store's centres,
    /// `[slot][kv_head][head_dim]` in f32.
    ///
    /// Keys that are stored less a centre have smaller ranges and norms where a model's keys have much in common, and
    /// attention over them is the same: softmax forgets `q·m`, which all scores of a query lack alike. So every key of
    /// a sequence, in all of its stores, must be stored less the same centre: each store holds a copy, made of the same
    /// keys. Log-sum-exps lack `q·m / √head_dim`: see [`Attention::uncentre_lse`](super::Attention::uncentre_lse).
    ///
    /// The sum is made in f32, token after token, and multiplied by `1 / tokens` rounded to f32. A centre that an
    /// engine knows is the mean of one token.
    ///
    /// # Errors
    /// When the keys are shorter than their layout says, or there is no such slot.
    fn key_mean(&self, store: &mut Self::Store, keys: &Self::Tensor, centre: NewCentre) -> Result<()>;

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

    /// Kernel `pack_windows`: packs full pages of a store of f16, each as a span of its own in another store, as
    /// `quantize` would pack what they hold.
    ///
    /// # Errors
    /// When pages or slots do not exist, or the first store is not f16.
    fn pack_windows(
        &self,
        shape: &AttentionShape,
        from: &Self::Store,
        to: &mut Self::Store,
        windows: &[WindowMove],
    ) -> Result<()>;

    /// Kernel `append`: puts single tokens into open pages of a store whose format
    /// [takes them](crate::SegmentFormat::takes_single_tokens), as `quantize` would store them. Elements that are not
    /// finite, or too large for the format, are stored as zeros.
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

    /// Kernel `copy_page`: copies a page to another of the same store, bit for bit: tiles and tile ranges.
    ///
    /// # Errors
    /// When a page does not exist.
    fn copy_page(&self, store: &mut Self::Store, from: Page, to: Page) -> Result<()>;

    /// All that a step writes for one layer, in the order of its table: [`copy_page`](Packing::copy_page), then
    /// [`key_mean`](Packing::key_mean), then [`append`](Packing::append), then [`pack_windows`](Packing::pack_windows).
    /// `stores` are those of the table's layout.
    ///
    /// Nothing waits, and nothing is read back: elements that cannot be stored are stored as zeros, and the token is
    /// flagged. `input` may be left out where the step reads no tokens.
    ///
    /// This is the comfortable way: through wgpu it makes buffers and submits. What an engine binds once and then only
    /// encodes or launches are `wgpu::StoreStep` and `cuda::StoreStep`.
    ///
    /// # Errors
    /// [`Plan`](crate::Error::Plan) when the stores are not those of the layout, or there is no input for tokens;
    /// [`Elements`](crate::Error::Elements) when keys or values are shorter than their layout says.
    fn write_step(
        &self,
        stores: &mut [&mut Self::Store],
        input: Option<WriteInput<'_, Self::Tensor, Self::NonFiniteFlags>>,
        table: &WriteTable,
    ) -> Result<()>;

    /// Flags for so many layers, none of them set.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory).
    fn create_non_finite_flags(&self, layers: usize) -> Result<Self::NonFiniteFlags>;

    /// What was flagged since the flags were made or cleared, by layer, keys before values. It waits for the work
    /// that may set them.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::Error::DeviceLost).
    fn read_non_finite_flags(&self, flags: &Self::NonFiniteFlags) -> impl Future<Output = Result<Vec<FlaggedToken>>>;

    /// Unsets all flags, in the order of the work that was queued.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::Error::DeviceLost).
    fn clear_non_finite_flags(&self, flags: &Self::NonFiniteFlags) -> Result<()>;

    /// Kernel `dequantize`, and `uncentre_keys` where there is a centre: the stored keys and the stored values of a
    /// span as dense f32 rows `[kv_heads, tokens, head_dim]`.
    ///
    /// # Errors
    /// When pages or slots do not exist.
    fn dequantize(&self, store: &Self::Store, read: SpanRead<'_>) -> Result<(Self::Tensor, Self::Tensor)>;
}
