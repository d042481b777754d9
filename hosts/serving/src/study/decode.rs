//! `decode`: steps of decoding over contexts of random keys and values, next to the library's own attention.

use kvpack::cache::ModelRecipe;
use serde::Serialize;

use super::report::{self, StudyReport};
use super::{FURTHER_TOKENS, Measure, RandomModel, StepTime, f16_bytes};
use crate::Contexts;

/// Sizes and recipes of the study `decode`.
#[derive(Clone, Debug, clap::Args)]
pub struct DecodeOptions {
    /// Sequences.
    #[arg(long, value_delimiter = ',', default_value = "1,8,64")]
    batches: Vec<usize>,
    /// Tokens of each.
    #[arg(long, value_delimiter = ',', default_value = "1024,8192,32768")]
    tokens: Vec<usize>,
    /// How keys and values are stored.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "f16,int8,saw-int4,calibquant:4,calibquant:2,calibquant:1,kivi:2"
    )]
    recipes: Vec<String>,
    /// Compares a greedy text of this many tokens with that of the library's own attention.
    #[arg(long, default_value_t = 0)]
    pub greedy: usize,
}

impl DecodeOptions {
    /// The same in the sizes of a model.
    #[must_use]
    pub fn sized(self, model: &RandomModel) -> Self {
        if model.quick { Self { batches: vec![1, 2], tokens: vec![256], ..self } } else { self }
    }

    /// The largest number of sequences.
    pub fn most(&self) -> usize {
        self.batches.iter().copied().max().unwrap_or(1)
    }
}

#[derive(Serialize)]
struct Row {
    batch: usize,
    tokens: usize,
    /// The library's name for its own attention.
    recipe: String,
    tokens_per_second: f64,
    #[serde(flatten)]
    time: StepTime,
}

/// Times tokens per second by recipe, batch and context, and what a step is made of.
///
/// # Errors
/// What is wrong with the recipes, and what the host reports.
pub fn decode<H: Measure>(host: &mut H, report: &StudyReport<'_>, options: &DecodeOptions) -> Result<(), H::Error> {
    report::heading(&["batch × tokens", "attention"], &[&["tokens/s"], H::COLUMNS.names()].concat());
    let mut rows = Vec::new();
    for &tokens in &options.tokens {
        for &batch in &options.batches {
            let time = host.decode_own((batch, tokens), report.steps())?;
            push::<H>(&mut rows, (batch, tokens, H::OWN), time);
            for recipe in &options.recipes {
                let time = packed(host, (batch, tokens, recipe), report.steps())?;
                push::<H>(&mut rows, (batch, tokens, recipe), time);
                // Whoever stops the program keeps what was measured.
                report.write(&rows, || {
                    let of = |row: &Row| (row.recipe.clone(), row.tokens as f64, row.time.step_ms);
                    let rows = rows.iter().filter(|row| row.batch == options.most()).map(of);
                    report::lines("Steps of decoding", ("tokens of a sequence", "ms"), rows)
                })?;
            }
        }
    }
    Ok(())
}

/// Steps over packed contexts; none where these do not fit.
fn packed<H: Measure>(
    host: &mut H,
    (batch, tokens, recipe): (usize, usize, &str),
    steps: usize,
) -> Result<Option<StepTime>, H::Error> {
    let recipe: ModelRecipe = recipe.parse()?;
    let layers = host.layers(&recipe)?;
    let bits = layers.first().map_or(16.0, |(shape, of)| of.packed().format.bits_per_element(shape));
    let bytes = f16_bytes(&layers, batch * (tokens + 256));
    // Random keys and values of one sequence lie there too.
    let needed = (bytes as f64 * bits / 16.0 * 1.05) as u64 + f16_bytes(&layers, tokens) / 4;
    if !host.has_room(needed) {
        return Ok(None);
    }
    let mut cache = host.filled(&recipe, Contexts { sequences: batch, tokens, more: steps + FURTHER_TOKENS }, None)?;
    host.decode(&mut cache, steps).map(Some)
}

fn push<H: Measure>(rows: &mut Vec<Row>, (batch, tokens, recipe): (usize, usize, &str), time: Option<StepTime>) {
    let size = format!("{batch} × {tokens}");
    let Some(time) = time else {
        println!("| {size} | {recipe} | does not fit |");
        return;
    };
    let tokens_per_second = batch as f64 / time.step_ms * 1e3;
    report::row(&[vec![size, recipe.into(), format!("{tokens_per_second:.1}")], H::COLUMNS.cells(&time)].concat());
    rows.push(Row { batch, tokens, recipe: recipe.into(), tokens_per_second, time });
}
