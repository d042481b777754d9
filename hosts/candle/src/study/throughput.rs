//! `study throughput`: throughput under a memory budget, as CalibQuant measures it (Tables 5-8). A prompt is an image
//! and some text; the recipe decides how many of them the budget holds at a time.

use std::time::Duration;

use anyhow::{Result, ensure};
use kvpack::cache::{Appended, Budget, Growth, ModelCache, StoreRoom, TokenRun};
use kvpack_serving::{Figures, Prompt, Request, Scheduler, Settings};
use pollster::block_on;
use serde::Serialize;

use super::{Common, VOCABULARY, report};
use crate::attention::Steps as _;
use crate::filled::{self, Contexts};
use crate::host::Host;
use crate::rig::Rig;

/// Measures throughput under a memory budget, with random weights.
#[derive(clap::Args)]
pub struct ThroughputArgs {
    #[command(flatten)]
    common: Common,
    /// MiB that the cache may take.
    #[arg(long, default_value_t = 5120)]
    memory_mib: u64,
    /// How keys and values are stored; the first is what the others are compared with.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "f16,calibquant:8,calibquant:4,calibquant:2,calibquant:1,saw-int4"
    )]
    recipes: Vec<String>,
    /// Tokens of a prompt: 576 of an image and 64 of text.
    #[arg(long, default_value_t = 640)]
    prompt: usize,
    /// Tokens to generate for each prompt.
    #[arg(long, default_value_t = 128)]
    output: usize,
    /// Tokens of a part of a prompt.
    #[arg(long, default_value_t = 640)]
    chunk: usize,
    /// Prompts of which a step may take a part.
    #[arg(long, default_value_t = 8)]
    parts: usize,
    /// The most requests at a time.
    #[arg(long, default_value_t = 256)]
    most: usize,
}

/// What came of a recipe.
#[derive(Clone, Debug, Serialize)]
struct Row {
    recipe: String,
    /// Bytes that one request needs at its end.
    bytes_of_request: u64,
    /// Requests that the budget holds at a time.
    batch: usize,
    /// Generated tokens per second over the whole queue, prompts included.
    tokens_per_second: f64,
    /// Milliseconds of a step without prompts, over contexts of random keys and values.
    step_ms: f64,
    /// Generated tokens per second in such steps.
    decoded_per_second: f64,
    /// Milliseconds of a step at the batch of the first recipe.
    same_batch_ms: f64,
    figures: Figures,
}

impl ThroughputArgs {
    fn memory_mib(&self) -> u64 {
        if self.common.quick { 6 } else { self.memory_mib }
    }

    fn output(&self) -> usize {
        if self.common.quick { 8 } else { self.output }
    }

    pub fn run<R: Rig>(&self, rig: &R) -> Result<()> {
        let model = self.common.model(rig)?;
        let name = format!("{}, {} MiB of cache", model.config.name, self.memory_mib());
        let steps = rig.steps(&model, model.config.layers, self.most + self.parts * self.chunk)?;
        let mut host = Host::new(model, steps).without_end();
        report::heading(rig, "throughput", &name);
        println!("prompts of {} tokens, {} generated\n", self.prompt, self.output());
        println!(
            "| recipe | MiB a request | batch | tokens/s | × | decoded/s | × | of kernels | of the batch | step ms \
             | ms to first p50 |"
        );
        println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
        let mut rows: Vec<Row> = Vec::new();
        for recipe in &self.recipes {
            let mut row = self.row(rig, &mut host, recipe)?;
            row.step_ms = self.decoded(rig, &mut host, recipe, row.batch)?;
            row.decoded_per_second = row.batch as f64 / row.step_ms * 1e3;
            let first = rows.first().map_or(row.batch, |of| of.batch);
            row.same_batch_ms = self.decoded(rig, &mut host, recipe, first)?;
            print(&row, rows.first().unwrap_or(&row));
            rows.push(row);
        }
        let plot = || {
            let of = |row: &Row| ("decoded".to_owned(), row.batch as f64, row.decoded_per_second);
            report::lines("Throughput under a memory budget", ("requests at a time", "tokens/s"), rows.iter().map(of))
        };
        report::write(rig, &self.common, ("throughput", &name), &rows, plot)
    }

    /// Milliseconds of a step without prompts, at this number of sequences.
    fn decoded<R: Rig>(&self, rig: &R, host: &mut Host<R::Steps>, recipe: &str, sequences: usize) -> Result<f64> {
        const STEPS: usize = 8;
        let of = Contexts { sequences, tokens: self.prompt, more: STEPS + 8 };
        let mut cache = filled::filled(rig, host, &recipe.parse()?, of, None)?;
        Ok(filled::decode(rig, host, &mut cache, STEPS)?.step_ms)
    }

    fn row<R: Rig>(&self, rig: &R, host: &mut Host<R::Steps>, recipe: &str) -> Result<Row> {
        let backend = rig.backend();
        let mut layers = host.model().config.cache_layers(&recipe.parse()?)?;
        if recipe.starts_with("calibquant") {
            // As in the paper: prompts are packed, generated tokens stay in f16.
            for (_, of_layer) in &mut layers {
                *of_layer = of_layer.clone().with_appended(Appended::Keep);
            }
        }
        let mut serve = |cache: ModelCache<R::Backend>, (requests, output): (usize, usize)| -> Result<Figures> {
            let request = |at: usize| {
                let prompt = Prompt::Length { tokens: self.prompt, shared: 0, seed: at + 1 };
                let prompt = prompt.drawn(VOCABULARY as u32).unwrap_or_default();
                Request { arrival: Duration::ZERO, prompt, output }
            };
            let sequences = cache.sequences();
            let settings =
                Settings { sequences, prefixes: 0, rows: sequences + self.parts * self.chunk, chunk: self.chunk };
            let requests = (0..requests).map(request).collect();
            let served = Scheduler::new(cache, settings, requests)?.serve(host, |_| {})?;
            host.steps().forget()?;
            Ok(served.figures)
        };
        // One request alone says which pages each needs; a part of a prompt lies in f16 besides until it is packed.
        let cache = ModelCache::new(backend, &layers, 1)?;
        let part = cache.room_for_append(0, &[TokenRun::prompt(0, self.chunk.min(self.prompt))])?;
        let alone = serve(cache.with_budget(Budget::unlimited().growing(Growth::Exact)), (1, self.output()))?.pages;
        let memory = self.memory_mib() << 20;
        let budget = Budget::of_bytes(memory).growing(Growth::None);
        let mut batch = usize::try_from(memory / alone.most_in_use_bytes.max(1))?.min(self.most);
        // Kernels for steps of several prompts are compiled before anything is timed.
        let several = ModelCache::new(backend, &layers, self.parts + 1)?;
        serve(several.with_budget(Budget::unlimited().growing(Growth::Doubling)), (self.parts + 1, 4))?;
        let cache = loop {
            ensure!(batch > 0, "{} MiB hold no request of {recipe}", self.memory_mib());
            // Every part of a prompt may have ranges of its own.
            let spans = self.prompt.div_ceil(self.chunk);
            let room = |(store, &pages): (usize, &usize)| {
                let staged = if store == 0 { part[0].pages * self.parts.min(batch) } else { 0 };
                StoreRoom { pages: batch * pages + staged, spans: batch * spans }
            };
            let rooms: Vec<StoreRoom> = alone.most_by_store.iter().enumerate().map(room).collect();
            let mut cache = ModelCache::new(backend, &layers, batch)?.with_budget(budget);
            match block_on(cache.reserve(&rooms)) {
                Ok(()) => break cache,
                Err(kvpack::Error::NoRoom { .. }) => batch -= 1,
                Err(error) => return Err(error.into()),
            }
        };
        let figures = serve(cache, (batch, self.output()))?;
        let preempted = figures.preemptions;
        ensure!(preempted == 0, "{batch} requests of {recipe} did not fit at a time: {preempted} were preempted");
        Ok(Row {
            recipe: recipe.into(),
            bytes_of_request: alone.most_in_use_bytes,
            batch,
            tokens_per_second: figures.tokens_per_second,
            decoded_per_second: 0.0,
            step_ms: 0.0,
            same_batch_ms: 0.0,
            figures,
        })
    }
}

fn print(row: &Row, first: &Row) {
    let decoded = row.decoded_per_second / first.decoded_per_second;
    let kernels = first.same_batch_ms / row.same_batch_ms;
    println!(
        "| {} | {:.2} | {} | {:.1} | {:.2} | {:.1} | {decoded:.2} | {kernels:.2} | {:.2} | {:.2} | {:.1} |",
        row.recipe,
        row.bytes_of_request as f64 / f64::from(1 << 20),
        row.batch,
        row.tokens_per_second,
        row.tokens_per_second / first.tokens_per_second,
        row.decoded_per_second,
        decoded / kernels,
        row.step_ms,
        row.figures.first_token_ms.p50,
    );
}
