//! `kvpack eval`: what a cache method loses, on a dump of keys and values or in a running model.

pub mod dump;
mod formats;
pub mod layer;
mod model;
pub mod page;
mod precision;
pub mod stored;

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Serialize;

use crate::backend::BackendArgs;
use crate::outcome::Outcome;
use crate::print;

/// Measure what packing loses: on a dump of keys, values and queries, or in a model that reads a text.
///
/// DUMP. A dump is a safetensors file. For each layer N it holds layerN.key and layerN.value [kv_heads, tokens,
/// head_dim], and at least one of layerN.query_prompt [query_heads, queries, head_dim], the queries of the last prompt
/// tokens, and layerN.query_decode [query_heads, queries, head_dim], queries of tokens after the prompt. Elements are
/// F16, BF16 or F32. Keys and queries are those after position encoding. Metadata, all optional: model and text are
/// shown; mask is causal or none. `kvpack capture` writes dumps. Without FILE, the bundled dump is evaluated: three
/// layers of SmolLM2-135M.
///
/// Each query attends to the tokens up to its own, or to all tokens where mask is none. The error is the relative L2
/// error of the outputs against exact attention over the dump. Calibrations (CalibQuant's τ1 and τ2, one pair per layer
/// and format) are searched on every second prompt query. They are used where both halves of those queries gain, and
/// judged on the other prompt queries and the decode queries.
///
/// PRECISION. With --precision, the table shows what rounding queries and weights adds to the error of each format, on
/// a GPU. The default precision of a format follows from it.
///
/// MODEL. With --model, a model reads a text in chunks of 128 tokens, once per recipe. The table shows perplexity, KL
/// divergence and top-1 agreement with the f16 cache, and the log-probability of a pass key hidden in the text.
///
/// DOCUMENTS. With --documents, the model answers questions about documents cut from the text, over what each recipe
/// keeps of document and question: policies (h2o:0.2, lookm:0.1/saw-int4), mixtures (cocktail, with chunks ranked by
/// BM25 or MiniLM, next to the same chunks shuffled), or everything packed.
#[derive(clap::Args)]
pub struct EvalArgs {
    /// The dump [default: the bundled one].
    #[arg(conflicts_with = "model")]
    file: Option<PathBuf>,
    #[command(flatten)]
    dump: dump::DumpArgs,
    #[command(flatten)]
    model: model::ModelArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Write PATH.json and a page with plots to PATH.html; with --model, after each recipe.
    #[arg(long, value_name = "PATH")]
    report: Option<PathBuf>,
    #[command(flatten)]
    backend: BackendArgs,
}

/// Where a report goes.
#[derive(Clone, Copy)]
struct Destination<'a> {
    json: bool,
    /// Files in addition to what is printed.
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
    to.try_files(args.file.as_deref().into_iter().chain(args.model.inputs()))?;
    match &args.model.model {
        None => dump::run(args.file.as_deref(), &args.dump, &args.backend, to),
        Some(model) => model::run(model, &args.model, &args.backend, to),
    }
}
