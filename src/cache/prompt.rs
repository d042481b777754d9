//! The spans of a prompt.

use super::StoreId;
use crate::plan::{Rows, TokenRange};

/// Tokens of a prompt that are stored as one span, with ranges of its own where the format has them.
#[derive(Debug)]
pub struct PromptSpan<'a, I> {
    /// The tokens: a run of them, or for every KV head those that an index tensor names.
    pub tokens: Rows<'a, I>,
    /// Where they go.
    pub store: StoreId,
}

impl<I> Clone for PromptSpan<'_, I> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<I> Copy for PromptSpan<'_, I> {}

impl<'a, I> PromptSpan<'a, I> {
    /// Tokens that stay in f16.
    pub const fn f16(tokens: TokenRange) -> Self {
        Self::run(tokens, StoreId::F16)
    }

    /// Tokens that go to the first packed store, or to f16 if the recipe packs nothing.
    pub const fn packed(tokens: TokenRange) -> Self {
        Self::run(tokens, StoreId::PACKED)
    }

    /// A run of tokens for a store.
    pub const fn run(tokens: TokenRange, store: StoreId) -> Self {
        Self { tokens: Rows::Run(tokens), store }
    }

    /// For every KV head the tokens that its indices name, in their order.
    pub const fn gather(indices: &'a I, store: StoreId) -> Self {
        Self { tokens: Rows::Gather(indices), store }
    }
}
