//! `study decode`: a step of decoding as a sum, over contexts of random keys and values, next to candle's own attention.

use std::path::PathBuf;

use anyhow::Result;
use kvpack::cache::ModelRecipe;
use kvpack_cli::Config;
use kvpack_serving::Contexts;
use serde::Serialize;

use super::report::{self, ms};
use super::{Common, f16_bytes, greedy, has_room, model_of};
use crate::filled::{self, StepTime};
use crate::host::Host;
use crate::own;
use crate::rig::Rig;

/// Tokens per second by recipe, batch and context, and what a step is made of.
#[derive(clap::Args)]
pub struct DecodeArgs {
    #[command(flatten)]
    common: Common,
    /// A GGUF file in place of random weights.
    #[arg(long)]
    model: Option<PathBuf>,
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
    /// Steps that are timed.
    #[arg(long, default_value_t = 12)]
    steps: usize,
    /// Launches every step kernel by kernel, without graphs.
    #[arg(long)]
    without_graphs: bool,
    /// Compares a greedy text of this many tokens with that of candle's own attention.
    #[arg(long, default_value_t = 0)]
    greedy: usize,
}

#[derive(Serialize)]
struct Row {
    batch: usize,
    tokens: usize,
    /// `candle` for candle's own attention in f16.
    recipe: String,
    tokens_per_second: f64,
    #[serde(flatten)]
    time: StepTime,
}

impl DecodeArgs {
    pub fn run<R: Rig>(&self, rig: &R) -> Result<()> {
        let model = model_of(rig, self.model.as_deref(), &self.common)?;
        let name = model.config.name.clone();
        let (batches, lengths) = match self.common.quick {
            true => (vec![1, 2], vec![256]),
            false => (self.batches.clone(), self.tokens.clone()),
        };
        let most = batches.iter().copied().max().unwrap_or(1);
        let steps = rig.steps(&model, model.config.layers, most)?;
        let host = Host::new(model, steps);
        let mut host = if self.without_graphs { host.without_records() } else { host };
        report::heading(rig, "decode", &name);
        if self.greedy > 0 {
            let (model, text) = greedy::compared(rig, host, self.greedy)?;
            println!("{text}\n");
            host = model;
        }
        println!("| batch × tokens | attention | tokens/s | step ms | attention ms | rest ms | host ms |");
        println!("| --- | --- | ---: | ---: | ---: | ---: | ---: |");
        let mut rows = Vec::new();
        for &tokens in &lengths {
            for &batch in &batches {
                self.of_size(rig, &mut host, (batch, tokens), &mut rows)?;
                // Whoever stops the program keeps what was measured.
                self.write(rig, (&name, most), &rows)?;
            }
        }
        Ok(())
    }

    /// Writes the rows so far, and a plot of those of the largest batch.
    fn write<R: Rig>(&self, rig: &R, (name, most): (&str, usize), rows: &[Row]) -> Result<()> {
        let plot = || {
            let of = |row: &Row| (row.recipe.clone(), row.tokens as f64, row.time.step_ms);
            let rows = rows.iter().filter(|row| row.batch == most).map(of);
            report::lines("Steps of decoding", ("tokens of a sequence", "ms"), rows)
        };
        report::write(rig, &self.common, ("decode", name), rows, plot)
    }

    fn of_size<R: Rig>(
        &self,
        rig: &R,
        host: &mut Host<R::Steps>,
        (batch, tokens): (usize, usize),
        rows: &mut Vec<Row>,
    ) -> Result<()> {
        let bytes = f16_bytes(&host.model().config, batch * (tokens + 256));
        let push = |recipe: &str, time: Option<StepTime>, rows: &mut Vec<Row>| {
            let Some(time) = time else {
                println!("| {batch} × {tokens} | {recipe} | does not fit |");
                return;
            };
            let tokens_per_second = batch as f64 / time.step_ms * 1e3;
            println!(
                "| {batch} × {tokens} | {recipe} | {tokens_per_second:.1} | {:.2} | {} | {} | {} |",
                time.step_ms,
                ms(time.attention_ms),
                ms(time.rest_ms()),
                ms(time.host_ms())
            );
            rows.push(Row { batch, tokens, recipe: recipe.into(), tokens_per_second, time });
        };
        // Keys, and weights of attention in f16 and in the making.
        let own = has_room(rig, bytes + bytes / 4).then(|| own::decode(rig, host.model(), (batch, tokens), self.steps));
        let own = own.transpose()?;
        let own = own.map(|step_ms| StepTime { step_ms, device_ms: None, attention_ms: None });
        push("candle", own, rows);
        for recipe in &self.recipes {
            let parsed: ModelRecipe = recipe.parse()?;
            let bits = bits_of(&host.model().config, &parsed)?;
            // Random keys and values of one sequence lie there too.
            let needed = (bytes as f64 * bits / 16.0 * 1.05) as u64 + f16_bytes(&host.model().config, tokens) / 4;
            let of = Contexts { sequences: batch, tokens, more: self.steps + 8 };
            let time = match has_room(rig, needed) {
                true => {
                    let mut cache = filled::filled(rig, host, &parsed, of, None)?;
                    Some(filled::decode(rig, host, &mut cache, self.steps)?)
                }
                false => None,
            };
            push(recipe, time, rows);
        }
        Ok(())
    }
}

/// Bits of an element where most tokens lie.
fn bits_of(config: &Config, recipe: &ModelRecipe) -> Result<f64> {
    let (_, of_layer) = config.cache_layers(recipe)?.swap_remove(0);
    Ok(of_layer.packed().format.bits_per_element(&config.attention))
}
