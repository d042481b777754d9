//! A model on burn as studies measure it.

use burn::tensor::Device;
use kvpack::AttentionShape;
use kvpack::cache::{ChunkStores, ModelCache, ModelRecipe, Recipe};
use kvpack::policy::{Policy, Spans};
use kvpack::wgpu::Wgpu;
use kvpack_serving::study::{Measure, ReadPrompt, StepColumns, StepTime, VOCABULARY};
use kvpack_serving::{Contexts, EqualRequests, Figures, Scheduler};

use super::prompt::Reader;
use super::{own, steps};
use crate::Result;
use crate::host::Host;

/// A model on a device.
pub struct Measured<'a> {
    device: &'a Device,
    backend: Wgpu,
    host: Host,
    own_bytes: usize,
}

impl<'a> Measured<'a> {
    /// What measures this model.
    pub fn new(device: &'a Device, backend: &Wgpu, host: Host) -> Self {
        Self { device, backend: backend.clone(), host, own_bytes: usize::MAX }
    }

    /// The model.
    pub const fn host(&mut self) -> &mut Host {
        &mut self.host
    }

    /// Sets the most bytes that burn's own keys and values may take. Larger steps are not timed.
    pub fn with_own_bytes(self, own_bytes: usize) -> Self {
        Self { own_bytes, ..self }
    }
}

impl Measure for Measured<'_> {
    type Backend = Wgpu;
    type Reader = Reader;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    const PROGRAM: &'static str = "burn-host";
    const OWN: &'static str = "burn";
    const OWN_BYTES: usize = 4;
    const COLUMNS: StepColumns = StepColumns::Submission;

    fn backend(&self) -> &Wgpu {
        &self.backend
    }

    fn layers(&self, recipe: &ModelRecipe) -> Result<Vec<(AttentionShape, Recipe)>> {
        Ok(self.host.config().cache_layers(recipe))
    }

    // wgpu does not say how much memory is free.
    fn has_room(&self, _: u64) -> bool {
        true
    }

    fn bytes_of_reading(&self, _: usize) -> u64 {
        0
    }

    fn filled(&mut self, recipe: &ModelRecipe, of: Contexts, chunks: Option<&ChunkStores>) -> Result<ModelCache<Wgpu>> {
        steps::filled(&self.backend, &self.host, recipe, of, chunks)
    }

    fn decode(&mut self, cache: &mut ModelCache<Wgpu>, steps: usize) -> Result<StepTime> {
        steps::decode(&mut self.host, cache, steps)
    }

    fn decode_own(&mut self, (sequences, tokens): (usize, usize), steps: usize) -> Result<Option<StepTime>> {
        let (layers, shape) = (self.host.config().layers, self.host.config().attention);
        let of_token = layers * 2 * shape.kv_heads() * shape.head_dim() * Self::OWN_BYTES;
        if of_token * tokens * sequences > self.own_bytes {
            return Ok(None);
        }
        own::decode(self.device, &self.host, (sequences, tokens), steps).map(Some)
    }

    fn serve(&mut self, of: &EqualRequests, cache: ModelCache<Wgpu>) -> Result<Figures> {
        let sequences = cache.sequences();
        let requests = of.drawn(sequences, VOCABULARY as u32);
        Ok(Scheduler::new(cache, of.settings(sequences), requests)?.serve(&mut self.host, |_| {})?.figures)
    }

    fn reader(&mut self, tokens: usize) -> Result<Reader> {
        Reader::new(&self.backend, self.host.decoder(), tokens)
    }

    fn read(&mut self, reader: &mut Reader, cache: &ModelCache<Wgpu>, by: (Policy, Spans)) -> Result<ReadPrompt<Wgpu>> {
        reader.read(self.host.decoder(), cache, by)
    }

    fn wait(reader: &Reader) -> Result<()> {
        reader.wait()
    }
}
