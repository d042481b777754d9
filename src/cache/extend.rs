//! Appending many tokens to one sequence at once, and attention for all of them.

use super::pool::Lease;
use super::sequence::{NextSlot, Sequence};
use super::{KvCache, SpanStorage};
use crate::backend::{AttendOptions, Backend, TokenWrite};
use crate::format::{SegmentFormat, TILE_TOKENS};
use crate::plan::{DecodePlan, ElementType, RowLayout, SpanView, StoreView};
use crate::{Error, Result};

impl<B: Backend> KvCache<B> {
    /// Appends the tokens of `rows` to one sequence, in f16: a chunk of a prompt, or of a text under evaluation.
    ///
    /// Unlike [`KvCache::append`] it packs nothing, so that the chunk's own queries still see the chunk in f16: let them
    /// attend ([`KvCache::attend_causal`]), then call [`KvCache::pack_windows`]. With chunks of 128 tokens that begin at
    /// multiples of 128, every query then sees what it would see if tokens were appended one by one, but for the last
    /// of each chunk.
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
        self.f16.reserve(&self.backend, pages, pages).await?;

        let mut extended = self.sequences[sequence].clone();
        let mut leases = Vec::new();
        let done = self
            .lease_for_extend(&mut extended, rows.tokens, &mut leases)
            .and_then(|writes| self.backend.append(&mut self.f16.store, keys, values, rows, &writes));
        if let Err(error) = done {
            leases.iter().for_each(|lease| self.f16.release(lease));
            return Err(error);
        }
        self.sequences[sequence] = extended;
        Ok(())
    }

    /// Puts tokens into a copy of a sequence; what pages they took is in `leases` whether it succeeds or not.
    fn lease_for_extend(
        &mut self,
        extended: &mut Sequence,
        tokens: usize,
        leases: &mut Vec<Lease>,
    ) -> Result<Vec<TokenWrite>> {
        let mut writes = Vec::with_capacity(tokens);
        for token in 0..tokens {
            let slot = extended.next_slot(self.packs_windows());
            let slot_index = extended.next_slot_index(slot);
            let (lease, page) = match slot {
                NextSlot::Open(page) => (Lease::default(), page),
                NextSlot::NewPage | NextSlot::NewSpan => {
                    let lease = self.f16.take(1)?;
                    let page = lease.pages[0];
                    leases.push(lease.clone());
                    (lease, page)
                }
            };
            writes.push(TokenWrite { token, page, slot: slot_index });
            extended.push_token(slot, lease);
        }
        Ok(writes)
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
        let plan = self.causal_plan(sequence, tokens - count + 1, count)?;
        let options = AttendOptions { query: self.recipe.query, output };
        self.backend.attend(&plan, &self.stores(), queries, options).await
    }

    /// A plan in which every query is a sequence of its own over the same pages: query i sees `first_sees + i` tokens.
    fn causal_plan(&self, sequence: usize, first_sees: usize, queries: usize) -> Result<DecodePlan> {
        let mut views = [SpanStorage::F16, SpanStorage::Packed].map(|storage| match storage {
            SpanStorage::F16 => StoreView { format: SegmentFormat::F16, calibration: None, spans: Vec::new() },
            SpanStorage::Packed => {
                StoreView { format: self.recipe.packed, calibration: self.recipe.calibration, spans: Vec::new() }
            }
        });
        for query in 0..queries {
            let mut unseen = first_sees + query;
            for span in &self.sequences[sequence].spans {
                let tokens = span.tokens.min(unseen);
                unseen -= tokens;
                if tokens > 0 {
                    let pages = &span.lease.pages[..tokens.div_ceil(TILE_TOKENS)];
                    let view = SpanView { sequence: query, tokens, pages, range_slot: span.lease.range_slot() };
                    views[usize::from(span.storage == SpanStorage::Packed)].spans.push(view);
                }
            }
        }
        DecodePlan::new(self.shape, queries, &views, self.split)
    }
}
