//! The spans of a prompt.

use super::StoreId;
use crate::plan::{Rows, TokenIndices, TokenRange};
use crate::{Error, Result};

/// Tokens of a prompt that are stored as one span, with ranges of its own if the format has them.
#[derive(Debug)]
pub struct PromptSpan<'a, I> {
    /// The tokens: consecutive ones, or for every KV head those that an index tensor names.
    pub tokens: Rows<'a, I>,
    /// Their store.
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

    /// Consecutive tokens for a store.
    pub const fn run(tokens: TokenRange, store: StoreId) -> Self {
        Self { tokens: Rows::Run(tokens), store }
    }

    /// For every KV head the tokens that its indices name, in their order. Name every token once
    /// over all spans of a prompt. The indices lie on the device, and nobody checks them there. Attention weighs a token
    /// twice that is named twice.
    pub const fn gather(indices: &'a I, store: StoreId) -> Self {
        Self { tokens: Rows::Gather(indices), store }
    }
}

/// Checks that the consecutive spans of a prompt lie within it, in order, and cover it if nothing is gathered. A gather
/// selects tokens; tokens that no span names are evicted.
pub(super) fn check_spans<I: TokenIndices>(spans: &[PromptSpan<'_, I>], tokens: usize) -> Result<()> {
    if tokens == 0 {
        return Err(Error::NoTokens { what: "a prompt", hint: "pass at least one token" });
    }
    let reject = |reason: String| Err(Error::PromptSpans { tokens, reason });
    let gathers = spans.iter().any(|span| matches!(span.tokens, Rows::Gather(_)));
    let mut next = 0;
    for (i, span) in spans.iter().enumerate() {
        match span.tokens {
            Rows::Run(run) => {
                let (start, end) = (run.start(), run.end());
                if start < next || (start > next && !gathers) {
                    return reject(format!("span {i} is {start}..{end} where {next} should begin"));
                }
                if end > tokens {
                    return reject(format!("span {i} ends at {end}"));
                }
                next = end;
            }
            Rows::Gather(indices) if indices.shape().below() as usize > tokens => {
                return reject(format!("span {i} gathers tokens below {}", indices.shape().below()));
            }
            Rows::Gather(indices) if indices.shape().count() > indices.shape().below() as usize => {
                let (count, below) = (indices.shape().count(), indices.shape().below());
                return reject(format!("span {i} gathers {count} tokens from {below}; name each of them once"));
            }
            Rows::Gather(_) => {}
        }
    }
    if next != tokens && !gathers { reject(format!("they end at {next}")) } else { Ok(()) }
}

/// The error for gathered tokens in a layer with a sliding window. A query would see some of them, and it is not known
/// which. Steps refuse that, so a sequence that held such tokens could not go on.
pub(super) fn refuse_gathers(what: &str) -> Error {
    Error::Unsupported {
        what: what.into(),
        hint: "where gathered tokens stood is not known, so that a window does not say which it sees; store spans of \
               consecutive tokens (PromptSpan::run)"
            .into(),
    }
}
