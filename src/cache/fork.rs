//! Sharing a prefix between sequences, and taking tokens back.

use super::sequence::{NextSlot, Window};
use super::{KvCache, SpanStorage, pool_of};
use crate::backend::Backend;
use crate::format::TILE_TOKENS;
use crate::plan::Page;
use crate::{Error, Result};

/// An open page that other sequences share, and the free one that takes its place before a token is written to it.
pub(super) struct Unshared {
    pub(super) storage: SpanStorage,
    shared: Page,
    pub(super) own: Page,
}

impl<B: Backend> KvCache<B> {
    /// Lets an empty sequence hold all tokens of another: beams, parallel samples, a system prompt that many share.
    ///
    /// Nothing is copied. Pages are shared and count once in [`KvCache::memory`]; the first of the sequences that appends
    /// to a shared open page gets a copy of it.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when `target` holds tokens.
    pub fn fork(&mut self, source: usize, target: usize) -> Result<()> {
        let tokens = self.sequence(source).and_then(|_| self.tokens(target))?;
        if tokens > 0 {
            let reason = format!("sequence {target} holds {tokens} tokens; clear it first, or fork to an empty one");
            return Err(Error::Plan { what: "fork", reason });
        }
        let forked = self.sequences[source].clone();
        for span in &forked.spans {
            pool_of(&mut self.f16, &mut self.packed, span.storage).share(&span.lease)?;
        }
        self.sequences[target] = forked;
        Ok(())
    }

    /// Forgets the newest tokens of a sequence and keeps the first `tokens`: speculative tokens that were rejected.
    ///
    /// Tokens that were packed stay packed.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when it holds fewer tokens.
    pub fn truncate(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        let held = self.tokens(sequence)?;
        if tokens > held {
            let reason = format!("{tokens} tokens of sequence {sequence} are to be kept, and it holds {held}");
            return Err(Error::Plan { what: "truncation", reason });
        }
        let mut kept = 0;
        let mut spans = std::mem::take(&mut self.sequences[sequence].spans);
        spans.retain_mut(|span| {
            let pool = pool_of(&mut self.f16, &mut self.packed, span.storage);
            let of_span = span.tokens.min(tokens - kept);
            kept += of_span;
            span.tokens = of_span;
            if of_span == 0 {
                pool.release(&span.lease);
                return false;
            }
            let pages = span.lease.pages.split_off(of_span.div_ceil(TILE_TOKENS));
            pool.release_pages(&pages);
            true
        });
        self.sequences[sequence].spans = spans;
        Ok(())
    }

    /// Pages that the next token of a sequence needs: a new one, or a copy of a shared one.
    pub(super) fn pages_for_next(&self, sequence: usize, window: Window) -> usize {
        match self.sequences[sequence].next_slot(window) {
            NextSlot::Open(page) if !self.is_shared(window.storage(), page) => 0,
            _ => 1,
        }
    }

    /// Leases a page in place of an open one, if that is shared.
    pub(super) fn lease_unshared(&mut self, storage: SpanStorage, page: Page) -> Result<Option<Unshared>> {
        if !self.is_shared(storage, page) {
            return Ok(None);
        }
        // A page of a span that goes on: the span has its range slot already, and open pages need none.
        let own = pool_of(&mut self.f16, &mut self.packed, storage).take_page()?;
        Ok(Some(Unshared { storage, shared: page, own }))
    }

    /// Copies a shared page to the page leased in its place.
    pub(super) fn copy_shared(&mut self, unshared: &Unshared) -> Result<()> {
        let pool = pool_of(&mut self.f16, &mut self.packed, unshared.storage);
        self.backend.copy_page(&mut pool.store, unshared.shared, unshared.own)
    }

    /// Gives the shared page back, when its copy has taken its place.
    pub(super) fn release_shared(&mut self, unshared: &Unshared) {
        pool_of(&mut self.f16, &mut self.packed, unshared.storage).release_pages(&[unshared.shared]);
    }

    /// Gives the copy back, when nothing came of it.
    pub(super) fn release_copy(&mut self, unshared: &Unshared) {
        pool_of(&mut self.f16, &mut self.packed, unshared.storage).release_pages(&[unshared.own]);
    }

    fn is_shared(&self, storage: SpanStorage, page: Page) -> bool {
        match storage {
            SpanStorage::F16 => self.f16.is_shared(page),
            SpanStorage::Packed => self.packed.is_shared(page),
        }
    }
}
