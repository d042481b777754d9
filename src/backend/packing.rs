//! Kernels that write and read pages.

use std::future::Future;

use super::Storage;
use crate::Result;
use crate::format::{AttentionShape, KeyOrValue};
use crate::plan::{Page, RowLayout, Rows, TokenRange, TokenWrite, WindowMove, WriteTable};

/// Writes tokens of dense tensors into pages as one span. `I` is the backend's index tensor.
#[derive(Debug)]
pub struct SpanWrite<'a, I> {
    /// Layout of keys and values in their tensors; the same for both.
    pub rows: RowLayout,
    /// The tokens of the tensors to write.
    pub tokens: Rows<'a, I>,
    /// Pages to fill, starting at their first slot: `tokens / 128`, rounded up.
    pub pages: &'a [Page],
    /// Slot for the span's ranges, if the format has them.
    pub range_slot: usize,
    /// Slot of the centre that is subtracted from every key, if keys are centred ([`Packing::key_mean`]).
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
    /// Slot of the span's ranges, if the format has them.
    pub range_slot: usize,
    /// Slot of the centre that is added to every key, if keys are centred.
    pub centre: Option<usize>,
}

/// The keys whose mean becomes a centre, and its slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NewCentre {
    /// Layout of the keys in their tensor.
    pub rows: RowLayout,
    /// The tokens whose mean the centre is.
    pub tokens: TokenRange,
    /// Its slot.
    pub slot: usize,
    /// The largest key that counts: [`LARGEST_CENTRED_KEY`], or less where packed stores hold less
    /// ([`WriteLayout::largest_centred`](crate::plan::WriteLayout::largest_centred)). Larger keys and keys that are not
    /// finite count as 0. Wherever they are stored, they are flagged or refused.
    pub largest: f32,
}

/// The largest key that counts in a centre of f16 pages alone.
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

/// The dense keys and values of a step, and the flags for elements that cannot be stored. `T` and `F` are the backend's
/// tensors and flags.
#[derive(Debug)]
pub struct WriteInput<'a, T, F> {
    /// Keys, after rotary embedding.
    pub keys: &'a T,
    /// Values.
    pub values: &'a T,
    /// Layout of both tensors, with at least the tokens that the step names.
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

/// A token that a step could not store exactly: an element of its keys or values is NaN, infinite or larger than the
/// formats of its store allow ([`WriteLayout::largest_element`](crate::plan::WriteLayout::largest_element)). Zero was
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
/// A method that returns an error has changed nothing that a later call can observe.
///
/// Through wgpu, a method that reads or writes stores returns [`NotSubmitted`](crate::Error::NotSubmitted) as long as an
/// engine has encoded steps over them and not submitted these.
pub trait Packing: Storage {
    /// Sticky flags on the device, for keys and values of every layer. They record tokens that a step could not store
    /// exactly.
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

    /// Kernel `key_mean`: writes the mean of some keys into a slot of the store's centres, `[slot][kv_head][head_dim]`
    /// in f32.
    ///
    /// Centred keys have smaller ranges and norms where a model's keys have much in common. Attention over them is the
    /// same, because softmax ignores `q·m`, a shift that all scores of a query share. Every key of a sequence must
    /// therefore be centred with the same centre, in all of the sequence's stores: each store holds a copy, computed
    /// from the same keys. Log-sum-exps are too small by `q·m / √head_dim`: see
    /// [`Attention::uncentre_lse`](super::Attention::uncentre_lse).
    ///
    /// The sum is taken in f32, token after token, and multiplied by `1 / tokens` rounded to f32. To set a centre that
    /// an engine already knows, pass it as the only token.
    ///
    /// # Errors
    /// When the keys are shorter than their layout says, or there is no such slot.
    fn key_mean(&self, store: &mut Self::Store, keys: &Self::Tensor, centre: NewCentre) -> Result<()>;

    /// Kernel `quantize`: computes and stores the ranges and codes of one span. The input must be finite.
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

    /// Kernel `pack_windows`: packs full pages of an f16 store into another store, each as a span of its own. The
    /// result is that of `quantize` on their contents.
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

    /// Kernel `append`: writes single tokens into open pages of a store whose format [takes
    /// them](crate::SegmentFormat::takes_single_tokens), as `quantize` would store them. Elements that are not finite,
    /// or too large for the format, are stored as zeros.
    ///
    /// # Errors
    /// When tensors, pages or slots do not fit the call, or the format does not take single tokens.
    fn append(
        &self,
        store: &mut Self::Store,
        keys: &Self::Tensor,
        values: &Self::Tensor,
        rows: RowLayout,
        writes: &[TokenWrite],
    ) -> Result<()>;

    /// Kernel `copy_page`: copies a page to another of the same store, bit for bit, with its tiles and tile ranges.
    ///
    /// # Errors
    /// When a page does not exist.
    fn copy_page(&self, store: &mut Self::Store, from: Page, to: Page) -> Result<()>;

    /// All writes of a step for one layer, in the order of its table: [`copy_page`](Packing::copy_page), then
    /// [`key_mean`](Packing::key_mean), then [`append`](Packing::append), then [`pack_windows`](Packing::pack_windows).
    /// `stores` are those of the table's layout.
    ///
    /// The call does not wait and reads nothing back. Elements that cannot be stored become zeros, and their token is
    /// flagged. `input` may be left out if the step reads no tokens.
    ///
    /// This is the convenient way: through wgpu it creates buffers and submits. An engine that binds once and then only
    /// encodes or launches uses `wgpu::StoreStep` or `cuda::StoreStep`.
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

    /// Flags for `layers` layers, none of them set.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory).
    fn create_non_finite_flags(&self, layers: usize) -> Result<Self::NonFiniteFlags>;

    /// The tokens flagged since the flags were created or cleared, by layer, keys before values. Waits for the work
    /// that may set flags.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::Error::DeviceLost).
    fn read_non_finite_flags(&self, flags: &Self::NonFiniteFlags) -> impl Future<Output = Result<Vec<FlaggedToken>>>;

    /// Clears all flags, in the order of the queued work.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::Error::DeviceLost).
    fn clear_non_finite_flags(&self, flags: &Self::NonFiniteFlags) -> Result<()>;

    /// Kernel `dequantize`, and `uncentre_keys` if there is a centre: decodes the keys and values of a span as dense
    /// f32 rows `[kv_heads, tokens, head_dim]`.
    ///
    /// # Errors
    /// When pages or slots do not exist.
    fn dequantize(&self, store: &Self::Store, read: SpanRead<'_>) -> Result<(Self::Tensor, Self::Tensor)>;

    /// [`dequantize`](Packing::dequantize) to the beginning of tensors that are used again and again, or to new ones
    /// where there are none yet, or too short ones.
    ///
    /// # Errors
    /// As [`dequantize`](Packing::dequantize).
    fn dequantize_with(
        &self,
        store: &Self::Store,
        read: SpanRead<'_>,
        rows: &mut Option<(Self::Tensor, Self::Tensor)>,
    ) -> Result<()> {
        *rows = Some(self.dequantize(store, read)?);
        Ok(())
    }
}
