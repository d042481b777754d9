//! `study context`: time per output token against the length of the context (Cocktail, Figures and Tables III-V).

use anyhow::Result;
use kvpack::cache::{ChunkStores, ModelRecipe};
use kvpack::plan::TokenRange;
use kvpack_serving::{Contexts, similarities};
use serde::Serialize;

use super::report::{self, ms};
use super::{Common, f16_bytes, has_room};
use crate::filled::{self, StepTime};
use crate::host::Host;
use crate::rig::Rig;

/// Time per output token against the context: f16, KIVI, uniform codes, and Cocktail's mixture of chunks, also without
/// reordering and without search.
#[derive(clap::Args)]
pub struct ContextArgs {
    #[command(flatten)]
    common: Common,
    /// Sequences.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Tokens of each.
    #[arg(long, value_delimiter = ',', default_value = "1024,4096,16384,65536,131072")]
    tokens: Vec<usize>,
    /// How contexts are stored.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "f16,kivi:4,kivi:2,int4,calibquant:2,cocktail,cocktail+reorder=none,cocktail+search=none"
    )]
    recipes: Vec<String>,
    /// Steps that are timed.
    #[arg(long, default_value_t = 12)]
    steps: usize,
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
    /// f16 over this.
    times: f64,
}

impl ContextArgs {
    pub fn run<R: Rig>(&self, rig: &R) -> Result<()> {
        let (batch, lengths) = match self.common.quick {
            true => (1, vec![512]),
            false => (self.batch, self.tokens.clone()),
        };
        let model = self.common.model(rig)?;
        let name = model.config.name.clone();
        let steps = rig.steps(&model, model.config.layers, batch)?;
        let mut host = Host::new(model, steps);
        report::heading(rig, "context", &name);
        println!("| batch × tokens | recipe | step ms | × | attention ms | rest ms | host ms |");
        println!("| --- | --- | ---: | ---: | ---: | ---: | ---: |");
        let mut rows: Vec<Row> = Vec::new();
        for &tokens in &lengths {
            for recipe in &self.recipes {
                let parsed: ModelRecipe = recipe.parse()?;
                if !has_room(rig, f16_bytes(&host.model().config, batch * tokens) * 21 / 20) {
                    println!("| {batch} × {tokens} | {recipe} | does not fit |");
                    continue;
                }
                let chunks = parsed.mixture().map(|mixture| -> Result<ChunkStores> {
                    Ok(mixture.chunks_of(TokenRange::new(0, tokens)?, CHUNK, &similarities(tokens / CHUNK))?)
                });
                let of = Contexts { sequences: batch, tokens, more: self.steps + 8 };
                let mut cache = filled::filled(rig, &mut host, &parsed, of, chunks.transpose()?.as_ref())?;
                let time = filled::decode(rig, &mut host, &mut cache, self.steps)?;
                let first = rows.iter().find(|row| row.tokens == tokens).map_or(time.step_ms, |row| row.time.step_ms);
                let times = first / time.step_ms;
                println!(
                    "| {batch} × {tokens} | {recipe} | {:.2} | {times:.2} | {} | {} | {} |",
                    time.step_ms,
                    ms(time.attention_ms),
                    ms(time.rest_ms()),
                    ms(time.host_ms())
                );
                rows.push(Row { batch, tokens, recipe: recipe.clone(), time, times });
            }
        }
        let plot = || {
            let of = |row: &Row| (row.recipe.clone(), row.tokens as f64, row.time.step_ms);
            report::lines("Time per output token", ("tokens of the context", "ms"), rows.iter().map(of))
        };
        report::write(rig, &self.common, ("context", &name), &rows, plot)
    }
}
