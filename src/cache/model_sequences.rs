//! Changes to the sequences of a [`ModelCache`] between its steps, in all layers alike.

use super::ModelCache;
use super::generation::ContentChange;
use super::layer_reads::StoredSpan;
use super::reserve::Asked;
use crate::backend::{Backend, FlaggedToken};
use crate::plan::{RowLayout, TokenRange};
use crate::{Error, Result};

impl<B: Backend> ModelCache<B> {
    /// Sets the centres of an empty sequence, `[kv_heads, head_dim]` for each layer, in order. See
    /// [`KvCache::set_centre`](super::KvCache::set_centre).
    ///
    /// # Errors
    /// As [`KvCache::set_centre`](super::KvCache::set_centre); [`Error::Plan`] when a step is open or there is not one
    /// centre per layer.
    pub async fn set_centres(&mut self, sequence: usize, centres: &[&B::Tensor]) -> Result<()> {
        self.check_no_step()?;
        if centres.len() != self.layers.len() {
            let reason = format!("{} centres for {} layers", centres.len(), self.layers.len());
            return Err(Error::Plan { what: "centre", reason });
        }
        for (&(group, _), centre) in self.layers.iter().zip(centres) {
            self.groups[group].check_centre(centre).await?;
        }
        let nothing = vec![Vec::new(); self.groups.len()];
        self.reserve_room(&nothing, Asked::OnTheWay).await?;
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

    /// Removes all tokens of a sequence and releases its pages, range slots and centre. Layers that parted because they
    /// held different numbers of its tokens share their page tables again, unless another sequence holds them apart: it
    /// too has different numbers of tokens in them, or lies in shards that they allocated apart. With
    /// [`Growth::None`](super::Growth::None) they allocate none.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when a step is open.
    pub fn clear(&mut self, sequence: usize) -> Result<()> {
        self.check_no_step()?;
        self.groups.iter_mut().try_for_each(|group| group.page_tables.clear(sequence))?;
        self.note_change(sequence, ContentChange::Cleared);
        self.join_layers();
        Ok(())
    }

    /// Lets an empty sequence share all tokens of another, in all layers: see [`KvCache::fork`](super::KvCache::fork).
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when `target` holds tokens or
    /// a step is open.
    pub fn fork(&mut self, source: usize, target: usize) -> Result<()> {
        self.check_no_step()?;
        // The lengths of a sequence are the same in all layers, so the first layer refuses whatever any would.
        self.groups.iter_mut().try_for_each(|group| group.page_tables.fork(source, target))?;
        self.note_fork(source, target);
        Ok(())
    }

    /// Removes the newest tokens of a sequence in all layers: see [`KvCache::truncate`](super::KvCache::truncate).
    ///
    /// # Errors
    /// As [`KvCache::truncate`](super::KvCache::truncate); [`Error::Plan`] when a step is open. On an error nothing has
    /// changed.
    pub fn truncate(&mut self, sequence: usize, length: usize) -> Result<()> {
        self.check_truncate(sequence, length)?;
        let is_shorter = length < self.length(sequence)?;
        self.groups.iter_mut().try_for_each(|group| group.page_tables.truncate(sequence, length))?;
        if is_shorter {
            self.note_change(sequence, ContentChange::Truncated(length));
        }
        self.join_layers();
        Ok(())
    }

    /// Checks that [`ModelCache::truncate`] can do this, and changes nothing: for callers that truncate several
    /// sequences, or none. What is done to one sequence does not change the answer for another.
    ///
    /// # Errors
    /// As [`ModelCache::truncate`].
    pub fn check_truncate(&self, sequence: usize, length: usize) -> Result<()> {
        self.check_no_step()?;
        self.groups.iter().try_for_each(|group| group.page_tables.check_truncate(sequence, length))
    }

    /// Releases whole pages of old tokens in all layers: see [`KvCache::forget`](super::KvCache::forget).
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when a step is open.
    pub fn forget(&mut self, sequence: usize, positions: TokenRange) -> Result<()> {
        self.check_no_step()?;
        self.groups.iter_mut().try_for_each(|group| group.page_tables.forget(sequence, positions))?;
        self.note_change(sequence, ContentChange::Forgot(positions.start(), positions.end()));
        Ok(())
    }

    /// The contents of a sequence in a layer, as dense f32 rows: see
    /// [`KvCache::dequantize`](super::KvCache::dequantize).
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer, or it has not stored the tokens that the open step appends to the
    /// sequence; as [`KvCache::dequantize`](super::KvCache::dequantize).
    pub fn dequantize(&self, layer: usize, sequence: usize) -> Result<Vec<StoredSpan<B::Tensor>>> {
        let (group, index) = self.group(layer)?;
        self.check_holds(layer, sequence)?;
        group.dequantize(index, sequence)
    }

    /// Packs every full tile of a sequence's appended tokens that is due, in all layers. Call it after chunks, once
    /// their queries have attended. Steps of decoded tokens do this themselves.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when a step is open, [`Error::NoRoom`]
    /// or [`Error::OutOfMemory`] when the packed tiles do not fit. The cache is as it was.
    pub async fn pack_windows(&mut self, sequence: usize) -> Result<()> {
        self.check_no_step()?;
        let needed = self.room_of_groups(|group| group.page_tables.room_for_windows(sequence))?;
        self.reserve_room(&needed, Asked::OnTheWay).await?;
        let mut changes = Vec::with_capacity(self.groups.len());
        let mut written = Ok(());
        for group in &mut self.groups {
            written = group.open_windows(sequence).and_then(|change| {
                let written = group.write_windows(&change);
                changes.push(change);
                written
            });
            if written.is_err() {
                break;
            }
        }
        for (group, change) in self.groups.iter_mut().zip(changes) {
            if written.is_ok() { group.page_tables.commit(change) } else { group.page_tables.abandon(change) }
        }
        written
    }

    /// Keys and values of appended tokens that could not be stored exactly, over all steps since
    /// [`ModelCache::clear_non_finite`], by layer: see [`KvCache::non_finite`](super::KvCache::non_finite). It waits
    /// for the device.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub async fn non_finite(&self) -> Result<Vec<FlaggedToken>> {
        self.groups[0].read_flags().await
    }

    /// Clears the tokens that [`ModelCache::non_finite`] returns.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub fn clear_non_finite(&mut self) -> Result<()> {
        self.groups[0].clear_flags()
    }
}
