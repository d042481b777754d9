//! What a recipe does to a model that reads a text, or answers questions about documents.

mod documents;
mod passkey;
mod report;
mod score;
mod wanted;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use indicatif::ProgressBar;
use kvpack::Backend;
use kvpack::cache::ModelRecipe;
use kvpack_report::page::of_model;
use kvpack_report::{RecipeRow, Run};

use super::{Destination, page};
use crate::backend::{BackendArgs, Chosen};
use crate::chunk_ranking::RankBy;
use crate::commands::{DEFAULT_MODEL, Text, text};
use crate::model::{ExactAttention, Model, PackedAttention};
use crate::outcome::Outcome;
use crate::print::{self, note};
use crate::provenance;
use passkey::Passkey;
use score::{Reference, Score};
use wanted::Wanted;

/// Heading of the options about models.
const MODEL: &str = "Model";

/// Options about models.
#[derive(clap::Args)]
pub struct ModelArgs {
    /// Run a GGUF model, or a folder of `kvpack quantize`, instead of reading a dump; scripts/fetch-model.sh fetches
    /// the default.
    #[arg(help_heading = MODEL, long, value_name = "FILE", num_args = 0..=1, default_missing_value = DEFAULT_MODEL)]
    pub model: Option<PathBuf>,
    /// The text [default: the bundled chapters of Alice in Wonderland].
    #[arg(help_heading = MODEL, long, value_name = "FILE", requires = "model")]
    text: Option<PathBuf>,
    /// Recipes, separated by spaces. 'all' is every method at every width, with and without a centre; 'centred' is
    /// those with one; 'windowed' is every method with its protection: a centre where it takes one, and the first and
    /// last 128 tokens in f16.
    #[arg(help_heading = MODEL, long, value_name = "RECIPE", num_args = 1.., default_value = "all", requires = "model")]
    recipes: Vec<String>,
    /// How many tokens of the text to read; perplexity is given at each length.
    #[arg(help_heading = MODEL, long, value_delimiter = ',', value_name = "N,N", default_value = "512,2048,4096", requires = "model")]
    lengths: Vec<usize>,
    /// Tokens of the texts in which the pass key is hidden; 0 skips this measurement.
    #[arg(help_heading = MODEL, long, value_name = "N", default_value_t = 1024, requires = "model")]
    passkey_tokens: usize,
    /// Compare predictions with those of this model, a file or a folder, with an f16 cache, instead of the model's own.
    #[arg(help_heading = MODEL, long, value_name = "FILE", requires = "model")]
    against: Option<PathBuf>,
    /// Cut N documents from the text and ask questions about them, instead of reading the text.
    #[arg(help_heading = MODEL, long, value_name = "N", requires = "model", conflicts_with_all = ["lengths", "passkey_tokens", "against"])]
    documents: Option<usize>,
    /// Tokens of each document.
    #[arg(help_heading = MODEL, long, value_name = "N", default_value_t = 640, requires = "documents")]
    document_tokens: usize,
    /// How mixtures rank the chunks of a document: bm25 (shared words), minilm (the encoder that
    /// scripts/fetch-encoder.sh fetches; minilm:FOLDER for one elsewhere), or FILE.safetensors with embeddings:
    /// documentN.chunks [chunks, width], documentN.quote and documentN.passkey [width] in F32, N from 0
    /// [default: bm25].
    #[arg(help_heading = MODEL, long, value_name = "RANKING", num_args = 1.., requires = "documents")]
    rank_by: Vec<RankBy>,
    /// Tokens of a chunk of a document, 16 to 128 [default: 32].
    #[arg(help_heading = MODEL, long, value_delimiter = ',', value_name = "N,N", requires = "documents")]
    chunk_tokens: Vec<usize>,
    /// How often a mixture's stores are shuffled over the chunks, for comparison with the ranking [default: 1].
    #[arg(help_heading = MODEL, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), requires = "documents")]
    draws: Option<u32>,
}

impl ModelArgs {
    /// The files and folders that are read.
    pub fn inputs(&self) -> impl Iterator<Item = &Path> + Clone {
        let named = [&self.model, &self.text, &self.against].into_iter().filter_map(|path| path.as_deref());
        named.chain(self.rank_by.iter().filter_map(|by| match by {
            RankBy::Bm25 => None,
            RankBy::Encoder(path) | RankBy::File(path) => Some(path.as_path()),
        }))
    }
}

/// Largest NMSE between the logits of the f16 cache and those of candle's attention.
const LARGEST_LOGIT_NMSE: f64 = 1e-6;
/// Tokens over which they are compared.
const COMPARED_TOKENS: usize = 512;

/// Evaluates a model.
pub fn run(file: &Path, args: &ModelArgs, backend: &BackendArgs, to: Destination<'_>) -> Result<Outcome> {
    if let Some(count) = args.documents {
        return documents::run(file, args, count, backend, to);
    }
    let wanted = Wanted::parse(&args.recipes)?;
    let model = Model::load(file)?;
    let text = text(args.text.as_deref())?;
    let task = Task::new(&model, &text, args)?;
    let task = match &args.against {
        Some(file) => task.against(Model::load(file)?, &text)?,
        None => task,
    };
    let backend = backend.open()?;
    let run = provenance::run(backend.driver(), None);
    match &backend {
        Chosen::Cpu(backend) => evaluate(&task, &wanted, (backend, run), to),
        Chosen::Wgpu(backend) => evaluate(&task, &wanted, (backend, run), to),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => evaluate(&task, &wanted, (backend, run), to),
    }
}

/// What every recipe has to do.
struct Task<'a> {
    model: &'a Model,
    /// The model whose predictions are the mark, unless that is the model itself.
    against: Option<Model>,
    text: String,
    tokens: Vec<u32>,
    lengths: Vec<usize>,
    passkeys: Vec<Passkey>,
}

impl<'a> Task<'a> {
    fn new(model: &'a Model, text: &Text, args: &ModelArgs) -> Result<Self> {
        let mut lengths = args.lengths.clone();
        lengths.sort_unstable();
        lengths.dedup();
        let (Some(&longest), Some(&shortest)) = (lengths.last(), lengths.first()) else {
            bail!("--lengths names no length");
        };
        if shortest < 2 {
            bail!("--lengths {shortest}: at least two tokens are needed, one to read and one to predict");
        }
        model.check_context(longest)?;
        let mut tokens = model.tokenizer.encode_text(&text.content)?;
        if tokens.len() < longest {
            bail!("{} has {} tokens; --lengths asks for {longest}", text.name, tokens.len());
        }
        let passkeys = passkey::hide(model, &tokens, args.passkey_tokens)?;
        tokens.truncate(longest);
        Ok(Self { model, against: None, text: text.name.clone(), tokens, lengths, passkeys })
    }

    /// The same against the predictions of another model, which cuts the text into the same tokens.
    fn against(self, other: Model, text: &Text) -> Result<Self> {
        other.check_context(self.tokens.len())?;
        let same_count = other.tokenizer.vocabulary() == self.model.tokenizer.vocabulary();
        if !same_count || !other.tokenizer.encode_text(&text.content)?.starts_with(&self.tokens) {
            bail!(
                "--against {}: it does not cut {} into the tokens of {}; predictions are compared token by token, so take \
                 a model with the same tokenizer",
                other.config.name,
                text.name,
                self.model.config.name
            );
        }
        Ok(Self { against: Some(other), ..self })
    }

    /// Tokens that one recipe reads.
    fn work(&self) -> usize {
        self.tokens.len() + self.passkeys.iter().map(|passkey| passkey.tokens.len()).sum::<usize>()
    }
}

fn evaluate<B: Backend + Clone>(
    task: &Task<'_>,
    wanted: &[Wanted],
    (backend, run): (&B, Run),
    to: Destination<'_>,
) -> Result<Outcome> {
    let recipes = wanted::fitting(&task.model.config, wanted, backend)?;
    let compared = COMPARED_TOKENS.min(task.tokens.len());
    // With another model as the mark, the model's own predictions are only compared with candle's attention.
    let own = if task.against.is_some() { compared } else { task.tokens.len() };
    let others = if task.against.is_some() { task.tokens.len() } else { 0 };
    let work = own + others + compared + recipes.len() * task.work();
    let progress = ProgressBar::new(work as u64).with_style(print::bar());

    progress.set_message("f16 cache");
    let f16: ModelRecipe = "f16".parse()?;
    let mut attention = PackedAttention::new(backend, &task.model.config, &f16)?;
    let own = Reference::read(task.model, &mut attention, &task.tokens[..own], &progress)?;
    progress.set_message("candle's attention");
    let mut exact = ExactAttention::new(&task.model.config);
    let nmse = own.nmse(task.model, &mut exact, &task.tokens[..compared], &progress)?;
    let reference = match &task.against {
        Some(other) => {
            progress.set_message("the other model");
            let mut attention = PackedAttention::new(backend, &other.config, &f16)?;
            Reference::read(other, &mut attention, &task.tokens, &progress)?
        }
        None => own,
    };

    let mut report = report::report(task, (backend.name(), run), compared, nmse);
    let mut add_row = |recipe: &ModelRecipe| {
        progress.set_message(recipe.to_string());
        let row = evaluate_recipe(task, recipe, backend, &reference, &progress)?;
        progress.suspend(|| note!("{}", row.line()));
        report.rows.push(row);
        to.files.map_or(Ok(()), |path| page::write(path, &report, &of_model(&report)))
    };
    let done = recipes.iter().try_for_each(&mut add_row);
    progress.finish_and_clear();
    // What was computed is printed, whatever came after it.
    to.print(&report, report::print)?;
    done?;
    if nmse <= LARGEST_LOGIT_NMSE {
        return Ok(Outcome::Passed);
    }
    note!(
        "FAILED: log-probabilities of the f16 cache have an NMSE of {nmse:.1e}; the limit is {LARGEST_LOGIT_NMSE:.0e}"
    );
    Ok(Outcome::Failed)
}

fn evaluate_recipe<B: Backend + Clone>(
    task: &Task<'_>,
    recipe: &ModelRecipe,
    backend: &B,
    reference: &Reference,
    progress: &ProgressBar,
) -> Result<RecipeRow> {
    let start = std::time::Instant::now();
    let mut attention = PackedAttention::new(backend, &task.model.config, recipe)?;
    let score = Score::read(task.model, &mut attention, &task.tokens, reference, progress)?;
    let total = start.elapsed();
    let mut row = report::row(task, recipe, &score, &attention, total);
    for passkey in &task.passkeys {
        let mut attention = PackedAttention::new(backend, &task.model.config, recipe)?;
        row.passkeys.push(passkey.score(task.model, &mut attention, progress)?);
    }
    Ok(row)
}
