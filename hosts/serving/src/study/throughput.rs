//! `throughput`: throughput under a memory budget, as CalibQuant measures it (Tables 5-8). A prompt is an image and some
//! text; the recipe decides how many of them the budget holds at a time.

use kvpack::AttentionShape;
use kvpack::backend::Backend;
use kvpack::cache::{Budget, Growth, ModelCache, Recipe};
use serde::Serialize;

use super::report::{self, StudyReport};
use super::step_time::number;
use super::{FURTHER_TOKENS, Measure, RandomModel, StepTime};
use crate::{Contexts, EqualRequests, Error, Figures, generated_in_f16};

/// Requests and budgets of the study `throughput`.
#[derive(Clone, Debug, clap::Args)]
pub struct ThroughputOptions {
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

impl ThroughputOptions {
    /// The same in the sizes of a model.
    #[must_use]
    pub fn sized(self, model: &RandomModel) -> Self {
        if model.quick { Self { memory_mib: vec![6], output: 8, ..self } } else { self }
    }

    /// The requests.
    const fn requests(&self) -> EqualRequests {
        EqualRequests { prompt: self.prompt, output: self.output, chunk: self.chunk, parts: self.parts }
    }

    /// Rows of the largest step.
    pub const fn rows(&self) -> usize {
        self.requests().settings(self.most).rows
    }

    /// The budgets, as the name of a model ends.
    pub fn budgets(&self) -> String {
        let listed: Vec<String> = self.memory_mib.iter().map(u64::to_string).collect();
        format!("{} MiB of cache", listed.join(" and "))
    }
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

/// Measures throughput under a memory budget.
///
/// # Errors
/// What is wrong with the recipes, [`Error::Preempted`] where a budget holds fewer requests than were computed for it,
/// and what the host reports.
pub fn throughput<H: Measure>(
    host: &mut H,
    report: &StudyReport<'_>,
    options: &ThroughputOptions,
) -> Result<(), H::Error> {
    println!("prompts of {} tokens, {} generated\n", options.prompt, options.output);
    let sizes = ["MiB a request", "batch", "tokens/s", "×", "decoded/s", "×", "of kernels", "of the batch"];
    let numbers = [&sizes, H::COLUMNS.names(), &["ms to first p50"]].concat();
    report::heading(&["MiB", "recipe"], &numbers);
    let mut rows: Vec<Row> = Vec::new();
    for &memory_mib in &options.memory_mib {
        let before = rows.len();
        for recipe in &options.recipes {
            let row = measured(host, report.steps(), options, (memory_mib, recipe), rows.get(before))?;
            print::<H>(&row, rows.get(before).unwrap_or(&row));
            rows.push(row);
            // Whoever stops the program keeps what was measured.
            report.write(&rows, || {
                let of = |row: &Row| ("decoded".to_owned(), row.batch as f64, row.decoded_per_second);
                let axes = ("requests at a time", "tokens/s");
                report::lines("Throughput under a memory budget", axes, rows.iter().map(of))
            })?;
        }
    }
    Ok(())
}

/// A recipe under a budget, whose first recipe came before.
fn measured<H: Measure>(
    host: &mut H,
    steps: usize,
    options: &ThroughputOptions,
    (memory_mib, recipe): (u64, &str),
    first: Option<&Row>,
) -> Result<Row, H::Error> {
    let mut layers = host.layers(&recipe.parse()?)?;
    if recipe.starts_with("calibquant") {
        layers = generated_in_f16(layers);
    }
    let Held { cache, bytes_of_request } = held(host, options, &layers, memory_mib)?;
    let batch = cache.sequences();
    let figures = match memory_mib <= options.served_mib {
        true => Some(host.serve(&options.requests(), cache)?),
        false => {
            drop(cache); // what is measured next needs the memory
            None
        }
    };
    let preempted = figures.as_ref().map_or(0, |figures| figures.preemptions);
    if preempted > 0 {
        return Err(Error::Preempted { recipe: recipe.into(), batch, preempted }.into());
    }
    // A step without prompts, at a number of sequences.
    let mut decoded = |sequences| {
        let of = Contexts { sequences, tokens: options.prompt, more: steps + FURTHER_TOKENS };
        let mut cache = host.filled(&recipe.parse()?, of, None)?;
        host.decode(&mut cache, steps)
    };
    let time = decoded(batch)?;
    let same_batch_ms = match first.filter(|first| first.batch != batch) {
        Some(first) => decoded(first.batch)?.step_ms,
        None => time.step_ms,
    };
    Ok(Row {
        memory_mib,
        recipe: recipe.into(),
        bytes_of_request,
        batch,
        tokens_per_second: figures.as_ref().map(|figures| figures.tokens_per_second),
        decoded_per_second: batch as f64 / time.step_ms * 1e3,
        time,
        same_batch_ms,
        figures,
    })
}

/// A cache for as many requests as the budget holds, with memory for all of them.
fn held<H: Measure>(
    host: &mut H,
    options: &ThroughputOptions,
    layers: &[(AttentionShape, Recipe)],
    memory_mib: u64,
) -> Result<Held<H::Backend>, H::Error> {
    let (backend, requests) = (host.backend().clone(), options.requests());
    let cache = |sequences, growth| -> kvpack::Result<_> {
        Ok(ModelCache::new(&backend, layers, sequences)?.with_budget(Budget::unlimited().growing(growth)))
    };
    // One request alone says which pages each needs.
    let alone = host.serve(&requests, cache(1, Growth::Exact)?)?.pages;
    // Kernels for steps of several prompts are compiled before anything is timed.
    host.serve(&EqualRequests { output: 4, ..requests }, cache(options.parts + 1, Growth::Doubling)?)?;
    let cache = requests.cache(&backend, layers, (memory_mib << 20, options.most), &alone)?;
    Ok(Held { cache, bytes_of_request: alone.most_in_use_bytes })
}

fn print<H: Measure>(row: &Row, first: &Row) {
    let decoded = row.decoded_per_second / first.decoded_per_second;
    let kernels = first.same_batch_ms / row.same_batch_ms;
    let times = row.tokens_per_second.zip(first.tokens_per_second).map(|(of, first)| of / first);
    let first_token_ms = row.figures.as_ref().map(|figures| figures.first_token_ms.p50);
    let cells = vec![
        row.memory_mib.to_string(),
        row.recipe.clone(),
        format!("{:.2}", row.bytes_of_request as f64 / f64::from(1 << 20)),
        row.batch.to_string(),
        number(row.tokens_per_second, 1),
        number(times, 2),
        format!("{:.1}", row.decoded_per_second),
        format!("{decoded:.2}"),
        format!("{kernels:.2}"),
        format!("{:.2}", decoded / kernels),
    ];
    report::row(&[cells, H::COLUMNS.cells(&row.time), vec![number(first_token_ms, 1)]].concat());
}
