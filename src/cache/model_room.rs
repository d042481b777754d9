//! Room of [`ModelCache`]: what its layers have left, need and allocate.

use super::model_cache::tokens_of;
use super::{ModelCache, PromptSpan, StoreRoom, TokenRun};
use crate::backend::Backend;
use crate::{Error, Result};

impl<B: Backend> ModelCache<B> {
    /// Room that the page tables of a layer have left, by store: what a scheduler has to give away.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub fn free_room(&self, layer: usize) -> Result<Vec<StoreRoom>> {
        Ok(self.group(layer)?.0.page_tables.free_room())
    }

    /// Room that appending needs in the page tables of a layer, by store.
    ///
    /// # Errors
    /// As [`ModelCache::begin_append`] for the runs.
    pub fn room_for_append(&self, layer: usize, runs: &[TokenRun]) -> Result<Vec<StoreRoom>> {
        self.group(layer)?.0.page_tables.room_for_append(runs, tokens_of(runs))
    }

    /// Allocates so much room in every layer, by store, in as few shards as the device allows: one, if it is the first.
    /// Room that is free already counts.
    ///
    /// # Errors
    /// [`Error::Plan`] when a recipe has more stores, [`Error::OutOfMemory`] or [`Error::Limit`].
    pub async fn reserve(&mut self, room: &[StoreRoom]) -> Result<()> {
        for group in &mut self.groups {
            let stores = group.recipe().stores().len();
            let Some(room) = room.get(..stores) else {
                let reason = format!("room for {} stores, and a layer has {stores}", room.len());
                return Err(Error::Plan { what: "reserve", reason });
            };
            group.reserve(room).await?;
        }
        Ok(())
    }

    /// Allocates the room that appending needs, unless it exists.
    ///
    /// # Errors
    /// Those of [`ModelCache::begin_append`] for the runs, [`Error::OutOfMemory`] or [`Error::Limit`].
    pub async fn reserve_for_append(&mut self, runs: &[TokenRun]) -> Result<()> {
        for group in &mut self.groups {
            let needed = group.page_tables.room_for_append(runs, tokens_of(runs))?;
            group.reserve(&needed).await?;
        }
        Ok(())
    }

    /// Allocates the room that a prompt needs, unless it exists.
    ///
    /// # Errors
    /// [`Error::Plan`] when a span names no store of a layer, [`Error::OutOfMemory`] or [`Error::Limit`].
    pub async fn reserve_for_prefill(&mut self, spans: &[PromptSpan<'_, B::Indices>]) -> Result<()> {
        for group in &mut self.groups {
            let needed = group.page_tables.room_for_prompt(spans)?;
            group.reserve(&needed).await?;
        }
        Ok(())
    }
}
