//! Parts of prompts: their queries attend to them in f16, and the same step packs them.

use std::ops::Range;

use super::super::change::Change;
use super::super::room::StoreRoom;
use super::super::sequence::{Positions, Span, SpanKind};
use super::super::step::RunKind;
use super::super::{Appended, StoreId, TokenRun};
use super::PageTables;
use crate::Result;
use crate::backend::StagedSpan;
use crate::format::TILE_TOKENS;
use crate::plan::{TokenIndices, TokenWrite};

/// Where a part of a prompt is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PackedPart {
    /// Tiles, by later steps.
    Later,
    /// Token by token where appended tokens lie.
    AtOnce,
    /// As a span of this store.
    AsSpan(StoreId),
}

impl<I: TokenIndices + Clone> PageTables<I> {
    fn packed_part(&self) -> PackedPart {
        match self.recipe.appended() {
            Appended::Tiles { .. } => PackedPart::Later,
            Appended::AtOnce(_) => PackedPart::AtOnce,
            Appended::Keep if self.recipe.packs() => PackedPart::AsSpan(StoreId::PACKED),
            Appended::Keep => PackedPart::Later,
        }
    }

    /// Tokens of a part that belong to the sink, and those that follow.
    fn sink_and_rest(&self, sequence: usize, tokens: usize) -> (usize, usize) {
        let sink = self.recipe.sink().saturating_sub(self.sequences[sequence].length).min(tokens);
        (sink, tokens - sink)
    }

    /// Adds the room that a part of a prompt needs.
    ///
    /// # Errors
    /// Those of [`PageTables::room_for_windows`].
    pub(super) fn add_room_for_part(&self, needed: &mut [StoreRoom], run: &TokenRun) -> Result<()> {
        let (sequence, tokens) = (run.sequence(), run.tokens());
        let packed = self.packed_part();
        if packed == PackedPart::Later {
            self.add_room_for_tokens(needed, sequence, tokens);
            let windows = self.room_for_windows(sequence)?;
            needed.iter_mut().zip(windows).for_each(|(needed, due)| needed.pages += due.pages);
            return Ok(());
        }
        let (sink, rest) = self.sink_and_rest(sequence, tokens);
        let staged = self.sequences[sequence].length + sink;
        let stored = self.pieces(staged..staged + rest).filter(|(_, stores)| *stores);
        let pages: Vec<usize> = stored.map(|(piece, _)| piece.len().div_ceil(TILE_TOKENS)).collect();
        needed[StoreId::F16.index()].pages += pages.iter().sum::<usize>();
        match packed {
            PackedPart::AsSpan(to) => {
                self.add_room_for_tokens(needed, sequence, sink);
                needed[to.index()].pages += pages.iter().sum::<usize>();
                needed[to.index()].spans += pages.len();
            }
            PackedPart::AtOnce | PackedPart::Later => self.add_room_for_tokens(needed, sequence, tokens),
        }
        Ok(())
    }

    /// Appends a part of a prompt, which lies in these rows. There is room for it.
    pub(super) fn append_part(&mut self, change: &mut Change<I>, sequence: usize, rows: Range<usize>) -> Result<()> {
        let packed = self.packed_part();
        if packed == PackedPart::Later {
            // Windows that this part fills stay, since its queries see them.
            while self.pack_window(change, sequence)? {}
            let before = self.sequences[sequence].spans.len();
            self.append_rows(change, (sequence, RunKind::Prompt), rows)?;
            self.see_as_one(change, sequence, before);
            return Ok(());
        }
        let (sink, rest) = self.sink_and_rest(sequence, rows.len());
        let staged = rows.start + sink..rows.end;
        self.append_rows(change, (sequence, RunKind::Prompt), rows.start..staged.start)?;
        if rest == 0 {
            return Ok(());
        }
        let mut seen = self.sequences[sequence].spans.clone();
        let start = self.sequences[sequence].length;
        for (piece, stores) in self.pieces(start..start + rest) {
            let rows = staged.start + (piece.start - start)..staged.start + (piece.end - start);
            if !stores {
                self.sequences[sequence].length = piece.end;
                continue;
            }
            let span = self.stage(change, sequence, rows.clone())?;
            match packed {
                PackedPart::AsSpan(to) => self.pack_staged(change, sequence, &span, to)?,
                PackedPart::AtOnce | PackedPart::Later => {
                    self.append_rows(change, (sequence, RunKind::Prompt), rows)?;
                }
            }
            seen.push(span);
        }
        debug_assert_eq!(self.sequences[sequence].length, start + rest);
        let committed = std::mem::replace(&mut self.sequences[sequence].spans, seen);
        change.committed.push((sequence, committed));
        Ok(())
    }

    /// Lets the queries of the open change see the windows that a part began as one span, which takes less work than a
    /// span for each tile. There were `before` spans before them.
    fn see_as_one(&mut self, change: &mut Change<I>, sequence: usize, before: usize) {
        let spans = &mut self.sequences[sequence].spans;
        if spans.len() < before + 2 {
            return;
        }
        let mut seen = spans[..=before].to_vec();
        for window in &spans[before + 1..] {
            match seen.last_mut() {
                // Those of a rank have gaps.
                Some(last) if last.end() == window.start() => {
                    last.tokens += window.tokens;
                    last.lease.pages.extend_from_slice(&window.lease.pages);
                }
                _ => seen.push(window.clone()),
            }
        }
        change.committed.push((sequence, std::mem::replace(spans, seen)));
    }

    /// Writes rows at the end of a sequence to f16 pages that it gives back with the commit.
    fn stage(&mut self, change: &mut Change<I>, sequence: usize, rows: Range<usize>) -> Result<Span<I>> {
        let (tokens, centre) = (rows.len(), self.sequences[sequence].centre);
        let lease = self.rooms[StoreId::F16.index()].take(tokens.div_ceil(TILE_TOKENS))?;
        change.leased.push((StoreId::F16, lease.clone()));
        change.freed.push((StoreId::F16, lease.clone()));
        let write =
            |(at, token)| TokenWrite { token, page: lease.pages[at / TILE_TOKENS], slot: at % TILE_TOKENS, centre };
        change.writes.stores[StoreId::F16.index()].tokens.extend(rows.enumerate().map(write));
        let positions = Positions::From(self.sequences[sequence].length);
        Ok(Span { store: StoreId::F16, tokens, positions, of_layers: Vec::new(), lease, kind: SpanKind::Stored })
    }

    /// Adds a staged span to its sequence as it is once it is packed.
    fn pack_staged(&mut self, change: &mut Change<I>, sequence: usize, staged: &Span<I>, to: StoreId) -> Result<()> {
        let lease = self.rooms[to.index()].take(staged.lease.pages.len())?;
        change.leased.push((to, lease.clone()));
        change.staged.push(StagedSpan {
            tokens: staged.tokens,
            staged: staged.lease.pages.clone(),
            centre: self.sequences[sequence].centre,
            store: to.index(),
            pages: lease.pages.clone(),
            range_slot: lease.range_slot(),
        });
        let of = &mut self.sequences[sequence];
        of.spans.push(Span { store: to, lease, ..staged.clone() });
        of.length += staged.tokens;
        Ok(())
    }
}
