//! What is done to the sequences of a [`ModelCache`] between its steps, in all layers alike.

use super::ModelCache;
use super::layer_reads::StoredSpan;
use crate::backend::Backend;
use crate::plan::{RowLayout, TokenRange};
use crate::{Error, Result};

impl<B: Backend> ModelCache<B> {
    /// Says what the keys of an empty sequence are stored without: one centre for each layer, in order. See
    /// [`KvCache::set_centre`](super::KvCache::set_centre).
    ///
    /// # Errors
    /// Those of [`KvCache::set_centre`](super::KvCache::set_centre), and [`Error::Plan`] when a step is open or there
    /// are more or fewer centres than layers.
    pub async fn set_centres(&mut self, sequence: usize, centres: &[&B::Tensor]) -> Result<()> {
        self.check_no_step()?;
        if centres.len() != self.layers.len() {
            let reason = format!("{} centres for {} layers", centres.len(), self.layers.len());
            return Err(Error::Plan { what: "centre", reason });
        }
        for (&(group, _), centre) in self.layers.iter().zip(centres) {
            self.groups[group].check_centre(centre).await?;
        }
        for group in &mut self.groups {
            group.reserve(&[]).await?;
        }
        let mut changes = Vec::with_capacity(self.groups.len());
        let mut written = Ok(());
        for group in &mut self.groups {
            written = group.page_tables.set_centre(sequence).map(|change| changes.push(change));
            if written.is_err() {
                break;
            }
        }
        if written.is_ok() {
            let places = self.layers.iter().zip(centres);
            written = places.into_iter().try_for_each(|(&(group, index), centre)| {
                let of = &mut self.groups[group];
                let rows = RowLayout::token_major(1, &of.shape);
                of.write_centres(index, &changes[group], rows, centre)
            });
        }
        for (group, change) in self.groups.iter_mut().zip(changes) {
            if written.is_ok() { group.page_tables.commit(change) } else { group.page_tables.abandon(change) }
        }
        written
    }

    /// Forgets all tokens of a sequence; its pages, range slots and centre are free again.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when a step is open.
    pub fn clear(&mut self, sequence: usize) -> Result<()> {
        self.check_no_step()?;
        self.groups.iter_mut().try_for_each(|group| group.page_tables.clear(sequence))
    }

    /// Lets an empty sequence hold all tokens of another, in all layers: see [`KvCache::fork`](super::KvCache::fork).
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when `target` holds tokens or
    /// a step is open.
    pub fn fork(&mut self, source: usize, target: usize) -> Result<()> {
        self.check_no_step()?;
        // The lengths of a sequence are those of all layers: the first refuses what any would.
        self.groups.iter_mut().try_for_each(|group| group.page_tables.fork(source, target))
    }

    /// Forgets the newest tokens of a sequence in all layers: see [`KvCache::truncate`](super::KvCache::truncate).
    ///
    /// # Errors
    /// Those of [`KvCache::truncate`](super::KvCache::truncate), and [`Error::Plan`] when a step is open.
    /// Nothing has changed.
    pub fn truncate(&mut self, sequence: usize, length: usize) -> Result<()> {
        self.check_no_step()?;
        self.groups.iter().try_for_each(|group| group.page_tables.check_truncate(sequence, length))?;
        self.groups.iter_mut().try_for_each(|group| group.page_tables.truncate(sequence, length))
    }

    /// Gives whole pages of old tokens back in all layers: see [`KvCache::forget`](super::KvCache::forget).
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when a step is open.
    pub fn forget(&mut self, sequence: usize, positions: TokenRange) -> Result<()> {
        self.check_no_step()?;
        self.groups.iter_mut().try_for_each(|group| group.page_tables.forget(sequence, positions))
    }

    /// What a layer holds of a sequence, as dense f32 rows: see [`KvCache::dequantize`](super::KvCache::dequantize).
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer, and those of [`KvCache::dequantize`](super::KvCache::dequantize).
    pub fn dequantize(&self, layer: usize, sequence: usize) -> Result<Vec<StoredSpan<B::Tensor>>> {
        let (group, index) = self.group(layer)?;
        group.dequantize(index, sequence)
    }
}
