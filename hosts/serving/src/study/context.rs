//! `context`: time per output token against the length of the context (Cocktail, Figures and Tables III-V).

use kvpack::cache::{ChunkStores, ModelRecipe};
use kvpack::plan::TokenRange;
use serde::Serialize;

use super::report::{self, StudyReport};
use super::{FURTHER_TOKENS, Measure, RandomModel, StepTime, f16_bytes};
use crate::{Contexts, similarities};

/// Sizes and recipes of the study `context`.
#[derive(Clone, Debug, clap::Args)]
pub struct ContextOptions {
    /// Sequences.
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    /// Tokens of each.
    #[arg(long, value_delimiter = ',', default_value = "1024,4096,16384,65536,131072")]
    tokens: Vec<usize>,
    /// How contexts are stored; the first is what the others are compared with.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "f16,kivi:4,kivi:2,int4,calibquant:2,cocktail,cocktail+reorder=none,cocktail+search=none"
    )]
    recipes: Vec<String>,
}

impl ContextOptions {
    /// The same in the sizes of a model.
    #[must_use]
    pub fn sized(self, model: &RandomModel) -> Self {
        if model.quick { Self { batch: 1, tokens: vec![512], ..self } } else { self }
    }
}

/// Tokens of a chunk.
const CHUNK: usize = 32;

#[derive(Serialize)]
struct Row {
    batch: usize,
    tokens: usize,
    recipe: String,
    #[serde(flatten)]
    time: StepTime,
    /// The first recipe's step over this.
    times: f64,
}

/// Times a token against the context: f16, KIVI, uniform codes, and Cocktail's mixture of chunks, also without
/// reordering and without search.
///
/// # Errors
/// What is wrong with the recipes, and what the host reports.
pub fn context<H: Measure>(host: &mut H, report: &StudyReport<'_>, options: &ContextOptions) -> Result<(), H::Error> {
    let numbers = [&["×"], H::COLUMNS.names()].concat();
    report::heading(&["batch × tokens", "recipe"], &numbers);
    let mut rows: Vec<Row> = Vec::new();
    let f16 = host.layers(&"f16".parse()?)?;
    for &tokens in &options.tokens {
        for recipe in &options.recipes {
            let (batch, size) = (options.batch, format!("{} × {tokens}", options.batch));
            if !host.has_room(f16_bytes(&f16, batch * tokens) * 21 / 20) {
                println!("| {size} | {recipe} | does not fit |");
                continue;
            }
            let parsed: ModelRecipe = recipe.parse()?;
            let of = Contexts { sequences: batch, tokens, more: report.steps() + FURTHER_TOKENS };
            let mut cache = host.filled(&parsed, of, chunks_of(&parsed, tokens)?.as_ref())?;
            let time = host.decode(&mut cache, report.steps())?;
            let first = rows.iter().find(|row| row.tokens == tokens).map_or(time.step_ms, |row| row.time.step_ms);
            let times = first / time.step_ms;
            report::row(&[vec![size, recipe.clone(), format!("{times:.2}")], H::COLUMNS.cells(&time)].concat());
            rows.push(Row { batch, tokens, recipe: recipe.clone(), time, times });
            // Whoever stops the program keeps what was measured.
            report.write(&rows, || {
                let of = |row: &Row| (row.recipe.clone(), row.tokens as f64, row.time.step_ms);
                report::lines("Time per output token", ("tokens of the context", "ms"), rows.iter().map(of))
            })?;
        }
    }
    Ok(())
}

/// The stores of a context's chunks, where a recipe is a mixture.
fn chunks_of(recipe: &ModelRecipe, tokens: usize) -> kvpack::Result<Option<ChunkStores>> {
    let Some(mixture) = recipe.mixture() else { return Ok(None) };
    mixture.chunks_of(TokenRange::new(0, tokens)?, CHUNK, &similarities(tokens / CHUNK)).map(Some)
}
