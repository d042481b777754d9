//! The free pages and range slots of a store, on the host alone.

use super::budget::Growth;
use super::slots::Slots;
use crate::plan::{Page, PageAllocator};
use crate::{Error, Result};

/// Room of a store: pages, and range slots for spans.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreRoom {
    /// Pages of 128 tokens.
    pub pages: usize,
    /// Spans that begin. Each takes a range slot if the format has them.
    pub spans: usize,
}

/// Pages of a sequence in one store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequencePages {
    /// Pages that no other sequence holds: they are free once the sequence is cleared or swapped out.
    pub own: usize,
    /// Pages that other sequences hold too.
    pub shared: usize,
}

/// Pages and a range slot for one span.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Lease {
    pub(super) pages: Vec<Page>,
    /// The slot, if the format has span ranges.
    pub(super) slot: Option<usize>,
}

impl Lease {
    /// The slot in the form that kernels take: any number will do if there is none.
    pub(super) fn range_slot(&self) -> usize {
        self.slot.unwrap_or(0)
    }
}

/// The used and free parts of a store.
#[derive(Clone, Debug, Default)]
pub(super) struct Room {
    pages: PageAllocator,
    /// Range slots, held by spans.
    slots: Slots,
    has_slots: bool,
}

impl Room {
    /// No room yet, for a store whose spans do or do not need range slots.
    pub(super) fn new(has_slots: bool) -> Self {
        Self { has_slots, ..Self::default() }
    }

    pub(super) fn add_shard(&mut self, pages: u32) -> Result<()> {
        self.pages.add_shard(pages)
    }

    /// Pages of the newest shard; 0 where there is none.
    pub(super) fn newest_shard_pages(&self) -> u32 {
        self.pages.shard_pages().next_back().unwrap_or(0)
    }

    /// The pages of the room with a larger newest shard.
    pub(super) fn with_larger_shard(&self, pages: u32) -> Result<PageAllocator> {
        self.pages.with_larger_shard(pages)
    }

    /// Puts these pages in the place of those of the room.
    pub(super) fn replace_pages(&mut self, pages: PageAllocator) {
        self.pages = pages;
    }

    /// Drops the newest shard if nothing lies in it, and says whether it did.
    pub(super) fn drop_shard(&mut self) -> bool {
        self.pages.drop_shard()
    }

    pub(super) fn add_slots(&mut self, slots: usize) {
        self.slots.grow(slots);
    }

    pub(super) fn pages(&self) -> usize {
        self.pages.capacity()
    }

    pub(super) fn shards(&self) -> usize {
        self.pages.shards()
    }

    pub(super) fn shard_pages(&self) -> Vec<u32> {
        self.pages.shard_pages().collect()
    }

    pub(super) fn free_pages(&self) -> usize {
        self.pages.free()
    }

    /// Number of spans that may begin. No limit if they need no slots.
    pub(super) fn free_spans(&self) -> usize {
        if self.has_slots { self.slots.free() } else { usize::MAX }
    }

    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Number of slots that are missing for `spans` spans.
    pub(super) fn missing_slots(&self, spans: usize) -> usize {
        if self.has_slots { spans.saturating_sub(self.slots.free()) } else { 0 }
    }

    pub(super) fn slots_in_use(&self) -> usize {
        self.slots.in_use()
    }

    /// Takes pages for `pages` tiles and a slot. On an error nothing is taken.
    pub(super) fn take(&mut self, pages: usize) -> Result<Lease> {
        self.check_slot()?;
        let pages = self.pages.allocate(pages)?;
        Ok(Lease { pages, slot: self.slots.take() })
    }

    /// The same from the end: for spans of which layers that parted hold different numbers of tokens, so that all other
    /// spans have the same places in each.
    pub(super) fn take_last(&mut self, pages: usize) -> Result<Lease> {
        self.check_slot()?;
        let pages = self.pages.allocate_last(pages)?;
        Ok(Lease { pages, slot: self.slots.take_last() })
    }

    fn check_slot(&self) -> Result<()> {
        if self.missing_slots(1) > 0 {
            return Err(Error::NoRoom { what: "range slots", store: "its spans".into(), needed: 1, free: 0 });
        }
        Ok(())
    }

    /// The room of layers in which the same is in use, each with a room of its own: what all of them have, and no less
    /// than the smallest has unless stores may grow. `None` if there is no such room.
    pub(super) fn common(rooms: &[&Self], growth: Growth) -> Option<Self> {
        let smallest = rooms.iter().min_by_key(|room| room.pages())?;
        let slots = rooms.iter().min_by_key(|room| room.slots())?.slots.clone();
        let shards = smallest.shard_pages();
        let common =
            |room: &&Self| shards.iter().zip(room.shard_pages()).take_while(|(one, other)| **one == *other).count();
        let common = rooms.iter().map(common).min()?;
        let mut pages = smallest.pages.clone();
        while pages.shards() > common {
            if growth == Growth::None || !pages.drop_shard() {
                return None;
            }
        }
        Some(Self { pages, slots, has_slots: smallest.has_slots })
    }

    /// Takes one page for a span that continues. The span already has its range slot.
    pub(super) fn take_page(&mut self) -> Result<Lease> {
        Ok(Lease { pages: self.pages.allocate(1)?, slot: None })
    }

    /// Adds another span as a holder of a lease.
    pub(super) fn share(&mut self, lease: &Lease) -> Result<()> {
        self.pages.share(&lease.pages)?;
        lease.slot.into_iter().for_each(|slot| self.slots.share(slot));
        Ok(())
    }

    /// Whether other spans also hold the page, so that it must not be written.
    pub(super) fn is_shared(&self, page: Page) -> bool {
        self.pages.holders(page) > 1
    }

    pub(super) fn release(&mut self, lease: &Lease) {
        let released = self.pages.release(&lease.pages);
        // The cache releases each of its leases once.
        debug_assert!(released.is_ok(), "{released:?}");
        lease.slot.into_iter().for_each(|slot| self.slots.release(slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A span that finds no slot takes no pages either.
    #[test]
    fn spans_need_a_slot() {
        for takes in [Room::take, Room::take_last] {
            let mut room = Room::new(true);
            room.add_shard(2).unwrap();
            let refused = takes(&mut room, 1);
            assert!(matches!(refused, Err(Error::NoRoom { what: "range slots", .. })), "{refused:?}");
            assert_eq!(room.free_pages(), 2);
            room.add_slots(1);
            assert_eq!(takes(&mut room, 1).unwrap().slot, Some(0));
            assert_eq!((room.free_pages(), room.slots_in_use()), (1, 1));
        }
    }
}
