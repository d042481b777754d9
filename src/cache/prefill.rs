//! Storing a prompt.

use super::sequence::Span;
use super::{KvCache, PromptSpan, SpanStorage, pool_of};
use crate::backend::{Backend, SpanWrite};
use crate::format::TILE_TOKENS;
use crate::plan::RowLayout;
use crate::{Error, Result};

impl<B: Backend> KvCache<B> {
    /// Stores the keys and values of a prompt, or of a further part of one, at the end of a sequence.
    ///
    /// `spans` say what is packed and what stays f16; they cover the tokens of `rows` once and in order. Each packed
    /// span gets ranges of its own where the format has span ranges, so an image is best one span.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::PromptSpans`], [`Error::NoTokens`], [`Error::Elements`] and [`Error::NotFinite`]
    /// for what was passed, [`Error::OutOfMemory`] or [`Error::Limit`] when it does not fit. The cache is as it was.
    pub async fn prefill(
        &mut self,
        sequence: usize,
        rows: RowLayout,
        keys: &B::Tensor,
        values: &B::Tensor,
        spans: &[PromptSpan],
    ) -> Result<()> {
        self.sequence(sequence)?;
        self.check_rows(&rows, keys, values).await?;
        check_spans(spans, rows.tokens)?;
        for storage in [SpanStorage::F16, SpanStorage::Packed] {
            let of_storage = || spans.iter().filter(|span| self.storage(span.storage) == storage);
            let pages = of_storage().map(|span| span.tokens.len().div_ceil(TILE_TOKENS)).sum();
            let count = of_storage().count();
            pool_of(&mut self.f16, &mut self.packed, storage).reserve(&self.backend, pages, count).await?;
        }

        let mut stored = Vec::with_capacity(spans.len());
        for span in spans {
            if let Err(error) = self.store_span(rows, keys, values, *span, &mut stored) {
                self.release(&stored);
                return Err(error);
            }
        }
        self.sequences[sequence].spans.extend(stored);
        Ok(())
    }

    /// Writes one span; what it took is in `stored` whether it succeeds or not.
    fn store_span(
        &mut self,
        rows: RowLayout,
        keys: &B::Tensor,
        values: &B::Tensor,
        span: PromptSpan,
        stored: &mut Vec<Span>,
    ) -> Result<()> {
        let storage = self.storage(span.storage);
        let pool = pool_of(&mut self.f16, &mut self.packed, storage);
        let lease = pool.take(span.tokens.len().div_ceil(TILE_TOKENS))?;
        let (pages, range_slot) = (lease.pages.clone(), lease.range_slot());
        stored.push(Span { storage, tokens: span.tokens.len(), lease, window: false });
        let write = SpanWrite { rows, tokens: span.tokens.into(), pages: &pages, range_slot };
        self.backend.quantize(&mut pool.store, keys, values, write)
    }

    fn release(&mut self, spans: &[Span]) {
        for span in spans {
            pool_of(&mut self.f16, &mut self.packed, span.storage).release(&span.lease);
        }
    }
}

/// Checks that spans cover `0..tokens` once and in order.
fn check_spans(spans: &[PromptSpan], tokens: usize) -> Result<()> {
    let reject = |reason: String| Err(Error::PromptSpans { tokens, reason });
    let mut next = 0;
    for (i, span) in spans.iter().enumerate() {
        let (start, end) = (span.tokens.start(), span.tokens.end());
        if start != next {
            return reject(format!("span {i} is {start}..{end} where {next} should begin"));
        }
        if end > tokens {
            return reject(format!("span {i} ends at {end}"));
        }
        next = end;
    }
    if next != tokens { reject(format!("they end at {next}")) } else { Ok(()) }
}
