//! The changes that a sequence went through: ranks compare them, since equal lengths do not say equal contents.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::ModelCache;
use crate::Result;
use crate::backend::Backend;

/// Names the changes of a sequence in their order, apart from tokens that were appended or kept at its end. Caches that
/// made the same changes have the same number, whatever they did to other sequences in between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Generation {
    number: u64,
    /// The number before the newest change.
    before: u64,
    /// Positions below this one are as they were before the newest change.
    unchanged: u64,
}

/// A change of a sequence's contents.
#[derive(Clone, Copy, Debug, Hash)]
pub(super) enum ContentChange {
    Cleared,
    /// Number of the source at the time.
    Forked(u64),
    /// The new length.
    Truncated(usize),
    /// From a position to another.
    Forgot(usize, usize),
    SwappedIn,
    CompressedAgain,
}

impl Generation {
    /// Numbers that stand for a generation.
    pub(crate) const NUMBERS: usize = 3;

    fn after(self, change: ContentChange) -> Self {
        let unchanged = match change {
            ContentChange::Truncated(length) => length as u64,
            _ => 0,
        };
        Self { number: hash_of(&(self.number, change)), before: self.number, unchanged }
    }

    pub(crate) const fn to_numbers(self) -> [u64; Self::NUMBERS] {
        [self.number, self.before, self.unchanged]
    }

    pub(crate) const fn from_numbers([number, before, unchanged]: [u64; Self::NUMBERS]) -> Self {
        Self { number, before, unchanged }
    }

    /// How many positions of a sequence are the same in caches with these generations and lengths, and the generation
    /// of all caches once they hold no more. Caches may be one change apart, as a rank that failed within a step is.
    /// Otherwise nothing is known to be the same.
    pub(crate) fn common(of_caches: &[(Self, u64)]) -> (Self, u64) {
        let follows =
            |newest: &Self| of_caches.iter().all(|(of, _)| [newest.number, newest.before].contains(&of.number));
        let newest = of_caches.iter().map(|(of, _)| *of).find(follows);
        let least = of_caches.iter().map(|(_, length)| *length).min().unwrap_or(0);
        if let Some(newest) = newest.filter(|_| least > 0) {
            let of_newest = of_caches.iter().filter(|(of, _)| of.number == newest.number);
            let unchanged = of_newest.clone().map(|(of, _)| of.unchanged).min().unwrap_or(0);
            let differ = of_newest.count() < of_caches.len();
            let length = if differ { least.min(unchanged) } else { least };
            if length > 0 {
                return (Self { unchanged: unchanged.min(length), ..newest }, length);
            }
        }
        let numbers: Vec<u64> = of_caches.iter().map(|(of, _)| of.number).collect();
        (Self { number: hash_of(&numbers), before: 0, unchanged: 0 }, 0)
    }
}

fn hash_of(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

impl<B: Backend> ModelCache<B> {
    /// The changes that a sequence went through.
    ///
    /// # Errors
    /// [`Error::Sequence`](crate::Error::Sequence) when there is no such sequence.
    pub(crate) fn generation(&self, sequence: usize) -> Result<Generation> {
        self.length(sequence)?;
        Ok(self.generations.get(sequence).copied().unwrap_or_default())
    }

    /// Gives a sequence the generation that all ranks agreed on, or takes back that of a change that was undone.
    pub(crate) fn set_generation(&mut self, sequence: usize, generation: Generation) {
        if let Some(of) = self.generations.get_mut(sequence) {
            *of = generation;
        }
    }

    /// Notes a change of a sequence.
    pub(super) fn note_change(&mut self, sequence: usize, change: ContentChange) {
        if let Some(of) = self.generations.get_mut(sequence) {
            *of = of.after(change);
        }
    }

    /// Notes that a sequence holds the tokens of another.
    pub(super) fn note_fork(&mut self, source: usize, target: usize) {
        let of_source = self.generations.get(source).map_or(0, |of| of.number);
        self.note_change(target, ContentChange::Forked(of_source));
    }
}
