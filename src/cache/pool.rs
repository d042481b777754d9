//! A store with its free pages and range slots.

use crate::backend::Backend;
use crate::format::{AttentionShape, SegmentFormat};
use crate::plan::{Page, PageAllocator};
use crate::{Error, Result};

/// Pages of a store's first shard, unless more are needed at once: 1024 tokens.
const FIRST_SHARD_PAGES: usize = 8;

/// Range slots of a store's first allocation.
const FIRST_SLOTS: usize = 8;

/// A store of a backend and what of it is in use.
pub(super) struct Pool<B: Backend> {
    pub(super) store: B::Store,
    pub(super) format: SegmentFormat,
    shape: AttentionShape,
    pages: PageAllocator,
    /// How many spans hold each range slot.
    slot_holders: Vec<u32>,
    /// Free slots, highest first.
    free_slots: Vec<usize>,
}

/// Pages and a range slot for one span.
#[derive(Clone, Debug, Default)]
pub(super) struct Lease {
    pub(super) pages: Vec<Page>,
    /// The slot, where the format has span ranges.
    pub(super) slot: Option<usize>,
}

impl Lease {
    /// The slot as kernels take it: any number will do where there is none.
    pub(super) fn range_slot(&self) -> usize {
        self.slot.unwrap_or(0)
    }
}

impl<B: Backend> Pool<B> {
    pub(super) fn new(backend: &B, shape: AttentionShape, format: SegmentFormat) -> Result<Self> {
        let store = backend.create_store(shape, format)?;
        Ok(Self {
            store,
            format,
            shape,
            pages: PageAllocator::default(),
            slot_holders: Vec::new(),
            free_slots: Vec::new(),
        })
    }

    /// Sees to it that so many pages and slots are free. What an error leaves behind is unused room, nothing else.
    pub(super) async fn reserve(&mut self, backend: &B, pages: usize, spans: usize) -> Result<()> {
        while self.pages.free() < pages {
            self.add_shard(backend, pages - self.pages.free()).await?;
        }
        let needed = if self.format.has_span_ranges() { spans } else { 0 };
        if self.free_slots.len() < needed {
            let held = self.slot_holders.len();
            let slots = (held + needed - self.free_slots.len()).max(2 * held).max(FIRST_SLOTS);
            backend.reserve_ranges(&mut self.store, slots).await?;
            self.free_slots.splice(0..0, (held..slots).rev());
            self.slot_holders.resize(slots, 0);
        }
        Ok(())
    }

    /// Takes pages for `pages` tiles and a slot. Nothing is taken on an error.
    pub(super) fn take(&mut self, pages: usize) -> Result<Lease> {
        if self.format.has_span_ranges() && self.free_slots.is_empty() {
            let (what, hint) = ("range slots of a store".into(), "reserve more or free sequences");
            return Err(Error::Limit { what, needed: 1, allowed: 0, hint });
        }
        let pages = self.pages.allocate(pages)?;
        let slot = self.free_slots.pop();
        slot.into_iter().for_each(|slot| self.slot_holders[slot] = 1);
        Ok(Lease { pages, slot })
    }

    /// Takes one page.
    pub(super) fn take_page(&mut self) -> Result<Page> {
        Ok(self.pages.allocate(1)?[0])
    }

    /// Lets one more span hold what a lease holds.
    pub(super) fn share(&mut self, lease: &Lease) -> Result<()> {
        self.pages.share(&lease.pages)?;
        lease.slot.into_iter().for_each(|slot| self.slot_holders[slot] += 1);
        Ok(())
    }

    /// True if other spans hold the page too, so that it must not be written.
    pub(super) fn is_shared(&self, page: Page) -> bool {
        self.pages.holders(page) > 1
    }

    pub(super) fn release(&mut self, lease: &Lease) {
        self.release_pages(&lease.pages);
        if let Some(slot) = lease.slot {
            self.slot_holders[slot] -= 1;
            if self.slot_holders[slot] == 0 {
                let at = self.free_slots.partition_point(|&free| free > slot);
                self.free_slots.insert(at, slot);
            }
        }
    }

    pub(super) fn release_pages(&mut self, pages: &[Page]) {
        let released = self.pages.release(pages);
        // The cache releases what it leased, once.
        debug_assert!(released.is_ok(), "{released:?}");
    }

    pub(super) fn memory(&self, backend: &B, tokens: usize) -> StoreMemory {
        let pages_in_use = self.pages.capacity() - self.pages.free();
        let slots_in_use = self.slot_holders.len() - self.free_slots.len();
        let page_bytes = self.format.page_bytes(&self.shape) as u64;
        let slot_bytes = self.format.range_slot_bytes(&self.shape) as u64;
        StoreMemory {
            format: self.format,
            allocated_bytes: backend.store_bytes(&self.store),
            in_use_bytes: pages_in_use as u64 * page_bytes + slots_in_use as u64 * slot_bytes,
            pages: self.pages.capacity(),
            pages_in_use,
            tokens,
            elements: 2 * tokens as u64 * (self.shape.kv_heads() * self.shape.head_dim()) as u64,
        }
    }

    /// Adds a shard that doubles the store and holds `missing` pages, as far as a shard can; where the device has no
    /// room for that much, one of what is missing.
    async fn add_shard(&mut self, backend: &B, missing: usize) -> Result<()> {
        let most = backend.max_shard_pages(&self.shape, &self.format);
        if most == 0 {
            return Err(Error::Limit {
                what: format!("one page of {}", self.format),
                needed: self.format.page_bytes(&self.shape) as u64,
                allowed: 0,
                hint: "a binding of the device holds not even one page; use fewer KV heads per cache or fewer bits",
            });
        }
        let at_most = |pages: usize| u32::try_from(pages).unwrap_or(u32::MAX).min(most);
        let wanted = at_most(missing.max(self.pages.capacity()).max(FIRST_SHARD_PAGES));
        let needed = at_most(missing);
        let mut pages = wanted;
        if let Err(error) = backend.add_shard(&mut self.store, wanted).await {
            if wanted == needed || !matches!(error, Error::OutOfMemory { .. }) {
                return Err(error);
            }
            backend.add_shard(&mut self.store, needed).await?;
            pages = needed;
        }
        self.pages.add_shard(pages);
        Ok(())
    }
}

/// The bytes of one store of a cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreMemory {
    /// Format of the store.
    pub format: SegmentFormat,
    /// Bytes that the store holds on the device, in use or free: tiles, tile ranges and span ranges.
    pub allocated_bytes: u64,
    /// Bytes of the pages and range slots that spans use, whole pages counted, shared ones once.
    pub in_use_bytes: u64,
    /// Pages of the store.
    pub pages: usize,
    /// Pages that spans use.
    pub pages_in_use: usize,
    /// Tokens stored, those that sequences share counted in each.
    pub tokens: usize,
    /// Key and value elements of these tokens.
    pub elements: u64,
}

impl StoreMemory {
    /// Bits in use per stored element, ranges and the unused rest of last pages included; 0 if nothing is stored.
    pub fn bits_per_element(&self) -> f64 {
        if self.elements == 0 { 0.0 } else { self.in_use_bytes as f64 * 8.0 / self.elements as f64 }
    }
}

/// The bytes of a cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheMemory {
    /// The f16 store.
    pub f16: StoreMemory,
    /// The packed store; nothing is ever in it if the recipe packs nothing.
    pub packed: StoreMemory,
}

impl CacheMemory {
    /// Bytes held on the device.
    pub fn allocated_bytes(&self) -> u64 {
        self.f16.allocated_bytes + self.packed.allocated_bytes
    }

    /// Bytes of the pages and range slots in use.
    pub fn in_use_bytes(&self) -> u64 {
        self.f16.in_use_bytes + self.packed.in_use_bytes
    }

    /// Bits in use per stored element; 0 if nothing is stored.
    pub fn bits_per_element(&self) -> f64 {
        let elements = self.f16.elements + self.packed.elements;
        if elements == 0 { 0.0 } else { self.in_use_bytes() as f64 * 8.0 / elements as f64 }
    }
}
