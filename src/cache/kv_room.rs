//! Room of [`KvCache`]: what it may allocate, and what it holds.

use super::budget::Budget;
use super::reserve::{Asked, reserve};
use super::{KvCache, SequencePages, StoreId, StoreRoom};
use crate::Result;
use crate::backend::Backend;
use crate::counts::TokenCount;
use crate::format::TILE_TOKENS;

impl<B: Backend> KvCache<B> {
    /// The same with a budget that every call keeps. What is allocated already counts.
    #[must_use]
    pub fn with_budget(self, budget: Budget) -> Self {
        Self { budget, ..self }
    }

    /// The budget.
    pub const fn budget(&self) -> Budget {
        self.budget
    }

    /// Reserves room for one more span of `tokens` tokens, so that storing them allocates nothing on the device.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when there is no such store, [`Error::Limit`](crate::Error::Limit) for more
    /// tokens than a sequence may have, [`Error::NoRoom`](crate::Error::NoRoom) when the budget has no room for them,
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory). The cache is as it was.
    pub async fn reserve(&mut self, store: StoreId, tokens: usize) -> Result<()> {
        TokenCount::new(tokens)?;
        let mut needed = vec![StoreRoom::default(); self.recipe().stores().len()];
        needed[self.recipe().resolve(store)?.index()] = StoreRoom { pages: tokens.div_ceil(TILE_TOKENS), spans: 1 };
        self.reserve_room(needed, Asked::ForItself).await
    }

    pub(super) async fn reserve_room(&mut self, needed: Vec<StoreRoom>, asked: Asked) -> Result<()> {
        reserve(std::slice::from_mut(&mut self.group), &[needed], self.budget, asked).await
    }

    /// Frees memory that holds nothing: the newest shards of every store. Returns the number of bytes.
    pub fn trim(&mut self) -> u64 {
        let before = self.memory().allocated_bytes();
        self.group.trim();
        before - self.memory().allocated_bytes()
    }

    /// Pages of a sequence, by store.
    ///
    /// # Errors
    /// [`Error::Sequence`](crate::Error::Sequence) when there is no such sequence.
    pub fn pages_of(&self, sequence: usize) -> Result<Vec<SequencePages>> {
        self.group.page_tables.pages_of(sequence)
    }
}
