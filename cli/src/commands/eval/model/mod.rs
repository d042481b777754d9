//! What a recipe does to a model that reads a text.

mod page;
mod passkey;
mod plots;
mod report;
mod score;

use std::path::PathBuf;

use anyhow::{Result, bail};
use indicatif::ProgressBar;
use kvpack::Backend;
use kvpack::cache::ModelRecipe;

use super::Destination;
use crate::backend::{BackendArgs, Chosen};
use crate::commands::{DEFAULT_MODEL, Text, text};
use crate::model::{ExactAttention, Model, PackedAttention};
use crate::outcome::Outcome;
use crate::print;
use passkey::Passkey;
use report::{ModelReport, RecipeRow};
use score::{Reference, Score};

/// Options about models.
#[derive(clap::Args)]
pub struct ModelArgs {
    /// Run a GGUF model instead of reading a dump; scripts/fetch-model.sh fetches the default.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = DEFAULT_MODEL)]
    pub model: Option<PathBuf>,
    /// With --model: the text [default: a chapter that kvpack brings].
    #[arg(long, value_name = "FILE", requires = "model")]
    text: Option<PathBuf>,
    /// With --model: recipes, separated by spaces or given one by one, or 'all' for every method at every width.
    #[arg(long, value_name = "RECIPE", num_args = 1.., default_value = "all", requires = "model")]
    recipes: Vec<String>,
    /// With --model: read so many tokens of the text; perplexity is given at each.
    #[arg(long, value_delimiter = ',', value_name = "N,N", default_value = "512,2048,4096", requires = "model")]
    lengths: Vec<usize>,
    /// With --model: tokens of the texts in which the pass key is hidden; 0 leaves that out.
    #[arg(long, value_name = "N", default_value_t = 1024, requires = "model")]
    passkey_tokens: usize,
}

/// Largest NMSE between the logits of the f16 cache and those of candle's attention.
const LARGEST_LOGIT_NMSE: f64 = 1e-6;
/// Tokens over which they are compared.
const COMPARED_TOKENS: usize = 512;

/// Evaluates a model.
pub fn run(file: &std::path::Path, args: &ModelArgs, backend: &BackendArgs, to: Destination<'_>) -> Result<Outcome> {
    let recipes = recipes(&args.recipes)?;
    let model = Model::load(file)?;
    let task = Task::new(&model, text(args.text.as_deref())?, args)?;
    match backend.open()? {
        Chosen::Cpu(backend) => evaluate(&task, &recipes, &backend, to),
        Chosen::Wgpu(backend) => evaluate(&task, &recipes, &backend, to),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => evaluate(&task, &recipes, &backend, to),
    }
}

fn recipes(given: &[String]) -> Result<Vec<ModelRecipe>> {
    let mut recipes = Vec::new();
    for text in given.iter().flat_map(|text| text.split_whitespace()) {
        match text {
            "all" => recipes.extend(ModelRecipe::all()),
            _ => recipes.push(text.parse()?),
        }
    }
    if recipes.is_empty() {
        bail!("--recipes names no recipe; 'all' stands for every method at every width");
    }
    Ok(recipes)
}

/// What every recipe has to do.
struct Task<'a> {
    model: &'a Model,
    text: String,
    tokens: Vec<u32>,
    lengths: Vec<usize>,
    passkeys: Vec<Passkey>,
}

impl<'a> Task<'a> {
    fn new(model: &'a Model, text: Text, args: &ModelArgs) -> Result<Self> {
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
        let mut tokens = model.tokenizer.encode(&text.content)?;
        if tokens.len() < longest {
            bail!("{} has {} tokens; --lengths asks for {longest}", text.name, tokens.len());
        }
        let passkeys = passkey::hide(model, &tokens, args.passkey_tokens)?;
        tokens.truncate(longest);
        Ok(Self { model, text: text.name, tokens, lengths, passkeys })
    }

    /// Tokens that one recipe reads.
    fn work(&self) -> usize {
        self.tokens.len() + self.passkeys.iter().map(|passkey| passkey.tokens.len()).sum::<usize>()
    }
}

fn evaluate<B: Backend + Clone>(
    task: &Task<'_>,
    recipes: &[ModelRecipe],
    backend: &B,
    to: Destination<'_>,
) -> Result<Outcome> {
    let compared = COMPARED_TOKENS.min(task.tokens.len());
    let work = task.tokens.len() + compared + recipes.len() * task.work();
    let progress = ProgressBar::new(work as u64).with_style(print::bar());

    progress.set_message("f16 cache");
    let f16: ModelRecipe = "f16".parse()?;
    let mut attention = PackedAttention::new(backend, &task.model.config, &f16)?;
    let reference = Reference::read(task.model, &mut attention, &task.tokens, &progress)?;
    progress.set_message("candle's attention");
    let mut exact = ExactAttention::new(task.model.config.attention, task.model.config.layers);
    let nmse = reference.nmse(task.model, &mut exact, &task.tokens[..compared], &progress)?;

    let mut report = ModelReport::new(task, backend.name(), compared, nmse);
    for recipe in recipes {
        progress.set_message(recipe.to_string());
        let row = evaluate_recipe(task, recipe, backend, &reference, &progress)?;
        progress.suspend(|| eprintln!("{}", row.line()));
        report.rows.push(row);
        if let Some(path) = to.files {
            page::write(&report, path)?;
        }
    }
    progress.finish_and_clear();
    to.print(&report, report::print)?;
    Ok(if nmse <= LARGEST_LOGIT_NMSE { Outcome::Passed } else { Outcome::Failed })
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
    let mut row = RecipeRow::new(task, recipe, &score, &attention, total);
    for passkey in &task.passkeys {
        let mut attention = PackedAttention::new(backend, &task.model.config, recipe)?;
        row.passkeys.push(passkey.score(task.model, &mut attention, progress)?);
    }
    Ok(row)
}
