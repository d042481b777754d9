//! Requests of one length, and as many of them at a time as a budget of memory holds.

use std::time::Duration;

use kvpack::AttentionShape;
use kvpack::backend::Backend;
use kvpack::cache::{Appended, Budget, Growth, ModelCache, Recipe, StoreRoom, TokenRun};
use pollster::block_on;

use crate::{Error, Pages, Prompt, Request, Settings};

/// Requests of one length.
#[derive(Clone, Copy, Debug)]
pub struct EqualRequests {
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Tokens to generate for each prompt.
    pub output: usize,
    /// Tokens of a part of a prompt.
    pub chunk: usize,
    /// Prompts of which a step may take a part.
    pub parts: usize,
}

impl EqualRequests {
    /// This many, which have all arrived. Their tokens are random ones of a vocabulary.
    pub fn drawn(&self, requests: usize, vocabulary: u32) -> Vec<Request> {
        let request = |at: usize| {
            let prompt = Prompt::Length { tokens: self.prompt, shared: 0, seed: at + 1 };
            let prompt = prompt.drawn(vocabulary).unwrap_or_default();
            Request { arrival: Duration::ZERO, prompt, output: self.output }
        };
        (0..requests).map(request).collect()
    }

    /// Sizes of a server of this many at a time.
    pub const fn settings(&self, sequences: usize) -> Settings {
        Settings { sequences, prefixes: 0, rows: sequences + self.parts * self.chunk, chunk: self.chunk }
    }

    /// A cache for as many requests as a budget of `bytes` holds and `most` allows, with memory for all of them.
    /// `alone` are the pages that one request took.
    ///
    /// # Errors
    /// That the budget holds none, and what the cache and its device report.
    pub fn cache<B: Backend + Clone>(
        &self,
        backend: &B,
        layers: &[(AttentionShape, Recipe)],
        (bytes, most): (u64, usize),
        alone: &Pages,
    ) -> Result<ModelCache<B>, Error> {
        // A part of a prompt lies in f16 besides until it is packed.
        let one = ModelCache::new(backend, layers, 1)?;
        let part = one.room_for_append(0, &[TokenRun::prompt(0, self.chunk.min(self.prompt))])?;
        let staged_pages = part.first().map_or(0, |room| room.pages);
        // Where there is one store, parts of prompts lie in it from the start.
        let packs = alone.most_by_store.len() > 1;
        // Every part of a prompt may have ranges of its own.
        let spans = self.prompt.div_ceil(self.chunk);
        let needed = alone.most_in_use_bytes.max(1);
        let fit = usize::try_from(bytes / needed).unwrap_or(usize::MAX).min(most);
        for batch in (1..=fit).rev() {
            let room = |(store, &pages): (usize, &usize)| {
                let staged = if packs && store == 0 { staged_pages * self.parts.min(batch) } else { 0 };
                StoreRoom { pages: batch * pages + staged, spans: batch * spans }
            };
            let rooms: Vec<StoreRoom> = alone.most_by_store.iter().enumerate().map(room).collect();
            let budget = Budget::of_bytes(bytes).growing(Growth::None);
            let mut cache = ModelCache::new(backend, layers, batch)?.with_budget(budget);
            match block_on(cache.reserve(&rooms)) {
                Ok(()) => return Ok(cache),
                Err(kvpack::Error::NoRoom { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(Error::NoRequest { bytes, needed })
    }
}

/// The layers of a cache where generated tokens stay in f16 and prompts are packed, as CalibQuant's paper has them.
pub fn generated_in_f16(layers: Vec<(AttentionShape, Recipe)>) -> Vec<(AttentionShape, Recipe)> {
    layers.into_iter().map(|(shape, recipe)| (shape, recipe.with_appended(Appended::Keep))).collect()
}
