//! The input of a decode step or a prompt step.

use crate::plan::{KeyMean, RowLayout};

/// Consecutive new tokens of one sequence. The runs of a step are contiguous in the tensors of keys and values, so that
/// a step may mix a chunk of one sequence's prompt with single decoded tokens of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenRun {
    sequence: usize,
    tokens: usize,
    packs: bool,
}

impl TokenRun {
    /// One decoded token. Its step also packs the tile that it pushes out of the residual window.
    pub const fn decode(sequence: usize) -> Self {
        Self { sequence, tokens: 1, packs: true }
    }

    /// A chunk of new tokens, at least one. The step packs no window, so that the chunk's own queries still see it in
    /// f16.
    pub const fn chunk(sequence: usize, tokens: usize) -> Self {
        Self { sequence, tokens, packs: false }
    }

    /// The sequence.
    pub const fn sequence(&self) -> usize {
        self.sequence
    }

    /// Its new tokens.
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether the step packs windows that become due.
    pub(super) const fn packs(&self) -> bool {
        self.packs
    }
}

/// The centre of a sequence that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CentreWrite {
    pub(super) sequence: usize,
    /// The new keys whose mean it is, and its slot, which is the same in all stores.
    pub(super) mean: KeyMean,
}

/// Keys and values of new tokens, as passed by callers.
pub(super) struct NewTokens<'a, T> {
    /// Layout of both in their tensors.
    pub(super) rows: RowLayout,
    pub(super) keys: &'a T,
    pub(super) values: &'a T,
}

impl<T> Clone for NewTokens<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for NewTokens<'_, T> {}
