//! Layers of one kind share their page tables as long as they hold as many tokens. They part where a policy keeps other
//! numbers of tokens in each, and join again once nothing holds them apart.

use super::ModelCache;
use super::budget::Growth;
use super::last_step::LastStep;
use super::layers::LayerGroup;
use super::page_tables::PageTables;
use crate::backend::Backend;

impl<B: Backend + Clone> ModelCache<B> {
    /// Gives every layer of the groups that are to part page tables of its own.
    pub(super) fn part_layers(&mut self, apart: impl Fn(&LayerGroup<B>) -> bool) {
        let mut groups = Vec::with_capacity(self.layers.len());
        for group in std::mem::take(&mut self.groups) {
            if group.layers() > 1 && apart(&group) {
                groups.extend(group.part());
            } else {
                groups.push(group);
            }
        }
        self.set_groups(groups);
    }
}

impl<B: Backend> ModelCache<B> {
    /// Joins layers of one kind that parted and hold the same again, at the same places.
    pub(super) fn join_layers(&mut self) {
        let alike =
            |one: &LayerGroup<B>, other: &LayerGroup<B>| one.shape == other.shape && one.recipe() == other.recipe();
        let growth = self.budget.growth();
        let mut kinds: Vec<Vec<LayerGroup<B>>> = Vec::new();
        for group in std::mem::take(&mut self.groups) {
            match kinds.iter_mut().find(|kind| alike(&kind[0], &group)) {
                Some(kind) => kind.push(group),
                None => kinds.push(vec![group]),
            }
        }
        let groups = kinds.into_iter().flat_map(|kind| LayerGroup::join(kind, growth)).collect();
        self.set_groups(groups);
    }

    fn set_groups(&mut self, mut groups: Vec<LayerGroup<B>>) {
        // In the order of their layers, as steps and changes of all layers have it.
        groups.sort_by_key(|group| group.numbers()[0]);
        for (at, group) in groups.iter().enumerate() {
            group.numbers().iter().enumerate().for_each(|(place, &number)| self.layers[number] = (at, place));
        }
        self.groups = groups;
    }
}

impl<B: Backend> LayerGroup<B> {
    /// Splits the group into single layers, each with its own copy of the page tables: from now on they may hold
    /// different numbers of tokens.
    fn part(self) -> impl Iterator<Item = Self>
    where
        B: Clone,
    {
        let Self { backend, shape, split, page_tables, table, flags, layers, numbers, last: _ } = self;
        let alone = move |(layer, (stores, number))| {
            let (backend, page_tables, table) = (backend.clone(), page_tables.of_layer(layer), table.clone());
            let (flags, layers, numbers) = (flags.clone(), vec![stores], vec![number]);
            let last = LastStep::default();
            Self { backend, shape, split, page_tables, table, flags, layers, numbers, last }
        };
        layers.into_iter().zip(numbers).enumerate().map(alone)
    }

    /// Joins the single layers of one kind, in their order, if their page tables say the same.
    fn join(mut singles: Vec<Self>, growth: Growth) -> Vec<Self> {
        let tables: Vec<_> = singles.iter().map(|group| &group.page_tables).collect();
        let Some(page_tables) = PageTables::joined(&tables, growth) else { return singles };
        let others = singles.split_off(1);
        if let Some(all) = singles.first_mut() {
            (all.page_tables, all.last) = (page_tables, LastStep::default());
            for other in others {
                all.numbers.extend(other.numbers);
                all.layers.extend(other.layers);
            }
            all.drop_unknown_shards();
        }
        singles
    }
}
