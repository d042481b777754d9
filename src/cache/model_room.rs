//! Room of [`ModelCache`]: what its layers have left, need and allocate.

use super::budget::Budget;
use super::layers::LayerGroup;
use super::model_cache::tokens_of;
use super::reserve::{Asked, check, reserve};
use super::{ModelCache, ObservedPrompt, PromptSpan, SequencePages, StoreRoom, SwappedSequence, TokenRun};
use crate::backend::Backend;
use crate::{Error, Result};

impl<B: Backend> ModelCache<B> {
    /// The same with a budget that every call keeps. What is allocated already counts.
    #[must_use]
    pub fn with_budget(mut self, budget: Budget) -> Self {
        self.budget = budget;
        self
    }

    /// The budget.
    pub const fn budget(&self) -> Budget {
        self.budget
    }

    // --- asking ------------------------------------------------------------------------------------------------------

    /// Whether a step that appends these runs has room: [`ModelCache::reserve_for_append`] within the budget, and then
    /// [`ModelCache::begin_append`].
    ///
    /// # Errors
    /// Those of [`ModelCache::begin_append`] for the runs.
    pub fn fits(&self, runs: &[TokenRun]) -> Result<bool> {
        self.fits_room(&self.room_of_groups(|group| group.page_tables.room_for_append(runs, tokens_of(runs)))?)
    }

    /// Whether a prompt of these spans has room.
    ///
    /// # Errors
    /// [`Error::Plan`] when a span names no store of a layer, [`Error::Unsupported`] when one is gathered and a layer has
    /// a window.
    pub fn fits_prefill(&self, spans: &[PromptSpan<'_, B::Indices>]) -> Result<bool> {
        self.fits_room(&self.room_of_groups(|group| group.page_tables.room_for_prompt(spans))?)
    }

    /// Whether a sequence that was swapped out has room.
    ///
    /// # Errors
    /// [`Error::Plan`] when it was taken out of a cache of other layers or recipes.
    pub fn fits_swap_in(&self, swapped: &SwappedSequence<B::Indices>) -> Result<bool> {
        self.fits_room(&swapped.room_in(&self.groups)?)
    }

    /// Room that the pages of a layer have left, by store: without what the budget would yet allow.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub fn free_room(&self, layer: usize) -> Result<Vec<StoreRoom>> {
        Ok(self.group(layer)?.0.page_tables.free_room())
    }

    /// Room that appending needs in a layer, by store.
    ///
    /// # Errors
    /// As [`ModelCache::begin_append`] for the runs.
    pub fn room_for_append(&self, layer: usize, runs: &[TokenRun]) -> Result<Vec<StoreRoom>> {
        self.group(layer)?.0.page_tables.room_for_append(runs, tokens_of(runs))
    }

    /// Room that a prompt of these spans needs in a layer, by store.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer, or a span names no store of it, [`Error::Unsupported`] when one is
    /// gathered and the layer has a window.
    pub fn room_for_prefill(&self, layer: usize, spans: &[PromptSpan<'_, B::Indices>]) -> Result<Vec<StoreRoom>> {
        self.group(layer)?.0.page_tables.room_for_prompt(spans)
    }

    /// Room that a sequence which was swapped out needs in a layer, by store.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer, or the sequence was taken out of a cache of other layers or
    /// recipes.
    pub fn room_for_swap_in(&self, layer: usize, swapped: &SwappedSequence<B::Indices>) -> Result<Vec<StoreRoom>> {
        swapped.room_in_layer(&self.groups, self.place(layer)?)
    }

    /// Room that [`ModelCache::compress`] needs in every layer for what the policy keeps of a prompt, by layer and
    /// store. Where budgets depend on the attention that was measured, it waits for the device.
    ///
    /// # Errors
    /// Those of [`ObservedPrompt::select`].
    pub async fn room_for_compress(&self, prompt: &ObservedPrompt<B>) -> Result<Vec<Vec<StoreRoom>>> {
        let decided = prompt.decide().await?;
        let mut rooms = Vec::with_capacity(self.layers());
        for (layer, decided) in decided.layers.iter().enumerate() {
            let spans = decided.kept.as_ref().map(|kept| PromptSpan::gather(kept, super::StoreId::PACKED));
            rooms.push(self.group(layer)?.0.page_tables.room_for_prompt(spans.as_slice())?);
        }
        Ok(rooms)
    }

    /// Pages of a sequence in a layer, by store. Swapping it out, or clearing it, frees those that are its own.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer, [`Error::Sequence`] when there is no such sequence.
    pub fn pages_of(&self, layer: usize, sequence: usize) -> Result<Vec<SequencePages>> {
        self.group(layer)?.0.page_tables.pages_of(sequence)
    }

    // --- allocating --------------------------------------------------------------------------------------------------

    /// Allocates this room in every layer, by store, in as few shards as the device allows: one, if it is the first.
    /// Room that is free already counts.
    ///
    /// # Errors
    /// [`Error::Plan`] when a recipe has more stores or a step is open, [`Error::NoRoom`] when the budget has no room for
    /// it, [`Error::OutOfMemory`] or [`Error::Limit`]. The cache is as it was.
    pub async fn reserve(&mut self, room: &[StoreRoom]) -> Result<()> {
        let needed = self.room_of_groups(|group| room_of_stores(group, room))?;
        self.reserve_room(&needed, Asked::ForItself).await
    }

    /// Allocates this room in all layers of the same shape and recipe as `layer`. Layers of another recipe get room of
    /// their own, so that f16 layers take no f16 pages of packed ones.
    ///
    /// # Errors
    /// Those of [`ModelCache::reserve`], and [`Error::Plan`] when there is no such layer.
    pub async fn reserve_kind(&mut self, layer: usize, room: &[StoreRoom]) -> Result<()> {
        let of = self.group(layer)?.0;
        let needed = room_of_stores(of, room)?;
        let same = |group: &LayerGroup<B>| group.shape == of.shape && group.recipe() == of.recipe();
        let rooms = self.groups.iter().map(|group| if same(group) { needed.clone() } else { Vec::new() });
        self.reserve_room(&rooms.collect::<Vec<_>>(), Asked::ForItself).await
    }

    /// Allocates the room that appending needs, unless it exists.
    ///
    /// # Errors
    /// Those of [`ModelCache::begin_append`], [`Error::NoRoom`] when the budget has no room for it,
    /// [`Error::OutOfMemory`] or [`Error::Limit`]. The cache is as it was.
    pub async fn reserve_for_append(&mut self, runs: &[TokenRun]) -> Result<()> {
        let needed = self.room_of_groups(|group| group.page_tables.room_for_append(runs, tokens_of(runs)))?;
        self.reserve_room(&needed, Asked::OnTheWay).await
    }

    /// Allocates the room that a prompt needs, unless it exists.
    ///
    /// # Errors
    /// [`Error::Plan`] when a span names no store of a layer or a step is open, [`Error::Unsupported`] when one is
    /// gathered and a layer has a window, [`Error::NoRoom`] when the budget has no room for it,
    /// [`Error::OutOfMemory`] or [`Error::Limit`]. The cache is as it was.
    pub async fn reserve_for_prefill(&mut self, spans: &[PromptSpan<'_, B::Indices>]) -> Result<()> {
        let needed = self.room_of_groups(|group| group.page_tables.room_for_prompt(spans))?;
        self.reserve_room(&needed, Asked::OnTheWay).await
    }

    /// Frees memory that holds nothing: the newest shards of every store. Returns the number of bytes. A bound step
    /// keeps the buffers alive that it was bound to, until the engine writes another step.
    ///
    /// # Errors
    /// [`Error::Plan`] when a step is open.
    pub fn trim(&mut self) -> Result<u64> {
        self.check_no_step()?;
        let before = self.memory().allocated_bytes();
        self.groups.iter_mut().for_each(LayerGroup::trim);
        Ok(before - self.memory().allocated_bytes())
    }

    // --- parts -------------------------------------------------------------------------------------------------------

    /// Room of every group.
    pub(super) fn room_of_groups(
        &self,
        room: impl Fn(&LayerGroup<B>) -> Result<Vec<StoreRoom>>,
    ) -> Result<Vec<Vec<StoreRoom>>> {
        self.groups.iter().map(room).collect()
    }

    /// The table of an open step names the shards that it writes, and reserving may replace them.
    pub(super) async fn reserve_room(&mut self, needed: &[Vec<StoreRoom>], asked: Asked) -> Result<()> {
        self.check_no_step()?;
        reserve(&mut self.groups, needed, self.budget, asked).await
    }

    fn fits_room(&self, needed: &[Vec<StoreRoom>]) -> Result<bool> {
        match check(&self.groups, needed, self.budget, Asked::OnTheWay) {
            Ok(_) => Ok(true),
            Err(Error::NoRoom { .. } | Error::OutOfMemory { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// The room of as many stores as the recipe of a group has.
fn room_of_stores<B: Backend>(group: &LayerGroup<B>, room: &[StoreRoom]) -> Result<Vec<StoreRoom>> {
    let stores = group.recipe().stores().len();
    room.get(..stores).map(<[StoreRoom]>::to_vec).ok_or_else(|| {
        let reason = format!("room for {} stores, and a layer has {stores}", room.len());
        Error::Plan { what: "reserve", reason }
    })
}
