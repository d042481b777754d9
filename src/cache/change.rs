//! A change of the page tables that is open: what to write to the device, and what it takes to be as if it had never
//! been.

use super::room::Lease;
use super::sequence::Span;
use super::step::CentreWrite;
use super::{Recipe, StoreId};
use crate::plan::{LayerWrites, StoreWrites};

/// A change that is open.
#[derive(Debug)]
pub(super) struct Change<I> {
    /// What to write.
    pub(super) writes: LayerWrites,
    pub(super) undo: Vec<Undo<I>>,
    /// Taken by the change.
    pub(super) leased: Vec<(StoreId, Lease)>,
    /// Of no use any more once it is committed.
    pub(super) freed: Vec<(StoreId, Lease)>,
    /// Centres that the change gave to sequences. A change that appends has them among what it writes.
    pub(super) centres: Vec<CentreWrite>,
    /// The sequence that came back with a centre, which is written with it.
    pub(super) taken_centre: Option<usize>,
}

/// The end of a sequence before a change: its spans from `first` on.
#[derive(Debug)]
pub(super) struct Undo<I> {
    pub(super) sequence: usize,
    pub(super) first: usize,
    pub(super) spans: Vec<Span<I>>,
    pub(super) length: usize,
}

impl<I> Change<I> {
    /// One of nothing, in the stores of a recipe.
    pub(super) fn new(recipe: &Recipe) -> Self {
        let stores = vec![StoreWrites::default(); recipe.stores().len()];
        let windows = vec![Vec::new(); usize::from(recipe.windows_to().is_some())];
        let writes = LayerWrites { stores, windows };
        Self {
            writes,
            undo: Vec::new(),
            leased: Vec::new(),
            freed: Vec::new(),
            centres: Vec::new(),
            taken_centre: None,
        }
    }

    /// Length that a sequence had before the change; 0 for one that it does not touch.
    pub(super) fn length_before(&self, sequence: usize) -> usize {
        self.undo.iter().find(|undo| undo.sequence == sequence).map_or(0, |undo| undo.length)
    }
}
