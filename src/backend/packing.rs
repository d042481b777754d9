//! What writes and reads pages.

use std::future::Future;

use super::Storage;
use crate::Result;
use crate::format::{AttentionShape, KeyOrValue, TILE_TOKENS};
use crate::plan::{Page, RowLayout, Rows, TokenRange};

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

/// A device whose kernels move rows of dense tensors into pages and back.
///
/// A method that returns an error has changed nothing that a later call could see.
pub trait Packing: Storage {
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
    /// [`dequantize`](Packing::dequantize) and [`quantize`](Packing::quantize) do one page after the other.
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
    /// [takes them](crate::SegmentFormat::takes_single_tokens), as `quantize` would store them. The input must be finite.
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
}
