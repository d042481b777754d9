//! Sequences that wait on the host: their pages are free for others, and come back bit for bit.

use super::budget::Budget;
use super::change::Change;
use super::layers::LayerGroup;
use super::reserve::{Asked, reserve};
use super::room::Lease;
use super::sequence::Sequence;
use super::{KvCache, ModelCache, Recipe, StoreRoom};
use crate::backend::{Backend, SpanBytes, SpanPlace};
use crate::format::AttentionShape;
use crate::plan::TokenIndices;
use crate::{Error, Result};

/// A sequence on the host, taken by [`ModelCache::swap_out`] or [`KvCache::swap_out`]. `I` is the backend's index
/// tensor, in which the positions of gathered spans stay on the device.
#[derive(Clone, Debug)]
pub struct SwappedSequence<I> {
    groups: Vec<SwappedGroup<I>>,
}

/// Its part in layers that share their page tables.
#[derive(Clone, Debug)]
struct SwappedGroup<I> {
    shape: AttentionShape,
    recipe: Recipe,
    /// The spans, without pages.
    sequence: Sequence<I>,
    /// The index of every layer in its model.
    numbers: Vec<usize>,
    layers: Vec<SwappedLayer>,
}

/// The part for a group of layers, which may have been split since the sequence was swapped out.
struct SwappedPart<'a, I> {
    sequence: Sequence<I>,
    layers: &'a [SwappedLayer],
}

/// Its contents in one layer.
#[derive(Clone, Debug)]
struct SwappedLayer {
    /// One entry per span.
    spans: Vec<SpanBytes>,
    /// The centre of its keys, one entry per store, if it has one.
    centres: Vec<SpanBytes>,
}

impl<I> SwappedSequence<I> {
    /// Number of its bytes on the host.
    pub fn bytes(&self) -> usize {
        let layers = self.groups.iter().flat_map(|group| &group.layers);
        layers.flat_map(|layer| layer.spans.iter().chain(&layer.centres)).map(|held| held.bytes().len()).sum()
    }

    /// Length of the sequence.
    pub fn length(&self) -> usize {
        self.groups.first().map_or(0, |group| group.sequence.length)
    }

    fn layers(&self) -> usize {
        self.groups.iter().map(|group| group.layers.len()).sum()
    }

    /// The part of the sequence for the layers of each group.
    ///
    /// # Errors
    /// [`Error::Plan`] when the groups are of other shapes or recipes.
    fn parts_of<B: Backend<Indices = I>>(&self, groups: &[LayerGroup<B>]) -> Result<Vec<SwappedPart<'_, I>>>
    where
        I: Clone,
    {
        let parts: Option<Vec<_>> = groups.iter().map(|group| self.part_of(group)).collect();
        let layers: usize = groups.iter().map(LayerGroup::layers).sum();
        parts.filter(|_| layers == self.layers()).ok_or_else(|| {
            let reason = "the sequence was taken out of a cache of other layers or recipes".into();
            Error::Plan { what: "swap", reason }
        })
    }

    /// Room that it needs in every group.
    ///
    /// # Errors
    /// [`Error::Plan`] when the groups are of other shapes or recipes.
    pub(super) fn room_in<B: Backend<Indices = I>>(&self, groups: &[LayerGroup<B>]) -> Result<Vec<Vec<StoreRoom>>>
    where
        I: TokenIndices + Clone,
    {
        let parts = self.parts_of(groups)?;
        Ok(groups.iter().zip(parts).map(|(group, part)| group.page_tables.room_for_sequence(&part.sequence)).collect())
    }

    /// The part of the sequence for the layers of a group; `None` if the group is of another shape or recipe.
    fn part_of<B: Backend<Indices = I>>(&self, group: &LayerGroup<B>) -> Option<SwappedPart<'_, I>>
    where
        I: Clone,
    {
        let (numbers, shape, recipe) = (group.numbers(), group.shape, group.recipe());
        self.groups.iter().find_map(|swapped| {
            let start = swapped.numbers.iter().position(|number| numbers.first() == Some(number))?;
            let part = start..start + numbers.len();
            let alike = swapped.shape == shape && swapped.recipe == *recipe;
            let same = alike && swapped.numbers.get(part.clone()) == Some(numbers);
            let sequence = || swapped.sequence.in_layers(part.clone());
            same.then(|| SwappedPart { sequence: sequence(), layers: &swapped.layers[part.clone()] })
        })
    }
}

impl<B: Backend> KvCache<B> {
    /// Moves a sequence to the host, and releases its pages and range slots: for one that must wait because memory is
    /// short. It waits for the device.
    ///
    /// Pages that it shares with other sequences are copied too, and belong to it alone when it comes back.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::OutOfMemory`] or [`Error::DeviceLost`]. On an error
    /// the cache is unchanged.
    pub async fn swap_out(&mut self, sequence: usize) -> Result<SwappedSequence<B::Indices>> {
        let swapped = read_sequence(std::slice::from_ref(&self.group), sequence).await?;
        self.clear(sequence)?;
        Ok(swapped)
    }

    /// Restores a swapped sequence, bit for bit, in an empty sequence, the same or another.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when it holds tokens or a centre, or the other
    /// was taken out of a cache of another shape or recipe, [`Error::NoRoom`] or [`Error::OutOfMemory`] when it does not
    /// fit. The cache is as it was.
    pub async fn swap_in(&mut self, sequence: usize, swapped: &SwappedSequence<B::Indices>) -> Result<()> {
        swap_in(std::slice::from_mut(&mut self.group), sequence, swapped, self.budget).await
    }
}

impl<B: Backend> ModelCache<B> {
    /// Moves a sequence to the host in all layers: see [`KvCache::swap_out`].
    ///
    /// # Errors
    /// As [`KvCache::swap_out`]; [`Error::Plan`] when a step is open. On an error the cache is unchanged.
    pub async fn swap_out(&mut self, sequence: usize) -> Result<SwappedSequence<B::Indices>> {
        self.check_no_step()?;
        let swapped = read_sequence(&self.groups, sequence).await?;
        self.clear(sequence)?;
        Ok(swapped)
    }

    /// Restores a swapped sequence in an empty one, in all layers: see [`KvCache::swap_in`].
    ///
    /// # Errors
    /// As [`KvCache::swap_in`]; [`Error::Plan`] when a step is open. On an error the cache is unchanged.
    pub async fn swap_in(&mut self, sequence: usize, swapped: &SwappedSequence<B::Indices>) -> Result<()> {
        self.check_no_step()?;
        swap_in(&mut self.groups, sequence, swapped, self.budget).await
    }
}

/// Restores a sequence in all groups, or in none.
async fn swap_in<B: Backend>(
    groups: &mut [LayerGroup<B>],
    sequence: usize,
    swapped: &SwappedSequence<B::Indices>,
    budget: Budget,
) -> Result<()> {
    let parts = swapped.parts_of(groups)?;
    groups.iter().try_for_each(|group| group.page_tables.check_empty(sequence))?;
    reserve(groups, &swapped.room_in(groups)?, budget, Asked::OnTheWay).await?;
    let mut changes: Vec<Change<B::Indices>> = Vec::with_capacity(groups.len());
    let mut written = Ok(());
    for (group, swapped) in groups.iter_mut().zip(&parts) {
        written = group.page_tables.restore(sequence, &swapped.sequence).and_then(|change| {
            changes.push(change);
            group.write_sequence(sequence, swapped)
        });
        if written.is_err() {
            break;
        }
    }
    for (group, change) in groups.iter_mut().zip(changes) {
        if written.is_ok() { group.page_tables.commit(change) } else { group.page_tables.abandon(change) }
    }
    written
}

/// Reads the contents of a sequence in every layer, all at once.
async fn read_sequence<B: Backend>(groups: &[LayerGroup<B>], sequence: usize) -> Result<SwappedSequence<B::Indices>> {
    let mut places = Vec::new();
    for group in groups {
        places.extend(group.places_of(sequence)?);
    }
    let mut bytes = groups[0].backend.read_spans(&places).await?.into_iter();
    let of_group = |group: &LayerGroup<B>| group.swapped(sequence, &mut bytes);
    Ok(SwappedSequence { groups: groups.iter().map(of_group).collect::<Result<_>>()? })
}

impl<B: Backend> LayerGroup<B> {
    /// Where the contents of a sequence lie: layer by layer its spans, then its centres.
    fn places_of(&self, sequence: usize) -> Result<Vec<(&B::Store, SpanPlace<'_>)>> {
        let held = self.page_tables.sequence(sequence)?;
        let mut places = Vec::new();
        for layer in 0..self.layers() {
            let stores = self.stores(layer);
            places.extend(held.spans.iter().map(|span| (stores[span.store.index()], span_place(&span.lease))));
            if held.centre.is_some() {
                places.extend(stores.into_iter().map(|store| (store, centre_place(held.centre))));
            }
        }
        Ok(places)
    }

    /// A sequence with the contents of [`LayerGroup::places_of`].
    fn swapped(
        &self,
        sequence: usize,
        bytes: &mut impl Iterator<Item = SpanBytes>,
    ) -> Result<SwappedGroup<B::Indices>> {
        let mut held = self.page_tables.sequence(sequence)?.clone();
        let centres = if held.centre.is_some() { self.recipe().stores().len() } else { 0 };
        let mut take = |count: usize| bytes.by_ref().take(count).collect();
        let layers = (0..self.layers())
            .map(|_| SwappedLayer { spans: take(held.spans.len()), centres: take(centres) })
            .collect();
        held.spans.iter_mut().for_each(|span| span.lease = Lease::default());
        let (shape, recipe, numbers) = (self.shape, self.recipe().clone(), self.numbers().to_vec());
        Ok(SwappedGroup { shape, recipe, sequence: held, numbers, layers })
    }

    /// Writes the contents of a sequence to its current pages and slots.
    fn write_sequence(&mut self, sequence: usize, swapped: &SwappedPart<'_, B::Indices>) -> Result<()> {
        let held = self.page_tables.sequence(sequence)?.clone();
        for (layer, swapped) in swapped.layers.iter().enumerate() {
            let (backend, mut stores) = self.backend_and_stores(layer);
            for (span, bytes) in held.spans.iter().zip(&swapped.spans) {
                backend.write_span(stores[span.store.index()], bytes, span_place(&span.lease))?;
            }
            for (store, bytes) in stores.iter_mut().zip(&swapped.centres) {
                backend.write_span(store, bytes, centre_place(held.centre))?;
            }
        }
        Ok(())
    }
}

fn span_place(lease: &Lease) -> SpanPlace<'_> {
    SpanPlace { pages: &lease.pages, range_slot: lease.slot, centre: None }
}

fn centre_place(centre: Option<usize>) -> SpanPlace<'static> {
    SpanPlace { centre, ..SpanPlace::default() }
}
