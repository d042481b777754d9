//! The page tables of a cache: the spans of its sequences, and the pages that they lie in. On the host alone.
//!
//! A change has two phases. When it is opened, the page tables show the new state, and the change lists the device
//! writes. Then it is committed, or abandoned, which restores the old state of the page tables. Pages that an open
//! change no longer needs are released only when it is committed, so that nothing is lost if it is abandoned.

mod going_on;
mod needed_room;
mod parts;
mod prompt_parts;
mod prompts;
mod shares;
mod sliding_window;
mod unpacked;

pub(super) use going_on::GoingOn;
pub(super) use unpacked::Packed;

use super::change::{Change, Undo};
use super::room::{Lease, Room, StoreRoom};
use super::sequence::{NextSlot, Positions, Sequence, Span, Window};
use super::slots::Slots;
use super::step::{CentreWrite, RunKind};
use super::{Appended, CENTRE_TOKENS, Recipe, StoreId, TokenRun};
use crate::format::TILE_TOKENS;
use crate::plan::{KeyMean, Page, PageCopy, RankShare, TokenIndices, TokenRange, TokenWrite, WindowMove};
use crate::{Error, Result};

/// The contents of a layer's stores for its sequences.
#[derive(Clone, Debug)]
pub(super) struct PageTables<I> {
    recipe: Recipe,
    rooms: Vec<Room>,
    sequences: Vec<Sequence<I>>,
    /// How often every sequence was changed, an open change and one that was rolled back included.
    changes: Vec<u64>,
    /// Slots of centres, which sequences hold; none if the recipe has no centres.
    centres: Slots,
    /// Whether they are those of one layer, of several of a kind that hold different numbers of tokens.
    parted: bool,
    /// The positions that these page tables store, where ranks share sequences; all of them otherwise.
    share: Option<RankShare>,
}

impl<I: TokenIndices + Clone> PageTables<I> {
    pub(super) fn new(recipe: Recipe, sequences: usize) -> Self {
        let rooms = recipe.stores().iter().map(|store| Room::new(store.format.has_span_ranges())).collect();
        let sequences: Vec<_> = (0..sequences).map(|_| Sequence::default()).collect();
        let (changes, centres) = (vec![0; sequences.len()], Slots::default());
        Self { recipe, rooms, sequences, changes, centres, parted: false, share: None }
    }

    /// How often a sequence was changed. What was read of it is what it holds as long as this stays.
    pub(super) fn changes_of(&self, sequence: usize) -> u64 {
        self.changes.get(sequence).copied().unwrap_or(0)
    }

    pub(super) fn centres(&self) -> &Slots {
        &self.centres
    }

    pub(super) fn centres_mut(&mut self) -> &mut Slots {
        &mut self.centres
    }

    /// Whether the recipe has centres, and there are fewer centre slots than sequences.
    pub(super) fn lacks_centres(&self) -> bool {
        self.recipe.is_centred() && self.centres.len() < self.sequences.len()
    }

    pub(super) fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    pub(super) fn room(&self, store: StoreId) -> &Room {
        &self.rooms[store.index()]
    }

    /// Number of shards of every store.
    pub(super) fn shards(&self) -> impl Iterator<Item = usize> + '_ {
        self.rooms.iter().map(Room::shards)
    }

    pub(super) fn room_mut(&mut self, store: StoreId) -> &mut Room {
        &mut self.rooms[store.index()]
    }

    pub(super) fn sequences(&self) -> &[Sequence<I>] {
        &self.sequences
    }

    pub(super) fn sequence(&self, index: usize) -> Result<&Sequence<I>> {
        let sequences = self.sequences.len();
        self.sequences.get(index).ok_or(Error::Sequence { given: index, sequences })
    }

    // --- opening -----------------------------------------------------------------------------------------------------

    /// Appends runs of new tokens to an empty change; their rows are contiguous. Decoding a token also packs the tile
    /// that it pushes out of the residual window, and a part of a prompt all windows that are due.
    ///
    /// # Errors
    /// Those of [`PageTables::room_for_append`], and [`Error::NoRoom`] when too little room is free. Nothing has
    /// changed.
    pub(super) fn append(&mut self, mut change: Change<I>, runs: &[TokenRun], tokens: usize) -> Result<Change<I>> {
        change.places.extend(runs.iter().map_while(|run| self.place_in_page(run)));
        if change.places.len() == runs.len() {
            self.check_appended(runs, tokens)?;
            self.check_room(&[])?;
            self.push_in_pages(&mut change, runs);
            return Ok(change);
        }
        let needed = self.room_for_append(runs, tokens)?;
        self.check_room(&needed)?;
        let mut row = 0;
        for run in runs {
            self.release_behind_window(&mut change, run.sequence());
            let packs = run.kind() == RunKind::Decode && self.window_to_pack(run.sequence(), 1).is_some();
            let first = match run.kind() {
                RunKind::Prompt | RunKind::Unpacked => 0,
                RunKind::Decode | RunKind::Chunk => self.first_changed(run.sequence(), packs),
            };
            self.remember(&mut change, run.sequence(), first);
            if let Some(mean) = self.begin_centre(&mut change, run.sequence(), row, run.tokens())? {
                change.writes.stores.iter_mut().for_each(|store| store.centres.push(mean));
            }
            let rows = row..row + run.tokens();
            row = rows.end;
            if run.kind() == RunKind::Prompt {
                self.append_part(&mut change, run.sequence(), rows)?;
                continue;
            }
            self.append_rows(&mut change, (run.sequence(), run.kind()), rows)?;
            if packs {
                self.pack_window(&mut change, run.sequence())?;
            }
        }
        Ok(change)
    }

    /// Packs every full window of a sequence that is due.
    ///
    /// # Errors
    /// [`Error::Sequence`], or [`Error::NoRoom`] when too little room is free. Nothing has changed.
    pub(super) fn pack_windows(&mut self, sequence: usize) -> Result<Change<I>> {
        let needed = self.room_for_windows(sequence)?;
        self.check_room(&needed)?;
        let mut change = Change::new(&self.recipe);
        if let Some((_, window)) = self.window_to_pack(sequence, 0) {
            self.remember(&mut change, sequence, window.saturating_sub(1));
            while self.pack_window(&mut change, sequence)? {}
        }
        Ok(change)
    }

    /// Room for the windows of a sequence that are due.
    pub(super) fn room_for_windows(&self, sequence: usize) -> Result<Vec<StoreRoom>> {
        self.sequence(sequence)?;
        let mut needed = vec![StoreRoom::default(); self.rooms.len()];
        if let Appended::Tiles { to, newer } = self.recipe.appended() {
            let windows = self.sequences[sequence].windows_to_pack(self.recipe.sink(), newer);
            needed[to.index()].pages = windows;
        }
        Ok(needed)
    }

    /// Gives an empty sequence a centre: the row of keys that is written with the change.
    ///
    /// # Errors
    /// [`Error::Sequence`], or [`Error::Plan`] when the recipe has no centres or the sequence is not empty;
    /// [`Error::NoRoom`] when there is no room for centres. Nothing has changed.
    pub(super) fn set_centre(&mut self, sequence: usize) -> Result<Change<I>> {
        let reject = |reason: String| Err(Error::Plan { what: "centre", reason });
        let held = self.sequence(sequence)?;
        if !self.recipe.is_centred() {
            return reject("the recipe does not centre keys; give it a centre (Recipe::with_centre)".into());
        }
        if held.length > 0 || held.centre.is_some() {
            let length = held.length;
            return reject(format!("sequence {sequence} has one, or {length} tokens; clear it first"));
        }
        self.check_room(&[])?;
        let mut change = Change::new(&self.recipe);
        self.changes[sequence] += 1;
        self.begin_centre(&mut change, sequence, 0, 1)?;
        Ok(change)
    }

    /// Gives a sequence without a centre one, if the recipe has centres: the mean of the first of its new tokens, which
    /// are `tokens` rows starting at `first`. Returns the write to all stores.
    fn begin_centre(
        &mut self,
        change: &mut Change<I>,
        sequence: usize,
        first: usize,
        tokens: usize,
    ) -> Result<Option<KeyMean>> {
        if !self.recipe.is_centred() || self.sequences[sequence].centre.is_some() {
            return Ok(None);
        }
        let tokens = TokenRange::new(first, first + tokens.min(CENTRE_TOKENS))?;
        // There are as many slots as sequences: `check_room`.
        let Some(slot) = self.centres.take() else { return Ok(None) };
        let mean = KeyMean { tokens, slot };
        change.centres.push(CentreWrite { sequence, mean });
        self.sequences[sequence].centre = Some(slot);
        Ok(Some(mean))
    }

    /// Checks that a sequence holds nothing.
    ///
    /// # Errors
    /// [`Error::Sequence`], or [`Error::Plan`] when it holds tokens or a centre.
    pub(super) fn check_empty(&self, index: usize) -> Result<()> {
        let held = self.sequence(index)?;
        if held.length == 0 && held.centre.is_none() {
            return Ok(());
        }
        let length = held.length;
        let reason = format!("sequence {index} holds {length} tokens, or a centre; clear it, or swap in to another");
        Err(Error::Plan { what: "swap", reason })
    }

    /// Room for a sequence that was taken to the host.
    pub(super) fn room_for_sequence(&self, swapped: &Sequence<I>) -> Vec<StoreRoom> {
        let mut needed = vec![StoreRoom::default(); self.rooms.len()];
        for span in &swapped.spans {
            let room = &mut needed[span.store.index()];
            room.pages += span.tokens.div_ceil(TILE_TOKENS);
            room.spans += 1;
        }
        needed
    }

    /// Gives an empty sequence the spans of one that was swapped out, with pages of its own to write them to.
    ///
    /// # Errors
    /// Those of [`PageTables::check_empty`], and [`Error::NoRoom`] when too little room is free. Nothing has changed.
    pub(super) fn restore(&mut self, index: usize, swapped: &Sequence<I>) -> Result<Change<I>> {
        self.check_empty(index)?;
        self.check_stores(swapped)?;
        self.check_room(&self.room_for_sequence(swapped))?;
        let mut change = Change::new(&self.recipe);
        self.remember(&mut change, index, 0);
        let mut restored = swapped.clone();
        if swapped.centre.is_some() {
            // There are as many slots as sequences: `check_room`.
            restored.centre = self.centres.take();
            change.taken_centre = restored.centre.map(|_| index);
        }
        for span in &mut restored.spans {
            span.lease = self.take(span.store, span.tokens, &span.positions)?;
            change.leased.push((span.store, span.lease.clone()));
        }
        self.sequences[index] = restored;
        Ok(change)
    }

    /// The spans that a change added to a sequence.
    pub(super) fn spans_since(&self, change: &Change<I>, sequence: usize) -> &[Span<I>] {
        let first = change.undo.iter().find(|undo| undo.sequence == sequence).map(|undo| undo.first);
        first.map_or(&[], |first| &self.sequences[sequence].spans[first..])
    }

    // --- closing -------------------------------------------------------------------------------------------------

    /// Commits a change: its new state becomes permanent.
    pub(super) fn commit(&mut self, mut change: Change<I>) {
        self.commit_and_clear(&mut change);
    }

    /// The same, and the change is an empty one afterwards.
    pub(super) fn commit_and_clear(&mut self, change: &mut Change<I>) {
        change.committed.drain(..).for_each(|(sequence, spans)| self.sequences[sequence].spans = spans);
        self.release(&change.freed);
        change.clear();
    }

    /// Rolls back a change: the page tables return to their old state.
    pub(super) fn abandon(&mut self, change: Change<I>) {
        for undo in change.undo.into_iter().rev() {
            let sequence = &mut self.sequences[undo.sequence];
            sequence.spans.truncate(undo.first);
            sequence.spans.extend(undo.spans);
            (sequence.length, sequence.released, sequence.elsewhere) = (undo.length, undo.released, undo.elsewhere);
        }
        for &sequence in &change.grown {
            self.sequences[sequence].pop_token();
            self.changes[sequence] += 1; // no step goes on from one that was rolled back
        }
        for sequence in change.centres.iter().map(|centre| centre.sequence).chain(change.taken_centre) {
            self.release_centre(sequence);
        }
        self.release(&change.leased);
    }

    // --- at once ----------------------------------------------------------------------------------------------------

    /// Removes all tokens of a sequence.
    pub(super) fn clear(&mut self, sequence: usize) -> Result<()> {
        self.sequence(sequence)?;
        self.changes[sequence] += 1;
        self.release_centre(sequence);
        let forgotten = std::mem::take(&mut self.sequences[sequence]);
        forgotten.spans.iter().for_each(|span| self.rooms[span.store.index()].release(&span.lease));
        Ok(())
    }

    /// Lets an empty sequence share the tokens of another.
    pub(super) fn fork(&mut self, source: usize, target: usize) -> Result<()> {
        let length = self.sequence(source).and_then(|_| self.sequence(target))?.length;
        if length > 0 {
            let reason = format!("sequence {target} holds {length} tokens; clear it first, or fork to an empty one");
            return Err(Error::Plan { what: "fork", reason });
        }
        let forked = self.sequences[source].clone();
        for span in &forked.spans {
            self.rooms[span.store.index()].share(&span.lease)?;
        }
        // Shared before the target's own centre is released, in case both are the same.
        forked.centre.into_iter().for_each(|slot| self.centres.share(slot));
        self.release_centre(target);
        // The source's open page is shared now, so that its next token goes to another.
        self.changes[source] += 1;
        self.changes[target] += 1;
        self.sequences[target] = forked;
        Ok(())
    }

    /// Checks that a sequence can be truncated to `length`.
    ///
    /// # Errors
    /// [`Error::Sequence`], or [`Error::Plan`] when it is shorter or the cut goes through a gathered span.
    pub(super) fn check_truncate(&self, sequence: usize, length: usize) -> Result<()> {
        let held = self.sequence(sequence)?.length;
        if length > held {
            let reason = format!("sequence {sequence} cannot keep {length} tokens; it holds {held}");
            return Err(Error::Plan { what: "truncation", reason });
        }
        self.check_window(sequence, length)?;
        self.sequences[sequence].check_cut(length)
    }

    /// Keeps the positions below `length` of a sequence.
    pub(super) fn truncate(&mut self, sequence: usize, length: usize) -> Result<()> {
        self.check_truncate(sequence, length)?;
        self.changes[sequence] += 1;
        let freed = self.sequences[sequence].truncate(length)?;
        self.release(&freed);
        Ok(())
    }

    /// Forgets whole pages of a sequence whose positions lie in `positions`.
    pub(super) fn forget(&mut self, sequence: usize, positions: TokenRange) -> Result<()> {
        self.sequence(sequence)?;
        self.changes[sequence] += 1;
        let freed = self.sequences[sequence].forget(positions);
        self.release(&freed);
        Ok(())
    }

    // --- parts ------------------------------------------------------------------------------------------------------

    fn release_centre(&mut self, sequence: usize) {
        if let Some(slot) = self.sequences[sequence].centre.take() {
            self.centres.release(slot);
        }
    }

    fn release(&mut self, leases: &[(StoreId, Lease)]) {
        leases.iter().for_each(|(store, lease)| self.rooms[store.index()].release(lease));
    }

    /// Records a sequence's spans, starting at `first`, before they change.
    fn remember(&mut self, change: &mut Change<I>, sequence: usize, first: usize) {
        self.changes[sequence] += 1;
        let of = &self.sequences[sequence];
        let spans = of.spans[first..].to_vec();
        let (length, released, elsewhere) = (of.length, of.released, of.elsewhere.clone());
        change.undo.push(Undo { sequence, first, spans, length, released, elsewhere });
    }

    /// The first span that appending to a sequence changes.
    fn first_changed(&self, sequence: usize, packs: bool) -> usize {
        let last = self.sequences[sequence].spans.len().saturating_sub(1);
        let packed = self.window_to_pack(sequence, 1).filter(|_| packs);
        packed.map_or(last, |(_, window)| last.min(window.saturating_sub(1)))
    }

    /// The place of a token of a run at a position.
    fn window_of(&self, kind: RunKind, position: usize) -> Window {
        if kind == RunKind::Unpacked { Window::Unpacked } else { self.window(position) }
    }

    /// The place of an appended token at a position.
    fn window(&self, position: usize) -> Window {
        match self.recipe.appended() {
            Appended::Keep => Window::For(StoreId::F16),
            Appended::Tiles { .. } => Window::PackedLater,
            Appended::AtOnce(_) if position < self.recipe.sink() => Window::For(StoreId::F16),
            Appended::AtOnce(to) => Window::For(to),
        }
    }

    /// The end of the positions whose tokens are stored like the one at `position`.
    fn window_end(&self, position: usize) -> usize {
        match self.recipe.appended() {
            Appended::AtOnce(_) if position < self.recipe.sink() => self.recipe.sink(),
            _ => usize::MAX,
        }
    }

    /// The span of a sequence to pack once `appended` (0 or 1) more tokens are stored, and its target store.
    fn window_to_pack(&self, sequence: usize, appended: usize) -> Option<(StoreId, usize)> {
        let Appended::Tiles { to, newer } = self.recipe.appended() else { return None };
        let window = self.sequences[sequence].window_to_pack(self.recipe.sink(), newer, appended)?;
        Some((to, window))
    }

    /// Takes the pages and the slot of a span of `tokens` tokens.
    fn take(&mut self, store: StoreId, tokens: usize, positions: &Positions<I>) -> Result<Lease> {
        let (room, pages) = (&mut self.rooms[store.index()], tokens.div_ceil(TILE_TOKENS));
        match positions {
            Positions::Gathered { .. } if self.parted => room.take_last(pages),
            _ => room.take(pages),
        }
    }

    fn append_token(&mut self, change: &mut Change<I>, (index, kind): (usize, RunKind), row: usize) -> Result<()> {
        let window = self.window_of(kind, self.sequences[index].length);
        let store = window.store();
        let sequence = &mut self.sequences[index];
        let centre = sequence.centre;
        let room = &mut self.rooms[store.index()];
        let next = sequence.next_slot(window);
        let (page, slot, lease) = match next {
            NextSlot::Open(shared, slot) if room.is_shared(shared) => {
                let own = room.take_page()?;
                let to = own.pages[0];
                change.writes.stores[store.index()].copies.push(PageCopy { from: shared, to });
                change.leased.push((store, own));
                change.freed.push((store, Lease { pages: vec![shared], slot: None }));
                sequence.replace_open_page(to);
                (to, slot, Lease::default())
            }
            NextSlot::Open(page, slot) => (page, slot, Lease::default()),
            NextSlot::NewPage | NextSlot::NewSpan => {
                let lease = if next == NextSlot::NewPage { room.take_page()? } else { room.take(1)? };
                change.leased.push((store, lease.clone()));
                (lease.pages[0], 0, lease)
            }
        };
        change.writes.stores[store.index()].tokens.push(TokenWrite { token: row, page, slot, centre });
        sequence.push_token(window, next, lease);
        Ok(())
    }

    /// The place of an appended token that lies within the last page of its sequence and changes nothing else.
    fn place_in_page(&self, run: &TokenRun) -> Option<(StoreId, Page, usize)> {
        let of = self.sequences.get(run.sequence())?;
        let begins = self.recipe.is_centred() && of.centre.is_none();
        if run.tokens() != 1 || run.kind().is_of_prompt() || self.share.is_some() || begins {
            return None;
        }
        let window = self.window(of.length);
        let NextSlot::Open(page, slot) = of.next_slot(window) else { return None };
        let changes_more = self.room(window.store()).is_shared(page)
            || self.unseen_behind_window(run.sequence()).is_some()
            || (run.kind() == RunKind::Decode && self.window_to_pack(run.sequence(), 1).is_some());
        (!changes_more).then_some((window.store(), page, slot))
    }

    /// Appends tokens to such places, without taking memory.
    fn push_in_pages(&mut self, change: &mut Change<I>, runs: &[TokenRun]) {
        for ((token, run), &(store, page, slot)) in runs.iter().enumerate().zip(&change.places) {
            let sequence = &mut self.sequences[run.sequence()];
            let write = TokenWrite { token, page, slot, centre: sequence.centre };
            change.writes.stores[store.index()].tokens.push(write);
            change.grown.push(run.sequence());
            sequence.push_in_page();
            self.changes[run.sequence()] += 1;
        }
    }

    /// Packs the oldest window that is due, if there is one.
    fn pack_window(&mut self, change: &mut Change<I>, sequence: usize) -> Result<bool> {
        let Some((to, window)) = self.window_to_pack(sequence, 0) else { return Ok(false) };
        let joined = self.sequences[sequence].joins(window, to);
        let packed = self.rooms[to.index()].take(1)?;
        change.leased.push((to, packed.clone()));
        let from = self.sequences[sequence].spans[window].lease.pages[0];
        let move_ = WindowMove { from, to: packed.pages[0], range_slot: packed.range_slot() };
        change.writes.windows.iter_mut().for_each(|windows| windows.push(move_));
        let freed = self.sequences[sequence].pack_window(window, to, packed, joined);
        change.freed.push((StoreId::F16, freed));
        Ok(true)
    }
}
