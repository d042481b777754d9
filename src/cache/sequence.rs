//! What a cache knows of one sequence: its spans, in token order.

use super::pool::Lease;
use super::recipe::SpanStorage;
use crate::format::TILE_TOKENS;
use crate::plan::Page;

/// Consecutive tokens in one store.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) storage: SpanStorage,
    pub(super) tokens: usize,
    pub(super) lease: Lease,
    /// True if decoding opened the span, so that it may be packed when it is full.
    pub(super) window: bool,
}

/// The spans of a sequence.
#[derive(Clone, Debug, Default)]
pub(super) struct Sequence {
    pub(super) spans: Vec<Span>,
}

/// What becomes of the tokens that decoding appends to a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// They stay in f16.
    F16,
    /// They are in f16 until they fill a tile.
    PackedLater,
    /// They are packed as they arrive.
    PackedAtOnce,
}

impl Window {
    /// Where appended tokens are stored first.
    pub(super) fn storage(self) -> SpanStorage {
        match self {
            Self::F16 | Self::PackedLater => SpanStorage::F16,
            Self::PackedAtOnce => SpanStorage::Packed,
        }
    }
}

/// Where the next appended token of a sequence goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextSlot {
    /// Into a page that has room.
    Open(Page),
    /// Into a new page of the last span.
    NewPage,
    /// Into a new span.
    NewSpan,
}

impl Sequence {
    pub(super) fn tokens(&self) -> usize {
        self.spans.iter().map(|span| span.tokens).sum()
    }

    pub(super) fn tokens_in(&self, storage: SpanStorage) -> usize {
        self.spans.iter().filter(|span| span.storage == storage).map(|span| span.tokens).sum()
    }

    /// Where the next token goes. A window that is packed later holds one page and nothing of the prompt; other tokens
    /// continue the last span if that is in their storage.
    pub(super) fn next_slot(&self, window: Window) -> NextSlot {
        let last = self.spans.last().filter(|span| span.storage == window.storage());
        let Some(span) = last.filter(|span| span.window || window != Window::PackedLater) else {
            return NextSlot::NewSpan;
        };
        match span.lease.pages.last() {
            Some(&page) if !span.tokens.is_multiple_of(TILE_TOKENS) => NextSlot::Open(page),
            _ if window == Window::PackedLater => NextSlot::NewSpan,
            _ => NextSlot::NewPage,
        }
    }

    /// Slot within its page that the next token takes.
    pub(super) fn next_slot_index(&self, slot: NextSlot) -> usize {
        match (slot, self.spans.last()) {
            (NextSlot::Open(_), Some(span)) => span.tokens % TILE_TOKENS,
            _ => 0,
        }
    }

    /// Puts another page in the place of the last, which is open.
    pub(super) fn replace_open_page(&mut self, page: Page) {
        if let Some(last) = self.spans.last_mut().and_then(|span| span.lease.pages.last_mut()) {
            *last = page;
        }
    }

    /// Counts a token that was put into `slot`, in the leased page if that is new.
    pub(super) fn push_token(&mut self, storage: SpanStorage, slot: NextSlot, lease: Lease) {
        match (slot, self.spans.last_mut()) {
            (NextSlot::Open(_) | NextSlot::NewPage, Some(span)) => {
                span.tokens += 1;
                span.lease.pages.extend(lease.pages);
            }
            _ => self.spans.push(Span { storage, tokens: 1, lease, window: true }),
        }
    }

    /// The oldest full window that is to be packed once `appended` (0 or 1) more tokens are in, by span index: it
    /// begins at `sink` or later and has at least `newer` tokens after it.
    pub(super) fn window_to_pack(&self, sink: usize, newer: usize, appended: usize) -> Option<usize> {
        let end = self.tokens() + appended;
        let mut start = 0;
        for (index, span) in self.spans.iter().enumerate() {
            let is_last = index + 1 == self.spans.len();
            let grows = is_last && !span.tokens.is_multiple_of(TILE_TOKENS);
            let tokens = span.tokens + if grows { appended } else { 0 };
            if span.window
                && span.storage == SpanStorage::F16
                && start >= sink
                && tokens == TILE_TOKENS
                && end - (start + tokens) >= newer
            {
                return Some(index);
            }
            start += tokens;
        }
        None
    }

    /// Replaces a full window by its packed form and returns the window's pages.
    ///
    /// The packed tile joins the packed span before it if that is full and `may_join`, that is, if ranges belong to
    /// tiles and not to spans.
    pub(super) fn pack_window(&mut self, index: usize, packed: Lease, may_join: bool) -> Lease {
        let before = index.checked_sub(1).map(|before| &mut self.spans[before]);
        if let Some(before) = before
            && may_join
            && before.storage == SpanStorage::Packed
            && before.tokens.is_multiple_of(TILE_TOKENS)
        {
            before.tokens += TILE_TOKENS;
            before.lease.pages.extend(packed.pages);
            return self.spans.remove(index).lease;
        }
        let span = Span { storage: SpanStorage::Packed, tokens: TILE_TOKENS, lease: packed, window: false };
        std::mem::replace(&mut self.spans[index], span).lease
    }
}
