//! What studies need of a host.

use std::time::Duration;

use kvpack::AttentionShape;
use kvpack::backend::Backend;
use kvpack::cache::{ChunkStores, ModelCache, ModelRecipe, ObservedPrompt, Recipe};
use kvpack::policy::{Policy, Spans};

use super::{StepColumns, StepTime};
use crate::{Contexts, EqualRequests, Figures};

/// A model of a host, whose steps are timed.
pub trait Measure {
    /// kvpack's backend.
    type Backend: Backend + Clone;
    /// What reads prompts whole.
    type Reader;
    /// What the host reports.
    type Error: From<kvpack::Error> + From<crate::Error> + From<std::io::Error>;

    /// The program, as commands name it.
    const PROGRAM: &'static str;
    /// The library whose own attention kvpack's is compared with, as rows name it.
    const OWN: &'static str;
    /// Bytes of an element of keys and values of that attention.
    const OWN_BYTES: usize;
    /// What the host knows of a step.
    const COLUMNS: StepColumns;

    /// kvpack's backend.
    fn backend(&self) -> &Self::Backend;

    /// The layers of a cache for the model.
    ///
    /// # Errors
    /// What is wrong with the recipe.
    fn layers(&self, recipe: &ModelRecipe) -> Result<Vec<(AttentionShape, Recipe)>, Self::Error>;

    /// Whether the device has room for this many bytes and as many more as a step needs.
    fn has_room(&self, bytes: u64) -> bool;

    /// Bytes that a layer takes to read a prompt whole, keys and values aside.
    fn bytes_of_reading(&self, tokens: usize) -> u64;

    /// A cache that holds contexts of random keys and values. `chunks` says how a context is stored in parts.
    ///
    /// # Errors
    /// What is wrong with the recipe, and what the device reports.
    fn filled(
        &mut self,
        recipe: &ModelRecipe,
        of: Contexts,
        chunks: Option<&ChunkStores>,
    ) -> Result<ModelCache<Self::Backend>, Self::Error>;

    /// Times steps of decoding for all sequences of a cache, which has room for
    /// [`FURTHER_TOKENS`](super::FURTHER_TOKENS) more.
    ///
    /// # Errors
    /// What the model, the cache or the device report.
    fn decode(&mut self, cache: &mut ModelCache<Self::Backend>, steps: usize) -> Result<StepTime, Self::Error>;

    /// Times steps of decoding with the library's own attention for this many sequences of this many tokens; none where
    /// these do not fit.
    ///
    /// # Errors
    /// What the model or the device report.
    fn decode_own(&mut self, size: (usize, usize), steps: usize) -> Result<Option<StepTime>, Self::Error>;

    /// Serves as many of the requests as the cache has sequences.
    ///
    /// # Errors
    /// What the scheduler, the model, the cache or the device report.
    fn serve(&mut self, of: &EqualRequests, cache: ModelCache<Self::Backend>) -> Result<Figures, Self::Error>;

    /// What reads prompts of up to `tokens` tokens.
    ///
    /// # Errors
    /// What the device reports.
    fn reader(&mut self, tokens: usize) -> Result<Self::Reader, Self::Error>;

    /// Reads a prompt whole for a cache, whose policy observes it.
    ///
    /// # Errors
    /// What the policy, the model or the device report.
    fn read(
        &mut self,
        reader: &mut Self::Reader,
        cache: &ModelCache<Self::Backend>,
        by: (Policy, Spans),
    ) -> Result<ReadPrompt<Self::Backend>, Self::Error>;

    /// Waits until the device of a reader is done.
    ///
    /// # Errors
    /// What the device reports.
    fn wait(reader: &Self::Reader) -> Result<(), Self::Error>;
}

/// A prompt that was read whole, and what it took to read it.
pub struct ReadPrompt<B: Backend> {
    /// What the policy observed.
    pub observed: ObservedPrompt<B>,
    /// Reading, without what follows.
    pub read: Duration,
    /// Statistics of attention, in all layers.
    pub statistics: Duration,
}
