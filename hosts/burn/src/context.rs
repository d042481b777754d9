//! `context`: time per output token against the length of the context (Cocktail, Figures and Tables III-V).

use std::path::PathBuf;

use burn::tensor::Device;
use kvpack::cache::{ChunkStores, ModelRecipe};
use kvpack::plan::TokenRange;
use kvpack::wgpu::Wgpu;
use kvpack_serving::{Contexts, similarities};
use serde::Serialize;

use crate::host::Host;
use crate::shape::Shape;
use crate::steps::{self, FIRST, StepTime, filled};
use crate::{Result, report};

/// Tokens of a chunk.
const CHUNK: usize = 32;

/// Time per output token against the context, with random weights.
#[derive(clap::Args)]
pub struct ContextArgs {
    /// The shape of the model.
    #[arg(long, value_enum, default_value = "8b")]
    shape: Shape,
    /// The shape `small` and the smallest sizes, on any machine.
    #[arg(long)]
    quick: bool,
    /// Sequences.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Tokens of each.
    #[arg(long, value_delimiter = ',', default_value = "1024,16384,131072")]
    tokens: Vec<usize>,
    /// How contexts are stored; the first is what the others are compared with.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "f16,kivi:4,kivi:2,int4,calibquant:2,cocktail,cocktail+reorder=none,cocktail+search=none"
    )]
    recipes: Vec<String>,
    /// Steps that are timed.
    #[arg(long, default_value_t = 12)]
    steps: usize,
    /// Writes the rows as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

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

impl ContextArgs {
    /// Runs the study.
    pub fn run(&self, device: &Device, backend: &Wgpu) -> Result<bool> {
        let (shape, batch, lengths) = match self.quick {
            true => (Shape::Small, 1, vec![512]),
            false => (self.shape, self.batch, self.tokens.clone()),
        };
        let mut host = Host::new(backend, shape.decoder(device)?, batch, None)?;
        report::heading(backend, "context", shape.name());
        println!("| batch × tokens | recipe | step ms | × | attention alone ms | submitted after ms |");
        println!("| --- | --- | ---: | ---: | ---: | ---: |");
        let mut rows: Vec<Row> = Vec::new();
        for &tokens in &lengths {
            for recipe in &self.recipes {
                let time = self.time(backend, &mut host, recipe, (batch, tokens))?;
                let first = rows.iter().find(|row| row.tokens == tokens).map_or(time.step_ms, |row| row.time.step_ms);
                let times = first / time.step_ms;
                println!(
                    "| {batch} × {tokens} | {recipe} | {:.2} | {times:.2} | {:.2} | {:.2} |",
                    time.step_ms,
                    time.attention_ms.unwrap_or(f64::NAN),
                    time.submitted_ms
                );
                rows.push(Row { batch, tokens, recipe: recipe.clone(), time, times });
                report::write(self.json.as_deref(), backend, ("context", shape.name()), &rows)?;
            }
        }
        Ok(true)
    }

    fn time(
        &self,
        backend: &Wgpu,
        host: &mut Host,
        recipe: &str,
        (sequences, tokens): (usize, usize),
    ) -> Result<StepTime> {
        let parsed: ModelRecipe = recipe.parse()?;
        let chunks = parsed.mixture().map(|mixture| -> Result<ChunkStores> {
            Ok(mixture.chunks_of(TokenRange::new(0, tokens)?, CHUNK, &similarities(tokens / CHUNK))?)
        });
        let of = Contexts { sequences, tokens, more: FIRST + self.steps + 1 };
        let mut cache = filled(backend, host, &parsed, of, chunks.transpose()?.as_ref())?;
        steps::decode(host, &mut cache, self.steps)
    }
}
