//! Spans of prompts, and spans that replace the whole contents of a sequence.

use super::super::PromptSpan;
use super::super::change::Change;
use super::super::prompt::check_spans;
use super::super::sequence::{Positions, Span, SpanKind};
use super::PageTables;
use crate::Result;
use crate::plan::{Rows, TokenIndices};

impl<I: TokenIndices + Clone> PageTables<I> {
    /// Stores the spans of a prompt of `tokens` tokens. [`PageTables::spans_since`] lists the writes.
    ///
    /// # Errors
    /// [`Error::Sequence`](crate::Error::Sequence), [`Error::PromptSpans`](crate::Error::PromptSpans),
    /// [`Error::NoTokens`](crate::Error::NoTokens), [`Error::Limit`](crate::Error::Limit) for too many tokens, or
    /// [`Error::NoRoom`](crate::Error::NoRoom). Nothing has changed.
    pub(in crate::cache) fn prefill(
        &mut self,
        sequence: usize,
        tokens: usize,
        spans: &[PromptSpan<'_, I>],
    ) -> Result<Change<I>> {
        self.sequence(sequence)?;
        self.check_whole("a prompt of spans")?;
        check_spans(spans, tokens)?;
        self.keep(sequence, tokens, spans)
    }

    /// Stores these spans of a prompt of `tokens` tokens, and evicts all other tokens, or all tokens if there are no
    /// spans. [`PageTables::spans_since`] lists the writes.
    ///
    /// # Errors
    /// [`Error::Sequence`](crate::Error::Sequence), [`Error::Limit`](crate::Error::Limit) when the sequence grows
    /// beyond [`MOST_TOKENS`](crate::plan::MOST_TOKENS), or [`Error::NoRoom`](crate::Error::NoRoom). Nothing has
    /// changed.
    pub(in crate::cache) fn keep(
        &mut self,
        sequence: usize,
        tokens: usize,
        spans: &[PromptSpan<'_, I>],
    ) -> Result<Change<I>> {
        self.check_longer(sequence, tokens)?;
        let needed = self.room_for_prompt(spans)?;
        self.check_room(&needed)?;
        let base = self.sequences[sequence].length;
        let mut change = Change::new(&self.recipe);
        let first = self.sequences[sequence].spans.len();
        self.remember(&mut change, sequence, first);
        self.begin_centre(&mut change, sequence, 0, tokens)?;
        self.push_spans(&mut change, sequence, base, spans)?;
        self.sequences[sequence].length = base + tokens;
        self.note_elsewhere(sequence, base, spans);
        Ok(change)
    }

    /// Stores these spans, whose positions count from the beginning of the sequence, in place of its whole contents.
    /// Its length and its centre stay. [`PageTables::spans_since`] lists the writes.
    ///
    /// # Errors
    /// [`Error::Sequence`](crate::Error::Sequence), or [`Error::NoRoom`](crate::Error::NoRoom) when too little room is
    /// free in addition to what is replaced.
    /// Nothing has changed.
    pub(in crate::cache) fn replace(&mut self, sequence: usize, spans: &[PromptSpan<'_, I>]) -> Result<Change<I>> {
        self.sequence(sequence)?;
        let needed = self.room_for_prompt(spans)?;
        self.check_room(&needed)?;
        let mut change = Change::new(&self.recipe);
        self.remember(&mut change, sequence, 0);
        let replaced = std::mem::take(&mut self.sequences[sequence].spans);
        change.freed.extend(replaced.into_iter().map(|span| (span.store, span.lease)));
        self.push_spans(&mut change, sequence, 0, spans)?;
        self.sequences[sequence].elsewhere.clear();
        self.note_elsewhere(sequence, 0, spans);
        Ok(change)
    }

    /// Notes that other ranks may have gathered tokens from the positions that begin at `base`, where this one has none.
    fn note_elsewhere(&mut self, sequence: usize, base: usize, spans: &[PromptSpan<'_, I>]) {
        let of = &mut self.sequences[sequence];
        if self.share.is_some() && spans.is_empty() && base < of.length {
            of.elsewhere.push(base..of.length);
        }
    }

    /// Adds spans whose positions count from `base` to a sequence. There is room for them.
    pub(super) fn push_spans(
        &mut self,
        change: &mut Change<I>,
        sequence: usize,
        base: usize,
        spans: &[PromptSpan<'_, I>],
    ) -> Result<()> {
        for span in spans {
            let (store, tokens) = (self.recipe.resolve(span.store)?, span.tokens.len());
            let positions = match span.tokens {
                Rows::Run(run) => Positions::From(base + run.start()),
                Rows::Gather(indices) => Positions::Gathered { base, indices: indices.clone() },
            };
            let lease = self.take(store, tokens, &positions)?;
            change.leased.push((store, lease.clone()));
            let of_layers = Vec::new();
            self.sequences[sequence].spans.push(Span {
                store,
                tokens,
                positions,
                of_layers,
                lease,
                kind: SpanKind::Stored,
            });
        }
        Ok(())
    }
}
