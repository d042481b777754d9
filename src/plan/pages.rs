//! Pages and the shards that hold them.
//!
//! A GPU limits the size of one storage binding (128 MiB on the WebGPU floor, up to 2 GiB through wgpu). The pages of a
//! store are therefore spread over *shards*, one binding each. A store grows by a shard, and nothing is copied, or by a
//! larger shard in place of its newest. Either way a page keeps its address.

use super::larger_shard::check_larger;
use crate::counts::{collected, filled, grow, in_32_bits, reserved};
use crate::{Error, Result};

/// The address of a page: a shard and an index within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Page {
    /// The shard.
    pub shard: u32,
    /// The page within the shard.
    pub index: u32,
}

/// Pages of one shard.
#[derive(Clone, Debug)]
struct Shard {
    /// Number of pages.
    pages: u32,
    /// Number of sequences that hold each page.
    holders: Vec<u32>,
    /// Free pages, highest index first, so that the lowest is handed out next.
    free: Vec<u32>,
}

/// Hands out the pages of a store, and counts how many sequences hold each.
///
/// Pages are handed out lowest first, from the lowest shard that has any. A sequence's pages therefore mostly lie in
/// one shard and in order. A page that several sequences share ([`PageAllocator::share`]) is free again once the last
/// of them has released it.
#[derive(Clone, Debug, Default)]
pub struct PageAllocator {
    shards: Vec<Shard>,
}

impl PageAllocator {
    /// Adds a shard of `pages` pages.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the host has no room for their tables, [`Error::Limit`] when 32 bits do not count
    /// the shards; nothing is added then.
    pub fn add_shard(&mut self, pages: u32) -> Result<()> {
        in_32_bits("shards of a store", self.shards.len())?;
        let holders = filled("books of pages", pages as usize, 0)?;
        let free = collected("books of pages", (0..pages).rev())?;
        self.shards.push(Shard { holders, free, pages });
        Ok(())
    }

    /// The same with a newest shard of `pages` pages, more than it has. Pages that are handed out stay what they are.
    ///
    /// # Errors
    /// [`Error::Plan`] when the newest shard has as many pages or there is none, [`Error::OutOfMemory`] when the host
    /// has no room for the tables of its pages.
    pub fn with_larger_shard(&self, pages: u32) -> Result<Self> {
        let newest = check_larger(self.shards.last().map(|shard| shard.pages), pages)?;
        let mut grown = self.clone();
        if let Some(shard) = grown.shards.last_mut() {
            let mut free = collected("books of pages", (newest..pages).rev())?;
            free.append(&mut shard.free);
            grow("books of pages", &mut shard.holders, pages as usize, 0)?;
            (shard.pages, shard.free) = (pages, free);
        }
        Ok(grown)
    }

    /// Drops the newest shard if none of its pages is handed out, and says whether it did.
    pub fn drop_shard(&mut self) -> bool {
        let unused = self.shards.last().is_some_and(|shard| shard.free.len() == shard.holders.len());
        if unused {
            self.shards.pop();
        }
        unused
    }

    /// Number of shards.
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Pages of every shard.
    pub fn shard_pages(&self) -> impl DoubleEndedIterator<Item = u32> + ExactSizeIterator + '_ {
        self.shards.iter().map(|shard| shard.pages)
    }

    /// Pages in all shards.
    pub fn capacity(&self) -> usize {
        self.shards.iter().map(|shard| shard.holders.len()).sum()
    }

    /// Pages not handed out.
    pub fn free(&self) -> usize {
        self.shards.iter().map(|shard| shard.free.len()).sum()
    }

    /// Hands out `count` pages, or none.
    ///
    /// # Errors
    /// [`Error::Limit`] when fewer are free.
    pub fn allocate(&mut self, count: usize) -> Result<Vec<Page>> {
        self.check_free(count)?;
        let mut pages = reserved("pages of a sequence", count)?;
        for (shard, state) in (0..).zip(&mut self.shards) {
            while pages.len() < count
                && let Some(index) = state.free.pop()
            {
                state.holders[index as usize] = 1;
                pages.push(Page { shard, index });
            }
        }
        Ok(pages)
    }

    /// Hands out `count` pages, or none: the highest ones, from the highest shards that have any, in ascending order.
    /// What is handed out lowest first then does not depend on how many these are, as long as some stay free between.
    ///
    /// # Errors
    /// [`Error::Limit`] when fewer are free.
    pub fn allocate_last(&mut self, count: usize) -> Result<Vec<Page>> {
        self.check_free(count)?;
        let mut pages = reserved("pages of a sequence", count)?;
        for (shard, state) in (0u32..).zip(&mut self.shards).collect::<Vec<_>>().into_iter().rev() {
            let taken = state.free.drain(..state.free.len().min(count - pages.len()));
            for index in taken {
                state.holders[index as usize] = 1;
                pages.push(Page { shard, index });
            }
        }
        pages.reverse();
        Ok(pages)
    }

    /// Number of sequences that hold a page; 0 if it is free or does not exist.
    pub fn holders(&self, page: Page) -> u32 {
        let shard = self.shards.get(page.shard as usize);
        shard.and_then(|shard| shard.holders.get(page.index as usize)).copied().unwrap_or(0)
    }

    /// Adds one holder to each of the pages, or to none of them.
    ///
    /// # Errors
    /// [`Error::Plan`] for a page that nobody holds.
    pub fn share(&mut self, pages: &[Page]) -> Result<()> {
        if let Some(free) = pages.iter().find(|page| self.holders(**page) == 0) {
            return Err(not_held("sharing of pages", *free));
        }
        for page in pages {
            self.shards[page.shard as usize].holders[page.index as usize] += 1;
        }
        Ok(())
    }

    /// Takes pages back from one sequence, or none of them.
    ///
    /// # Errors
    /// [`Error::Plan`] for a page that nobody holds, or that is named more often than it is held.
    pub fn release(&mut self, pages: &[Page]) -> Result<()> {
        for (at, page) in pages.iter().enumerate() {
            if self.holders(*page) == 0 {
                pages[..at].iter().rev().for_each(|page| self.hold_again(*page));
                return Err(not_held("release of pages", *page));
            }
            let shard = &mut self.shards[page.shard as usize];
            shard.holders[page.index as usize] -= 1;
            if shard.holders[page.index as usize] == 0 {
                let at = shard.free.partition_point(|&free| free > page.index);
                shard.free.insert(at, page.index);
            }
        }
        Ok(())
    }

    fn check_free(&self, count: usize) -> Result<()> {
        if count <= self.free() {
            return Ok(());
        }
        Err(Error::Limit {
            what: "pages of a store".into(),
            needed: count as u64,
            allowed: self.free() as u64,
            hint: "reserve more pages or free sequences",
        })
    }

    /// Undoes the release of a page.
    fn hold_again(&mut self, page: Page) {
        let shard = &mut self.shards[page.shard as usize];
        shard.holders[page.index as usize] += 1;
        shard.free.retain(|&free| free != page.index);
    }
}

fn not_held(what: &'static str, page: Page) -> Error {
    Error::Plan { what, reason: format!("page {} of shard {} is held by nobody", page.index, page.shard) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn strange_pages_are_not_taken_back() {
        let mut pages = PageAllocator::default();
        pages.add_shard(3).unwrap();
        let held = pages.allocate(2).unwrap();
        for strange in [Page { shard: 1, index: 0 }, Page { shard: 0, index: 3 }, Page { shard: 0, index: 2 }, held[0]]
        {
            assert!(matches!(pages.release(&[held[0], strange]), Err(Error::Plan { .. })), "{strange:?}");
            assert_eq!(pages.free(), 1);
        }
        pages.release(&held).unwrap();
        assert_eq!(pages.free(), 3);
    }

    #[test]
    fn the_last_pages_are_handed_out_in_order() {
        let mut pages = PageAllocator::default();
        pages.add_shard(3).unwrap();
        pages.add_shard(2).unwrap();
        let of = |shard, index| Page { shard, index };
        assert_eq!(pages.allocate(1).unwrap(), [of(0, 0)]);
        assert_eq!(pages.allocate_last(3).unwrap(), [of(0, 2), of(1, 0), of(1, 1)]);
        assert!(matches!(pages.allocate_last(2), Err(Error::Limit { needed: 2, allowed: 1, .. })));
        assert_eq!(pages.allocate(1).unwrap(), [of(0, 1)]);
        pages.release(&[of(1, 0)]).unwrap();
        assert_eq!(pages.allocate_last(1).unwrap(), [of(1, 0)]);
        assert_eq!(pages.holders(of(1, 0)), 1);
    }

    #[test]
    fn shared_pages_are_free_when_the_last_holder_is_gone() {
        let mut pages = PageAllocator::default();
        pages.add_shard(2).unwrap();
        let held = pages.allocate(1).unwrap();
        pages.share(&held).unwrap();
        assert_eq!(pages.holders(held[0]), 2);
        assert!(pages.release(&[held[0], held[0], held[0]]).is_err());
        assert_eq!((pages.holders(held[0]), pages.free()), (2, 1));
        pages.release(&held).unwrap();
        assert_eq!(pages.free(), 1);
        pages.release(&held).unwrap();
        assert_eq!((pages.holders(held[0]), pages.free()), (0, 2));
        assert!(pages.share(&held).is_err());
    }

    /// A larger shard has the pages of the old one at their places, and new ones behind them.
    #[test]
    fn pages_keep_their_places_in_a_larger_shard() {
        let mut small = PageAllocator::default();
        assert!(matches!(small.with_larger_shard(4), Err(Error::Plan { .. })), "there is no shard");
        small.add_shard(2).unwrap();
        small.add_shard(3).unwrap();
        let held = small.allocate(3).unwrap();
        small.release(&held[1..2]).unwrap();
        for pages in [0, 3] {
            assert!(matches!(small.with_larger_shard(pages), Err(Error::Plan { .. })), "{pages}");
        }
        let mut larger = small.with_larger_shard(5).unwrap();
        assert_eq!((small.capacity(), larger.capacity(), larger.free()), (5, 7, 5));
        assert_eq!(larger.shard_pages().collect::<Vec<_>>(), [2, 5]);
        assert_eq!([held[0], held[1], held[2]].map(|page| larger.holders(page)), [1, 0, 1]);
        let of = |shard, index| Page { shard, index };
        assert_eq!(larger.allocate(5).unwrap(), [of(0, 1), of(1, 1), of(1, 2), of(1, 3), of(1, 4)]);
    }

    /// The lowest page is handed out first, whatever the order of the releases.
    #[test]
    fn released_pages_are_handed_out_in_order() {
        let mut pages = PageAllocator::default();
        pages.add_shard(6).unwrap();
        let held = pages.allocate(6).unwrap();
        for index in [4, 0, 5, 2] {
            pages.release(&[held[index]]).unwrap();
        }
        let again: Vec<u32> = pages.allocate(4).unwrap().iter().map(|page| page.index).collect();
        assert_eq!(again, [0, 2, 4, 5]);
    }

    #[test]
    fn a_shard_in_use_is_not_dropped() {
        let mut pages = PageAllocator::default();
        pages.add_shard(2).unwrap();
        pages.add_shard(1).unwrap();
        let held = pages.allocate(3).unwrap();
        assert!(!pages.drop_shard());
        pages.release(&held[2..]).unwrap();
        assert!(pages.drop_shard());
        assert!(!pages.drop_shard());
        assert_eq!((pages.shards(), pages.capacity(), pages.free()), (1, 2, 0));
        pages.release(&held[..2]).unwrap();
        assert!(pages.drop_shard());
        assert!(!pages.drop_shard(), "there is none");
    }

    #[test]
    fn exhaustion_hands_out_nothing() {
        let mut pages = PageAllocator::default();
        pages.add_shard(2).unwrap();
        pages.add_shard(1).unwrap();
        assert!(pages.allocate(4).is_err());
        assert_eq!(pages.free(), 3);
        let all = pages.allocate(3).unwrap();
        assert_eq!(all.iter().map(|p| (p.shard, p.index)).collect::<Vec<_>>(), [(0, 0), (0, 1), (1, 0)]);
    }

    proptest! {
        /// Over long random runs no page is handed out twice and none is lost.
        #[test]
        fn pages_are_conserved(operations in prop::collection::vec((0usize..5, any::<bool>()), 1..200)) {
            let mut allocator = PageAllocator::default();
            allocator.add_shard(7).unwrap();
            allocator.add_shard(5).unwrap();
            let mut held: Vec<Vec<Page>> = Vec::new();
            for (count, release) in operations {
                if release && !held.is_empty() {
                    allocator.release(&held.remove(count % held.len())).unwrap();
                } else if let Ok(pages) = allocator.allocate(count) {
                    held.push(pages);
                }
                let mut out: Vec<Page> = held.iter().flatten().copied().collect();
                prop_assert_eq!(out.len() + allocator.free(), allocator.capacity());
                out.sort();
                out.dedup();
                prop_assert_eq!(out.len(), held.iter().map(Vec::len).sum::<usize>());
            }
        }
    }
}
