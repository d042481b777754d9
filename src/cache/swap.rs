//! Sequences that wait on the host: their pages are free for others, and come back bit for bit.

use super::budget::Budget;
use super::change::Change;
use super::generation::ContentChange;
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
    pub(super) groups: Vec<SwappedGroup<I>>,
}

/// Its part in layers that share their page tables.
#[derive(Clone, Debug)]
pub(super) struct SwappedGroup<I> {
    pub(super) shape: AttentionShape,
    pub(super) recipe: Recipe,
    /// The spans, without pages.
    pub(super) sequence: Sequence<I>,
    /// The index of every layer in its model.
    pub(super) numbers: Vec<usize>,
    pub(super) layers: Vec<SwappedLayer>,
}

/// The part for a layer.
#[derive(Clone)]
struct LayerPart<'a, I> {
    sequence: Sequence<I>,
    contents: &'a SwappedLayer,
}

/// Its contents in one layer.
#[derive(Clone, Debug)]
pub(super) struct SwappedLayer {
    /// One entry per span.
    pub(super) spans: Vec<SpanBytes>,
    /// The centre of its keys, one entry per store, if it has one.
    pub(super) centres: Vec<SpanBytes>,
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

    /// The parts of the sequence for the layers of each group, in their order.
    ///
    /// # Errors
    /// [`Error::Plan`] when the groups are of other layers, shapes or recipes.
    fn parts_of<B: Backend<Indices = I>>(&self, groups: &[LayerGroup<B>]) -> Result<Vec<Vec<LayerPart<'_, I>>>>
    where
        I: Clone,
    {
        let of_group = |group: &LayerGroup<B>| {
            let of_layer = |&number: &usize| self.part_of(number, group.shape, group.recipe());
            group.numbers().iter().map(of_layer).collect::<Option<Vec<_>>>()
        };
        let parts: Option<Vec<_>> = groups.iter().map(of_group).collect();
        let layers: usize = groups.iter().map(LayerGroup::layers).sum();
        parts.filter(|_| layers == self.groups.iter().map(|group| group.layers.len()).sum()).ok_or_else(|| {
            let reason = "the sequence was taken out of a cache of other layers or recipes".into();
            Error::Plan { what: "swap", reason }
        })
    }

    /// The part for a layer of this shape and recipe, if it has one.
    fn part_of(&self, number: usize, shape: AttentionShape, recipe: &Recipe) -> Option<LayerPart<'_, I>>
    where
        I: Clone,
    {
        self.groups.iter().find_map(|group| {
            let place = group.numbers.iter().position(|of| *of == number)?;
            let contents = group.layers.get(place).filter(|_| group.shape == shape && group.recipe == *recipe)?;
            Some(LayerPart { sequence: group.sequence.in_layers(place..place + 1), contents })
        })
    }

    /// Room that it needs in the layers of every group. Where layers that share their page tables would part, this is
    /// what the one with most tokens needs.
    ///
    /// # Errors
    /// [`Error::Plan`] when the groups are of other shapes or recipes.
    pub(super) fn room_in<B: Backend<Indices = I>>(&self, groups: &[LayerGroup<B>]) -> Result<Vec<Vec<StoreRoom>>>
    where
        I: TokenIndices + Clone,
    {
        let most = |(group, parts): (&LayerGroup<B>, Vec<LayerPart<'_, I>>)| {
            let mut most = vec![StoreRoom::default(); group.recipe().stores().len()];
            for part in parts {
                let needed = group.page_tables.room_for_sequence(&part.sequence);
                for (most, needed) in most.iter_mut().zip(needed) {
                    *most = StoreRoom { pages: most.pages.max(needed.pages), spans: most.spans.max(needed.spans) };
                }
            }
            most
        };
        Ok(groups.iter().zip(self.parts_of(groups)?).map(most).collect())
    }

    /// Room that it needs in a layer: a group, and the place there.
    ///
    /// # Errors
    /// [`Error::Plan`] when the groups are of other shapes or recipes.
    pub(super) fn room_in_layer<B: Backend<Indices = I>>(
        &self,
        groups: &[LayerGroup<B>],
        (group, place): (usize, usize),
    ) -> Result<Vec<StoreRoom>>
    where
        I: TokenIndices + Clone,
    {
        let parts = self.parts_of(groups)?;
        Ok(groups[group].page_tables.room_for_sequence(&parts[group][place].sequence))
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
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when it holds tokens or a centre, or the
    /// other was taken out of a cache of another shape or recipe, [`Error::NoRoom`] or [`Error::OutOfMemory`] when it
    /// does not fit. The cache is as it was.
    pub async fn swap_in(&mut self, sequence: usize, swapped: &SwappedSequence<B::Indices>) -> Result<()> {
        let parts = swapped.parts_of(std::slice::from_ref(&self.group))?;
        swap_in(std::slice::from_mut(&mut self.group), sequence, &parts, self.budget).await
    }
}

impl<B: Backend> ModelCache<B> {
    /// Moves a sequence to the host in all layers: see [`KvCache::swap_out`]. It waits for the device;
    /// [`ModelCache::begin_swap_out`] does not.
    ///
    /// # Errors
    /// As [`KvCache::swap_out`]; [`Error::Plan`] when a step is open. On an error the cache is unchanged.
    pub async fn swap_out(&mut self, sequence: usize) -> Result<SwappedSequence<B::Indices>> {
        self.check_no_step()?;
        let swapped = read_sequence(&self.groups, sequence).await?;
        self.clear(sequence)?;
        Ok(swapped)
    }
}

impl<B: Backend + Clone> ModelCache<B> {
    /// Restores a swapped sequence in an empty one, in all layers: see [`KvCache::swap_in`]. It may have been taken out
    /// of another cache of the same layers. Layers that share their page tables and hold different numbers of its
    /// tokens part, as they do when it is [compressed](ModelCache::compress).
    ///
    /// # Errors
    /// As [`KvCache::swap_in`]; [`Error::Plan`] when a step is open. On an error the cache is unchanged.
    pub async fn swap_in(&mut self, sequence: usize, swapped: &SwappedSequence<B::Indices>) -> Result<()> {
        self.check_no_step()?;
        let parts = swapped.parts_of(&self.groups)?;
        self.groups.iter().try_for_each(|group| group.page_tables.check_empty(sequence))?;
        let differ = |of: &[LayerPart<'_, B::Indices>]| of.iter().any(|part| !part.sequence.is_like(&of[0].sequence));
        let apart: Vec<usize> =
            self.groups.iter().zip(&parts).filter(|(_, of)| differ(of)).map(|(group, _)| group.numbers()[0]).collect();
        self.part_layers(|group| apart.contains(&group.numbers()[0]));
        let parts = swapped.parts_of(&self.groups)?;
        let restored = swap_in(&mut self.groups, sequence, &parts, self.budget).await;
        match restored {
            Ok(()) => self.note_change(sequence, ContentChange::SwappedIn),
            Err(_) => self.join_layers(),
        }
        restored
    }
}

/// Restores a sequence in all groups, or in none. The parts for the layers of a group are alike.
async fn swap_in<B: Backend>(
    groups: &mut [LayerGroup<B>],
    sequence: usize,
    parts: &[Vec<LayerPart<'_, B::Indices>>],
    budget: Budget,
) -> Result<()> {
    groups.iter().try_for_each(|group| group.page_tables.check_empty(sequence))?;
    let together: Vec<Sequence<B::Indices>> =
        parts.iter().map(|of| Sequence::together(of.iter().map(|part| &part.sequence))).collect();
    let room = |(group, of): (&LayerGroup<B>, &Sequence<B::Indices>)| group.page_tables.room_for_sequence(of);
    let needed: Vec<_> = groups.iter().zip(&together).map(room).collect();
    reserve(groups, &needed, budget, Asked::OnTheWay).await?;
    let mut changes: Vec<Change<B::Indices>> = Vec::with_capacity(groups.len());
    let mut written = Ok(());
    for ((group, parts), together) in groups.iter_mut().zip(parts).zip(&together) {
        written = group.page_tables.restore(sequence, together).and_then(|change| {
            changes.push(change);
            group.write_sequence(sequence, parts)
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
    let mut swapped = without_contents(groups, sequence)?;
    swapped.fill(groups[0].backend.read_spans(&places_in(groups, sequence)?).await?);
    Ok(swapped)
}

/// Where the contents of a sequence lie, group by group.
///
/// # Errors
/// [`Error::Sequence`].
pub(super) fn places_in<B: Backend>(
    groups: &[LayerGroup<B>],
    sequence: usize,
) -> Result<Vec<(&B::Store, SpanPlace<'_>)>> {
    let mut places = Vec::new();
    for group in groups {
        places.extend(group.places_of(sequence)?);
    }
    Ok(places)
}

/// A sequence as it is on the host, but for the contents of [`places_in`].
///
/// # Errors
/// [`Error::Sequence`].
pub(super) fn without_contents<B: Backend>(
    groups: &[LayerGroup<B>],
    sequence: usize,
) -> Result<SwappedSequence<B::Indices>> {
    Ok(SwappedSequence { groups: groups.iter().map(|group| group.without_contents(sequence)).collect::<Result<_>>()? })
}

impl<I> SwappedSequence<I> {
    /// Fills in the contents of [`places_in`].
    pub(super) fn fill(&mut self, contents: Vec<SpanBytes>) {
        let mut bytes = contents.into_iter();
        let mut take = |count: usize| bytes.by_ref().take(count).collect();
        for group in &mut self.groups {
            let spans = group.sequence.spans.len();
            let centres = if group.sequence.centre.is_some() { group.recipe.stores().len() } else { 0 };
            group.layers =
                group.numbers.iter().map(|_| SwappedLayer { spans: take(spans), centres: take(centres) }).collect();
        }
    }
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

    /// A sequence without the contents of [`LayerGroup::places_of`].
    fn without_contents(&self, sequence: usize) -> Result<SwappedGroup<B::Indices>> {
        let mut held = self.page_tables.sequence(sequence)?.clone();
        held.spans.iter_mut().for_each(|span| span.lease = Lease::default());
        let (shape, recipe, numbers) = (self.shape, self.recipe().clone(), self.numbers().to_vec());
        Ok(SwappedGroup { shape, recipe, sequence: held, numbers, layers: Vec::new() })
    }

    /// Writes the contents of a sequence to its current pages and slots.
    fn write_sequence(&mut self, sequence: usize, parts: &[LayerPart<'_, B::Indices>]) -> Result<()> {
        let held = self.page_tables.sequence(sequence)?.clone();
        for (layer, part) in parts.iter().enumerate() {
            let (backend, mut stores) = self.backend_and_stores(layer);
            for (span, bytes) in held.spans.iter().zip(&part.contents.spans) {
                backend.write_span(stores[span.store.index()], bytes, span_place(&span.lease))?;
            }
            for (store, bytes) in stores.iter_mut().zip(&part.contents.centres) {
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
