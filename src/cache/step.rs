//! What a step of decoding, or of a prompt, is given.

use crate::plan::{KeyMean, RowLayout};

/// Consecutive new tokens of one sequence. The runs of a step lie one after the other in the tensors of keys and
/// values, so that a step may mix a chunk of one sequence's prompt with single decoded tokens of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenRun {
    sequence: usize,
    tokens: usize,
    packs: bool,
}

impl TokenRun {
    /// One decoded token. The window that falls behind with it is packed within the step.
    pub const fn decode(sequence: usize) -> Self {
        Self { sequence, tokens: 1, packs: true }
    }

    /// A chunk of new tokens, at least one. No window is packed within the step, so that the chunk's own queries
    /// still see it in f16.
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

    /// True if the step packs the window that falls behind.
    pub(super) const fn packs(&self) -> bool {
        self.packs
    }
}

/// The centre of a sequence that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CentreWrite {
    pub(super) sequence: usize,
    /// The mean of which of the new keys it is, and its slot, the same in all stores.
    pub(super) mean: KeyMean,
}

/// Keys and values of new tokens, as callers hand them in.
pub(super) struct NewTokens<'a, T> {
    /// Where both lie in their tensors.
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
