//! The table of a step of decoding that goes on from the step before.

use super::entry::{move_token_on, slot_of_token};
use super::layout::{ENTRY_WORDS, TableSection};
use super::table::WriteTable;
use crate::format::TILE_TOKENS;

impl WriteTable {
    /// Makes it the table of a step that puts each token into the slot behind the one where this step put it. False for
    /// a step that did more than to store tokens, or has filled a page: the table is as it was then.
    pub(crate) fn move_on(&mut self) -> bool {
        let moves = self.all_sections(|section, entries| match section {
            TableSection::Tokens(_) => entries.iter().all(|&entry| slot_of_token(entry) < TILE_TOKENS - 1),
            TableSection::Copies(_) | TableSection::Centres(_) | TableSection::Windows(_) => entries.is_empty(),
        });
        moves
            && self.all_sections(|_, entries| {
                entries.iter_mut().for_each(move_token_on);
                true
            })
    }

    /// Whether something holds of the entries of every section.
    fn all_sections(&mut self, holds: impl Fn(TableSection, &mut [[u32; ENTRY_WORDS]]) -> bool) -> bool {
        let Self { layout, words, .. } = self;
        let mut rest = words.as_chunks_mut::<ENTRY_WORDS>().0;
        for section in layout.sections() {
            let Some((of, behind)) = rest.split_at_mut_checked(1 + layout.capacity(section)) else { return false };
            let Some(([count, ..], entries)) = of.split_first_mut() else { return false };
            let Some(entries) = entries.get_mut(..*count as usize) else { return false };
            if !holds(section, entries) {
                return false;
            }
            rest = behind;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::{LayerWrites, StoreCapacity, TokenWrite, WriteLayout};
    use super::*;
    use crate::format::{AttentionShape, SegmentFormat};
    use crate::plan::{Page, PageCopy};

    fn table(writes: impl FnOnce(&mut LayerWrites)) -> WriteTable {
        let of = |format, tokens| StoreCapacity {
            format,
            shard_pages: vec![9],
            range_slots: 0,
            tokens,
            copies: 2,
            centres: 0,
            centre_slots: 0,
        };
        let stores = vec![of(SegmentFormat::F16, 3), of(SegmentFormat::saw_int4(), 3)];
        let layout = Arc::new(WriteLayout::new(AttentionShape::new(2, 2, 64).unwrap(), 4, stores, vec![]).unwrap());
        let (mut table, mut step) = (WriteTable::new(&layout), LayerWrites::of(&layout));
        writes(&mut step);
        table.set(&step).unwrap();
        table
    }

    fn write(token: usize, slot: usize) -> TokenWrite {
        TokenWrite { token, page: Page { shard: 0, index: token as u32 }, slot, centre: None }
    }

    /// Tokens of all stores go to the next slots until a page is full; a step that copies a page does not go on.
    #[test]
    fn tables_move_on_until_a_page_is_full() {
        let at = |step: usize| {
            table(|writes| {
                writes.stores[0].tokens.push(write(0, 124 + step));
                writes.stores[1].tokens.extend([write(1, step), write(2, 70 + step)]);
            })
        };
        let mut moved = at(0);
        for step in 1..4 {
            assert!(moved.move_on());
            assert_eq!(moved.words(), at(step).words());
        }
        assert!(!moved.move_on(), "a page is full");
        assert_eq!(moved.words(), at(3).words());
        let copy = PageCopy { from: Page { shard: 0, index: 1 }, to: Page { shard: 0, index: 2 } };
        let mut copies = table(|writes| {
            writes.stores[0].copies.push(copy);
            writes.stores[0].tokens.push(write(0, 3));
        });
        let before = copies.words().to_vec();
        assert!(!copies.move_on());
        assert_eq!(copies.words(), before);
    }
}
