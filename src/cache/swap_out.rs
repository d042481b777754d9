//! Sequences on their way to the host while steps go on.

use std::fmt;
use std::sync::Arc;

use super::layers::LayerGroup;
use super::swap::{places_in, without_contents};
use super::{ModelCache, SwappedSequence};
use crate::backend::Backend;
use crate::{Error, Result};

/// A sequence on its way to the host, begun by [`ModelCache::begin_swap_out`]. Where it is dropped, the sequence stays
/// in the cache, and nothing has changed.
pub struct SwapOut<B: Backend> {
    backend: B,
    sequence: usize,
    reads: B::SpanReads,
    swapped: SwappedSequence<B::Indices>,
    /// How often the sequence had been changed, by layer.
    changes: Vec<u64>,
    /// Those of the cache that it leaves.
    flags: Arc<B::NonFiniteFlags>,
}

impl<B: Backend> SwapOut<B> {
    /// The sequence, in the cache that it leaves.
    pub const fn sequence(&self) -> usize {
        self.sequence
    }

    /// Whether its contents are on the host, so that [`ModelCache::finish_swap_out`] waits for nothing. Asks the
    /// device, and waits for nothing itself.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub fn has_arrived(&self) -> Result<bool> {
        self.backend.have_arrived(&self.reads)
    }
}

impl<B: Backend> fmt::Debug for SwapOut<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SwapOut").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl<B: Backend + Clone> ModelCache<B> {
    /// Begins to move a sequence to the host in all layers. The copies of its pages are queued after all submitted work.
    /// Nothing waits: steps of other sequences go on. The sequence keeps its pages until
    /// [`ModelCache::finish_swap_out`], and must not change before. While the copies arrive, the host holds the same
    /// number of bytes in staging buffers.
    ///
    /// ```
    /// # use kvpack::cache::{ModelCache, Recipe, TokenRun};
    /// # use kvpack::cpu::{Cpu, CpuTensor};
    /// # use kvpack::plan::RowLayout;
    /// # use kvpack::AttentionShape;
    /// # futures::executor::block_on(async {
    /// # let shape = AttentionShape::new(8, 2, 64)?;
    /// # let mut cache = ModelCache::new(&Cpu::new(), &[(shape, Recipe::f16())], 2)?;
    /// # let runs = [TokenRun::chunk(0, 9)];
    /// # cache.reserve_for_append(&runs).await?;
    /// # cache.begin_append(&runs)?;
    /// # let keys = CpuTensor::F32(vec![0.5; 9 * 2 * 64]);
    /// # cache.store(0, RowLayout::token_major(9, &shape), &keys, &keys).await?;
    /// # cache.commit()?;
    /// let leaving = cache.begin_swap_out(0)?;
    /// // Steps of other sequences, as long as `leaving.has_arrived()?` is false. Then:
    /// let swapped = cache.finish_swap_out(leaving).await?;
    /// assert_eq!((swapped.length(), cache.length(0)?), (9, 0));
    /// # Ok::<(), kvpack::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when a step is open,
    /// [`Error::NotSubmitted`] when an engine has encoded steps and not submitted them, [`Error::OutOfMemory`] or
    /// [`Error::DeviceLost`].
    pub fn begin_swap_out(&mut self, sequence: usize) -> Result<SwapOut<B>> {
        self.check_no_step()?;
        let swapped = without_contents(&self.groups, sequence)?;
        let backend = self.backend().clone();
        let reads = backend.begin_reads(&places_in(&self.groups, sequence)?)?;
        let (changes, flags) = (self.changes_of(sequence), self.groups[0].flags.clone());
        Ok(SwapOut { backend, sequence, reads, swapped, changes, flags })
    }

    /// Takes the contents of a sequence that began to leave, and releases its pages. It waits for what has not arrived
    /// yet: see [`SwapOut::has_arrived`].
    ///
    /// # Errors
    /// [`Error::Plan`] when the sequence was changed meanwhile, it began to leave another cache, or a step is open;
    /// [`Error::DeviceLost`]. Then it stays in the cache as it is.
    pub async fn finish_swap_out(&mut self, leaving: SwapOut<B>) -> Result<SwappedSequence<B::Indices>> {
        self.check_no_step()?;
        let refuse = |reason: String| Err(Error::Plan { what: "swap", reason });
        let SwapOut { backend, sequence, reads, mut swapped, changes, flags } = leaving;
        if !Arc::ptr_eq(&flags, &self.groups[0].flags) {
            return refuse(format!("sequence {sequence} began to leave another cache; finish it there"));
        }
        if self.changes_of(sequence) != changes {
            return refuse(format!(
                "sequence {sequence} was changed since it began to leave, and stays as it is; begin again \
                 (ModelCache::begin_swap_out)"
            ));
        }
        swapped.fill(backend.finish_reads(reads).await?);
        self.clear(sequence)?;
        Ok(swapped)
    }

    /// How often a sequence was changed, by layer.
    fn changes_of(&self, sequence: usize) -> Vec<u64> {
        let of_layer = |&(group, _): &(usize, usize)| {
            let group: &LayerGroup<B> = &self.groups[group];
            group.page_tables.changes_of(sequence)
        };
        self.layers.iter().map(of_layer).collect()
    }
}
