//! Pages and the shards that hold them.
//!
//! One storage binding of a GPU is limited (128 MiB on the WebGPU floor, 2 GiB at most through wgpu), so the pages of
//! a store are spread over *shards*, each one binding. A cache grows by adding a shard; nothing is copied.

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
pub struct Shard {
    capacity: u32,
    /// Free pages, highest index first, so that the lowest is handed out next.
    free: Vec<u32>,
}

/// Hands out the pages of a store.
///
/// Pages are handed out lowest first from the lowest shard that has any, so that a sequence's pages mostly lie in one
/// shard and in order.
#[derive(Clone, Debug, Default)]
pub struct PageAllocator {
    shards: Vec<Shard>,
}

impl PageAllocator {
    /// Adds a shard of `pages` pages.
    pub fn add_shard(&mut self, pages: u32) {
        self.shards.push(Shard { capacity: pages, free: (0..pages).rev().collect() });
    }

    /// Number of shards.
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Pages in all shards.
    pub fn capacity(&self) -> usize {
        self.shards.iter().map(|shard| shard.capacity as usize).sum()
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
        if self.free() < count {
            return Err(Error::Limit {
                what: "pages of a store".into(),
                needed: count as u64,
                allowed: self.free() as u64,
                hint: "reserve more pages or free sequences",
            });
        }
        let mut pages = Vec::with_capacity(count);
        for (shard, state) in self.shards.iter_mut().enumerate() {
            while pages.len() < count
                && let Some(index) = state.free.pop()
            {
                pages.push(Page { shard: shard as u32, index });
            }
        }
        Ok(pages)
    }

    /// Takes pages back, all or none.
    ///
    /// # Errors
    /// [`Error::Plan`] for a page that was not handed out, or is named twice.
    pub fn release(&mut self, pages: &[Page]) -> Result<()> {
        for (at, page) in pages.iter().enumerate() {
            if let Err(reason) = self.take_back(*page) {
                // The places of the pages taken back so far are theirs again.
                for taken in &pages[..at] {
                    self.shards[taken.shard as usize].free.retain(|&index| index != taken.index);
                }
                return Err(Error::Plan { what: "release of pages", reason });
            }
        }
        Ok(())
    }

    fn take_back(&mut self, page: Page) -> std::result::Result<(), String> {
        let Page { shard, index } = page;
        let shards = self.shards.len();
        let state = self.shards.get_mut(shard as usize).ok_or_else(|| format!("shard {shard} of {shards}"))?;
        if index >= state.capacity {
            return Err(format!("page {index} of a shard of {} pages", state.capacity));
        }
        let at = state.free.partition_point(|&free| free > index);
        if state.free.get(at) == Some(&index) {
            return Err(format!("page {index} of shard {shard} is free already"));
        }
        state.free.insert(at, index);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn strange_pages_are_not_taken_back() {
        let mut pages = PageAllocator::default();
        pages.add_shard(3);
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
    fn exhaustion_hands_out_nothing() {
        let mut pages = PageAllocator::default();
        pages.add_shard(2);
        pages.add_shard(1);
        assert!(pages.allocate(4).is_err());
        assert_eq!(pages.free(), 3);
        let all = pages.allocate(3).unwrap();
        assert_eq!(all.iter().map(|p| (p.shard, p.index)).collect::<Vec<_>>(), [(0, 0), (0, 1), (1, 0)]);
    }

    proptest! {
        /// Over long random runs no page is out twice and none is lost.
        #[test]
        fn pages_are_conserved(operations in prop::collection::vec((0usize..5, any::<bool>()), 1..200)) {
            let mut allocator = PageAllocator::default();
            allocator.add_shard(7);
            allocator.add_shard(5);
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
