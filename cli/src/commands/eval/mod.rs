//! `kvpack eval`: what a cache method loses, on a dump of keys and values or in a running model.

pub mod dump;
mod formats;
pub mod layer;
mod model;
pub mod page;
mod precision;
pub mod stored;

use std::path::{Path, PathBuf};

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
/// With --precision, what rounding the query and the weights adds to the error of each format, on a GPU: the precision
/// that a format gets by default follows from that.
///
/// With --model, a model reads a text in chunks of 128 tokens with its cache stored by each recipe: perplexity, KL
/// divergence and top-1 agreement against the f16 cache, and the log-probability of a pass key hidden in the text.
///
/// With --documents it answers questions about documents cut from the text instead, over what each recipe keeps of
/// document and question: policies (h2o:0.2, lookm:0.1/saw-int4), mixtures (cocktail, its chunks ranked by BM25 or by
/// MiniLM, beside the same shuffled), or all of it packed.
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
    /// Write PATH.json and a page with plots to PATH.html; of a model anew after each recipe.
    #[arg(long, value_name = "PATH")]
    report: Option<PathBuf>,
    #[command(flatten)]
    backend: BackendArgs,
}

/// Where a report goes.
#[derive(Clone, Copy)]
struct Destination<'a> {
    json: bool,
    /// Files beside what is printed.
    files: Option<&'a Path>,
}

impl Destination<'_> {
    /// Finds out whether the files can be written, before anything is computed for them.
    fn try_files<'a>(self, inputs: impl IntoIterator<Item = &'a Path> + Clone) -> Result<()> {
        self.files.map_or(Ok(()), |path| page::try_files(path, inputs))
    }

    fn print<T: Serialize>(self, report: &T, tables: impl FnOnce(&T) -> Result<()>) -> Result<()> {
        if self.json { print::json(report) } else { tables(report) }
    }
}

/// Runs the command.
pub fn run(args: &EvalArgs) -> Result<Outcome> {
    let to = Destination { json: args.json, files: args.report.as_deref() };
    to.try_files(args.file.as_deref().into_iter().chain(args.model.model.as_deref()))?;
    match (&args.file, &args.model.model) {
        (Some(file), None) => dump::run(file, &args.dump, &args.backend, to),
        (_, Some(model)) => model::run(model, &args.model, &args.backend, to),
        (None, None) => bail!("name a dump, or a model with --model"),
    }
}
