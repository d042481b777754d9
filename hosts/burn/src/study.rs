//! The command `decode`: steps of decoding over contexts of random keys and values, next to burn's own attention.

use std::path::PathBuf;
use std::time::Instant;

use burn::tensor::{DType, Device};
use kvpack::AttentionShape;
use kvpack::backend::Device as _;
use kvpack::cache::{Budget, Growth, ModelCache, ModelRecipe, PromptSpan, StoreRoom, TokenRun};
use kvpack::plan::{RowLayout, TokenRange};
use kvpack::wgpu::Wgpu;
use kvpack_cli::{ModelFile, this_run};
use kvpack_serving::decoder::{Activation, Config, RandomTensors, RopePairs};
use kvpack_serving::{Batch, BatchRun, Model as _};
use pollster::block_on;
use serde::Serialize;

use crate::Result;
use crate::attention::lend;
use crate::decoder::Decoder;
use crate::host::Host;
use crate::own::OwnAttention;
use crate::projections::normal;

/// Measures steps of decoding by recipe, batch and context, next to burn's own attention in f16.
#[derive(clap::Args)]
pub struct DecodeArgs {
    /// A GGUF file in place of random weights.
    #[arg(long)]
    model: Option<PathBuf>,
    /// The shape of a model whose weights are random.
    #[arg(long, value_enum, default_value = "qwen-1.5b")]
    shape: Shape,
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
    #[arg(long, default_value_t = 8)]
    steps: usize,
    /// Prints a greedy text of this many tokens, and compares it with that of burn's own attention.
    #[arg(long, default_value_t = 0)]
    greedy: usize,
    /// Writes the rows as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The shape of a model.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Shape {
    /// 28 layers, 12 query and 2 KV heads of 128, 1536 channels, 8960 inside (Qwen2.5-1.5B)
    #[value(name = "qwen-1.5b")]
    Qwen,
    /// 2 layers, 4 query and 4 KV heads of 64, 256 channels, 512 inside
    Small,
}

/// Tokens that random models know.
const VOCABULARY: usize = 32_000;

/// Steps in which kernels are compiled and chosen, which do not count.
const FIRST: usize = 4;

/// What greedy texts continue.
const PROMPT: &str = "The history of the lighthouse begins with a storm that nobody in the village expected.";

#[derive(Serialize)]
struct Row {
    batch: usize,
    tokens: usize,
    /// `burn` for burn's own attention in f16.
    recipe: String,
    tokens_per_second: f64,
    step_ms: f64,
}

/// A file of rows.
#[derive(Serialize)]
struct Report<'a> {
    study: &'a str,
    commit: Option<String>,
    date: String,
    command: String,
    device: String,
    model: &'a str,
    rows: &'a [Row],
}

impl Shape {
    fn config(self) -> Result<Config> {
        let (layers, heads, kv_heads, head_dim, feed_forward) = match self {
            Self::Qwen => (28, 12, 2, 128, 8960),
            Self::Small => (2, 4, 4, 64, 512),
        };
        Ok(Config {
            name: format!("{self:?} shape, random weights"),
            layers,
            width: heads * head_dim,
            feed_forward,
            attention: AttentionShape::new(heads, kv_heads, head_dim)?,
            context: 1 << 20,
            norm_epsilon: 1e-5,
            rope_base: 10_000.0,
            rope_pairs: RopePairs::Halves,
            activation: Activation::Silu,
            embedding_scale: 1.0,
            local: None,
        })
    }
}

impl DecodeArgs {
    pub fn run(&self, device: &Device, backend: &Wgpu) -> Result<bool> {
        let (decoder, file) = match &self.model {
            Some(path) => {
                let mut file = ModelFile::open(path).map_err(|error| format!("{error:#}"))?;
                let (config, vocabulary) = (file.config.clone(), file.tokenizer.vocabulary());
                (Decoder::load(device, config, vocabulary, &mut file)?, Some(file))
            }
            None => (Decoder::load(device, self.shape.config()?, VOCABULARY, &mut RandomTensors::default())?, None),
        };
        let name = decoder.config.name.clone();
        let most = self.batches.iter().copied().max().unwrap_or(1);
        let mut host = Host::new(backend, decoder, most, None)?;
        println!("{name}, weights in f32");
        let equal = match file.filter(|_| self.greedy > 0) {
            Some(file) => greedy((device, backend), &mut host, &file, self.greedy)?,
            None => true,
        };
        println!("| batch × tokens | attention | tokens/s | step ms |\n| --- | --- | ---: | ---: |");
        let mut rows = Vec::new();
        for (&tokens, &batch) in self.tokens.iter().flat_map(|of| self.batches.iter().map(move |batch| (of, batch))) {
            let mut push = |recipe: &str, step_ms: f64| {
                let tokens_per_second = batch as f64 / step_ms * 1e3;
                println!("| {batch} × {tokens} | {recipe} | {tokens_per_second:.1} | {step_ms:.2} |");
                rows.push(Row { batch, tokens, recipe: recipe.into(), tokens_per_second, step_ms });
            };
            let mut own = OwnAttention::new(device, host.decoder(), batch, (tokens, FIRST + self.steps));
            push("burn", timed(self.steps, batch, &mut |next| own.step(next))?);
            drop(own);
            for recipe in &self.recipes {
                let mut cache =
                    filled((device, backend), &host, &recipe.parse()?, (batch, tokens, self.steps + FIRST))?;
                push(recipe, timed(self.steps, batch, &mut |next| step(&mut host, &mut cache, next))?);
            }
        }
        if let Some(path) = &self.json {
            let run = this_run(String::new(), None);
            let arguments = run.command.split_once(' ').map_or("", |(_, arguments)| arguments);
            let report = Report {
                study: "decode",
                commit: run.commit,
                date: run.date,
                command: format!("burn-host {arguments}"),
                device: backend.name(),
                model: &name,
                rows: &rows,
            };
            std::fs::write(path, serde_json::to_string_pretty(&report)?)
                .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        }
        Ok(equal)
    }
}

/// The middle of the times of some steps, from one token to the next, in ms.
fn timed(steps: usize, batch: usize, step: &mut dyn FnMut(&[u32]) -> Result<Vec<u32>>) -> Result<f64> {
    let mut next: Vec<u32> = (0..batch as u32).map(|sequence| 7 + 13 * sequence % 400).collect();
    let mut times = Vec::new();
    for at in 0..FIRST + steps {
        let start = Instant::now();
        next = step(&next)?;
        if at >= FIRST {
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    times.sort_unstable_by(f64::total_cmp);
    times.get(times.len() / 2).copied().ok_or_else(|| "no step was timed; pass --steps 1 or more".into())
}

/// A step of decoding for every sequence: their next tokens.
fn step(host: &mut Host, cache: &mut ModelCache<Wgpu>, tokens: &[u32]) -> Result<Vec<u32>> {
    let of = |(sequence, &token): (usize, &u32)| -> Result<BatchRun> {
        let (run, start) = (TokenRun::decode(sequence), cache.length(sequence)?);
        Ok(BatchRun { request: sequence, run, start, tokens: vec![token], answers: true })
    };
    let batch = Batch::new(tokens.iter().enumerate().map(of).collect::<Result<_>>()?);
    block_on(cache.reserve_for_append(&batch.token_runs()))?;
    cache.begin_append(&batch.token_runs())?;
    let next = host.forward(cache, &batch)?;
    cache.commit()?;
    Ok(next)
}

/// A cache that holds contexts of random keys and values.
fn filled(
    (device, backend): (&Device, &Wgpu),
    host: &Host,
    recipe: &ModelRecipe,
    (sequences, tokens, more): (usize, usize, usize),
) -> Result<ModelCache<Wgpu>> {
    let config = &host.decoder().config;
    let shape = config.attention;
    let cache = ModelCache::new(backend, &config.cache_layers(recipe)?, sequences)?;
    let mut cache = cache.with_budget(Budget::unlimited().growing(Growth::Exact));
    let random = || normal(device, DType::F16, [tokens, shape.kv_heads() * shape.head_dim()], 1.0);
    let (keys, values) = (random(), random());
    let (keys, values) = (lend(&keys)?, lend(&values)?);
    let spans = [PromptSpan::packed(TokenRange::new(0, tokens)?)];
    let all = |room: &StoreRoom| StoreRoom { pages: room.pages * sequences, spans: room.spans * sequences };
    let rooms: Vec<StoreRoom> = cache.room_for_prefill(0, &spans)?.iter().map(all).collect();
    block_on(cache.reserve(&rooms))?;
    for sequence in 0..sequences {
        block_on(cache.reserve_for_prefill(&spans))?;
        cache.begin_prefill(sequence, tokens, &spans)?;
        for layer in 0..cache.layers() {
            block_on(cache.store_prompt(layer, RowLayout::token_major(tokens, &shape), &keys, &values, &spans))?;
        }
        cache.commit()?;
    }
    let later: Vec<TokenRun> = (0..sequences).map(|sequence| TokenRun::chunk(sequence, more)).collect();
    block_on(cache.reserve_for_append(&later))?;
    Ok(cache)
}

/// Compares the greedy text with kvpack's attention in f16 with that of burn's own.
fn greedy((device, backend): (&Device, &Wgpu), host: &mut Host, file: &ModelFile, output: usize) -> Result<bool> {
    let prompt = file.tokenizer.encode_text(PROMPT).map_err(|error| format!("{error:#}"))?;
    let text = |step: &mut dyn FnMut(&[u32]) -> Result<Vec<u32>>| -> Result<Vec<u32>> {
        let mut text = prompt.clone();
        for at in 0..prompt.len() + output - 1 {
            let next = step(&text[at..at + 1])?;
            if at + 1 >= prompt.len() {
                text.extend(next);
            }
        }
        Ok(text.split_off(prompt.len()))
    };
    let layers = host.decoder().config.cache_layers(&"f16".parse()?)?;
    let mut cache = ModelCache::new(backend, &layers, 1)?;
    let given = text(&mut |token| step(host, &mut cache, token))?;
    let mut own = OwnAttention::new(device, host.decoder(), 1, (0, prompt.len() + output));
    let expected = text(&mut |token| own.step(token))?;
    let same = given.iter().zip(&expected).take_while(|(given, expected)| given == expected).count();
    let verdict = if same == output { "equal" } else { "DIFFERENT" };
    println!("greedy text of {output} tokens in f16, kvpack and burn: the first {same} are equal: {verdict}");
    println!("{}", file.tokenizer.decode(&given).map_err(|error| format!("{error:#}"))?.escape_debug());
    Ok(same == output)
}
