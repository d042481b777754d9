//! Room that changes of the page tables need, and room that is free.

use std::ops::Range;

use super::super::prompt::refuse_gathers;
use super::super::room::{Room, SequencePages, StoreRoom};
use super::super::sequence::NextSlot;
use super::super::step::RunKind;
use super::super::{PromptSpan, StoreId, TokenRun};
use super::PageTables;
use crate::counts::TokenCount;
use crate::format::TILE_TOKENS;
use crate::plan::{Rows, TokenIndices};
use crate::{Error, Result};

impl<I: TokenIndices + Clone> PageTables<I> {
    /// Room that appending needs, by store.
    ///
    /// # Errors
    /// Those of [`PageTables::check_runs`] and of [`PageTables::check_longer`].
    pub(in crate::cache) fn room_for_append(&self, runs: &[TokenRun], tokens: usize) -> Result<Vec<StoreRoom>> {
        self.check_appended(runs, tokens)?;
        let mut needed = vec![StoreRoom::default(); self.rooms.len()];
        for run in runs {
            if run.kind() == RunKind::Prompt {
                self.add_room_for_part(&mut needed, run)?;
                continue;
            }
            if run.kind() == RunKind::Unpacked {
                self.check_unpacked(run.sequence())?;
                needed[StoreId::F16.index()].pages += self.pages_of_unpacked(run);
                continue;
            }
            self.add_room_for_tokens(&mut needed, run.sequence(), run.tokens());
            if let (RunKind::Decode, Some((to, _))) = (run.kind(), self.window_to_pack(run.sequence(), 1)) {
                needed[to.index()].pages += 1;
            }
        }
        Ok(needed)
    }

    /// Checks that runs may be appended, if there is room.
    ///
    /// # Errors
    /// Those of [`PageTables::check_runs`] and of [`PageTables::check_longer`].
    pub(super) fn check_appended(&self, runs: &[TokenRun], tokens: usize) -> Result<()> {
        self.check_runs(runs, tokens)?;
        runs.iter().try_for_each(|run| self.check_longer(run.sequence(), run.tokens()))
    }

    /// Adds the room that tokens need where appended tokens lie.
    pub(super) fn add_room_for_tokens(&self, needed: &mut [StoreRoom], sequence: usize, tokens: usize) {
        let length = self.sequences[sequence].length;
        for (positions, stores) in self.pieces(length..length.saturating_add(tokens)) {
            if stores {
                self.add_room_for_positions(needed, sequence, positions);
            }
        }
    }

    /// Adds the room for tokens at consecutive positions that these page tables store.
    fn add_room_for_positions(&self, needed: &mut [StoreRoom], sequence: usize, positions: Range<usize>) {
        let sequence = &self.sequences[sequence];
        let (mut from, length) = (positions.start, positions.end);
        // Tokens before the sink's end come first, then those after it. Only the first ones can meet an open page.
        while from < length {
            let window = self.window(from);
            let end = self.window_end(from).min(length);
            let first = if from == sequence.length { sequence.next_slot(window) } else { NextSlot::NewSpan };
            let store = window.store();
            let (open, copied) = match first {
                NextSlot::Open(page, slot) => (TILE_TOKENS - slot, usize::from(self.room(store).is_shared(page))),
                _ => (0, 0),
            };
            let pages = &mut needed[store.index()].pages;
            *pages = pages.saturating_add((end - from).saturating_sub(open).div_ceil(TILE_TOKENS) + copied);
            from = end;
        }
    }

    /// Room that the spans of a prompt need, by store.
    ///
    /// # Errors
    /// [`Error::Plan`] when a span names a store that the recipe does not have, [`Error::Limit`] when a span
    /// has more tokens than a sequence may have, [`Error::Unsupported`] when the layer has a window and tokens are
    /// gathered.
    pub(in crate::cache) fn room_for_prompt(&self, spans: &[PromptSpan<'_, I>]) -> Result<Vec<StoreRoom>> {
        let gathers = spans.iter().any(|span| matches!(span.tokens, Rows::Gather(_)));
        if let Some(left) = self.recipe.attention().window().filter(|_| gathers) {
            return Err(refuse_gathers(&format!("a gathered span in a layer with a window of {left} positions")));
        }
        let mut needed = vec![StoreRoom::default(); self.rooms.len()];
        for span in spans {
            TokenCount::new(span.tokens.len())?;
            let room = &mut needed[self.recipe.resolve(span.store)?.index()];
            room.pages += span.tokens.len().div_ceil(TILE_TOKENS);
            room.spans += 1;
        }
        Ok(needed)
    }

    /// Room that is free, by store.
    pub(in crate::cache) fn free_room(&self) -> Vec<StoreRoom> {
        let of = |room: &Room| StoreRoom { pages: room.free_pages(), spans: room.free_spans() };
        self.rooms.iter().map(of).collect()
    }

    /// Checks that this much room is free.
    ///
    /// # Errors
    /// [`Error::NoRoom`].
    pub(in crate::cache) fn check_room(&self, needed: &[StoreRoom]) -> Result<()> {
        let short = |what, store: &crate::plan::StoreFormat, needed: usize, free: usize| {
            let store = store.format.to_string();
            Err(Error::NoRoom { what, store, needed: needed as u64, free: free as u64 })
        };
        let stores = self.recipe.stores();
        if self.lacks_centres() {
            return short("centres", &stores[0], self.sequences.len(), self.centres.len());
        }
        for ((needed, room), store) in needed.iter().zip(&self.rooms).zip(stores) {
            if room.free_pages() < needed.pages {
                return short("pages", store, needed.pages, room.free_pages());
            }
            let missing = room.missing_slots(needed.spans);
            if missing > 0 {
                return short("range slots", store, needed.spans, needed.spans - missing);
            }
        }
        Ok(())
    }

    /// Checks that a sequence may grow by `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Limit`].
    pub(in crate::cache) fn check_longer(&self, sequence: usize, tokens: usize) -> Result<()> {
        TokenCount::new(self.sequence(sequence)?.length.saturating_add(tokens)).map(drop)
    }

    /// Pages of a sequence, by store.
    pub(in crate::cache) fn pages_of(&self, sequence: usize) -> Result<Vec<SequencePages>> {
        let mut pages = vec![SequencePages::default(); self.rooms.len()];
        for span in &self.sequence(sequence)?.spans {
            let (of, room) = (&mut pages[span.store.index()], self.room(span.store));
            let shared = span.lease.pages.iter().filter(|page| room.is_shared(**page)).count();
            of.shared += shared;
            of.own += span.lease.pages.len() - shared;
        }
        Ok(pages)
    }

    /// Checks that runs name sequences, each once, and have `tokens` tokens together.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::NoTokens`], or [`Error::Plan`].
    pub(in crate::cache) fn check_runs(&self, runs: &[TokenRun], tokens: usize) -> Result<()> {
        let reject = |reason: String| Err(Error::Plan { what: "append", reason });
        // Nothing has to be noted of sequences that ascend, as they do in most steps.
        let ascend = runs.is_sorted_by(|one, next| one.sequence() < next.sequence());
        let mut named = if ascend { Vec::new() } else { vec![false; self.sequences.len()] };
        for run in runs {
            let sequence = run.sequence();
            self.sequence(sequence)?;
            if run.tokens() == 0 {
                return Err(Error::NoTokens { what: "run of tokens", hint: "append at least one, or leave it out" });
            }
            if !ascend && std::mem::replace(&mut named[sequence], true) {
                return reject(format!("sequence {sequence} is named twice; give it one run of tokens"));
            }
        }
        let named = runs.iter().fold(0usize, |sum, run| sum.saturating_add(run.tokens()));
        if named != tokens {
            return reject(format!("{tokens} tokens for runs of {named} over {} sequences", runs.len()));
        }
        Ok(())
    }
}
