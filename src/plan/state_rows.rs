//! Rows of attention states: the row that an item writes, and the rows that the merge combines for a query.

use std::ops::Range;

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

impl StateRows {
    /// Those of a query whose only item writes its output: no row is written or read.
    pub const WRITTEN: Self = Self { first: u32::MAX, end: u32::MAX };
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
        self.assign_rows(|_| true)
    }

    /// The same for kernels that write a query's only state as its output: blocks of such queries share their rows with
    /// others, since nothing writes or reads them.
    ///
    /// # Errors
    /// As [`StateCounts::assign`].
    #[cfg(feature = "cuda")]
    pub(crate) fn assign_merged(self) -> Result<StateAssignment> {
        self.assign_rows(|counts| counts.most() > 1)
    }

    /// The same for kernels that do so for items of several queries alone. These queries have the rows
    /// [`StateRows::WRITTEN`].
    ///
    /// # Errors
    /// As [`StateCounts::assign`].
    pub(crate) fn assign_unwritten(self) -> Result<StateAssignment> {
        let is_written = |counts: &BlockCounts<'_>| counts.alone.len() > 1 && counts.shared == 1 && counts.most() == 1;
        let blocks = self.block_counts().filter(|(_, counts)| is_written(counts));
        let written: Vec<Range<usize>> = blocks.map(|(rows, _)| rows).collect();
        let mut of = self.assign_rows(|counts| !is_written(counts))?;
        written.into_iter().for_each(|rows| of.rows[rows].fill(StateRows::WRITTEN));
        Ok(of)
    }

    /// The rows of queries of every block, and their states.
    fn block_counts(&self) -> impl Iterator<Item = (Range<usize>, BlockCounts<'_>)> {
        self.blocks.iter().zip(&self.shared).map(|(&(first_row, queries), &shared)| {
            let of_block = first_row..first_row + queries;
            (of_block.clone(), BlockCounts { shared, alone: &self.alone[of_block] })
        })
    }

    /// Assigns rows of their own to the queries of blocks that have some.
    fn assign_rows(self, have_rows: impl Fn(&BlockCounts<'_>) -> bool) -> Result<StateAssignment> {
        let mut rows = vec![StateRows::default(); self.alone.len()];
        let (mut strides, mut next_shared) = (Vec::new(), Vec::new());
        let mut states = 0u64;
        for (of_block, counts) in self.block_counts() {
            let stride = counts.most();
            let own = if stride == 0 || !have_rows(&counts) { 0 } else { u64::from(stride) };
            let needed = states + own * of_block.len() as u64;
            if needed > u64::from(u32::MAX) {
                let hint = "attend with fewer queries per call";
                return Err(Error::Limit { what: "attention states".into(), needed, allowed: u32::MAX.into(), hint });
            }
            next_shared.push(states as u32);
            strides.push(stride);
            for row in of_block {
                let first = states as u32;
                rows[row] = StateRows { first, end: first + counts.shared + self.alone[row] };
                states += own;
            }
        }
        let queries = self.blocks.iter().map(|&(_, queries)| queries).collect();
        Ok(StateAssignment { rows, states: states as usize, queries, strides, next_shared, alone: self.alone })
    }
}

/// The states of the queries of one block.
struct BlockCounts<'a> {
    /// Those that all have.
    shared: u32,
    /// Those that each has alone.
    alone: &'a [u32],
}

impl BlockCounts<'_> {
    /// States of the query that has the most.
    fn most(&self) -> u32 {
        self.shared + self.alone.iter().copied().max().unwrap_or(0)
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
