//! The command `serve`: a queue of requests from a file.

use std::fs;
use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use kvpack::backend::Device as _;
use kvpack::cache::{Budget, ModelCache, ModelRecipe};
use kvpack_cli::Model;
use kvpack_serving::{Progress, Prompt, Scheduler, Settings, read_requests};
use kvpack_weights::Bits;

use crate::host::Host;
use crate::rig::Rig;
use crate::weights;

/// Serves a queue of requests by continuous batching.
#[derive(clap::Args)]
pub struct ServeArgs {
    /// A GGUF file of the Llama, Qwen2 or Gemma 3 family.
    #[arg(long)]
    model: PathBuf,
    /// Bits of the codes of projections: 2, 3, 4 or 8. Without this option projections are dense.
    #[arg(long, value_name = "BITS", value_parser = weights::bits)]
    weights: Option<Bits>,
    /// JSON lines: arrival_s, prompt or prompt_tokens (and shared_tokens), output_tokens.
    #[arg(long)]
    requests: PathBuf,
    /// How keys and values are stored, as for `kvpack generate`.
    #[arg(long, default_value = "saw-int4")]
    recipe: String,
    /// MiB that the cache may take; requests that do not fit wait on the host.
    #[arg(long)]
    memory_mib: Option<u64>,
    /// Requests that run at a time.
    #[arg(long, default_value_t = 8)]
    sequences: usize,
    /// Prompts whose beginnings are kept for others that begin alike.
    #[arg(long, default_value_t = 4)]
    prefixes: usize,
    /// Tokens of a part of a prompt.
    #[arg(long, default_value_t = 128)]
    chunk: usize,
    /// Rows of a step [default: two parts of prompts and a token of every request].
    #[arg(long)]
    rows: Option<usize>,
    /// Prints the texts.
    #[arg(long)]
    texts: bool,
    /// Writes the figures as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl ServeArgs {
    /// Sizes of the server.
    fn settings(&self) -> Settings {
        let Self { sequences, prefixes, chunk, .. } = *self;
        Settings { sequences, prefixes, chunk, rows: self.rows.unwrap_or(sequences + 2 * chunk) }
    }

    /// Serves the requests on a device.
    ///
    /// # Errors
    /// What is wrong with the requests or the recipe, and what the cache or the device report.
    pub fn run<R: Rig>(&self, rig: &R) -> Result<()> {
        let recipe: ModelRecipe = self.recipe.parse()?;
        ensure!(
            recipe.policy().is_none(),
            "recipe '{recipe}' chooses tokens of whole prompts; prompts are served in parts"
        );
        recipe.plain()?;
        let model = weights::in_codes(rig, Model::load(&self.model)?, self.weights)?;
        let model = rig.on_device(model, rig.dtype())?;
        let (backend, layers) = (rig.backend(), model.config.cache_layers(&recipe)?);
        let settings = self.settings();
        let steps = rig.steps(&model, model.config.layers, settings.rows)?;
        let budget = self.memory_mib.map_or(Budget::unlimited(), |mib| Budget::of_bytes(mib << 20));
        let cache = ModelCache::new(backend, &layers, settings.sequences + settings.prefixes)?;
        let cache = cache.with_budget(budget);
        let lines = fs::read_to_string(&self.requests)
            .with_context(|| format!("cannot read the requests {}", self.requests.display()))?;
        let requests = read_requests(&lines, |prompt| match prompt {
            Prompt::Text(text) => model.tokenizer.encode_text(text).map_err(|error| error.to_string()),
            length => length.drawn(model.tokenizer.vocabulary() as u32).ok_or_else(|| "it has no tokens".into()),
        })?;
        let mut host = Host::new(model, steps);
        let served = Scheduler::new(cache, settings, requests)?.serve(&mut host, show)?;
        if stderr().is_terminal() {
            eprintln!();
        }
        let mut out = stdout().lock();
        if self.texts {
            for (at, text) in served.texts.iter().enumerate() {
                writeln!(out, "{at}: {}", host.model().tokenizer.decode(text)?.escape_debug())?;
            }
        }
        writeln!(out, "{}, {recipe}\n{}", backend.name(), served.figures)?;
        if let Some(path) = &self.json {
            fs::write(path, serde_json::to_string_pretty(&served.figures)?)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }
}

/// A bar on a terminal.
fn show(progress: Progress) {
    const WIDTH: usize = 30;
    if stderr().is_terminal() {
        let Progress { done, requests, running, generated } = progress;
        let full = WIDTH * done / requests.max(1);
        eprint!("\r[{:<WIDTH$}] {done}/{requests} done, {running} running, {generated} tokens ", "#".repeat(full));
    }
}
