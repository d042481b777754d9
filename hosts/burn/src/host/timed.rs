//! What timing a step needs of a host.

use std::time::Instant;

use kvpack::backend::Device as _;
use kvpack::cache::ModelCache;
use kvpack::plan::Elements;
use kvpack::wgpu::{LayerTensors, Wgpu};
use kvpack_serving::decoder::Config;
use kvpack_serving::tiny;
use pollster::block_on;

use super::Host;
use crate::Result;
use crate::decoder::Decoder;

impl Host {
    /// The decoder.
    pub const fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Its shape.
    pub const fn config(&self) -> &Config {
        &self.decoder.config
    }

    /// Milliseconds of an open step in all layers without the rest of the model, submitted as in a step: the middle of
    /// several.
    pub fn attention_ms(&mut self, cache: &ModelCache<Wgpu>) -> Result<f64> {
        const REPEATS: usize = 5;
        let open = cache.open_steps()?;
        let rows = open.first().map_or(0, |part| part.plan.rows());
        let step = self.steps.write(&open)?;
        let (shape, mut seed) = (self.decoder.config.attention, 5);
        let mut random = |heads: usize| {
            let elements = tiny::random(&mut seed, rows * heads * shape.head_dim(), 1.7);
            block_on(cache.backend().upload(Elements::F32(&elements)))
        };
        let (kv, query) = (shape.kv_heads(), shape.query_heads());
        let lent =
            LayerTensors { keys: random(kv)?, values: random(kv)?, queries: random(query)?, output: random(query)? };
        let mut times = Vec::new();
        for _ in 0..REPEATS {
            let start = Instant::now();
            (0..cache.layers()).try_for_each(|layer| step.submit(layer, &lent))?;
            block_on(cache.backend().download(&lent.output))?; // waits for what was submitted
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        times.sort_unstable_by(f64::total_cmp);
        Ok(times[REPEATS / 2])
    }
}
