//! The command `study`: throughput under a memory budget, as CalibQuant measures it (Tables 5-8). A prompt is an image
//! and some text; the recipe decides how many of them the budget holds at a time.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device};
use clap::ValueEnum;
use kvpack::AttentionShape;
use kvpack::backend::Backend;
use kvpack::cache::{Appended, Budget, Growth, ModelCache, StoreRoom, TokenRun};
use kvpack_cli::{Activation, Config, Model, RopePairs};
use kvpack_serving::{Figures, Prompt, Request, Scheduler, Settings};
use pollster::block_on;
use serde::Serialize;

use crate::attention::Steps;
use crate::host::{Host, cache_layers};

/// Tokens that the models know.
const VOCABULARY: usize = 32_000;

/// A shape of a model; its weights are random.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    /// 32 layers, 32 query and 32 KV heads of 128, 4096 channels, 11008 inside (LLaVA-1.5-7B, Llama 2 7B)
    #[value(name = "7b")]
    B7,
    /// 32 layers, 32 query and 8 KV heads of 128, 4096 channels, 14336 inside (Llama 3 8B)
    #[value(name = "8b")]
    B8,
    /// 40 layers, 40 query and 40 KV heads of 128, 5120 channels, 13824 inside (LLaVA-1.5-13B)
    #[value(name = "13b")]
    B13,
    /// 2 layers, 4 query and 4 KV heads of 64, 256 channels, 512 inside
    Small,
}

/// Measures throughput under a memory budget, with random weights.
#[derive(clap::Args)]
pub struct StudyArgs {
    /// The shape of the model.
    #[arg(long, value_enum, default_value = "7b")]
    shape: Shape,
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
    /// The shape `small` with a budget of 6 MiB and 8 generated tokens, on any machine.
    #[arg(long)]
    quick: bool,
    /// Writes the rows as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
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
    /// Generated tokens per second in steps without prompts: the batch over the middle time of a token.
    decoded_per_second: f64,
    figures: Figures,
}

#[derive(Serialize)]
struct Report<'a> {
    shape: String,
    random_weights: bool,
    device: String,
    memory_mib: u64,
    prompt: usize,
    output: usize,
    rows: &'a [Row],
}

impl StudyArgs {
    /// The shape, in its small form where asked for.
    fn shape(&self) -> Shape {
        if self.quick { Shape::Small } else { self.shape }
    }

    fn memory_mib(&self) -> u64 {
        if self.quick { 6 } else { self.memory_mib }
    }

    fn output(&self) -> usize {
        if self.quick { 8 } else { self.output }
    }

    /// Rows of the largest step.
    pub const fn rows(&self) -> usize {
        self.most + self.parts * self.chunk
    }

    /// The model, its weights random.
    ///
    /// # Errors
    /// What the device reports.
    pub fn model(&self, device: &Device, dtype: DType) -> Result<Model> {
        let (layers, heads, kv_heads, head_dim, feed_forward) = match self.shape() {
            Shape::B7 => (32, 32, 32, 128, 11008),
            Shape::B8 => (32, 32, 8, 128, 14336),
            Shape::B13 => (40, 40, 40, 128, 13824),
            Shape::Small => (2, 4, 4, 64, 512),
        };
        let config = Config {
            name: "random".into(),
            layers,
            width: heads * head_dim,
            feed_forward,
            attention: AttentionShape::new(heads, kv_heads, head_dim)?,
            context: self.prompt + self.output(),
            norm_epsilon: 1e-5,
            rope_base: 10_000.0,
            rope_pairs: RopePairs::Halves,
            activation: Activation::Silu,
            embedding_scale: 1.0,
            local: None,
        };
        Model::random(config, VOCABULARY, device, dtype)
    }

    /// Measures all recipes.
    ///
    /// # Errors
    /// What is wrong with a recipe or the budget, and what the device reports.
    pub fn run<B: Backend + Clone, S: Steps<B>>(&self, backend: &B, host: Host<S>) -> Result<()> {
        let mut host = host.without_end();
        let mut rows: Vec<Row> = Vec::new();
        let memory = self.memory_mib();
        println!("{}, {:?}, random weights, {memory} MiB of cache", backend.name(), self.shape());
        println!("prompts of {} tokens, {} generated\n", self.prompt, self.output());
        println!(
            "| recipe | MiB a request | batch | tokens/s | × | decoded/s | × | ms a token p50 | ms to first p50 |"
        );
        println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
        for recipe in &self.recipes {
            let row = self.row(backend, &mut host, recipe)?;
            let first = rows.first().unwrap_or(&row);
            println!(
                "| {recipe} | {:.2} | {} | {:.1} | {:.2} | {:.1} | {:.2} | {:.2} | {:.1} |",
                row.bytes_of_request as f64 / f64::from(1 << 20),
                row.batch,
                row.tokens_per_second,
                row.tokens_per_second / first.tokens_per_second,
                row.decoded_per_second,
                row.decoded_per_second / first.decoded_per_second,
                row.figures.token_ms.p50,
                row.figures.first_token_ms.p50,
            );
            rows.push(row);
        }
        if let Some(path) = &self.json {
            let report = Report {
                shape: format!("{:?}", self.shape()),
                random_weights: true,
                device: backend.name(),
                memory_mib: memory,
                prompt: self.prompt,
                output: self.output(),
                rows: &rows,
            };
            fs::write(path, serde_json::to_string_pretty(&report)?)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    fn row<B: Backend + Clone, S: Steps<B>>(&self, backend: &B, host: &mut Host<S>, recipe: &str) -> Result<Row> {
        let mut layers = cache_layers(&host.model().config, &recipe.parse()?)?;
        if recipe.starts_with("calibquant") {
            // As in the paper: prompts are packed, generated tokens stay in f16.
            for (_, of_layer) in &mut layers {
                *of_layer = of_layer.clone().with_appended(Appended::Keep);
            }
        }
        let mut serve = |cache: ModelCache<B>| -> Result<Figures> {
            let request = |at: usize| {
                let prompt = Prompt::Length { tokens: self.prompt, shared: 0, seed: at + 1 };
                let prompt = prompt.drawn(VOCABULARY as u32).unwrap_or_default();
                Request { arrival: Duration::ZERO, prompt, output: self.output() }
            };
            let sequences = cache.sequences();
            let settings =
                Settings { sequences, prefixes: 0, rows: sequences + self.parts * self.chunk, chunk: self.chunk };
            Ok(Scheduler::new(cache, settings, (0..sequences).map(request).collect())?.serve(host, |_| {})?.figures)
        };
        // One request alone says which pages each needs; a part of a prompt lies in f16 besides until it is packed.
        let cache = ModelCache::new(backend, &layers, 1)?;
        let part = cache.room_for_append(0, &[TokenRun::prompt(0, self.chunk.min(self.prompt))])?;
        let alone = serve(cache.with_budget(Budget::unlimited().growing(Growth::Exact)))?.pages;
        let memory = self.memory_mib() << 20;
        let budget = Budget::of_bytes(memory).growing(Growth::None);
        let mut batch = usize::try_from(memory / alone.most_in_use_bytes.max(1))?.min(self.most);
        let cache = loop {
            ensure!(batch > 0, "{} MiB hold no request of {recipe}", self.memory_mib());
            let room = |(store, &pages): (usize, &usize)| {
                let staged = if store == 0 { part[0].pages * self.parts.min(batch) } else { 0 };
                StoreRoom { pages: batch * pages + staged, spans: batch }
            };
            let rooms: Vec<StoreRoom> = alone.most_by_store.iter().enumerate().map(room).collect();
            let mut cache = ModelCache::new(backend, &layers, batch)?.with_budget(budget);
            match block_on(cache.reserve(&rooms)) {
                Ok(()) => break cache,
                Err(kvpack::Error::NoRoom { .. }) => batch -= 1,
                Err(error) => return Err(error.into()),
            }
        };
        let figures = serve(cache)?;
        let preempted = figures.preemptions;
        ensure!(preempted == 0, "{batch} requests of {recipe} did not fit at a time: {preempted} were preempted");
        Ok(Row {
            recipe: recipe.into(),
            bytes_of_request: alone.most_in_use_bytes,
            batch,
            tokens_per_second: figures.tokens_per_second,
            decoded_per_second: batch as f64 / (figures.token_ms.p50 / 1e3).max(1e-9),
            figures,
        })
    }
}
