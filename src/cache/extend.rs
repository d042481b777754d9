//! Appending many tokens to one sequence at once, and attention for all of them.

use super::fork::Unshared;
use super::pool::Lease;
use super::sequence::{NextSlot, Sequence};
use super::{KvCache, SpanStorage, pool_of};
use crate::backend::{Backend, TokenWrite};
use crate::format::TILE_TOKENS;
use crate::plan::{ElementType, QueryRun, RowLayout};
use crate::{Error, Result};

/// A sequence with more tokens, before it takes the place of the sequence.
struct Extension {
    sequence: Sequence,
    /// The copy of its open page, if that is shared.
    unshared: Option<Unshared>,
    /// What its new tokens took.
    leases: Vec<(SpanStorage, Lease)>,
    /// Where they go.
    writes: Vec<(SpanStorage, TokenWrite)>,
}

impl<B: Backend> KvCache<B> {
    /// Appends the tokens of `rows` to one sequence: a chunk of a prompt, or of a text under evaluation.
    ///
    /// Unlike [`KvCache::append`] it packs no tiles, so that the chunk's own queries still see them in f16: let them attend
    /// ([`KvCache::attend_causal`]), then call [`KvCache::pack_windows`]. With chunks of 128 tokens that begin at
    /// multiples of 128, every query then sees what it would see if tokens were appended one by one, but for the last
    /// of each chunk. A recipe that packs each token as it arrives does so here too.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::NoTokens`], [`Error::Elements`] and
    /// [`Error::NotFinite`] for keys and values, [`Error::OutOfMemory`] or [`Error::Limit`] when they do not fit. The
    /// cache is as it was.
    pub async fn extend(
        &mut self,
        sequence: usize,
        rows: RowLayout,
        keys: &B::Tensor,
        values: &B::Tensor,
    ) -> Result<()> {
        self.sequence(sequence)?;
        self.check_rows(&rows, keys, values).await?;
        let pages = rows.tokens.div_ceil(TILE_TOKENS) + 1;
        let first_window = self.window(sequence).storage();
        let last_window = self.window_at(self.sequences[sequence].tokens() + rows.tokens - 1).storage();
        for storage in [SpanStorage::F16, SpanStorage::Packed] {
            if storage == first_window || storage == last_window {
                pool_of(&mut self.f16, &mut self.packed, storage).reserve(&self.backend, pages, pages).await?;
            }
        }

        let mut extension =
            Extension { sequence: self.sequences[sequence].clone(), unshared: None, leases: vec![], writes: vec![] };
        let done = self
            .lease_for_extend(&mut extension, rows.tokens)
            .and_then(|()| self.write_extension(&extension, rows, keys, values));
        if let Err(error) = done {
            extension.unshared.iter().for_each(|unshared| self.release_copy(unshared));
            for (storage, lease) in &extension.leases {
                pool_of(&mut self.f16, &mut self.packed, *storage).release(lease);
            }
            return Err(error);
        }
        extension.unshared.iter().for_each(|unshared| self.release_shared(unshared));
        self.sequences[sequence] = extension.sequence;
        Ok(())
    }

    /// Puts tokens into the copy of a sequence; what they took is in the extension whether it succeeds or not.
    fn lease_for_extend(&mut self, extension: &mut Extension, tokens: usize) -> Result<()> {
        for token in 0..tokens {
            let sequence = &mut extension.sequence;
            let window = self.window_at(sequence.tokens());
            let storage = window.storage();
            let slot = sequence.next_slot(window);
            let slot_index = sequence.next_slot_index(slot);
            let (lease, page) = match slot {
                // Only the first token can meet a page that is shared: later ones go on where it went.
                NextSlot::Open(page) => match self.lease_unshared(storage, page)? {
                    Some(unshared) => {
                        let own = unshared.own;
                        sequence.replace_open_page(own);
                        extension.unshared = Some(unshared);
                        (Lease::default(), own)
                    }
                    None => (Lease::default(), page),
                },
                NextSlot::NewPage | NextSlot::NewSpan => {
                    let lease = pool_of(&mut self.f16, &mut self.packed, storage).take(1)?;
                    let page = lease.pages[0];
                    extension.leases.push((storage, lease.clone()));
                    (lease, page)
                }
            };
            extension.writes.push((storage, TokenWrite { token, page, slot: slot_index }));
            sequence.push_token(storage, slot, lease);
        }
        Ok(())
    }

    fn write_extension(
        &mut self,
        extension: &Extension,
        rows: RowLayout,
        keys: &B::Tensor,
        values: &B::Tensor,
    ) -> Result<()> {
        extension.unshared.iter().try_for_each(|unshared| self.copy_shared(unshared))?;
        for storage in [SpanStorage::F16, SpanStorage::Packed] {
            let of_storage = extension.writes.iter().filter(|(of, _)| *of == storage);
            let writes: Vec<TokenWrite> = of_storage.map(|(_, write)| *write).collect();
            if !writes.is_empty() {
                let pool = pool_of(&mut self.f16, &mut self.packed, storage);
                self.backend.append(&mut pool.store, keys, values, rows, &writes)?;
            }
        }
        Ok(())
    }

    /// Attends with the queries of the newest tokens of one sequence, each to the tokens up to its own.
    ///
    /// `queries` are `[queries, query_heads, head_dim]` and so is the output; the last query is that of the last token.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when it holds fewer tokens than there are
    /// queries, [`Error::Elements`] when the queries have another shape, [`Error::OutOfMemory`] or
    /// [`Error::DeviceLost`] from the device.
    pub async fn attend_causal(&self, sequence: usize, queries: &B::Tensor, output: ElementType) -> Result<B::Tensor> {
        let per_query = self.query_elements(1);
        let given = self.backend.elements(queries);
        let count = given / per_query;
        let tokens = self.tokens(sequence)?;
        if given == 0 || given % per_query != 0 {
            let (heads, head_dim) = (self.shape.query_heads(), self.shape.head_dim());
            let shape = format!("queries × {heads} query heads × {head_dim} channels");
            let expected = count.max(1) * per_query;
            return Err(Error::Elements { what: "queries", given, expected, shape });
        }
        if count > tokens {
            let reason = format!("{count} queries for the newest tokens of a sequence that holds {tokens}");
            return Err(Error::Plan { what: "causal attention", reason });
        }
        let plan = self.plan_runs(&[QueryRun::causal(sequence, count)])?;
        self.backend.attend(&plan, &self.stores(), queries, self.attend_options(output)).await
    }
}
