//! Appending decoded tokens, and packing the windows that fall behind.

use super::fork::Unshared;
use super::pool::Lease;
use super::sequence::NextSlot;
use super::windows::Packing;
use super::{KvCache, SpanStorage, pool_of};
use crate::backend::{Backend, TokenWrite};
use crate::plan::{Page, RowLayout};
use crate::{Error, Result};

/// One token on its way into a sequence.
struct Appending {
    sequence: usize,
    storage: SpanStorage,
    slot: NextSlot,
    /// A new page, if the token needs one.
    lease: Lease,
    /// The copy of an open page, if that is shared.
    unshared: Option<Unshared>,
    /// The page the token goes to.
    page: Page,
    /// The place within the page.
    slot_index: usize,
    /// The window that is to be packed once the token is in.
    packing: Option<Packing>,
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
    /// The recipe says whether they are stored in f16 or packed. If it packs full tiles, the token that lets one fall
    /// behind the window has it packed within this call.
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
            .and_then(|()| appending.iter().filter_map(|t| t.unshared.as_ref()).try_for_each(|u| self.copy_shared(u)))
            .and_then(|()| self.write_tokens(&appending, rows, keys, values))
            .and_then(|()| self.write_packed(&appending.iter().filter_map(|t| t.packing.as_ref()).collect::<Vec<_>>()));
        if let Err(error) = done {
            for token in &appending {
                pool_of(&mut self.f16, &mut self.packed, token.storage).release(&token.lease);
                token.unshared.iter().for_each(|unshared| self.release_copy(unshared));
                token.packing.iter().for_each(|packing| self.packed.release(&packing.lease));
            }
            return Err(error);
        }
        self.commit(appending);
        Ok(())
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

    async fn reserve_for_append(&mut self, sequences: &[usize]) -> Result<()> {
        let mut pages = [0, 0];
        for &sequence in sequences {
            let window = self.window(sequence);
            pages[usize::from(window.storage() == SpanStorage::Packed)] += self.pages_for_next(sequence, window);
            pages[1] += usize::from(self.window_to_pack(sequence, 1).is_some());
        }
        self.f16.reserve(&self.backend, pages[0], pages[0]).await?;
        self.packed.reserve(&self.backend, pages[1], pages[1]).await
    }

    /// Takes what the tokens need; what was taken is in `appending` whether it succeeds or not.
    fn lease_for_append(&mut self, sequences: &[usize], appending: &mut Vec<Appending>) -> Result<()> {
        for &sequence in sequences {
            let window = self.window(sequence);
            let storage = window.storage();
            let slot = self.sequences[sequence].next_slot(window);
            let slot_index = self.sequences[sequence].next_slot_index(slot);
            let to_pack = self.window_to_pack(sequence, 1);
            let (lease, unshared, page) = match slot {
                NextSlot::Open(page) => {
                    let unshared = self.lease_unshared(storage, page)?;
                    let page = unshared.as_ref().map_or(page, |unshared| unshared.own);
                    (Lease::default(), unshared, page)
                }
                NextSlot::NewPage | NextSlot::NewSpan => {
                    let lease = pool_of(&mut self.f16, &mut self.packed, storage).take(1)?;
                    let page = lease.pages[0];
                    (lease, None, page)
                }
            };
            appending.push(Appending { sequence, storage, slot, lease, unshared, page, slot_index, packing: None });
            if let (Some(window), Some(token)) = (to_pack, appending.last_mut()) {
                let spans = &self.sequences[sequence].spans;
                // The window may be the one that this token completes, whose page may be about to change.
                let completed = window + 1 == spans.len() && matches!(slot, NextSlot::Open(_));
                let page = if completed { page } else { spans[window].lease.pages[0] };
                token.packing = Some(Packing { sequence, window, page, lease: self.packed.take(1)? });
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
        for storage in [SpanStorage::F16, SpanStorage::Packed] {
            let of_storage = appending.iter().enumerate().filter(|(_, to)| to.storage == storage);
            let write = |(token, to): (usize, &Appending)| TokenWrite { token, page: to.page, slot: to.slot_index };
            let writes: Vec<TokenWrite> = of_storage.map(write).collect();
            if !writes.is_empty() {
                let pool = pool_of(&mut self.f16, &mut self.packed, storage);
                self.backend.append(&mut pool.store, keys, values, rows, &writes)?;
            }
        }
        Ok(())
    }

    fn commit(&mut self, appending: Vec<Appending>) {
        for token in appending {
            if let Some(unshared) = &token.unshared {
                self.sequences[token.sequence].replace_open_page(unshared.own);
                self.release_shared(unshared);
            }
            self.sequences[token.sequence].push_token(token.storage, token.slot, token.lease);
            token.packing.into_iter().for_each(|packing| self.commit_packed(packing));
        }
    }
}
