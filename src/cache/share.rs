//! A [`ModelCache`] of one of several ranks that share sequences.

use super::ModelCache;
use crate::Result;
use crate::backend::Backend;
use crate::plan::RankShare;

impl<B: Backend> ModelCache<B> {
    /// The same as the cache of one rank: it stores the positions of this share, and counts the others. All calls take
    /// the tokens of all ranks: a [`TokenRun`](super::TokenRun) names all new tokens, `store` takes the rows of all of
    /// them and stores those of the share, and lengths, windows, sinks and truncations are positions of the sequence.
    /// [`ModelCache::tokens`] returns what is stored here. A query attends to what is stored here, so that its states
    /// have to be merged with those of the other ranks: [`ContextParallel`](crate::ranks::ContextParallel) does so.
    ///
    /// Prompts come as [`TokenRun::prompt`](super::TokenRun::prompt) or [`TokenRun::chunk`](super::TokenRun::chunk).
    /// What needs all tokens of a sequence in one place (`begin_prefill`, `compress`, `compress_again`, `keep`) returns
    /// [`Error::Unsupported`](crate::Error::Unsupported); `ContextParallel` has the last three for all ranks together.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when a step is open or a sequence holds tokens,
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a recipe with calibrated scores.
    pub fn with_share(mut self, share: RankShare) -> Result<Self> {
        self.check_no_step()?;
        self.groups.iter_mut().try_for_each(|group| group.page_tables.set_share(share))?;
        Ok(self)
    }

    /// The positions that it stores, if it is the cache of a rank; none where it stores all.
    pub fn share(&self) -> Option<&RankShare> {
        self.groups[0].page_tables.share()
    }
}
