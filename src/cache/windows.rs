//! Windows: full f16 tiles of appended tokens, packed once enough newer tokens are there.

use super::pool::Lease;
use super::sequence::Window;
use super::{KvCache, RecentWindow};
use crate::Result;
use crate::backend::{Backend, WindowMove};
use crate::plan::Page;

/// A full window on its way into the packed store.
pub(super) struct Packing {
    pub(super) sequence: usize,
    /// Index of its span.
    pub(super) window: usize,
    /// The f16 page that holds it.
    pub(super) page: Page,
    /// Room in the packed store.
    pub(super) lease: Lease,
}

impl<B: Backend> KvCache<B> {
    /// Packs every full tile of a sequence's appended tokens that the recipe wants packed by now.
    ///
    /// [`KvCache::append`] does so by itself; after [`KvCache::extend`] it is the caller's to do, when the queries of
    /// the new tokens have attended.
    ///
    /// # Errors
    /// [`Error::Sequence`](crate::Error::Sequence) when there is no such sequence,
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) or [`Error::Limit`](crate::Error::Limit) when the packed tiles
    /// do not fit: tiles before the one that did not fit are packed, nothing is lost.
    pub async fn pack_windows(&mut self, sequence: usize) -> Result<()> {
        self.sequence(sequence)?;
        while let Some(window) = self.window_to_pack(sequence, 0) {
            self.packed.reserve(&self.backend, 1, 1).await?;
            let page = self.sequences[sequence].spans[window].lease.pages[0];
            let packing = Packing { sequence, window, page, lease: self.packed.take(1)? };
            if let Err(error) = self.write_packed(&[&packing]) {
                self.packed.release(&packing.lease);
                return Err(error);
            }
            self.commit_packed(packing);
        }
        Ok(())
    }

    /// What becomes of the next token that is appended to a sequence.
    pub(super) fn window(&self, sequence: usize) -> Window {
        self.window_at(self.sequences[sequence].tokens())
    }

    /// What becomes of an appended token with so many tokens before it.
    pub(super) fn window_at(&self, tokens: usize) -> Window {
        match self.recipe.recent {
            _ if !self.recipe.packs() => Window::F16,
            RecentWindow::KeepF16 => Window::F16,
            RecentWindow::PackTiles { .. } => Window::PackedLater,
            RecentWindow::PackTokens if tokens < self.recipe.sink => Window::F16,
            RecentWindow::PackTokens => Window::PackedAtOnce,
        }
    }

    /// The span of a sequence that is to be packed once `appended` (0 or 1) more tokens are in.
    pub(super) fn window_to_pack(&self, sequence: usize, appended: usize) -> Option<usize> {
        let RecentWindow::PackTiles { newer } = self.recipe.recent else { return None };
        let due = || self.sequences[sequence].window_to_pack(self.recipe.sink, newer, appended);
        if self.recipe.packs() { due() } else { None }
    }

    /// Packs windows into free pages: nothing that a reader sees changes yet.
    pub(super) fn write_packed(&mut self, packings: &[&Packing]) -> Result<()> {
        let of = |packing: &&Packing| WindowMove {
            from: packing.page,
            to: packing.lease.pages[0],
            range_slot: packing.lease.range_slot(),
        };
        let windows: Vec<WindowMove> = packings.iter().map(of).collect();
        if windows.is_empty() {
            return Ok(());
        }
        self.backend.pack_windows(&self.shape, &self.f16.store, &mut self.packed.store, &windows)
    }

    pub(super) fn commit_packed(&mut self, packing: Packing) {
        let may_join = !self.packed.format.has_span_ranges();
        let window = self.sequences[packing.sequence].pack_window(packing.window, packing.lease, may_join);
        self.f16.release(&window);
    }
}
