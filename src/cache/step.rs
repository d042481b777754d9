//! The input of a decode step or a prompt step.

use crate::plan::{KeyMean, RowLayout};

/// Consecutive new tokens of one sequence. The runs of a step are contiguous in the tensors of keys and values, so that
/// a step may mix a chunk of one sequence's prompt with single decoded tokens of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenRun {
    sequence: usize,
    tokens: usize,
    kind: RunKind,
}

/// What a run's tokens are, and so when they are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum RunKind {
    /// A decoded token, which packs the tile that leaves the residual window.
    Decode,
    /// Tokens that may be taken back.
    Chunk,
    /// A prompt, or a part of one.
    Prompt,
    /// The same, of which nothing is packed yet.
    Unpacked,
}

impl RunKind {
    /// Whether the tokens are a part of a prompt.
    pub(super) const fn is_of_prompt(self) -> bool {
        matches!(self, Self::Prompt | Self::Unpacked)
    }
}

impl TokenRun {
    /// One decoded token. Its step also packs the tile that it pushes out of the residual window.
    pub const fn decode(sequence: usize) -> Self {
        Self { sequence, tokens: 1, kind: RunKind::Decode }
    }

    /// A chunk of new tokens, at least one, that are stored as decoding stores them: drafts, or a text under
    /// evaluation. The step packs no window, so that the chunk's own queries still see it in f16.
    pub const fn chunk(sequence: usize, tokens: usize) -> Self {
        Self { sequence, tokens, kind: RunKind::Chunk }
    }

    /// A prompt or a part of one, at least one token. Its queries attend to its own keys and values in f16, and to what
    /// was stored before as it is stored. The same step packs it as the recipe packs prompts:
    ///
    /// - [`Appended::AtOnce`](super::Appended::AtOnce): all of it, to the store of appended tokens.
    /// - [`Appended::Tiles`](super::Appended::Tiles): the windows that earlier steps filled. Those that this one fills
    ///   follow with the next part, and then one with every decoded token.
    /// - [`Appended::Keep`](super::Appended::Keep), in a recipe that packs: all of it, as one span of the first packed
    ///   store. Parts of multiples of 128 tokens fill their pages.
    ///
    /// Tokens of the recipe's sink stay in f16. Until the step is committed or abandoned, the part lies in f16 pages
    /// that the sequence does not keep: [`ModelCache::reserve_for_append`](super::ModelCache::reserve_for_append)
    /// counts them.
    pub const fn prompt(sequence: usize, tokens: usize) -> Self {
        Self { sequence, tokens, kind: RunKind::Prompt }
    }

    /// A prompt or a part of one, at least one token, of which nothing is packed yet: it stays in f16 pages, whatever
    /// the recipe, and its queries see it and the parts before it in f16. Once all parts are there, the engine says
    /// what is stored of them: [`ModelCache::compress_parts`](super::ModelCache::compress_parts) what a policy keeps,
    /// [`ModelCache::pack_parts`](super::ModelCache::pack_parts) spans in stores of the engine's choice, such as those
    /// of a mixture. Until then the tokens can be swapped out, truncated and forked as others; as bytes
    /// ([`ModelCache::swapped_to_bytes`](super::ModelCache::swapped_to_bytes)) they become tokens that stay in f16.
    pub const fn unpacked(sequence: usize, tokens: usize) -> Self {
        Self { sequence, tokens, kind: RunKind::Unpacked }
    }

    /// The sequence.
    pub const fn sequence(&self) -> usize {
        self.sequence
    }

    /// Its new tokens.
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    pub(super) const fn kind(&self) -> RunKind {
        self.kind
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
