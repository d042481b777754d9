//! What a step of decoding, or of a prompt, changes.

use super::StoreId;
use crate::backend::{TokenWrite, WindowMove};
use crate::plan::{PageCopy, RowLayout};

/// Consecutive new tokens of one sequence. The runs of a step lie one after the other in the tensors of keys and values, so
/// that a step may mix a chunk of one sequence's prompt with single decoded tokens of others.
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

    /// A chunk of new tokens, at least one. No window is packed within the step, so that the chunk's own queries still see
    /// it in f16.
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

/// What a step writes to the stores of every layer, in this order: the pages are the same in all layers that share books.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepWrites {
    /// Pages to copy, each within a store.
    pub copies: Vec<(StoreId, PageCopy)>,
    /// Tokens to put into pages, as kernel `append` does; rows of the step's tensors.
    pub tokens: Vec<(StoreId, TokenWrite)>,
    /// Full pages of the f16 store to pack into a page of another.
    pub windows: Vec<(StoreId, WindowMove)>,
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
