//! An open transaction on the page tables: its device writes, and the undo log that rolls it back.

use std::ops::Range;

use super::room::Lease;
use super::sequence::Span;
use super::step::CentreWrite;
use super::{Recipe, StoreId};
use crate::backend::StagedSpan;
use crate::plan::{LayerWrites, Page, StoreWrites};

/// An open change.
#[derive(Debug)]
pub(super) struct Change<I> {
    /// The device writes.
    pub(super) writes: LayerWrites,
    pub(super) undo: Vec<Undo<I>>,
    /// Sequences whose last span got a token within its last page, which is all that changed in them.
    pub(super) grown: Vec<usize>,
    /// The places of the tokens of a step that does nothing else, while it is opened.
    pub(super) places: Vec<(StoreId, Page, usize)>,
    /// Leases that the change took.
    pub(super) leased: Vec<(StoreId, Lease)>,
    /// Leases that are released once the change is committed.
    pub(super) freed: Vec<(StoreId, Lease)>,
    /// Centres that the change gave to sequences. A change that appends lists them among its writes.
    pub(super) centres: Vec<CentreWrite>,
    /// Parts of prompts that lie in f16 while the change is open and are packed from there.
    pub(super) staged: Vec<StagedSpan>,
    /// The spans of sequences once the change is committed, where they are not those of the open change.
    pub(super) committed: Vec<(usize, Vec<Span<I>>)>,
    /// The sequence that was swapped in with a centre. The centre is written with it.
    pub(super) taken_centre: Option<usize>,
}

/// The end of a sequence before a change: its spans, starting at `first`.
#[derive(Debug)]
pub(super) struct Undo<I> {
    pub(super) sequence: usize,
    pub(super) first: usize,
    pub(super) spans: Vec<Span<I>>,
    pub(super) length: usize,
    pub(super) released: usize,
    pub(super) elsewhere: Vec<Range<usize>>,
}

impl<I> Change<I> {
    /// An empty change of the stores of a recipe.
    pub(super) fn new(recipe: &Recipe) -> Self {
        let stores = vec![StoreWrites::default(); recipe.stores().len()];
        let windows = vec![Vec::new(); usize::from(recipe.packed_later().is_some())];
        let writes = LayerWrites { stores, windows };
        Self {
            writes,
            undo: Vec::new(),
            grown: Vec::new(),
            places: Vec::new(),
            leased: Vec::new(),
            freed: Vec::new(),
            centres: Vec::new(),
            staged: Vec::new(),
            committed: Vec::new(),
            taken_centre: None,
        }
    }

    /// Makes it an empty change again, which keeps its memory.
    pub(super) fn clear(&mut self) {
        let Self { writes, undo, grown, places, leased, freed, centres, staged, committed, taken_centre } = self;
        writes.clear();
        undo.clear();
        grown.clear();
        places.clear();
        leased.clear();
        freed.clear();
        centres.clear();
        staged.clear();
        committed.clear();
        *taken_centre = None;
    }

    /// Whether the change is one of this sequence, too.
    pub(super) fn touches(&self, sequence: usize) -> bool {
        self.grown.contains(&sequence) || self.undo.iter().any(|undo| undo.sequence == sequence)
    }

    /// Length of a sequence before the change; 0 if the change does not touch it.
    pub(super) fn length_before(&self, sequence: usize) -> usize {
        self.undo.iter().find(|undo| undo.sequence == sequence).map_or(0, |undo| undo.length)
    }
}
