//! `kvpack generate`: a model writes text, its cache packed.

mod written;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use candle_core::Tensor;
use kvpack::Backend;
use kvpack::cache::{CacheMemory, ChunkStores, Mixture, ModelRecipe};
use kvpack::plan::TokenRange;
use kvpack::policy::{ChunkSearch, Spans};

use crate::backend::{BackendArgs, Chosen};
use crate::chunk_ranking::{Query, RankBy, Ranking};
use crate::model::{DensePrompt, ExactAttention, KeysWatched, Model, PackedAttention, Tokenizer};
use crate::outcome::Outcome;
use crate::print::{self, note, say};
use written::{Limits, Prompt, Written, compare, read, write};

/// Write text with a GGUF model whose KV cache is packed.
///
/// Attention and cache are kvpack's; the likeliest token is always taken. The last lines say what the cache takes and
/// what an f16 cache would take. A cache keeps whole pages of 128 tokens, so that short prompts save nothing: without a
/// prompt, the model continues the first thousand tokens of the bundled text.
#[derive(clap::Args)]
pub struct GenerateArgs {
    /// What the text begins with, or the question with --chat [default: a thousand tokens of the bundled text].
    prompt: Option<String>,
    /// A GGUF file, or a folder of `kvpack quantize`; scripts/fetch-model.sh fetches the default.
    #[arg(long, value_name = "FILE", default_value = super::DEFAULT_MODEL)]
    model: PathBuf,
    /// How the cache is stored: f16, calibquant:4, kivi:2+window=64, … A policy before a slash keeps part of the prompt
    /// (h2o:0.2/saw-int4), with +every=512 also of the text that follows. `kvpack list` has every recipe.
    #[arg(long, default_value = "f16")]
    recipe: ModelRecipe,
    /// A text before the prompt. Recipes such as cocktail store each of its chunks by its similarity to the prompt.
    #[arg(long, value_name = "FILE", requires = "prompt")]
    context: Option<PathBuf>,
    /// How chunks of the context are ranked: bm25 (shared words), minilm (the encoder that scripts/fetch-encoder.sh
    /// fetches; minilm:FOLDER for one elsewhere), or FILE.safetensors with embeddings: chunks [chunks, width] and query
    /// [width] in F32 [default: bm25].
    #[arg(long, value_name = "RANKING", requires = "context")]
    rank_by: Option<RankBy>,
    /// Tokens of a chunk of the context, 16 to 128 [default: 32].
    #[arg(long, value_name = "N", requires = "context")]
    chunk_tokens: Option<usize>,
    /// Maximum number of tokens to generate.
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// Ask an instruction-tuned model: ChatML around the prompt, without a system turn. The template in the model's file
    /// is not read.
    #[arg(long, requires = "prompt")]
    chat: bool,
    /// Generate the same with candle's full-precision attention and compare token by token; exit code 1 if they
    /// differ.
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    backend: BackendArgs,
}

/// Tokens of the bundled text that stand for a prompt: enough that whole pages of 128 tokens are packed.
const DEFAULT_PROMPT: usize = 1024;

/// Runs the command.
pub fn run(args: &GenerateArgs) -> Result<Outcome> {
    args.check_chunks()?;
    let model = Model::load(&args.model)?;
    match args.backend.open()? {
        Chosen::Cpu(backend) => generate(args, &model, &backend),
        Chosen::Wgpu(backend) => generate(args, &model, &backend),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => generate(args, &model, &backend),
    }
}

impl GenerateArgs {
    /// Refuses options that cut and rank chunks if the recipe has no chunks, because they would have no effect.
    fn check_chunks(&self) -> Result<()> {
        let given = [("--rank-by", self.rank_by.is_some()), ("--chunk-tokens", self.chunk_tokens.is_some())];
        match given.iter().find(|(_, given)| *given && self.recipe.mixture().is_none()) {
            Some((option, _)) => bail!("{}", super::no_chunks(option, &self.recipe)),
            None => Ok(()),
        }
    }
}

fn generate<B: Backend + Clone>(args: &GenerateArgs, model: &Model, backend: &B) -> Result<Outcome> {
    let Asked { tokens: prompt, context, ends } = Asked::new(args, &model.tokenizer)?;
    let limits = Limits { tokens: args.tokens, ends: &ends };
    if prompt.is_empty() {
        bail!("the prompt is empty; write a few words for the model to go on from");
    }
    model.check_context(prompt.len().saturating_add(args.tokens))?;

    let mut attention = PackedAttention::new(backend, &model.config, &args.recipe)?;
    let mut printed = Printed::new(model);
    let start = Instant::now();
    let (stream, warning) = match args.recipe.mixture() {
        Some(mixture) => {
            let chunks = rank(args, model, mixture, &prompt, context)?;
            read_chunks(&args.recipe, model, &mut attention, &prompt, &chunks)?
        }
        None => read_by(&args.recipe, model, &mut attention, &prompt)?,
    };
    let prompt_read = Prompt { tokens: prompt.len(), time: start.elapsed(), stream };
    if let Some(warning) = warning {
        note!("{warning}");
    }
    let written = write(model, &mut attention, prompt_read, limits, |token| printed.push(token))?;
    say!("")?;
    report(args, backend, (model, &attention), &written)?;
    if !args.verify {
        return Ok(Outcome::Passed);
    }
    let mut exact = ExactAttention::new(&model.config);
    let start = Instant::now();
    let stream = read(model, &mut exact, &prompt)?;
    let prompt = Prompt { tokens: prompt.len(), time: start.elapsed(), stream };
    let expected = write(model, &mut exact, prompt, limits, |_| Ok(()))?;
    compare(&written, &expected)
}

/// What a model is asked to go on from.
struct Asked {
    tokens: Vec<u32>,
    /// Those of the context.
    context: Option<TokenRange>,
    /// The tokens that end what it writes.
    ends: Vec<u32>,
}

impl Asked {
    fn new(args: &GenerateArgs, tokenizer: &Tokenizer) -> Result<Self> {
        let chat = args.chat.then(|| tokenizer.chat()).transpose()?;
        let ends = tokenizer.ends().chain(chat.map(|chat| chat.end)).collect();
        let (before, after) = chat.map_or(("", ""), |chat| (chat.before, chat.after));
        let Some(prompt) = &args.prompt else {
            let mut tokens = tokenizer.encode_text(&super::text(None)?.content)?;
            tokens.truncate(DEFAULT_PROMPT);
            return Ok(Self { tokens, context: None, ends });
        };
        if args.context.is_none() {
            return Ok(Self {
                tokens: tokenizer.encode_text(&format!("{before}{prompt}{after}"))?,
                context: None,
                ends,
            });
        }
        // The context is cut into tokens by itself, so that its chunks are those of the text.
        let super::Text { name, content } = super::text(args.context.as_deref())?;
        let begin = tokenizer.encode_text(before)?;
        let context = match before.is_empty() {
            true => tokenizer.encode_text(&content)?.split_off(begin.len()),
            false => tokenizer.encode(&content)?,
        };
        let end = tokenizer.encode(&format!("\n\n{prompt}{after}"))?;
        ensure!(!context.is_empty(), "the context {name} has no tokens; give a text");
        let range = TokenRange::new(begin.len(), begin.len() + context.len())?;
        Ok(Self { tokens: [begin, context, end].concat(), context: Some(range), ends })
    }
}

/// The stores of the chunks of a context.
fn rank(
    args: &GenerateArgs,
    model: &Model,
    mixture: &Mixture,
    prompt: &[u32],
    context: Option<TokenRange>,
) -> Result<ChunkStores> {
    let Some(context) = context else {
        bail!(
            "recipe {} stores the chunks of a context by how much they resemble the prompt; name a file with --context",
            args.recipe
        );
    };
    let chunk_tokens = args.chunk_tokens.unwrap_or(super::CHUNK_TOKENS);
    ChunkSearch::chunks(context.len(), chunk_tokens)?;
    let chunks = prompt[context.start()..context.end()].chunks_exact(chunk_tokens);
    let texts: Result<_> = chunks.map(|chunk| model.tokenizer.decode(chunk)).collect();
    let ranking = Ranking::open(args.rank_by.as_ref().unwrap_or(&RankBy::Bm25))?;
    let query = Query { name: "query", text: args.prompt.as_deref().unwrap_or_default() };
    Ok(mixture.chunks_of(context, chunk_tokens, &ranking.chunks("", texts?)?.similarities(query)?)?)
}

/// Reads a prompt into a cache, its context in chunks; returns what [`read_by`] does.
fn read_chunks<B: Backend + Clone>(
    recipe: &ModelRecipe,
    model: &Model,
    attention: &mut PackedAttention<B>,
    prompt: &[u32],
    chunks: &ChunkStores,
) -> Result<(Option<Tensor>, Option<String>)> {
    let mut dense = DensePrompt::new(&model.config);
    let stream = dense.read(model, prompt)?;
    attention.store_chunks(&dense, chunks)?;
    Ok((Some(stream), dense.bias(model)?.warning(recipe)))
}

/// Reads a prompt into a cache by a recipe. Returns the residual stream of its last chunk, and a warning where the
/// recipe is known to break keys like those of the prompt.
fn read_by<B: Backend + Clone>(
    recipe: &ModelRecipe,
    model: &Model,
    attention: &mut PackedAttention<B>,
    prompt: &[u32],
) -> Result<(Option<Tensor>, Option<String>)> {
    let Some(policy) = recipe.policy() else {
        recipe.plain()?;
        let mut watched = KeysWatched::new(attention, &model.config);
        let stream = read(model, &mut watched, prompt)?;
        return Ok((stream, watched.into_bias().warning(recipe)));
    };
    let mut dense = DensePrompt::new(&model.config);
    let stream = dense.read(model, prompt)?;
    let observed = attention.observe(&dense, policy.clone(), Spans::new(prompt.len(), &[])?)?;
    attention.compress(&observed)?;
    Ok((Some(stream), dense.bias(model)?.warning(recipe)))
}

/// Prints text as its tokens come, whole characters only.
struct Printed<'a> {
    model: &'a Model,
    tokens: Vec<u32>,
    bytes: usize,
}

impl<'a> Printed<'a> {
    fn new(model: &'a Model) -> Self {
        Self { model, tokens: Vec::new(), bytes: 0 }
    }

    fn push(&mut self, token: u32) -> Result<()> {
        self.tokens.push(token);
        let text = self.model.tokenizer.decode(&self.tokens)?;
        if let Some(new) = text.get(self.bytes..).filter(|new| !new.ends_with('\u{fffd}')) {
            print::piece(new)?;
            self.bytes = text.len();
        }
        Ok(())
    }
}

fn report<B: Backend>(
    args: &GenerateArgs,
    backend: &B,
    (model, attention): (&Model, &PackedAttention<B>),
    written: &Written,
) -> Result<()> {
    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
    let total = written.prompt_time + written.decode_time;
    let share = attention.time().as_secs_f64() / total.as_secs_f64().max(1e-9);
    let bytes: u64 = attention.memory().map(|memory| memory.in_use_bytes()).sum();
    let held = written.prompt_tokens + written.tokens.len().saturating_sub(1);
    let dense =
        (held * model.config.layers * model.config.attention.kv_heads() * model.config.attention.head_dim() * 4) as u64;
    if args.prompt.is_none() {
        say!("\n(The model continued the bundled text; give a prompt of your own as an argument.)")?;
    }
    say!("\nrecipe   {} on {}", args.recipe, backend.name())?;
    say!(
        "prompt   {} tokens, {:.1} tokens/s",
        written.prompt_tokens,
        rate(written.prompt_tokens, written.prompt_time)
    )?;
    say!("decode   {} tokens, {:.1} tokens/s", written.tokens.len(), rate(written.tokens.len(), written.decode_time))?;
    say!(
        "time     {:.2} s in the cache's attention ({}), {:.2} s in the model",
        attention.time().as_secs_f64(),
        print::percent(share),
        (total - attention.time().min(total)).as_secs_f64()
    )?;
    let tokens = |part: fn(&CacheMemory) -> usize| attention.memory().map(|memory| part(&memory)).max().unwrap_or(0);
    let (packed, kept) =
        (tokens(|memory| memory.packed().iter().map(|store| store.tokens).sum()), tokens(|memory| memory.f16().tokens));
    say!("cache    {}", cache_in_words(bytes, dense))?;
    say!("         per layer {packed} tokens packed and {kept} in f16")?;
    if let (Some(every), Some(times)) = (args.recipe.every(), attention.compressed_again()) {
        say!("again    compressed {times} times while the text grew, after every {every} tokens")?;
    }
    Ok(())
}

/// What a cache takes and what f16 rows of the same tokens would take, in bytes.
fn cache_in_words(bytes: u64, dense: u64) -> String {
    let megabytes = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
    let both = format!("f16 would take {}, this takes {}", megabytes(dense), megabytes(bytes));
    match bytes < dense {
        true => format!("{both}: {:.1} times smaller", dense as f64 / bytes.max(1) as f64),
        false => format!("{both}: pages of 128 tokens count whole, so that a longer text is needed to save memory"),
    }
}

#[cfg(test)]
mod tests {
    use kvpack::cpu::Cpu;

    use super::*;
    use crate::model::tiny;

    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        args: GenerateArgs,
    }

    #[test]
    fn chunks_of_a_context_are_ranked_by_the_prompt() {
        let (_file, model) = tiny::model("generate-context");
        let context = std::env::temp_dir().join(format!("kvpack-{}-context.txt", std::process::id()));
        std::fs::write(&context, "A hatter had tea. ".repeat(5) + "The Queen ran. " + &"A hatter. ".repeat(5)).unwrap();
        let named = context.display().to_string();
        let args = |more: &[&str]| {
            let words = ["kvpack", "Where is the Queen?", "--recipe", "cocktail", "--rank-by", "bm25"];
            <Command as clap::Parser>::parse_from(words.iter().chain(more)).args
        };
        let stored = |args: &GenerateArgs| {
            let Asked { tokens, context, .. } = Asked::new(args, &model.tokenizer)?;
            let chunks = rank(args, &model, args.recipe.mixture().unwrap(), &tokens, context)?;
            let mut attention = PackedAttention::new(&Cpu::new(), &model.config, &args.recipe)?;
            read_chunks(&args.recipe, &model, &mut attention, &tokens, &chunks)?;
            let stores = attention.memory().next().unwrap().stores().iter().map(|store| store.tokens).collect();
            Ok::<(Vec<usize>, Vec<u8>), anyhow::Error>((stores, chunks.stores().iter().map(|store| store.0).collect()))
        };
        let (stores, chunks) = stored(&args(&["--context", &named, "--chunk-tokens", "16"])).unwrap();
        let best = chunks.iter().position(|&store| store == 0).unwrap();
        assert!((4..=6).contains(&best) && chunks.iter().filter(|&&store| store == 2).count() > 3, "{chunks:?}");
        let packed = 16 * (chunks.len() - 1);
        assert!(stores[0] > 16 && stores[1] + stores[2] == packed, "{stores:?}");
        assert!(stored(&args(&["--context", &named, "--chunk-tokens", "8"])).is_err());
        let bare = <Command as clap::Parser>::parse_from(["kvpack", "a", "--recipe", "cocktail"]).args;
        assert!(stored(&bare).unwrap_err().to_string().contains("--context"));
        std::fs::remove_file(&context).unwrap();
    }

    #[test]
    fn a_context_is_cut_by_itself() {
        let context = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(context.path(), "ab ab").unwrap();
        let args = |more: &[&str]| {
            let words = ["kvpack", "a", "--context", context.path().to_str().unwrap()];
            <Command as clap::Parser>::parse_from(words.iter().chain(more)).args
        };
        let tokenizer = tiny::bytes(&[]).unwrap();
        let Asked { tokens, context: range, ends } = Asked::new(&args(&["--chat"]), &tokenizer).unwrap();
        let parts = ["<|im_start|>user\n", "ab ab", "\n\na<|im_end|>\n<|im_start|>assistant\n"];
        let parts = parts.map(|part| tokenizer.encode(part).unwrap());
        assert_eq!(tokens, parts.concat());
        assert_eq!(range.unwrap().len(), parts[1].len());
        assert_eq!(ends, tokenizer.encode("<|im_end|>").unwrap(), "the end of an answer");
        // Without --chat the text begins with the context: after the first token, with a space.
        let tokenizer = tiny::scored(&[]).unwrap();
        let Asked { tokens, context: range, ends } = Asked::new(&args(&[]), &tokenizer).unwrap();
        assert_eq!((tokens[..4].to_vec(), range.unwrap().start()), (vec![1, 8, 4, 8], 1));
        assert_eq!(tokens.last(), Some(&3), "no space inside of the text");
        assert_eq!(ends, [2]);
    }

    /// What is written counts against the budget too, whether the policy measures attention or not.
    #[test]
    fn a_long_text_stays_within_its_budget() {
        let (_file, model) = tiny::model("generate-every");
        let prompt: Vec<u32> = (0..60).map(|i| i * 7 % 250).collect();
        let held = |recipe: &str, tokens: usize| {
            let recipe: ModelRecipe = recipe.parse().unwrap();
            let mut attention = PackedAttention::new(&Cpu::new(), &model.config, &recipe).unwrap();
            read_by(&recipe, &model, &mut attention, &prompt).unwrap();
            for token in 0..tokens {
                let stream = model.forward(&[token as u32 % 250], prompt.len() + token, &mut attention).unwrap();
                assert!(model.logits(&stream).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()[0].is_finite());
            }
            let tokens = |memory: CacheMemory| memory.stores().iter().map(|store| store.tokens).sum::<usize>();
            (attention.memory().map(tokens).collect::<Vec<_>>(), attention.compressed_again())
        };
        assert_eq!(held("h2o:0.5", 45), (vec![75; 2], None));
        // Half of 100 tokens, and the five since.
        for recipe in ["h2o:0.5", "h2o:0.5/saw-int4", "lookm:0.5/kivi:4", "snapkv:0.5", "random:0.5/int8"] {
            assert_eq!(held(&format!("{recipe}+every=20"), 45), (vec![55; 2], Some(2)), "{recipe}");
        }
        assert_eq!(held("streaming:2,8/int8+every=1", 45), (vec![10; 2], Some(45)));
        assert_eq!(held("streaming:2,8/int8+every=46", 45), (vec![55; 2], Some(0)));
        assert_eq!(held("vlcache:0.5+every=45", 45).1, Some(1));
    }

    #[test]
    fn a_model_with_a_bias_is_warned_of() {
        let (_file, plain) = tiny::model("generate-plain");
        let (_biased_file, biased) = tiny::model_with_key_bias("generate-biased");
        let warning = |model: &Model, recipe: &str| {
            let recipe: ModelRecipe = recipe.parse().unwrap();
            let mut attention = PackedAttention::new(&Cpu::new(), &model.config, &recipe).unwrap();
            let prompt: Vec<u32> = (0..200).map(|i| i * 7 % 250).collect();
            read_by(&recipe, model, &mut attention, &prompt).unwrap().1
        };
        for recipe in ["int4", "turboquant:4", "h2o:0.5/saw-int4"] {
            let said = warning(&biased, recipe).unwrap_or_else(|| panic!("{recipe}"));
            assert!(said.contains("in 2 of 2 layers") && said.contains(&format!("--recipe {recipe}+centre")), "{said}");
            assert_eq!(warning(&plain, recipe), None, "{recipe}");
        }
        for recipe in ["f16", "int4+centre", "kivi:4", "h2o:0.5"] {
            assert_eq!(warning(&biased, recipe), None, "{recipe}");
        }
    }
}
