//! A model on candle as studies measure it.

use anyhow::Result;
use kvpack::AttentionShape;
use kvpack::cache::{ChunkStores, ModelCache, ModelRecipe, Recipe};
use kvpack::policy::{Policy, Spans};
use kvpack_serving::study::{Measure, ReadPrompt, StepColumns, StepTime, VOCABULARY, f16_bytes};
use kvpack_serving::{Contexts, EqualRequests, Figures, Scheduler};

use crate::attention::Steps;
use crate::host::Host;
use crate::rig::Rig;
use crate::{filled, own, prompt};

/// A model on a device.
pub struct Measured<'a, R: Rig> {
    rig: &'a R,
    host: Host<R::Steps>,
}

impl<'a, R: Rig> Measured<'a, R> {
    /// What measures this model.
    pub const fn new(rig: &'a R, host: Host<R::Steps>) -> Self {
        Self { rig, host }
    }

    /// The model.
    pub fn into_host(self) -> Host<R::Steps> {
        self.host
    }
}

impl<R: Rig> Measure for Measured<'_, R> {
    type Backend = R::Backend;
    type Reader = R::Steps;
    type Error = anyhow::Error;

    const PROGRAM: &'static str = "candle-host";
    const OWN: &'static str = "candle";
    const OWN_BYTES: usize = 2;
    const COLUMNS: StepColumns = StepColumns::Device;

    fn backend(&self) -> &R::Backend {
        self.rig.backend()
    }

    fn layers(&self, recipe: &ModelRecipe) -> Result<Vec<(AttentionShape, Recipe)>> {
        Ok(self.host.model().config.cache_layers(recipe)?)
    }

    fn has_room(&self, bytes: u64) -> bool {
        const FOR_STEPS: u64 = 2 << 30;
        self.rig.free_bytes().is_none_or(|free| bytes + FOR_STEPS <= free)
    }

    fn bytes_of_reading(&self, tokens: usize) -> u64 {
        let config = &self.host.model().config;
        (tokens * (4 * config.feed_forward + 12 * config.width) * 2) as u64
    }

    fn filled(
        &mut self,
        recipe: &ModelRecipe,
        of: Contexts,
        chunks: Option<&ChunkStores>,
    ) -> Result<ModelCache<R::Backend>> {
        filled::filled(self.rig, &mut self.host, recipe, of, chunks)
    }

    fn decode(&mut self, cache: &mut ModelCache<R::Backend>, steps: usize) -> Result<StepTime> {
        filled::decode(self.rig, &mut self.host, cache, steps)
    }

    fn decode_own(&mut self, (sequences, tokens): (usize, usize), steps: usize) -> Result<Option<StepTime>> {
        // Keys, and weights of attention in f16 and in the making.
        let bytes = f16_bytes(&self.layers(&"f16".parse()?)?, sequences * (tokens + 256));
        if !self.has_room(bytes + bytes / 4) {
            return Ok(None);
        }
        own::decode(self.rig, self.host.model(), (sequences, tokens), steps).map(StepTime::of_step).map(Some)
    }

    fn serve(&mut self, of: &EqualRequests, cache: ModelCache<R::Backend>) -> Result<Figures> {
        let sequences = cache.sequences();
        let requests = of.drawn(sequences, VOCABULARY as u32);
        let served = Scheduler::new(cache, of.settings(sequences), requests)?.serve(&mut self.host, |_| {})?;
        self.host.steps().forget()?;
        Ok(served.figures)
    }

    fn reader(&mut self, tokens: usize) -> Result<R::Steps> {
        self.rig.steps(self.host.model(), 1, tokens)
    }

    fn read(
        &mut self,
        reader: &mut R::Steps,
        cache: &ModelCache<R::Backend>,
        by: (Policy, Spans),
    ) -> Result<ReadPrompt<R::Backend>> {
        prompt::read(self.rig, self.host.model(), reader, cache, by)
    }

    fn wait(reader: &R::Steps) -> Result<()> {
        reader.wait()
    }
}
