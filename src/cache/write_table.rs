//! The writes of the open step of a group of layers, as the words that kernels read.

use std::sync::Arc;

use super::page_tables::PageTables;
use super::{Appended, Recipe, StoreId};
use crate::Result;
use crate::format::{AttentionShape, TensorFormat};
use crate::plan::{LayerWrites, StoreCapacity, TokenIndices, WindowCapacity, WriteLayout, WriteTable};

/// The table of the open step, laid out for the current stores. The layout is rebuilt when a store has other buffers
/// than before, or a step writes more than any before. Resources bound to a layout serve all steps in between: an
/// engine keeps them as long as it sees the same layout, which need not differ in any number from the one before.
#[derive(Clone, Debug)]
pub(super) struct GroupTable {
    shape: AttentionShape,
    most: WriteLimits,
    table: WriteTable,
    /// Whether a store got or lost buffers since the layout was made.
    stores_changed: bool,
    /// How often the table was filled.
    fillings: u64,
}

/// Number of sequences that a table has room for before any step needs it.
const FIRST_SEQUENCES: usize = 256;

/// Number of them that may begin in one step.
const FIRST_BEGINNING: usize = 8;

/// Number of windows that a step may pack, where each passes through scratch memory as f32 rows that are rotated.
const FIRST_ROTATED: usize = 8;

/// Limits of what steps write. They only grow, by doubling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WriteLimits {
    tokens: usize,
    /// Tokens for the f16 store where appended tokens go elsewhere: parts of prompts. At least 1, so that kernels can
    /// be prepared before there is one.
    staged: usize,
    copies: usize,
    centres: usize,
    windows: usize,
}

impl WriteLimits {
    /// These limits, raised to those of a step.
    fn with(self, writes: &LayerWrites, tokens: usize) -> Self {
        let larger = |most: usize, needed: usize| if needed <= most { most } else { needed.next_power_of_two() };
        let copies = writes.stores.iter().map(|store| store.copies.len()).max().unwrap_or(0);
        let centres = writes.stores.iter().map(|store| store.centres.len()).max().unwrap_or(0);
        let windows = writes.windows.iter().map(Vec::len).max().unwrap_or(0);
        Self {
            tokens: larger(self.tokens, tokens),
            staged: larger(self.staged, writes.stores[StoreId::F16.index()].tokens.len()),
            copies: larger(self.copies, copies),
            centres: larger(self.centres, centres),
            windows: larger(self.windows, windows),
        }
    }
}

impl GroupTable {
    /// A table for steps that decode one token of every sequence, unless there are very many.
    pub(super) fn new<I: TokenIndices + Clone>(shape: AttentionShape, page_tables: &PageTables<I>) -> Result<Self> {
        let sequences = page_tables.sequences().len().min(FIRST_SEQUENCES);
        // Pages are copied only for a sequence that was forked in the middle of one.
        let centres = if page_tables.recipe().is_centred() { sequences.min(FIRST_BEGINNING) } else { 0 };
        let windows = if rotates_windows(page_tables.recipe()) { sequences.min(FIRST_ROTATED) } else { sequences };
        let most = WriteLimits { tokens: sequences, staged: 1, copies: 0, centres, windows };
        let table = WriteTable::new(&lay_out(shape, page_tables, most)?);
        Ok(Self { shape, most, table, stores_changed: false, fillings: 0 })
    }

    /// Notes that the buffers of a store change. A shard that replaces one of the same size is another buffer, though
    /// all numbers of the layout stay what they were.
    pub(super) const fn note_changed_stores(&mut self) {
        self.stores_changed = true;
    }

    /// Fills the table with the writes of a step of `tokens` tokens. On an error it is unchanged.
    pub(super) fn set<I: TokenIndices + Clone>(
        &mut self,
        page_tables: &PageTables<I>,
        writes: &LayerWrites,
        tokens: usize,
    ) -> Result<()> {
        let most = self.most.with(writes, tokens);
        self.fillings += 1;
        if most != self.most || self.stores_changed {
            let mut table = WriteTable::new(&lay_out(self.shape, page_tables, most)?);
            table.set(writes)?;
            (self.most, self.table, self.stores_changed) = (most, table, false);
            return Ok(());
        }
        self.table.set(writes)
    }

    /// How often the table was filled: as long as this stays, it is the table of the step that filled it last, or of
    /// one that [went on](GroupTable::move_on) from there.
    pub(super) const fn fillings(&self) -> u64 {
        self.fillings
    }

    /// Makes it the table of a step that goes on from the one that it is of: see [`WriteTable::move_on`]. False if it
    /// cannot, or the stores have other buffers since; the table is as it was then.
    pub(super) fn move_on(&mut self) -> bool {
        !self.stores_changed && self.table.move_on()
    }

    pub(super) const fn table(&self) -> &WriteTable {
        &self.table
    }
}

/// Whether rows of windows are rotated before the ranges of their tiles are known.
fn rotates_windows(recipe: &Recipe) -> bool {
    let format = recipe.packed_later().map(|store| recipe.stores()[store.index()].format);
    let rotates = |of: &TensorFormat| of.rotation().is_some() && !of.takes_single_tokens();
    format.is_some_and(|format| rotates(&format.key) || rotates(&format.value))
}

fn lay_out<I: TokenIndices + Clone>(
    shape: AttentionShape,
    page_tables: &PageTables<I>,
    most: WriteLimits,
) -> Result<Arc<WriteLayout>> {
    let recipe = page_tables.recipe();
    // Where appended tokens stay no window moves, but no element may be too large for the store of prompts.
    let (windows, newer) = match recipe.appended() {
        Appended::Tiles { newer, .. } => (most.windows, newer),
        Appended::Keep | Appended::AtOnce(_) => (0, 0),
    };
    let pair = |to: StoreId| WindowCapacity { from: StoreId::F16.index(), to: to.index(), windows, newer };
    let windows = recipe.packed_later().into_iter().map(pair).collect();
    let layout = WriteLayout::new(shape, most.tokens, capacities(page_tables, most), windows)?;
    // Prompts of which nothing is packed yet may go to any store.
    Ok(Arc::new(layout.with_packed_later(1..recipe.stores().len())))
}

/// The current stores, and the limits of what a step puts into them.
fn capacities<I: TokenIndices + Clone>(page_tables: &PageTables<I>, most: WriteLimits) -> Vec<StoreCapacity> {
    let recipe = page_tables.recipe();
    // As many as `LayerGroup::reserve` creates before any step, so that kernels can be prepared before that.
    let centre_slots = if recipe.is_centred() { page_tables.sequences().len() } else { 0 };
    let of = |(index, store): (usize, &super::StoreFormat)| {
        let id = StoreId::at(index);
        let (tokens, copies) = match recipe.takes_tokens(id) {
            true => (most.tokens, most.copies),
            // A sequence that was forked may go on with a prompt of which nothing is packed.
            false if id == StoreId::F16 => (most.staged, most.copies),
            false => (0, 0),
        };
        let room = page_tables.room(id);
        StoreCapacity {
            format: store.format,
            shard_pages: room.shard_pages(),
            range_slots: room.slots(),
            tokens,
            copies,
            centres: most.centres,
            centre_slots,
        }
    };
    recipe.stores().iter().enumerate().map(of).collect()
}
