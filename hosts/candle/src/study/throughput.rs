//! `study throughput`: throughput under a memory budget, as CalibQuant measures it (Tables 5-8). A prompt is an image
//! and some text; the recipe decides how many of them the budget holds at a time.

use anyhow::{Context, Result, ensure};
use kvpack::backend::Backend;
use kvpack::cache::{Budget, Growth, ModelCache};
use kvpack_serving::{Contexts, EqualRequests, Figures, Scheduler, generated_in_f16};
use serde::Serialize;

use super::report::{self, ms};
use super::{Common, VOCABULARY};
use crate::attention::Steps;
use crate::filled::{self, StepTime};
use crate::host::Host;
use crate::rig::Rig;

/// Measures throughput under a memory budget, with random weights.
#[derive(clap::Args)]
pub struct ThroughputArgs {
    #[command(flatten)]
    common: Common,
    /// MiB that the cache may take; several budgets one after the other.
    #[arg(long, value_delimiter = ',', default_value = "5120")]
    memory_mib: Vec<u64>,
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
    /// The largest budget whose queue is served; of larger ones only steps without prompts are measured.
    #[arg(long, value_name = "MIB", default_value_t = u64::MAX)]
    served_mib: u64,
}

/// What came of a recipe.
#[derive(Clone, Debug, Serialize)]
struct Row {
    /// MiB of the budget.
    memory_mib: u64,
    recipe: String,
    /// Bytes that one request needs at its end.
    bytes_of_request: u64,
    /// Requests that the budget holds at a time.
    batch: usize,
    /// Generated tokens per second over the whole queue, prompts included.
    tokens_per_second: Option<f64>,
    /// A step without prompts, over contexts of random keys and values.
    #[serde(flatten)]
    time: StepTime,
    /// Generated tokens per second in such steps.
    decoded_per_second: f64,
    /// Milliseconds of a step at the batch of the first recipe.
    same_batch_ms: f64,
    figures: Option<Figures>,
}

/// What the budget holds of a recipe.
struct Held<B: Backend> {
    cache: ModelCache<B>,
    bytes_of_request: u64,
}

impl ThroughputArgs {
    fn budgets(&self) -> Vec<u64> {
        if self.common.quick { vec![6] } else { self.memory_mib.clone() }
    }

    /// The requests, with this many tokens to generate for each.
    fn requests(&self, output: usize) -> EqualRequests {
        EqualRequests { prompt: self.prompt, output, chunk: self.chunk, parts: self.parts }
    }

    fn output(&self) -> usize {
        if self.common.quick { 8 } else { self.output }
    }

    pub fn run<R: Rig>(&self, rig: &R) -> Result<()> {
        let model = self.common.model(rig)?;
        let budgets = self.budgets();
        let listed: Vec<String> = budgets.iter().map(u64::to_string).collect();
        let name = format!("{}, {} MiB of cache", model.config.name, listed.join(" and "));
        let steps = rig.steps(&model, model.config.layers, self.most + self.parts * self.chunk)?;
        let mut host = Host::new(model, steps).without_end();
        report::heading(rig, "throughput", &name);
        println!("prompts of {} tokens, {} generated\n", self.prompt, self.output());
        println!(
            "| MiB | recipe | MiB a request | batch | tokens/s | × | decoded/s | × | of kernels | of the batch | step ms \
             | attention ms | rest ms | host ms | ms to first p50 |"
        );
        println!("| ---: | --- | {}", "---: | ".repeat(13).trim_end());
        let mut rows: Vec<Row> = Vec::new();
        for memory_mib in budgets {
            let before = rows.len();
            for recipe in &self.recipes {
                let row = self.row(rig, &mut host, (memory_mib, recipe), rows.get(before))?;
                print(&row, rows.get(before).unwrap_or(&row));
                rows.push(row);
            }
        }
        let plot = || {
            let of = |row: &Row| ("decoded".to_owned(), row.batch as f64, row.decoded_per_second);
            report::lines("Throughput under a memory budget", ("requests at a time", "tokens/s"), rows.iter().map(of))
        };
        report::write(rig, &self.common, ("throughput", &name), &rows, plot)
    }

    /// A recipe under a budget, whose first recipe came before.
    fn row<R: Rig>(
        &self,
        rig: &R,
        host: &mut Host<R::Steps>,
        (memory_mib, recipe): (u64, &String),
        first: Option<&Row>,
    ) -> Result<Row> {
        let Held { cache, bytes_of_request } = self.held(rig, host, (memory_mib, recipe))?;
        let batch = cache.sequences();
        let figures = match memory_mib <= self.served_mib {
            true => Some(self.serve(host, cache, (batch, self.output()))?),
            false => {
                drop(cache); // what is measured next needs the memory
                None
            }
        };
        let preempted = figures.as_ref().map_or(0, |figures| figures.preemptions);
        ensure!(preempted == 0, "{batch} requests of {recipe} did not fit at a time: {preempted} were preempted");
        let time = self.decoded(rig, host, recipe, batch)?;
        let same_batch_ms = match first.filter(|first| first.batch != batch) {
            Some(first) => self.decoded(rig, host, recipe, first.batch)?.step_ms,
            None => time.step_ms,
        };
        Ok(Row {
            memory_mib,
            recipe: recipe.clone(),
            bytes_of_request,
            batch,
            tokens_per_second: figures.as_ref().map(|figures| figures.tokens_per_second),
            decoded_per_second: batch as f64 / time.step_ms * 1e3,
            time,
            same_batch_ms,
            figures,
        })
    }

    /// A step without prompts, at this number of sequences.
    fn decoded<R: Rig>(&self, rig: &R, host: &mut Host<R::Steps>, recipe: &str, sequences: usize) -> Result<StepTime> {
        const STEPS: usize = 16;
        let of = Contexts { sequences, tokens: self.prompt, more: STEPS + 8 };
        let mut cache = filled::filled(rig, host, &recipe.parse()?, of, None)?;
        filled::decode(rig, host, &mut cache, STEPS)
    }

    /// Serves some requests that have all arrived, with this many tokens to generate for each.
    fn serve<B: Backend + Clone, S: Steps<B>>(
        &self,
        host: &mut Host<S>,
        cache: ModelCache<B>,
        (requests, output): (usize, usize),
    ) -> Result<Figures> {
        let of = self.requests(output);
        let settings = of.settings(cache.sequences());
        let served = Scheduler::new(cache, settings, of.drawn(requests, VOCABULARY as u32))?.serve(host, |_| {})?;
        host.steps().forget()?;
        Ok(served.figures)
    }

    /// A cache for as many requests as the budget holds, with memory for all of them.
    fn held<R: Rig>(
        &self,
        rig: &R,
        host: &mut Host<R::Steps>,
        (memory_mib, recipe): (u64, &str),
    ) -> Result<Held<R::Backend>> {
        let backend = rig.backend();
        let mut layers = host.model().config.cache_layers(&recipe.parse()?)?;
        if recipe.starts_with("calibquant") {
            layers = generated_in_f16(layers);
        }
        // One request alone says which pages each needs.
        let exact = Budget::unlimited().growing(Growth::Exact);
        let cache = ModelCache::new(backend, &layers, 1)?.with_budget(exact);
        let alone = self.serve(host, cache, (1, self.output()))?.pages;
        // Kernels for steps of several prompts are compiled before anything is timed.
        let several = ModelCache::new(backend, &layers, self.parts + 1)?;
        let doubling = Budget::unlimited().growing(Growth::Doubling);
        self.serve(host, several.with_budget(doubling), (self.parts + 1, 4))?;
        let within = (memory_mib << 20, self.most);
        let cache = self.requests(self.output()).cache(backend, &layers, within, &alone).context(recipe.to_owned())?;
        Ok(Held { cache, bytes_of_request: alone.most_in_use_bytes })
    }
}

fn print(row: &Row, first: &Row) {
    let decoded = row.decoded_per_second / first.decoded_per_second;
    let kernels = first.same_batch_ms / row.same_batch_ms;
    let or_dash = |x: Option<f64>, digits: usize| x.map_or("–".into(), |x| format!("{x:.digits$}"));
    let times = row.tokens_per_second.zip(first.tokens_per_second).map(|(of, first)| of / first);
    println!(
        "| {} | {} | {:.2} | {} | {} | {} | {:.1} | {decoded:.2} | {kernels:.2} | {:.2} | {:.2} | {} | {} | {} | {} |",
        row.memory_mib,
        row.recipe,
        row.bytes_of_request as f64 / f64::from(1 << 20),
        row.batch,
        or_dash(row.tokens_per_second, 1),
        or_dash(times, 2),
        row.decoded_per_second,
        decoded / kernels,
        row.time.step_ms,
        ms(row.time.attention_ms),
        ms(row.time.rest_ms()),
        ms(row.time.host_ms()),
        or_dash(row.figures.as_ref().map(|figures| figures.first_token_ms.p50), 1),
    );
}
