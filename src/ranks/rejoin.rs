//! Ranks that find each other again after a failure, and drop what they do not all have.

use super::context_parallel::ContextParallel;
use super::purpose::Purpose;
use super::transport::Transport;
use crate::backend::Backend;
use crate::cache::Generation;
use crate::{Error, Result};

/// What ranks have after they have found each other again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rejoined {
    /// Sequences that lost their newest tokens on some ranks, since not all ranks had them.
    pub truncated: Vec<usize>,
    /// Sequences that the ranks have no common beginning of. They are empty now.
    pub lost: Vec<usize>,
}

/// Numbers that a rank sends of a sequence: its generation and its length.
const NUMBERS: usize = Generation::NUMBERS + 1;

impl<T: Transport> ContextParallel<T>
where
    T::Backend: Backend,
{
    /// Goes on with another transport after [`Error::Transport`]. An open step is abandoned. A rank may have committed
    /// the last step before the failure and another not: the ranks tell each other how long their sequences are and
    /// which changes they went through, and drop tokens that not all have. Where ranks differ in a change of a sequence
    /// other than one truncation (a clear, a fork, a `forget`, a swap, a compression), its contents differ, and it is
    /// lost. A rank that comes with an empty cache, since its process is new, empties the sequences of all. Waits for
    /// the others.
    ///
    /// Sequences that hold prefixes are among them. [Clear](crate::cache::PrefixCache::clear) a
    /// [`PrefixCache`](crate::cache::PrefixCache) that has one of these in [`Rejoined`].
    ///
    /// # Errors
    /// [`Error::Plan`] when the transport is one of another rank or between other ranks, [`Error::Transport`].
    pub async fn rejoin(&mut self, transport: T) -> Result<Rejoined> {
        let (rank, ranks) = (transport.rank(), transport.ranks());
        if (rank, ranks) != (self.rank(), self.ranks()) {
            let reason = format!("rank {rank} of {ranks} for rank {} of {}", self.rank(), self.ranks());
            return Err(Error::Plan { what: "ranks", reason });
        }
        self.cache.abandon();
        self.transport = transport;
        let sequences = self.cache.sequences();
        let mut mine = Vec::with_capacity(sequences.saturating_mul(NUMBERS));
        for sequence in 0..sequences {
            mine.extend(self.cache.generation(sequence)?.to_numbers());
            mine.push(self.cache.length(sequence)? as u64);
        }
        let of_ranks = self.gather_numbers(Purpose::Rejoin, &mine).await?;
        let mut rejoined = Rejoined::default();
        let mut failed = Vec::with_capacity(sequences);
        for sequence in 0..sequences {
            let of_sequence: Vec<(Generation, u64)> = of_ranks.iter().map(|of| of_rank(of, sequence)).collect();
            let (generation, length) = Generation::common(&of_sequence);
            if of_sequence.iter().any(|(_, of_rank)| *of_rank != length) {
                rejoined.truncated.push(sequence);
            }
            let kept = self.cut(sequence, length as usize);
            self.cache.set_generation(sequence, generation);
            let parted = length == 0 && of_sequence.iter().all(|(_, of_rank)| *of_rank > 0);
            failed.push(u64::from(kept.is_err() || parted));
        }
        let of_ranks = self.gather_numbers(Purpose::Rejoin, &failed).await?;
        rejoined.lost = (0..sequences).filter(|&of| of_ranks.iter().any(|failed| failed[of] > 0)).collect();
        rejoined.truncated.retain(|sequence| !rejoined.lost.contains(sequence));
        for &sequence in &rejoined.lost {
            self.cache.clear(sequence)?;
        }
        Ok(rejoined)
    }

    fn cut(&mut self, sequence: usize, length: usize) -> Result<()> {
        if length == 0 {
            return self.cache.clear(sequence);
        }
        if self.cache.length(sequence)? == length { Ok(()) } else { self.cache.truncate(sequence, length) }
    }
}

/// What a rank sent of a sequence.
fn of_rank(numbers: &[u64], sequence: usize) -> (Generation, u64) {
    let [number, before, unchanged, length] = numbers.as_chunks::<NUMBERS>().0[sequence];
    (Generation::from_numbers([number, before, unchanged]), length)
}
