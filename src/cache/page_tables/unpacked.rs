//! Prompts of which nothing is packed yet: they lie in f16, part after part, until it is said what is stored of them.

use super::super::change::Change;
use super::super::sequence::{NextSlot, Span, SpanKind, Window};
use super::super::{PromptSpan, TokenRun};
use super::PageTables;
use crate::format::TILE_TOKENS;
use crate::plan::TokenIndices;
use crate::{Error, Result};

/// The prompt that a change replaces, and the first of the spans that take its place.
pub(in crate::cache) struct Packed<I> {
    pub(in crate::cache) change: Change<I>,
    pub(in crate::cache) prompt: Span<I>,
    pub(in crate::cache) first: usize,
}

impl<I: TokenIndices + Clone> PageTables<I> {
    /// Checks that a sequence may hold a prompt of which nothing is packed.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where ranks share sequences.
    pub(super) fn check_unpacked(&self, sequence: usize) -> Result<()> {
        self.sequence(sequence)?;
        if self.share.is_none() {
            return Ok(());
        }
        let what = "a prompt of which nothing is packed yet (TokenRun::unpacked), where ranks share sequences".into();
        let hint = "a rank holds a part of every page table, and none has the prompt to choose from; use \
                    TokenRun::prompt"
            .into();
        Err(Error::Unsupported { what, hint })
    }

    /// Pages that a further part takes.
    pub(super) fn pages_of_unpacked(&self, run: &TokenRun) -> usize {
        let (open, copied) = match self.sequences[run.sequence()].next_slot(Window::Unpacked) {
            NextSlot::Open(page, slot) => {
                (TILE_TOKENS - slot, usize::from(self.room(Window::Unpacked.store()).is_shared(page)))
            }
            NextSlot::NewPage | NextSlot::NewSpan => (0, 0),
        };
        run.tokens().saturating_sub(open).div_ceil(TILE_TOKENS) + copied
    }

    /// The prompt of a sequence of which nothing is packed yet, with its first position: the one that begins at
    /// `start`, if that is given.
    ///
    /// # Errors
    /// [`Error::Sequence`], or [`Error::Plan`] when there is none.
    pub(in crate::cache) fn unpacked(&self, sequence: usize, start: Option<usize>) -> Result<(usize, &Span<I>)> {
        let spans = &self.sequence(sequence)?.spans;
        let found = spans.iter().find_map(|span| match span.start() {
            Some(first) if span.kind == SpanKind::Unpacked && start.is_none_or(|start| start == first) => {
                Some((first, span))
            }
            _ => None,
        });
        found.ok_or_else(|| {
            let at = start.map_or(String::new(), |start| format!(" that begins at position {start}"));
            let reason = format!(
                "sequence {sequence} holds no prompt{at} of which nothing is packed yet; append its parts with \
                 TokenRun::unpacked"
            );
            Error::Plan { what: "prompt in parts", reason }
        })
    }

    /// Opens a change that stores these spans in place of the prompt that begins at `start`, of which nothing was
    /// packed; their positions count from there. Evicts all its other tokens, or all if there are no spans.
    ///
    /// # Errors
    /// Those of [`PageTables::unpacked`]; [`Error::NoRoom`] when the free pages are too few, as the prompt keeps its
    /// own. Nothing has changed.
    pub(in crate::cache) fn pack_unpacked(
        &mut self,
        (sequence, start): (usize, usize),
        spans: &[PromptSpan<'_, I>],
    ) -> Result<Packed<I>> {
        let prompt = self.unpacked(sequence, Some(start))?.1.clone();
        let needed = self.room_for_prompt(spans)?;
        self.check_room(&needed)?;
        let of = &self.sequences[sequence].spans;
        let first = of.iter().position(|span| span.start() == Some(start)).unwrap_or(of.len());
        let mut change = Change::new(&self.recipe);
        self.remember(&mut change, sequence, first);
        let later = self.sequences[sequence].spans.split_off(first);
        change.freed.push((prompt.store, prompt.lease.clone()));
        self.push_spans(&mut change, sequence, start, spans)?;
        self.sequences[sequence].spans.extend(later.into_iter().skip(1));
        Ok(Packed { change, prompt, first })
    }
}
