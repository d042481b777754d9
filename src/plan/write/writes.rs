//! What one step writes.

use super::WriteLayout;
use crate::plan::{Page, TokenRange};

/// A page that becomes the copy of another of the same store, bit for bit: tiles and tile ranges.
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
    /// Slot of the centre that is taken from the key, where the store has centres.
    pub centre: Option<usize>,
}

/// The mean of some keys, which becomes the centre of a sequence that begins: kernel `key_mean`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyMean {
    /// Tokens of the dense keys, at most [`MOST_MEAN_TOKENS`](super::MOST_MEAN_TOKENS).
    pub tokens: TokenRange,
    /// Slot of the centre that it becomes.
    pub slot: usize,
}

/// A full page of f16 that becomes a span of its own in another store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowMove {
    /// The page in the store that holds it.
    pub from: Page,
    /// The page that it is packed into.
    pub to: Page,
    /// Slot for the span's ranges, where the format has them.
    pub range_slot: usize,
}

/// What a step writes to one store, its windows aside.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreWrites {
    /// Copies, made before any token is stored.
    pub copies: Vec<PageCopy>,
    /// Centres of sequences that begin, made before any token is stored.
    pub centres: Vec<KeyMean>,
    /// Tokens.
    pub tokens: Vec<TokenWrite>,
}

/// What one step writes, in this order: copies, then centres, then tokens, which may be stored less those, then
/// windows, which may hold tokens of the step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerWrites {
    /// By store, as the layout counts them.
    pub stores: Vec<StoreWrites>,
    /// Full windows, by pair of stores as the layout counts them ([`WriteLayout::windows`]).
    pub windows: Vec<Vec<WindowMove>>,
}

impl LayerWrites {
    /// Nothing, with room for as much as the layout allows: filling it allocates nothing.
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

    /// Takes everything out and keeps the room.
    pub fn clear(&mut self) {
        for store in &mut self.stores {
            store.copies.clear();
            store.centres.clear();
            store.tokens.clear();
        }
        self.windows.iter_mut().for_each(Vec::clear);
    }

    /// True if the step writes nothing.
    pub fn is_empty(&self) -> bool {
        let is_empty =
            |store: &StoreWrites| store.copies.is_empty() && store.centres.is_empty() && store.tokens.is_empty();
        self.stores.iter().all(is_empty) && self.windows.iter().all(Vec::is_empty)
    }
}
