//! What one step writes.

use super::StepLayout;
use crate::plan::Page;

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
    /// Tokens.
    pub tokens: Vec<TokenWrite>,
}

/// What one step writes, in this order: copies, then tokens, then windows, which may hold tokens of the step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepWrites {
    /// By store, as the layout counts them.
    pub stores: Vec<StoreWrites>,
    /// Full windows, by pair of stores as the layout counts them ([`StepLayout::windows`]).
    pub windows: Vec<Vec<WindowMove>>,
}

impl StepWrites {
    /// Nothing, with room for as much as the layout allows: filling it allocates nothing.
    pub fn of(layout: &StepLayout) -> Self {
        let store = |store: &super::StoreCapacity| StoreWrites {
            copies: Vec::with_capacity(store.copies),
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
            store.tokens.clear();
        }
        self.windows.iter_mut().for_each(Vec::clear);
    }

    /// True if the step writes nothing.
    pub fn is_empty(&self) -> bool {
        self.stores.iter().all(|store| store.copies.is_empty() && store.tokens.is_empty())
            && self.windows.iter().all(Vec::is_empty)
    }
}
