//! The contents of a sequence replaced layer by layer: for ranks, which exchange what they keep in between.

use super::ModelCache;
use super::change::Change;
use super::decided::DecidedLayer;
use super::generation::ContentChange;
use super::layers::LayerGroup;
use super::observed::DenseLayer;
use super::reserve::Asked;
use super::sequence::Sequence;
use super::step::NewTokens;
use super::{PromptSpan, StoreId};
use crate::Result;
use crate::backend::Backend;
use crate::policy::LayerSelection;

/// A change that is open in all layers: the kept tokens take the place of what a sequence held.
pub(crate) struct Replaced<B: Backend> {
    sequence: usize,
    changes: Vec<Change<B::Indices>>,
    /// What every group of layers held before.
    held: Vec<Sequence<B::Indices>>,
}

impl<B: Backend> ModelCache<B> {
    /// The rows that a layer holds of a sequence, or held before a change that is open; `None` if there are none.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan), [`Error::Sequence`](crate::Error::Sequence), those of the device.
    pub(crate) async fn held_rows(
        &self,
        (layer, sequence): (usize, usize),
        before: Option<&Replaced<B>>,
    ) -> Result<Option<DenseLayer<B::Tensor>>> {
        let (group, place) = self.place(layer)?;
        let held = match before.and_then(|replaced| replaced.held.get(group)) {
            Some(held) => held,
            None => self.groups[group].page_tables.sequence(sequence)?,
        };
        if held.tokens() == 0 {
            return Ok(None);
        }
        self.groups[group].dense(place, held).await.map(Some)
    }

    /// Writes the rows that a layer keeps, `[kv_heads, count, head_dim]`, to the span of an open change.
    ///
    /// # Errors
    /// [`Error::NotFinite`](crate::Error::NotFinite) when a row is not what a store holds; those of the device.
    pub(crate) async fn write_replaced(
        &mut self,
        replaced: &Replaced<B>,
        layer: usize,
        rows: &DenseLayer<B::Tensor>,
    ) -> Result<()> {
        let (group, place) = self.place(layer)?;
        let new = NewTokens { rows: rows.rows, keys: &rows.keys, values: &rows.values };
        self.groups[group].check_rows(new).await?;
        self.groups[group].write_rows(place, &replaced.changes[group], replaced.sequence, new)
    }
}

impl<B: Backend + Clone> ModelCache<B> {
    /// Opens a change that replaces what a sequence holds by tokens at these positions, one choice for each layer.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when a step is open; [`Error::NoRoom`](crate::Error::NoRoom) or
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory). The cache is as it was.
    pub(crate) async fn open_replaced(&mut self, sequence: usize, kept: &[LayerSelection]) -> Result<Replaced<B>> {
        self.check_no_step()?;
        self.length(sequence)?;
        self.check_gathers("compressing a sequence again")?;
        let count = |number: &usize| kept[*number].count();
        let mut positions = Vec::with_capacity(kept.len());
        for layer in kept {
            positions.push(DecidedLayer::upload(self.backend(), layer).await?.kept);
        }
        self.part_layers(|group| group.numbers().iter().any(|number| count(number) != count(&group.numbers()[0])));
        let mut needed = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            let first = positions[group.numbers()[0]].as_ref();
            let spans = first.map(|positions| PromptSpan::gather(positions, StoreId::PACKED));
            needed.push(group.page_tables.room_for_prompt(spans.as_slice())?);
        }
        if let Err(error) = self.reserve_room(&needed, Asked::OnTheWay).await {
            self.join_layers();
            return Err(error);
        }
        let mut replaced = Replaced { sequence, changes: Vec::new(), held: Vec::new() };
        let mut opened = Ok(());
        for group in &mut self.groups {
            let of_layers = group.numbers().iter().filter_map(|&number| positions[number].clone()).collect();
            match group.open_replaced(sequence, of_layers) {
                Ok((change, held)) => {
                    replaced.changes.push(change);
                    replaced.held.push(held);
                }
                Err(error) => {
                    opened = Err(error);
                    break;
                }
            }
        }
        match opened {
            Ok(()) => Ok(replaced),
            Err(error) => {
                self.close_replaced(replaced, false);
                Err(error)
            }
        }
    }

    /// Commits a change, or rolls it back.
    pub(crate) fn close_replaced(&mut self, replaced: Replaced<B>, commits: bool) {
        if commits {
            self.note_change(replaced.sequence, ContentChange::CompressedAgain);
        }
        self.close_all(replaced.changes, commits);
    }
}

/// The open change of a group of layers, and what they held before.
type OpenReplaced<I> = (Change<I>, Sequence<I>);

impl<B: Backend> LayerGroup<B> {
    /// Opens a change that replaces the held tokens by those at these positions: a tensor for each layer, or no tensor
    /// if nothing is kept. It returns the change, and the sequence as it was.
    pub(super) fn open_replaced(
        &mut self,
        sequence: usize,
        positions: Vec<B::Indices>,
    ) -> Result<OpenReplaced<B::Indices>> {
        let held = self.page_tables.sequence(sequence)?.clone();
        let spans: Vec<_> =
            positions.first().map(|first| PromptSpan::gather(first, StoreId::PACKED)).into_iter().collect();
        let change = self.page_tables.replace(sequence, &spans)?;
        if positions.len() > 1 {
            let newest = self.page_tables.newest(sequence);
            self.page_tables.differ_in_layers(sequence, newest, positions);
        }
        Ok((change, held))
    }
}
