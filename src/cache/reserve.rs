//! Memory for what calls need: decided for all layers before anything is allocated, and given back where that fails.

use super::budget::{Budget, Growth};
use super::larger_shards::LargerShards;
use super::layers::LayerGroup;
use super::{StoreId, StoreRoom};
use crate::backend::Backend;
use crate::format::SegmentFormat;
use crate::{Error, Result};

/// Pages of a store's first shard, unless more are needed at once: 1024 tokens.
const FIRST_SHARD_PAGES: usize = 8;

/// Range slots of a store's first allocation.
const FIRST_SLOTS: usize = 8;

/// Who asks for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// A caller who wants this room and no more.
    ForItself,
    /// A call that needs it on the way: it allocates as the budget lets stores grow.
    OnTheWay,
}

/// What the stores of layers that share their pages get.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GroupGrowth {
    /// Slots of centres in all, where some are missing.
    centres: Option<usize>,
    stores: Vec<StoreGrowth>,
}

/// What one store gets in every layer.
#[derive(Clone, Copy, Debug, PartialEq)]
struct StoreGrowth {
    /// Pages more.
    pages: usize,
    /// Range slots in all, where some are missing.
    slots: Option<usize>,
}

impl GroupGrowth {
    /// Pages more of every store.
    pub(super) fn pages(&self) -> impl Iterator<Item = usize> + '_ {
        self.stores.iter().map(|store| store.pages)
    }

    fn is_nothing(&self) -> bool {
        self.centres.is_none() && self.stores.iter().all(|store| store.pages == 0 && store.slots.is_none())
    }
}

/// Sees to it that so much room is free, group by group and store by store. On an error the cache is as it was, but for
/// range slots that are free.
///
/// # Errors
/// Those of [`check`], and those of the device.
pub(super) async fn reserve<B: Backend>(
    groups: &mut [LayerGroup<B>],
    needed: &[Vec<StoreRoom>],
    budget: Budget,
    asked: Asked,
) -> Result<()> {
    let lacking = check(groups, needed, budget, asked)?;
    if lacking.iter().all(GroupGrowth::is_nothing) {
        return Ok(());
    }
    if asked == Asked::OnTheWay && budget.growth() == Growth::Doubling {
        let doubled: Vec<_> = groups.iter().zip(&lacking).map(|(group, lacking)| group.doubled(lacking)).collect();
        if check_bytes(groups, &doubled, 0, budget).is_ok() {
            match grow(groups, &doubled, budget).await {
                // What is lacking may fit yet.
                Err(Error::OutOfMemory { .. } | Error::Limit { .. }) => {}
                grown => return grown,
            }
        }
    }
    grow(groups, &lacking, budget).await
}

/// What is lacking of the room that is needed, if the cache may have it.
///
/// # Errors
/// [`Error::NoRoom`] when the budget has no room for it, [`Error::OutOfMemory`] when the device has none.
pub(super) fn check<B: Backend>(
    groups: &[LayerGroup<B>],
    needed: &[Vec<StoreRoom>],
    budget: Budget,
    asked: Asked,
) -> Result<Vec<GroupGrowth>> {
    let mut lacking = Vec::with_capacity(groups.len());
    for (group, needed) in groups.iter().zip(needed) {
        if asked == Asked::OnTheWay && budget.growth() == Growth::None {
            group.page_tables.check_room(needed)?;
        }
        lacking.push(group.lacking(needed)?);
    }
    check_bytes(groups, &lacking, 0, budget)?;
    Ok(lacking)
}

/// Checks that a budget and the device have room for what groups are to get, and for `besides` bytes for a while.
fn check_bytes<B: Backend>(
    groups: &[LayerGroup<B>],
    growth: &[GroupGrowth],
    besides: u64,
    budget: Budget,
) -> Result<()> {
    let of = |(group, growth): (&LayerGroup<B>, &GroupGrowth)| group.growth_bytes(growth);
    let needed = groups.iter().zip(growth).map(of).fold(besides, u64::saturating_add);
    let grows = groups.iter().zip(growth).find(|(_, growth)| !growth.is_nothing());
    let Some((group, growth)) = grows else { return Ok(()) };
    let held: u64 = groups.iter().map(|group| group.memory().allocated_bytes()).sum();
    let free = budget.bytes().saturating_sub(held);
    if needed > free || needed == u64::MAX {
        let first = growth.stores.iter().position(|store| store.pages > 0 || store.slots.is_some()).unwrap_or(0);
        let store = group.recipe().stores()[first].format.to_string();
        return Err(Error::NoRoom { what: "bytes of the budget", store, needed, free });
    }
    match group.backend.available_bytes() {
        Some(available) if needed > available => {
            let message = format!("{available} bytes are available");
            Err(Error::OutOfMemory { what: "pages of a cache", bytes: needed, message })
        }
        _ => Ok(()),
    }
}

/// Lets all groups grow, or none.
async fn grow<B: Backend>(groups: &mut [LayerGroup<B>], growth: &[GroupGrowth], budget: Budget) -> Result<()> {
    let larger = larger_shards(groups, growth, budget).await;
    let before: Vec<Vec<usize>> = groups.iter().map(LayerGroup::shards).collect();
    let mut grown = Ok(());
    for ((group, growth), larger) in groups.iter_mut().zip(growth).zip(&larger) {
        grown = group.grow(growth, larger).await;
        if grown.is_err() {
            break;
        }
    }
    if grown.is_err() {
        groups.iter_mut().zip(&before).for_each(|(group, shards)| group.drop_shards(shards));
        return grown;
    }
    let mut of_groups = groups.iter_mut().zip(larger);
    of_groups.try_for_each(|(group, larger)| larger.into_iter().try_for_each(|larger| group.replace_shards(larger)))
}

/// Larger shards for the stores of every group that grow by one, next to those that they are to replace. None where the
/// budget or the device has no room for both, or steps are not submitted: then shards are added, which need less. What
/// else fails, such as a lost device, fails there again.
async fn larger_shards<B: Backend>(
    groups: &mut [LayerGroup<B>],
    growth: &[GroupGrowth],
    budget: Budget,
) -> Vec<Vec<LargerShards<B>>> {
    let of = |(group, growth): (&LayerGroup<B>, &GroupGrowth)| group.replaced_bytes(growth);
    let replaced = groups.iter().zip(growth).map(of).fold(0u64, u64::saturating_add);
    let none = || growth.iter().map(|_| Vec::new()).collect();
    if replaced == 0 || check_bytes(groups, growth, replaced, budget).is_err() {
        return none();
    }
    let mut larger = Vec::with_capacity(groups.len());
    for (group, growth) in groups.iter_mut().zip(growth) {
        match group.larger_shards(growth).await {
            Ok(of_group) => larger.push(of_group),
            Err(_) => return none(),
        }
    }
    larger
}

impl<B: Backend> LayerGroup<B> {
    /// What is missing of the room that is needed.
    ///
    /// # Errors
    /// [`Error::Limit`] when the device cannot hold a page of a store.
    fn lacking(&self, needed: &[StoreRoom]) -> Result<GroupGrowth> {
        let centres = self.page_tables.lacks_centres().then(|| self.page_tables.sequences().len());
        let mut stores = Vec::with_capacity(needed.len());
        for (store, needed) in self.store_ids().zip(needed) {
            let room = self.page_tables.room(store);
            let (pages, slots) = (needed.pages.saturating_sub(room.free_pages()), room.missing_slots(needed.spans));
            if pages > 0 {
                self.most_shard_pages(store)?;
            }
            let slots = (slots > 0).then(|| room.slots().saturating_add(slots));
            stores.push(StoreGrowth { pages, slots });
        }
        Ok(GroupGrowth { centres, stores })
    }

    /// The same, and as much as every store that lacks something holds.
    fn doubled(&self, lacking: &GroupGrowth) -> GroupGrowth {
        let double = |(store, of): (StoreId, &StoreGrowth)| {
            let room = self.page_tables.room(store);
            // More than a shard more is no use.
            let most = self.most_shard_pages(store).map_or(0, |most| most as usize);
            let double = room.pages().max(FIRST_SHARD_PAGES).min(most);
            let pages = if of.pages == 0 { 0 } else { of.pages.max(double) };
            let slots = of.slots.map(|slots| slots.max(2 * room.slots()).max(FIRST_SLOTS));
            StoreGrowth { pages, slots }
        };
        GroupGrowth { stores: self.store_ids().zip(&lacking.stores).map(double).collect(), ..lacking.clone() }
    }

    /// Bytes of what is to come, in all layers; `u64::MAX` where they cannot be counted.
    fn growth_bytes(&self, growth: &GroupGrowth) -> u64 {
        let mut bytes = 0u64;
        for (store, of) in self.store_ids().zip(&growth.stores) {
            let (format, room) = (self.recipe().stores()[store.index()].format, self.page_tables.room(store));
            let pages = (of.pages as u64).saturating_mul(format.page_bytes(&self.shape) as u64);
            let slots = of.slots.map_or(0, |slots| slots.saturating_sub(room.slots())) as u64;
            let slots = slots.saturating_mul(format.range_slot_bytes(&self.shape) as u64);
            bytes = bytes.saturating_add(pages).saturating_add(slots);
        }
        if let Some(centres) = growth.centres {
            let stores = self.recipe().stores().len() as u64;
            let new = centres.saturating_sub(self.page_tables.centres().len()) as u64;
            let of_store = new.saturating_mul(SegmentFormat::centre_bytes(&self.shape) as u64);
            bytes = bytes.saturating_add(of_store.saturating_mul(stores));
        }
        bytes.saturating_mul(self.layers() as u64)
    }

    /// Most pages of a shard.
    pub(super) fn most_shard_pages(&self, store: StoreId) -> Result<u32> {
        let format = self.recipe().stores()[store.index()].format;
        match self.backend.max_shard_pages(&self.shape, &format) {
            0 => Err(Error::Limit {
                what: format!("one page of {format} in bytes"),
                needed: format.page_bytes(&self.shape) as u64,
                allowed: 0,
                hint: "a binding of the device holds not even one page; use fewer KV heads per cache or fewer bits",
            }),
            most => Ok(most),
        }
    }

    /// Shards of every store.
    fn shards(&self) -> Vec<usize> {
        self.store_ids().map(|store| self.page_tables.room(store).shards()).collect()
    }

    /// Adds shards to all stores but those that have larger ones coming, and slots.
    async fn grow(&mut self, growth: &GroupGrowth, larger: &[LargerShards<B>]) -> Result<()> {
        for (store, of) in self.store_ids().zip(&growth.stores) {
            let comes = larger.iter().any(|larger| larger.store() == store);
            let mut missing = if comes { 0 } else { of.pages };
            while missing > 0 {
                let most = self.most_shard_pages(store)?;
                let pages = u32::try_from(missing).unwrap_or(u32::MAX).min(most);
                self.add_shard(store, pages).await?;
                missing -= pages as usize;
            }
        }
        for (store, of) in self.store_ids().zip(&growth.stores) {
            let Some(slots) = of.slots else { continue };
            self.reserve_ranges(store, slots).await?;
        }
        if let Some(slots) = growth.centres {
            self.reserve_centres(slots).await?;
        }
        Ok(())
    }

    /// Drops the newest shards of every store until it has the number in `shards`, or until a shard holds pages.
    fn drop_shards(&mut self, shards: &[usize]) {
        for (store, &shards) in self.store_ids().zip(shards) {
            while self.page_tables.room(store).shards() > shards && self.drop_shard(store) {}
        }
    }

    /// Drops the newest shards of every store as long as nothing lies in them.
    pub(super) fn trim(&mut self) {
        self.drop_shards(&vec![0; self.recipe().stores().len()]);
    }
}
