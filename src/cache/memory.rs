//! The bytes of a cache.

use crate::format::SegmentFormat;

/// The bytes of one store of a cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreMemory {
    /// Format of the store.
    pub format: SegmentFormat,
    /// Bytes that the store has on the device, used or free: tiles, tile ranges, span ranges and centres.
    pub allocated_bytes: u64,
    /// Bytes of the pages and range slots that spans use, and of the centres of sequences. Whole pages count, shared
    /// ones once.
    pub in_use_bytes: u64,
    /// Number of pages of the store.
    pub pages: usize,
    /// Number of pages that spans use.
    pub pages_in_use: usize,
    /// Number of stored tokens. A token that sequences share counts in each of them.
    pub tokens: usize,
    /// Number of key and value elements of these tokens.
    pub elements: u64,
}

impl StoreMemory {
    /// Bits in use per stored element, including ranges and the unused rest of last pages; 0 if nothing is stored.
    pub fn bits_per_element(&self) -> f64 {
        if self.elements == 0 { 0.0 } else { self.in_use_bytes as f64 * 8.0 / self.elements as f64 }
    }

    /// The sum of the bytes of two stores of one format.
    pub(super) const fn plus(self, other: &Self) -> Self {
        Self {
            format: self.format,
            allocated_bytes: self.allocated_bytes + other.allocated_bytes,
            in_use_bytes: self.in_use_bytes + other.in_use_bytes,
            pages: self.pages + other.pages,
            pages_in_use: self.pages_in_use + other.pages_in_use,
            tokens: self.tokens + other.tokens,
            elements: self.elements + other.elements,
        }
    }
}

/// The bytes of a cache.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheMemory {
    /// Its stores, in the order of [`Recipe::stores`](super::Recipe::stores): the first is f16.
    stores: Vec<StoreMemory>,
}

impl CacheMemory {
    /// Combines the bytes of the stores. The first is f16.
    pub(super) fn new(f16: StoreMemory, packed: impl IntoIterator<Item = StoreMemory>) -> Self {
        Self { stores: std::iter::once(f16).chain(packed).collect() }
    }

    /// The stores.
    pub fn stores(&self) -> &[StoreMemory] {
        &self.stores
    }

    /// The f16 store.
    pub fn f16(&self) -> &StoreMemory {
        &self.stores[0]
    }

    /// The packed stores.
    pub fn packed(&self) -> &[StoreMemory] {
        &self.stores[1..]
    }

    /// Bytes allocated on the device.
    pub fn allocated_bytes(&self) -> u64 {
        self.stores.iter().map(|store| store.allocated_bytes).sum()
    }

    /// Bytes of the pages and range slots in use.
    pub fn in_use_bytes(&self) -> u64 {
        self.stores.iter().map(|store| store.in_use_bytes).sum()
    }

    /// Number of stored elements.
    pub fn elements(&self) -> u64 {
        self.stores.iter().map(|store| store.elements).sum()
    }

    /// Bits in use per stored element; 0 if nothing is stored.
    pub fn bits_per_element(&self) -> f64 {
        let elements = self.elements();
        if elements == 0 { 0.0 } else { self.in_use_bytes() as f64 * 8.0 / elements as f64 }
    }
}
