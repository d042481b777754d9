//! Page tables of layers that part and join.

use super::PageTables;
use crate::cache::budget::Growth;
use crate::cache::room::Room;
use crate::cache::sequence::Sequence;
use crate::plan::TokenIndices;

impl<I: TokenIndices + Clone> PageTables<I> {
    /// Notes which tokens every layer gathers in a span of a sequence: as many, but others.
    pub(in crate::cache) fn differ_in_layers(&mut self, sequence: usize, span: usize, indices: Vec<I>) {
        if let Some(span) = self.sequences[sequence].spans.get_mut(span) {
            span.of_layers = indices;
        }
    }

    /// The place of the newest span of a sequence.
    pub(in crate::cache) fn newest(&self, sequence: usize) -> usize {
        self.sequences[sequence].spans.len().saturating_sub(1)
    }

    /// The page tables of one of the layers that share these.
    pub(in crate::cache) fn of_layer(&self, layer: usize) -> Self {
        let mut alone = self.clone();
        alone.sequences.iter_mut().for_each(|sequence| *sequence = sequence.in_layers(layer..layer + 1));
        alone.parted = true;
        alone
    }

    /// The page tables of layers that parted, in the order of the layers, if all sequences hold the same in each, at
    /// the same places. What a store has more in some layers than in others is left out, where stores may grow.
    pub(in crate::cache) fn joined(layers: &[&Self], growth: Growth) -> Option<Self> {
        let (first, others) = layers.split_first()?;
        let alike = |other: &&Self| {
            let both = first.sequences.iter().zip(&other.sequences);
            both.into_iter().all(|(one, other)| one.is_like(other) && one.lies_with(other))
        };
        if others.is_empty() || !others.iter().all(alike) {
            return None;
        }
        let room = |store: usize| Room::common(&layers.iter().map(|of| &of.rooms[store]).collect::<Vec<_>>(), growth);
        let rooms = (0..first.rooms.len()).map(room).collect::<Option<Vec<_>>>()?;
        let centres = layers.iter().map(|of| &of.centres).min_by_key(|centres| centres.len())?.clone();
        let of_sequence = |index: usize| Sequence::together(layers.iter().map(|of| &of.sequences[index]));
        let sequences = (0..first.sequences.len()).map(of_sequence).collect();
        // More than any layer had as soon as one changed, so that no reading begun before is taken for what they hold.
        let most = |index: usize| layers.iter().map(|of| of.changes_of(index)).max().unwrap_or(0);
        let changes = (0..first.sequences.len()).map(most).collect();
        let (recipe, share) = (first.recipe.clone(), first.share);
        Some(Self { recipe, rooms, sequences, changes, centres, parted: false, share })
    }
}
