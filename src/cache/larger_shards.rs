//! Growth of stores that have as many shards as steps read at once: a larger shard takes the place of the newest.

use super::StoreId;
use super::layers::LayerGroup;
use super::reserve::GroupGrowth;
use crate::Result;
use crate::backend::Backend;
use crate::plan::PageAllocator;

/// Shards that are to take the place of the newest ones of a store, one for every layer.
pub(super) struct LargerShards<B: Backend> {
    store: StoreId,
    pages: PageAllocator,
    of_layers: Vec<B::Shard>,
}

impl<B: Backend> LargerShards<B> {
    pub(super) const fn store(&self) -> StoreId {
        self.store
    }
}

impl<B: Backend> LayerGroup<B> {
    /// Pages of the newest shard of a store that grows by `more` pages, if the store grows by a larger shard.
    fn larger_shard_pages(&self, store: StoreId, more: usize) -> Option<u32> {
        let room = self.page_tables.room(store);
        let newest = room.newest_shard_pages();
        let pages = newest.checked_add(u32::try_from(more).ok()?)?;
        let fits = self.most_shard_pages(store).is_ok_and(|most| pages <= most);
        (pages > newest && newest > 0 && room.shards() >= self.backend.shards_at_once() && fits).then_some(pages)
    }

    /// Bytes of the shards that larger ones replace, in all layers. They exist until all larger ones do.
    pub(super) fn replaced_bytes(&self, growth: &GroupGrowth) -> u64 {
        let of = |(store, more): (StoreId, usize)| {
            self.larger_shard_pages(store, more)?;
            let page = self.recipe().stores()[store.index()].format.page_bytes(&self.shape) as u64;
            Some(u64::from(self.page_tables.room(store).newest_shard_pages()).saturating_mul(page))
        };
        let of_layer = self.store_ids().zip(growth.pages()).filter_map(of).fold(0u64, u64::saturating_add);
        of_layer.saturating_mul(self.layers() as u64)
    }

    /// Larger shards for all stores that grow by one. The group is not changed, but for shards that only some layers
    /// have, from a future that was dropped: they go, since they would be the newest.
    ///
    /// # Errors
    /// Those of [`larger_shard`](crate::backend::Storage::larger_shard).
    pub(super) async fn larger_shards(&mut self, growth: &GroupGrowth) -> Result<Vec<LargerShards<B>>> {
        let mut larger = Vec::new();
        for (store, more) in self.store_ids().zip(growth.pages()) {
            let Some(shard_pages) = self.larger_shard_pages(store, more) else { continue };
            self.drop_unknown_shards();
            let pages = self.page_tables.room(store).with_larger_shard(shard_pages)?;
            let mut of_layers = Vec::with_capacity(self.layers());
            for layer in 0..self.layers() {
                of_layers.push(self.backend.larger_shard(self.store(layer, store), shard_pages).await?);
            }
            larger.push(LargerShards { store, pages, of_layers });
        }
        Ok(larger)
    }

    /// Puts the larger shards of a store in the places of its newest ones.
    ///
    /// # Errors
    /// None for shards that were made for this group and its present room.
    pub(super) fn replace_shards(&mut self, larger: LargerShards<B>) -> Result<()> {
        self.table.note_changed_stores();
        for (layer, shard) in larger.of_layers.into_iter().enumerate() {
            let (backend, mut stores) = self.backend_and_stores(layer);
            backend.replace_shard(stores[larger.store.index()], shard)?;
        }
        self.page_tables.room_mut(larger.store).replace_pages(larger.pages);
        Ok(())
    }
}
