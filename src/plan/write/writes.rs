//! The writes of one step.

use super::WriteLayout;
use crate::plan::{Page, TokenRange};

/// A page that becomes a copy of another page of the same store, bit for bit: tiles and tile ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// The page to read.
    pub from: Page,
    /// The page to write.
    pub to: Page,
}

/// Puts one token into a page of a store whose format takes single tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenWrite {
    /// Token of the dense tensors.
    pub token: usize,
    /// The page.
    pub page: Page,
    /// The slot within the page, 0..128.
    pub slot: usize,
    /// Slot of the centre that is subtracted from the key, if the store has centres.
    pub centre: Option<usize>,
}

/// The mean of some keys, which becomes the centre of a sequence that begins: kernel `key_mean`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyMean {
    /// Tokens of the dense keys, no more than [`MOST_MEAN_TOKENS`](super::MOST_MEAN_TOKENS).
    pub tokens: TokenRange,
    /// Slot of the centre.
    pub slot: usize,
}

/// A full f16 page that is packed into a span of its own in another store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowMove {
    /// The page in the store that holds it.
    pub from: Page,
    /// The page that it is packed into.
    pub to: Page,
    /// Slot for the span's ranges, if the format has them.
    pub range_slot: usize,
}

/// The writes of one step to one store, without its windows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreWrites {
    /// Copies, done before any token is stored.
    pub copies: Vec<PageCopy>,
    /// Centres of sequences that begin, computed before any token is stored.
    pub centres: Vec<KeyMean>,
    /// Tokens.
    pub tokens: Vec<TokenWrite>,
}

/// The writes of one step, in this order: copies; then centres; then tokens, which may be centred with these; then
/// windows, which may hold tokens of the step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerWrites {
    /// One entry per store of the layout.
    pub stores: Vec<StoreWrites>,
    /// Full windows, one list per pair of stores of the layout ([`WriteLayout::windows`]).
    pub windows: Vec<Vec<WindowMove>>,
}

impl LayerWrites {
    /// Empty writes, with capacity for everything that the layout allows. Filling them allocates nothing.
    pub fn of(layout: &WriteLayout) -> Self {
        let store = |store: &super::StoreCapacity| StoreWrites {
            copies: Vec::with_capacity(store.copies),
            centres: Vec::with_capacity(store.centres),
            tokens: Vec::with_capacity(store.tokens),
        };
        Self {
            stores: layout.stores().iter().map(store).collect(),
            windows: layout.windows().iter().map(|pair| Vec::with_capacity(pair.windows)).collect(),
        }
    }

    /// Removes all writes and keeps the capacity.
    pub fn clear(&mut self) {
        for store in &mut self.stores {
            store.copies.clear();
            store.centres.clear();
            store.tokens.clear();
        }
        self.windows.iter_mut().for_each(Vec::clear);
    }

    /// Whether the step writes nothing.
    pub fn is_empty(&self) -> bool {
        let is_empty =
            |store: &StoreWrites| store.copies.is_empty() && store.centres.is_empty() && store.tokens.is_empty();
        self.stores.iter().all(is_empty) && self.windows.iter().all(Vec::is_empty)
    }
}
