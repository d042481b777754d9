//! Appending decoded tokens, and packing the window they fill.

use super::pool::Lease;
use super::sequence::{NextSlot, Window};
use super::{KvCache, RecentWindow, pool_of};
use crate::backend::{Backend, SpanRead, SpanWrite, TokenWrite};
use crate::format::TILE_TOKENS;
use crate::plan::{Page, RowLayout, TokenRange};
use crate::{Error, Result};

/// One token on its way into a sequence.
struct Appending {
    sequence: usize,
    slot: NextSlot,
    /// A new page, if the token needs one.
    lease: Lease,
    /// The page the token goes to.
    page: Page,
    /// The place within the page.
    slot_index: usize,
    /// Room for the packed window, if the token completes one.
    packed: Option<Lease>,
}

impl<B: Backend> KvCache<B> {
    /// Appends one token to every sequence: token i of `rows` to sequence i.
    ///
    /// # Errors
    /// Those of [`KvCache::append_to`].
    pub async fn append(&mut self, rows: RowLayout, keys: &B::Tensor, values: &B::Tensor) -> Result<()> {
        let all: Vec<usize> = (0..self.sequences.len()).collect();
        self.append_to(&all, rows, keys, values).await
    }

    /// Appends one token to each of the given sequences: token i of `rows` to `sequences[i]`.
    ///
    /// The recipe says whether they are stored in f16 or packed; if it packs full tiles, the token that completes 128 of
    /// them has them packed within this call.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when one is named twice or there are more or
    /// fewer tokens than sequences, [`Error::NoTokens`], [`Error::Elements`] and [`Error::NotFinite`] for keys and
    /// values, [`Error::OutOfMemory`] or [`Error::Limit`] when they do not fit. The cache is as it was.
    pub async fn append_to(
        &mut self,
        sequences: &[usize],
        rows: RowLayout,
        keys: &B::Tensor,
        values: &B::Tensor,
    ) -> Result<()> {
        self.check_sequences(sequences, &rows)?;
        self.check_rows(&rows, keys, values).await?;
        self.reserve_for_append(sequences).await?;

        let mut appending = Vec::with_capacity(sequences.len());
        let done = self
            .lease_for_append(sequences, &mut appending)
            .and_then(|()| self.write_tokens(&appending, rows, keys, values))
            .and_then(|()| self.pack_full_windows(&appending));
        if let Err(error) = done {
            let storage = self.window().storage();
            for token in &appending {
                pool_of(&mut self.f16, &mut self.packed, storage).release(&token.lease);
                token.packed.iter().for_each(|lease| self.packed.release(lease));
            }
            return Err(error);
        }
        self.commit(appending);
        Ok(())
    }

    fn window(&self) -> Window {
        match self.recipe.recent {
            _ if !self.recipe.packs() => Window::F16,
            RecentWindow::KeepF16 => Window::F16,
            RecentWindow::PackFullTiles => Window::PackedLater,
            RecentWindow::PackTokens => Window::PackedAtOnce,
        }
    }

    fn check_sequences(&self, sequences: &[usize], rows: &RowLayout) -> Result<()> {
        let reject = |reason: String| Err(Error::Plan { what: "append", reason });
        let mut named = vec![false; self.sequences.len()];
        for &sequence in sequences {
            self.sequence(sequence)?;
            if std::mem::replace(&mut named[sequence], true) {
                return reject(format!("sequence {sequence} is named twice; append one token at a time"));
            }
        }
        if rows.tokens != sequences.len() {
            return reject(format!("{} tokens for {} sequences; pass one for each", rows.tokens, sequences.len()));
        }
        Ok(())
    }

    /// True if the next token of a sequence completes a window that is to be packed.
    fn completes_window(&self, sequence: usize) -> bool {
        let slot = self.sequences[sequence].next_slot(self.window());
        self.window() == Window::PackedLater && self.sequences[sequence].next_slot_index(slot) == TILE_TOKENS - 1
    }

    async fn reserve_for_append(&mut self, sequences: &[usize]) -> Result<()> {
        let window = self.window();
        let needs_page = |&&s: &&usize| !matches!(self.sequences[s].next_slot(window), NextSlot::Open(_));
        let pages = sequences.iter().filter(needs_page).count();
        let packed_pages = sequences.iter().filter(|&&s| self.completes_window(s)).count();
        let pool = pool_of(&mut self.f16, &mut self.packed, window.storage());
        pool.reserve(&self.backend, pages, pages).await?;
        self.packed.reserve(&self.backend, packed_pages, packed_pages).await
    }

    /// Takes what the tokens need; what was taken is in `appending` whether it succeeds or not.
    fn lease_for_append(&mut self, sequences: &[usize], appending: &mut Vec<Appending>) -> Result<()> {
        for &sequence in sequences {
            let window = self.window();
            let slot = self.sequences[sequence].next_slot(window);
            let slot_index = self.sequences[sequence].next_slot_index(slot);
            let completes_window = self.completes_window(sequence);
            let (lease, page) = match slot {
                NextSlot::Open(page) => (Lease::default(), page),
                NextSlot::NewPage | NextSlot::NewSpan => {
                    let lease = pool_of(&mut self.f16, &mut self.packed, window.storage()).take(1)?;
                    let page = lease.pages[0];
                    (lease, page)
                }
            };
            appending.push(Appending { sequence, slot, lease, page, slot_index, packed: None });
            if completes_window && let Some(token) = appending.last_mut() {
                token.packed = Some(self.packed.take(1)?);
            }
        }
        Ok(())
    }

    fn write_tokens(
        &mut self,
        appending: &[Appending],
        rows: RowLayout,
        keys: &B::Tensor,
        values: &B::Tensor,
    ) -> Result<()> {
        let write = |(token, to): (usize, &Appending)| TokenWrite { token, page: to.page, slot: to.slot_index };
        let writes: Vec<TokenWrite> = appending.iter().enumerate().map(write).collect();
        let storage = self.window().storage();
        let pool = pool_of(&mut self.f16, &mut self.packed, storage);
        self.backend.append(&mut pool.store, keys, values, rows, &writes)
    }

    /// Packs the windows that the tokens complete. Only free pages are written.
    fn pack_full_windows(&mut self, appending: &[Appending]) -> Result<()> {
        let rows = RowLayout::head_major(TILE_TOKENS, &self.shape);
        for token in appending {
            let Some(packed) = &token.packed else { continue };
            let read = SpanRead { pages: &[token.page], tokens: TILE_TOKENS, range_slot: 0 };
            let (keys, values) = self.backend.dequantize(&self.f16.store, read)?;
            let tokens = TokenRange::new(0, TILE_TOKENS)?;
            let write = SpanWrite { rows, tokens, pages: &packed.pages, range_slot: packed.range_slot() };
            self.backend.quantize(&mut self.packed.store, &keys, &values, write)?;
        }
        Ok(())
    }

    fn commit(&mut self, appending: Vec<Appending>) {
        let may_join = !self.packed.format.has_span_ranges();
        let window = self.window();
        for token in appending {
            let sequence = &mut self.sequences[token.sequence];
            sequence.push_token(window, token.slot, token.lease);
            if let Some(packed) = token.packed
                && let Some(window) = sequence.pack_window(packed, may_join)
            {
                self.f16.release(&window);
            }
        }
    }
}
