//! `throughput`: throughput under a memory budget, as CalibQuant measures it (Tables 5-8). A prompt is an image and some
//! text; the recipe decides how many of them the budget holds at a time.

use std::path::PathBuf;

use burn::tensor::Device;
use kvpack::cache::{Budget, Growth, ModelCache};
use kvpack::wgpu::Wgpu;
use kvpack_serving::{Contexts, EqualRequests, Figures, Scheduler, generated_in_f16};
use serde::Serialize;

use crate::host::Host;
use crate::shape::{Shape, VOCABULARY};
use crate::steps::{self, FIRST, StepTime, filled};
use crate::{Result, report};

/// Steps that are timed.
const STEPS: usize = 12;

/// Throughput under a memory budget, with random weights.
#[derive(clap::Args)]
pub struct ThroughputArgs {
    /// The shape of the model.
    #[arg(long, value_enum, default_value = "7b")]
    shape: Shape,
    /// The shape `small` and the smallest sizes, on any machine.
    #[arg(long)]
    quick: bool,
    /// MiB that the cache may take; several budgets one after the other.
    #[arg(long, value_delimiter = ',', default_value = "5120")]
    memory_mib: Vec<u64>,
    /// How keys and values are stored; the first is what the others are compared with.
    #[arg(long, value_delimiter = ',', default_value = "f16,calibquant:4,calibquant:2,calibquant:1,saw-int4")]
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
    /// The most requests at a time.
    #[arg(long, default_value_t = 128)]
    most: usize,
    /// The largest budget whose queue is served; of larger ones only steps without prompts are measured.
    #[arg(long, value_name = "MIB", default_value_t = u64::MAX)]
    served_mib: u64,
    /// Writes the rows as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What came of a recipe.
#[derive(Serialize)]
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

impl ThroughputArgs {
    /// Runs the study. False where a queue did not fit the budget that was computed for it.
    pub fn run(&self, device: &Device, backend: &Wgpu) -> Result<bool> {
        let (shape, budgets, output) = match self.quick {
            true => (Shape::Small, vec![6], 8),
            false => (self.shape, self.memory_mib.clone(), self.output),
        };
        let of = EqualRequests { prompt: self.prompt, output, chunk: self.chunk, parts: 1 };
        let mut host = Host::new(backend, shape.decoder(device)?, of.settings(self.most).rows, None)?;
        report::heading(backend, "throughput", shape.name());
        println!("prompts of {} tokens, {output} generated\n", self.prompt);
        println!(
            "| MiB | recipe | MiB a request | batch | tokens/s | decoded/s | × | of kernels | of the batch | step ms | \
             attention alone ms | submitted after ms |"
        );
        println!("| ---: | --- | {}", "---: | ".repeat(10).trim_end());
        let (mut rows, mut fit): (Vec<Row>, bool) = (Vec::new(), true);
        for memory_mib in budgets {
            let before = rows.len();
            for recipe in &self.recipes {
                let row = self.row(backend, &mut host, of, (memory_mib, recipe), rows.get(before))?;
                fit &= row.figures.as_ref().is_none_or(|figures| figures.preemptions == 0);
                print(&row, rows.get(before).unwrap_or(&row));
                rows.push(row);
                report::write(self.json.as_deref(), backend, ("throughput", shape.name()), &rows)?;
            }
        }
        Ok(fit)
    }

    /// A recipe under a budget, whose first recipe came before.
    fn row(
        &self,
        backend: &Wgpu,
        host: &mut Host,
        of: EqualRequests,
        (memory_mib, recipe): (u64, &String),
        first: Option<&Row>,
    ) -> Result<Row> {
        let mut layers = host.config().cache_layers(&recipe.parse()?);
        if recipe.starts_with("calibquant") {
            layers = generated_in_f16(layers);
        }
        // One request alone says which pages each needs.
        let exact = Budget::unlimited().growing(Growth::Exact);
        let alone = serve(host, of, ModelCache::new(backend, &layers, 1)?.with_budget(exact))?.pages;
        let cache = of.cache(backend, &layers, (memory_mib << 20, self.most), &alone)?;
        let batch = cache.sequences();
        let figures = match memory_mib <= self.served_mib {
            true => Some(serve(host, of, cache)?),
            false => {
                drop(cache); // what is measured next needs the memory
                None
            }
        };
        let time = self.decoded(backend, host, recipe, batch)?;
        let same_batch_ms = match first.filter(|first| first.batch != batch) {
            Some(first) => self.decoded(backend, host, recipe, first.batch)?.step_ms,
            None => time.step_ms,
        };
        Ok(Row {
            memory_mib,
            recipe: recipe.clone(),
            bytes_of_request: alone.most_in_use_bytes,
            batch,
            tokens_per_second: figures.as_ref().map(|figures| figures.tokens_per_second),
            decoded_per_second: batch as f64 / time.step_ms * 1e3,
            time,
            same_batch_ms,
            figures,
        })
    }

    /// A step without prompts, at this number of sequences.
    fn decoded(&self, backend: &Wgpu, host: &mut Host, recipe: &str, sequences: usize) -> Result<StepTime> {
        let of = Contexts { sequences, tokens: self.prompt, more: FIRST + STEPS + 1 };
        let mut cache = filled(backend, host, &recipe.parse()?, of, None)?;
        steps::decode(host, &mut cache, STEPS)
    }
}

/// Serves as many requests as the cache has sequences.
fn serve(host: &mut Host, of: EqualRequests, cache: ModelCache<Wgpu>) -> Result<Figures> {
    let sequences = cache.sequences();
    let requests = of.drawn(sequences, VOCABULARY as u32);
    Ok(Scheduler::new(cache, of.settings(sequences), requests)?.serve(host, |_| {})?.figures)
}

fn print(row: &Row, first: &Row) {
    let decoded = row.decoded_per_second / first.decoded_per_second;
    let kernels = first.same_batch_ms / row.same_batch_ms;
    println!(
        "| {} | {} | {:.2} | {} | {} | {:.1} | {decoded:.2} | {kernels:.2} | {:.2} | {:.2} | {:.2} | {:.2} |",
        row.memory_mib,
        row.recipe,
        row.bytes_of_request as f64 / f64::from(1 << 20),
        row.batch,
        row.tokens_per_second.map_or("–".into(), |tokens| format!("{tokens:.1}")),
        row.decoded_per_second,
        decoded / kernels,
        row.time.step_ms,
        row.time.attention_ms.unwrap_or(f64::NAN),
        row.time.submitted_ms,
    );
}
