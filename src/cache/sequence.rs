//! The spans of one sequence, in the order in which they were stored.

use std::ops::Range;

use super::StoreId;
use super::room::Lease;
use crate::format::TILE_TOKENS;
use crate::plan::{Page, TokenIndices, TokenRange};
use crate::{Error, Result};

/// The positions of a span's tokens in their sequence.
#[derive(Clone, Debug, PartialEq)]
pub enum Positions<I> {
    /// Consecutive, starting here.
    From(usize),
    /// Those that an index tensor names for every KV head, `[kv_heads, tokens]`, relative to `base`.
    Gathered {
        /// Position of the token with index 0.
        base: usize,
        /// The indices.
        indices: I,
    },
}

/// The positions of a span's tokens in their sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpanPositions {
    /// Consecutive, the same for every KV head.
    Run(TokenRange),
    /// In storage order, `[kv_heads, tokens]`.
    PerHead(Vec<usize>),
}

/// Tokens in one store, with ranges of their own if the format has them.
#[derive(Clone, Debug)]
pub(super) struct Span<I> {
    pub(super) store: StoreId,
    pub(super) tokens: usize,
    /// Those of the first layer, where layers differ.
    pub(super) positions: Positions<I>,
    /// The indices of every layer, where layers that share their page tables gathered different tokens.
    pub(super) of_layers: Vec<I>,
    pub(super) lease: Lease,
    pub(super) kind: SpanKind,
}

/// What becomes of a span's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpanKind {
    /// They stay as they are.
    Stored,
    /// Decoding opened the span, perhaps as a residual window, which may be packed when it is full.
    Appended,
    /// They are a prompt, or its first parts, until it is said what is stored of it.
    Unpacked,
}

/// The part of a span that remains when a sequence is truncated.
enum Left {
    Whole,
    Tokens(usize),
    Nothing,
}

impl<I: Clone> Span<I> {
    /// The same span in some of the layers that share it.
    fn in_layers(&self, layers: Range<usize>) -> Self {
        let mut span = self.clone();
        if let (Positions::Gathered { indices, .. }, Some(of_layers)) =
            (&mut span.positions, self.of_layers.get(layers))
            && let [first, others @ ..] = of_layers
        {
            *indices = first.clone();
            span.of_layers = if others.is_empty() { Vec::new() } else { of_layers.to_vec() };
        }
        span
    }
}

impl<I: TokenIndices> Span<I> {
    /// Whether a span of another layer has as many tokens in the same store, at positions of the same kind.
    fn is_like(&self, other: &Self) -> bool {
        let of = |span: &Self| (span.store, span.tokens, span.kind);
        let positions = match (&self.positions, &other.positions) {
            (Positions::From(one), Positions::From(other)) => one == other,
            (
                Positions::Gathered { base, indices },
                Positions::Gathered { base: other_base, indices: other_indices },
            ) => base == other_base && indices.shape() == other_indices.shape(),
            _ => false,
        };
        of(self) == of(other) && positions
    }

    /// The first position, if positions are consecutive.
    pub(super) const fn start(&self) -> Option<usize> {
        match self.positions {
            Positions::From(start) => Some(start),
            Positions::Gathered { .. } => None,
        }
    }

    /// One past the last position, if positions are consecutive.
    pub(super) fn end(&self) -> Option<usize> {
        match self.positions {
            Positions::From(start) => Some(start + self.tokens),
            Positions::Gathered { .. } => None,
        }
    }

    /// The part of it that remains when a sequence keeps the positions below `length`.
    fn left(&self, length: usize) -> Result<Left> {
        match &self.positions {
            Positions::From(start) if start + self.tokens <= length => Ok(Left::Whole),
            Positions::From(start) if *start >= length => Ok(Left::Nothing),
            Positions::From(start) => Ok(Left::Tokens(length - start)),
            Positions::Gathered { base, indices } => {
                let end = base + indices.shape().below() as usize;
                if end <= length {
                    return Ok(Left::Whole);
                }
                if *base >= length {
                    return Ok(Left::Nothing);
                }
                Err(cuts_gathered(length, *base..end))
            }
        }
    }
}

/// A cut goes through positions from which tokens were gathered.
fn cuts_gathered(length: usize, Range { start, end }: Range<usize>) -> Error {
    let reason = format!(
        "a cut at {length} goes through a span that was gathered from positions {start} to {end}; cut before or after them"
    );
    Error::Plan { what: "truncation", reason }
}

/// The spans of a sequence.
#[derive(Clone, Debug)]
pub(super) struct Sequence<I> {
    pub(super) spans: Vec<Span<I>>,
    /// Position of the next token: the number of tokens that the sequence would hold if nothing had been evicted.
    pub(super) length: usize,
    /// Slot of the centre of its keys, once it has one.
    pub(super) centre: Option<usize>,
    /// Positions before this one were released behind a sliding window.
    pub(super) released: usize,
    /// Positions from which other ranks gathered tokens, and this one none. What their spans refuse is refused here too,
    /// so that ranks stay alike.
    pub(super) elsewhere: Vec<Range<usize>>,
}

impl<I: Clone> Sequence<I> {
    /// The same sequence in some of the layers that share it.
    pub(super) fn in_layers(&self, layers: Range<usize>) -> Self {
        let spans = self.spans.iter().map(|span| span.in_layers(layers.clone())).collect();
        let elsewhere = self.elsewhere.clone();
        Self { spans, length: self.length, centre: self.centre, released: self.released, elsewhere }
    }
}

impl<I: TokenIndices + Clone> Sequence<I> {
    /// Whether another layer's part of the sequence has the same spans, so that one page table serves both.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let of = |sequence: &Self| (sequence.length, sequence.released, sequence.centre.is_some());
        let both = self.spans.iter().zip(&other.spans);
        of(self) == of(other)
            && self.elsewhere == other.elsewhere
            && self.spans.len() == other.spans.len()
            && both.into_iter().all(|(one, other)| one.is_like(other))
    }

    /// Whether it lies at the same places there.
    pub(super) fn lies_with(&self, other: &Self) -> bool {
        let both = self.spans.iter().zip(&other.spans);
        self.centre == other.centre && both.into_iter().all(|(one, other)| one.lease == other.lease)
    }

    /// The sequence of layers whose parts are alike.
    pub(super) fn together<'a>(layers: impl Iterator<Item = &'a Self> + Clone) -> Self
    where
        I: 'a,
    {
        let Some(mut all) = layers.clone().next().cloned() else { return Self::default() };
        for (place, span) in all.spans.iter_mut().enumerate() {
            let of_layer = |layer: &'a Self| match &layer.spans.get(place)?.positions {
                Positions::Gathered { indices, .. } => Some(indices.clone()),
                Positions::From(_) => None,
            };
            let of_layers: Vec<I> = layers.clone().filter_map(of_layer).collect();
            span.of_layers = if of_layers.len() > 1 { of_layers } else { Vec::new() };
        }
        all
    }
}

impl<I> Default for Sequence<I> {
    fn default() -> Self {
        Self { spans: Vec::new(), length: 0, centre: None, released: 0, elsewhere: Vec::new() }
    }
}

/// The first place of an appended token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// In this store, permanently.
    For(StoreId),
    /// In f16, in a tile of its own that is packed when it is full.
    PackedLater,
    /// In f16, with the other parts of its prompt.
    Unpacked,
}

impl Window {
    pub(super) const fn store(self) -> StoreId {
        match self {
            Self::For(store) => store,
            Self::PackedLater | Self::Unpacked => StoreId::F16,
        }
    }
}

/// The place of the next appended token of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextSlot {
    /// At this slot of the last span's page, which has room.
    Open(Page, usize),
    /// Into a new page of the last span.
    NewPage,
    /// Into a new span.
    NewSpan,
}

impl<I: TokenIndices> Sequence<I> {
    /// Tokens stored.
    pub(super) fn tokens(&self) -> usize {
        self.spans.iter().map(|span| span.tokens).sum()
    }

    pub(super) fn tokens_in(&self, store: StoreId) -> usize {
        self.spans.iter().filter(|span| span.store == store).map(|span| span.tokens).sum()
    }

    /// Number of consecutive tokens at the end of the sequence, without a gap: nothing was evicted since them.
    pub(super) fn unbroken(&self) -> usize {
        let mut from = self.length;
        for span in self.spans.iter().rev() {
            match span.positions {
                Positions::From(start) if start + span.tokens == from => from = start,
                _ => break,
            }
        }
        self.length - from
    }

    /// The place of the next token. A window that is packed later holds one page and no tokens of the prompt. Other
    /// tokens continue the last span if it is in their store and ends where they begin.
    pub(super) fn next_slot(&self, window: Window) -> NextSlot {
        let continues = |span: &&Span<I>| span.store == window.store() && span.end() == Some(self.length);
        let takes = |span: &&Span<I>| match span.kind {
            SpanKind::Stored => window != Window::PackedLater && window != Window::Unpacked,
            SpanKind::Appended => window != Window::Unpacked,
            SpanKind::Unpacked => window == Window::Unpacked,
        };
        let Some(span) = self.spans.last().filter(continues).filter(takes) else { return NextSlot::NewSpan };
        match span.lease.pages.last() {
            Some(&page) if !span.tokens.is_multiple_of(TILE_TOKENS) => NextSlot::Open(page, span.tokens % TILE_TOKENS),
            _ if window == Window::PackedLater => NextSlot::NewSpan,
            _ => NextSlot::NewPage,
        }
    }

    /// Replaces the last page, which is open, by another.
    pub(super) fn replace_open_page(&mut self, page: Page) {
        if let Some(last) = self.spans.last_mut().and_then(|span| span.lease.pages.last_mut()) {
            *last = page;
        }
    }

    /// Counts a token that was put into `slot`, in the leased page if that is new.
    pub(super) fn push_token(&mut self, window: Window, slot: NextSlot, lease: Lease) {
        match (slot, self.spans.last_mut()) {
            (NextSlot::Open(..) | NextSlot::NewPage, Some(span)) => {
                span.tokens += 1;
                span.lease.pages.extend(lease.pages);
            }
            _ => {
                let positions = Positions::From(self.length);
                let (store, of_layers) = (window.store(), Vec::new());
                let kind = if window == Window::Unpacked { SpanKind::Unpacked } else { SpanKind::Appended };
                self.spans.push(Span { store, tokens: 1, positions, of_layers, lease, kind });
            }
        }
        self.length += 1;
    }

    /// Counts a token that was put into the open page.
    pub(super) fn push_in_page(&mut self) {
        if let Some(last) = self.spans.last_mut() {
            last.tokens += 1;
        }
        self.length += 1;
    }

    /// Takes back a token that was put into the last page with others.
    pub(super) fn pop_token(&mut self) {
        if let Some(last) = self.spans.last_mut() {
            last.tokens -= 1;
        }
        self.length -= 1;
    }

    /// The oldest full window that is due once `appended` (0 or 1) more tokens are stored, by span index. It begins at
    /// `sink` or later and has at least `newer` tokens after it.
    pub(super) fn window_to_pack(&self, sink: usize, newer: usize, appended: usize) -> Option<usize> {
        self.windows_due(sink, newer, appended).next()
    }

    /// Number of steps that decode a token into the open page before a window is due.
    pub(super) fn steps_until_window(&self, sink: usize, newer: usize) -> usize {
        let last = self.spans.len().wrapping_sub(1);
        let steps_of = |(index, span): (usize, &Span<I>)| {
            let end = span.start().filter(|&start| start >= sink)? + TILE_TOKENS;
            let is_window = span.kind == SpanKind::Appended && span.store == StoreId::F16;
            let fills = span.tokens == TILE_TOKENS || (index == last && span.tokens < TILE_TOKENS);
            // The step that makes it due has `newer` tokens behind its end, its own included.
            (is_window && fills).then(|| end.saturating_add(newer).saturating_sub(self.length + 1))
        };
        self.spans.iter().enumerate().filter_map(steps_of).min().unwrap_or(usize::MAX)
    }

    /// Number of full windows that are due.
    pub(super) fn windows_to_pack(&self, sink: usize, newer: usize) -> usize {
        self.windows_due(sink, newer, 0).count()
    }

    fn windows_due(&self, sink: usize, newer: usize, appended: usize) -> impl Iterator<Item = usize> + '_ {
        let last = self.spans.len().wrapping_sub(1);
        let is_due = move |(index, span): &(usize, &Span<I>)| {
            let index = *index;
            let Positions::From(start) = span.positions else { return false };
            let grows = index == last && !span.tokens.is_multiple_of(TILE_TOKENS);
            let tokens = span.tokens + if grows { appended } else { 0 };
            let full = span.kind == SpanKind::Appended && span.store == StoreId::F16 && tokens == TILE_TOKENS;
            full && start >= sink && self.length + appended - (start + tokens) >= newer
        };
        self.spans.iter().enumerate().filter(is_due).map(|(index, _)| index)
    }

    /// Index of the first span that packing the window at `index` changes: the packed span before it, if the packed
    /// tile joins that span.
    ///
    /// It joins if that span is full, because packed tiles have ranges of their own.
    pub(super) fn joins(&self, index: usize, to: StoreId) -> Option<usize> {
        let before = index.checked_sub(1)?;
        let (span, window) = (&self.spans[before], &self.spans[index]);
        let follows = span.end().is_some_and(|end| Some(end + window.tokens) == window.end());
        let joins = follows && span.store == to && span.tokens.is_multiple_of(TILE_TOKENS);
        joins.then_some(before)
    }

    /// Replaces a full window by its packed form, which joins the span at `joined` if there is one, and returns the
    /// window's pages.
    pub(super) fn pack_window(&mut self, index: usize, to: StoreId, packed: Lease, joined: Option<usize>) -> Lease {
        if let Some(before) = joined.map(|joined| &mut self.spans[joined]) {
            before.tokens += TILE_TOKENS;
            before.lease.pages.extend(packed.pages);
            return self.spans.remove(index).lease;
        }
        let span = &mut self.spans[index];
        (span.store, span.kind) = (to, SpanKind::Stored);
        std::mem::replace(&mut span.lease, packed)
    }

    /// Checks that truncating at `length` does not cut a gathered span.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub(super) fn check_cut(&self, length: usize) -> Result<()> {
        self.spans.iter().try_for_each(|span| span.left(length).map(drop))?;
        match self.elsewhere.iter().find(|of| of.start < length && length < of.end) {
            Some(of) => Err(cuts_gathered(length, of.clone())),
            None => Ok(()),
        }
    }

    /// Truncates to `length` and returns the leases that became free.
    ///
    /// # Errors
    /// [`Error::Plan`] when the cut goes through a gathered span. On an error nothing has changed.
    pub(super) fn truncate(&mut self, length: usize) -> Result<Vec<(StoreId, Lease)>> {
        let left = self.spans.iter().map(|span| span.left(length)).collect::<Result<Vec<_>>>()?;
        let mut freed = Vec::new();
        let spans = std::mem::take(&mut self.spans);
        for (mut span, left) in spans.into_iter().zip(left) {
            match left {
                Left::Whole => {}
                Left::Nothing => {
                    freed.push((span.store, span.lease));
                    continue;
                }
                Left::Tokens(tokens) => {
                    span.tokens = tokens;
                    let pages = span.lease.pages.split_off(tokens.div_ceil(TILE_TOKENS));
                    freed.push((span.store, Lease { pages, slot: None }));
                }
            }
            self.spans.push(span);
        }
        self.length = self.length.min(length);
        self.released = self.released.min(self.length);
        let length = self.length;
        self.elsewhere.retain(|of| of.end <= length);
        Ok(freed)
    }

    /// Forgets whole pages of tokens at `positions`, the oldest first, and returns them.
    ///
    /// Only spans with consecutive positions give pages back, and only from their beginning.
    pub(super) fn forget(&mut self, positions: TokenRange) -> Vec<(StoreId, Lease)> {
        let mut freed = Vec::new();
        for span in &mut self.spans {
            let Positions::From(start) = &mut span.positions else { continue };
            if *start < positions.start() || *start >= positions.end() {
                continue;
            }
            let whole = (*start + span.tokens <= positions.end()).then_some(span.tokens);
            let tokens = whole.unwrap_or((positions.end() - *start) / TILE_TOKENS * TILE_TOKENS);
            let rest = span.lease.pages.split_off(tokens.div_ceil(TILE_TOKENS));
            let pages = std::mem::replace(&mut span.lease.pages, rest);
            *start += tokens;
            span.tokens -= tokens;
            // The slot is released with the last token.
            let slot = if span.tokens == 0 { span.lease.slot.take() } else { None };
            freed.push((span.store, Lease { pages, slot }));
        }
        self.spans.retain(|span| span.tokens > 0);
        freed
    }
}
