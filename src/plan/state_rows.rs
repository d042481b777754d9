//! Rows of attention states: the row that an item writes, and the rows that the merge combines for a query.

use super::attend::AttendPlan;
use super::blocks::Block;
use crate::{Error, Result};

/// The state rows of one query: `first .. end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StateRows {
    /// The first.
    pub first: u32,
    /// One past the last.
    pub end: u32,
}

/// The rows that an item writes its states to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StatePlace {
    /// The row of its first query. The row of each further query lies `stride` rows later.
    pub state: u32,
    pub stride: u32,
    /// All rows of its first query.
    pub rows: StateRows,
}

/// Counts the states of every query, then assigns rows so that those of a query are contiguous.
///
/// Queries of a block have the same number of rows, so that an item of the whole block finds them at a constant stride.
/// Rows of such items come first, then those of items for the query alone. If a query has fewer of these than another,
/// rows stay unused.
#[derive(Debug)]
pub(crate) struct StateCounts {
    /// Index of the block's first query row, and the number of its rows.
    blocks: Vec<(usize, usize)>,
    shared: Vec<u32>,
    alone: Vec<u32>,
}

impl StateCounts {
    pub(crate) fn new(plan: &AttendPlan, blocks: &[Block]) -> Self {
        let place = |block: &Block| (plan.runs()[block.run].first_row + block.first, block.queries);
        Self { blocks: blocks.iter().map(place).collect(), shared: vec![0; blocks.len()], alone: vec![0; plan.rows()] }
    }

    /// Counts an item of `queries` queries of a block, starting at row `row`.
    pub(crate) fn count(&mut self, block: usize, row: usize, queries: usize) {
        match queries == self.blocks[block].1 {
            true => self.shared[block] += 1,
            false => self.alone[row] += 1,
        }
    }

    /// Assigns rows to every query.
    ///
    /// # Errors
    /// [`Error::Limit`] when there are more rows than a 32-bit word can count.
    pub(crate) fn assign(self) -> Result<StateAssignment> {
        self.assign_rows(1)
    }

    /// The same for kernels that write a query's only state as its output: blocks of such queries share their rows with
    /// others, since nothing writes or reads them.
    ///
    /// # Errors
    /// As [`StateCounts::assign`].
    #[cfg(feature = "cuda")]
    pub(crate) fn assign_merged(self) -> Result<StateAssignment> {
        self.assign_rows(2)
    }

    /// Assigns rows of their own to the queries of blocks in which one has at least `least` states.
    fn assign_rows(self, least: u32) -> Result<StateAssignment> {
        let mut rows = vec![StateRows::default(); self.alone.len()];
        let (mut strides, mut next_shared) = (Vec::new(), Vec::new());
        let mut states = 0u64;
        for (&(first_row, queries), &shared) in self.blocks.iter().zip(&self.shared) {
            let of_block = first_row..first_row + queries;
            let stride = shared + self.alone[of_block.clone()].iter().copied().max().unwrap_or(0);
            let own = if stride < least { 0 } else { u64::from(stride) };
            let needed = states + own * queries as u64;
            if needed > u64::from(u32::MAX) {
                let hint = "attend with fewer queries per call";
                return Err(Error::Limit { what: "attention states".into(), needed, allowed: u32::MAX.into(), hint });
            }
            next_shared.push(states as u32);
            strides.push(stride);
            for row in of_block {
                let first = states as u32;
                rows[row] = StateRows { first, end: first + shared + self.alone[row] };
                states += own;
            }
        }
        let queries = self.blocks.iter().map(|&(_, queries)| queries).collect();
        Ok(StateAssignment { rows, states: states as usize, queries, strides, next_shared, alone: self.alone })
    }
}

/// The rows of every query, and the rows that are still to be assigned.
#[derive(Debug)]
pub(crate) struct StateAssignment {
    /// The rows of every query.
    pub(crate) rows: Vec<StateRows>,
    /// Total number of rows.
    pub(crate) states: usize,
    /// For every block: its number of queries, and the rows from one query to the next.
    queries: Vec<usize>,
    strides: Vec<u32>,
    next_shared: Vec<u32>,
    /// For every query: rows of items for it alone that are still to be taken, the last of its rows.
    alone: Vec<u32>,
}

impl StateAssignment {
    /// Takes the rows of an item that was counted.
    pub(crate) fn take(&mut self, block: usize, row: usize, queries: usize) -> StatePlace {
        let state = match queries == self.queries[block] {
            true => {
                self.next_shared[block] += 1;
                self.next_shared[block] - 1
            }
            false => {
                self.alone[row] -= 1;
                self.rows[row].end - self.alone[row] - 1
            }
        };
        StatePlace { state, stride: self.strides[block], rows: self.rows[row] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As many states as a word counts, and one more.
    #[test]
    fn states_are_counted_in_a_word() {
        let assign = |queries: usize| {
            let (blocks, shared) = (vec![(0, 2), (2, queries)], vec![u32::MAX / 2, 1]);
            StateCounts { blocks, shared, alone: vec![0; 2 + queries] }.assign()
        };
        assert_eq!(assign(1).unwrap().states, u32::MAX as usize);
        let refused = assign(2).map(|of| of.states);
        assert!(matches!(refused, Err(Error::Limit { needed: 0x1_0000_0000, .. })), "{refused:?}");
    }
}
