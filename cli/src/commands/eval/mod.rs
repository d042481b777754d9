//! `kvpack eval`: what a cache method loses, on a dump of keys and values or in a running model.

mod dump;
mod formats;
mod layer;
mod model;
mod report;
mod stored;

use std::path::PathBuf;

use anyhow::{Result, bail};
use serde::Serialize;

use crate::backend::BackendArgs;
use crate::outcome::Outcome;
use crate::print;

/// Measures what cache methods lose: on a dump of keys, values and queries, or in a model that reads a text.
///
/// A dump is a safetensors file with, for each layer N: layerN.key and layerN.value [kv_heads, tokens, head_dim],
/// and at least one of layerN.query_prompt [query_heads, queries, head_dim], the queries of the last prompt tokens, and
/// layerN.query_decode [query_heads, queries, head_dim], queries of tokens after the prompt. Elements are F16, BF16 or
/// F32; keys and queries are taken after position encoding. `kvpack capture` writes dumps.
///
/// Each query attends to the tokens up to its own, or to all of them where the file's metadata have mask = none. The
/// error is the relative L2 error of the outputs against exact attention over the data of the dump. Calibrations
/// (CalibQuant's τ1 and τ2, one pair for each layer and format) are searched on every second prompt query, taken where
/// both halves of these gain by them, and judged on the other prompt queries and the decode queries.
///
/// With --model, a model reads a text in chunks of 128 tokens with its cache stored by each recipe: perplexity, KL
/// divergence and top-1 agreement against the f16 cache, and the log-probability of a pass key hidden in the text.
#[derive(clap::Args)]
pub struct EvalArgs {
    /// The dump.
    #[arg(required_unless_present = "model", conflicts_with = "model")]
    file: Option<PathBuf>,
    #[command(flatten)]
    dump: dump::DumpArgs,
    #[command(flatten)]
    model: model::ModelArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    backend: BackendArgs,
}

/// How a report is printed.
#[derive(Clone, Copy)]
enum Form {
    Tables,
    Json,
}

impl Form {
    fn print<T: Serialize>(self, report: &T, tables: impl FnOnce(&T)) -> Result<()> {
        match self {
            Self::Tables => tables(report),
            Self::Json => print::json(report)?,
        }
        Ok(())
    }
}

/// Runs the command.
pub fn run(args: &EvalArgs) -> Result<Outcome> {
    let form = if args.json { Form::Json } else { Form::Tables };
    match (&args.file, &args.model.model) {
        (Some(file), None) => dump::run(file, &args.dump, &args.backend, form),
        (_, Some(model)) => model::run(model, &args.model, &args.backend, form),
        (None, None) => bail!("name a dump, or a model with --model"),
    }
}
