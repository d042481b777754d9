//! Sequences that wait on the host: their pages are free for others, and come back bit for bit.

use super::change::Change;
use super::layers::LayerGroup;
use super::room::Lease;
use super::sequence::Sequence;
use super::{KvCache, ModelCache, Recipe};
use crate::backend::{Backend, SpanBytes, SpanPlace};
use crate::format::AttentionShape;
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
    sequence: &'a Sequence<I>,
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

    /// What it held in the layers of a group; `None` if those are of another shape or recipe.
    fn part_of<B: Backend<Indices = I>>(&self, group: &LayerGroup<B>) -> Option<SwappedPart<'_, I>> {
        let (numbers, shape, recipe) = (group.numbers(), group.shape, group.recipe());
        self.groups.iter().find_map(|swapped| {
            let start = swapped.numbers.iter().position(|number| numbers.first() == Some(number))?;
            let part = start..start + numbers.len();
            let alike = swapped.shape == shape && swapped.recipe == *recipe;
            let same = alike && swapped.numbers.get(part.clone()) == Some(numbers);
            same.then(|| SwappedPart { sequence: &swapped.sequence, layers: &swapped.layers[part] })
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
        let groups = vec![self.group.read_sequence(sequence).await?];
        self.clear(sequence)?;
        Ok(SwappedSequence { groups })
    }

    /// Restores a swapped sequence, bit for bit, in an empty sequence, the same or another.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when it holds tokens or a centre, or the other
    /// was taken out of a cache of another shape or recipe, [`Error::OutOfMemory`] or [`Error::Limit`] when it does not
    /// fit. The cache is as it was.
    pub async fn swap_in(&mut self, sequence: usize, swapped: &SwappedSequence<B::Indices>) -> Result<()> {
        swap_in(std::slice::from_mut(&mut self.group), sequence, swapped).await
    }
}

impl<B: Backend> ModelCache<B> {
    /// Moves a sequence to the host in all layers: see [`KvCache::swap_out`].
    ///
    /// # Errors
    /// As [`KvCache::swap_out`]; [`Error::Plan`] when a step is open. On an error the cache is unchanged.
    pub async fn swap_out(&mut self, sequence: usize) -> Result<SwappedSequence<B::Indices>> {
        self.check_no_step()?;
        let mut groups = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            groups.push(group.read_sequence(sequence).await?);
        }
        self.clear(sequence)?;
        Ok(SwappedSequence { groups })
    }

    /// Restores a swapped sequence in an empty one, in all layers: see [`KvCache::swap_in`].
    ///
    /// # Errors
    /// As [`KvCache::swap_in`]; [`Error::Plan`] when a step is open. On an error the cache is unchanged.
    pub async fn swap_in(&mut self, sequence: usize, swapped: &SwappedSequence<B::Indices>) -> Result<()> {
        self.check_no_step()?;
        swap_in(&mut self.groups, sequence, swapped).await
    }
}

/// Restores a sequence in all groups, or in none.
async fn swap_in<B: Backend>(
    groups: &mut [LayerGroup<B>],
    sequence: usize,
    swapped: &SwappedSequence<B::Indices>,
) -> Result<()> {
    let parts: Option<Vec<_>> = groups.iter().map(|group| swapped.part_of(group)).collect();
    let layers: usize = groups.iter().map(LayerGroup::layers).sum();
    let Some(parts) = parts.filter(|_| layers == swapped.layers()) else {
        let reason = "the sequence was taken out of a cache of other layers or recipes".into();
        return Err(Error::Plan { what: "swap", reason });
    };
    for (group, swapped) in groups.iter_mut().zip(&parts) {
        let needed = group.page_tables.room_for_sequence(sequence, swapped.sequence)?;
        group.reserve(&needed).await?;
    }
    let mut changes: Vec<Change<B::Indices>> = Vec::with_capacity(groups.len());
    let mut written = Ok(());
    for (group, swapped) in groups.iter_mut().zip(&parts) {
        written = group.page_tables.restore(sequence, swapped.sequence).and_then(|change| {
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

impl<B: Backend> LayerGroup<B> {
    /// Reads the contents of a sequence in every layer.
    async fn read_sequence(&self, sequence: usize) -> Result<SwappedGroup<B::Indices>> {
        let mut held = self.page_tables.sequence(sequence)?.clone();
        let mut layers = Vec::with_capacity(self.layers());
        for layer in 0..self.layers() {
            let stores = self.stores(layer);
            let mut swapped = SwappedLayer { spans: Vec::with_capacity(held.spans.len()), centres: Vec::new() };
            for span in &held.spans {
                let place = span_place(&span.lease);
                swapped.spans.push(self.backend.read_span(stores[span.store.index()], place).await?);
            }
            if held.centre.is_some() {
                for store in stores {
                    swapped.centres.push(self.backend.read_span(store, centre_place(held.centre)).await?);
                }
            }
            layers.push(swapped);
        }
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
