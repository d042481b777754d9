//! `decode`: steps of decoding of a GGUF file's model, with kvpack's attention over contexts of random keys and values,
//! and with burn's own. Greedy texts of both are compared.

use std::path::PathBuf;
use std::time::Instant;

use burn::tensor::Device;
use kvpack::backend::Device as _;
use kvpack::cache::{Budget, Growth, ModelCache, ModelRecipe, PromptSpan, StoreRoom, TokenRun};
use kvpack::plan::{Elements, RowLayout, TokenRange};
use kvpack::wgpu::Wgpu;
use kvpack_serving::{Batch, BatchRun, tiny};
use pollster::block_on;
use serde::Serialize;

use crate::decoder::Decoder;
use crate::gguf::Gguf;
use crate::host::Host;
use crate::own::OwnAttention;
use crate::{Result, report};

/// What greedy texts continue.
const PROMPT: &str = "The history of the lighthouse begins with a storm that nobody in the village expected.";

/// Steps before those that are timed. In them burn tries its kernels, and kvpack's are compiled.
const FIRST: usize = 6;

/// Steps of decoding with kvpack's attention and with burn's own.
#[derive(clap::Args)]
pub struct DecodeArgs {
    /// A GGUF file.
    #[arg(long)]
    model: PathBuf,
    /// Sequences.
    #[arg(long, value_delimiter = ',', default_value = "1,8,64")]
    batches: Vec<usize>,
    /// Tokens of each.
    #[arg(long, value_delimiter = ',', default_value = "1024,8000")]
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
    /// Writes this many tokens greedily with kvpack's attention and with burn's own, and compares them.
    #[arg(long, default_value_t = 32)]
    greedy: usize,
    /// The most bytes, in GiB, that burn's own keys and values may take.
    #[arg(long, default_value_t = 32)]
    own_gib: usize,
    /// Writes the rows as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A step, the middle of several.
#[derive(Serialize)]
struct Row {
    batch: usize,
    tokens: usize,
    /// `burn` for burn's own attention, in f32.
    recipe: String,
    tokens_per_second: f64,
    /// By the clock of the host, from one token to the next.
    step_ms: f64,
    /// Of that, until all is submitted.
    submitted_ms: f64,
    /// Storing and attending in all layers, one submission a layer, without the rest of the model.
    attention_ms: Option<f64>,
}

impl DecodeArgs {
    /// Runs the study. False where texts differ.
    pub fn run(&self, device: &Device, backend: &Wgpu) -> Result<bool> {
        let mut gguf = Gguf::open(&self.model)?;
        let config = gguf.config.clone();
        let decoder = Decoder::load(device, config, &mut gguf)?;
        let most = self.batches.iter().copied().max().unwrap_or(1);
        let mut host = Host::new(backend, decoder, most, None)?;
        report::heading(backend, &gguf.name);
        let same = self.greedy == 0 || greedy(device, backend, &mut host, (&gguf, self.greedy))?;
        println!("| batch × tokens | attention | tokens/s | step ms | attention alone ms | submitted after ms |");
        println!("| --- | --- | ---: | ---: | ---: | ---: |");
        let mut rows = Vec::new();
        for &tokens in &self.tokens {
            for &batch in &self.batches {
                let config = host.config();
                let bytes =
                    config.layers * 8 * config.attention.kv_heads() * config.attention.head_dim() * tokens * batch;
                if bytes <= self.own_gib << 30 {
                    push(&mut rows, self.own(device, &host, (batch, tokens))?);
                } else {
                    println!("| {batch} × {tokens} | burn | does not fit |");
                }
                for recipe in &self.recipes {
                    push(&mut rows, self.packed(backend, &mut host, (recipe, batch, tokens))?);
                }
                // Whoever stops the program keeps what was measured.
                report::write(self.json.as_deref(), backend, &gguf.name, &rows)?;
            }
        }
        Ok(same)
    }

    /// Steps with burn's own attention.
    fn own(&self, device: &Device, host: &Host, (batch, tokens): (usize, usize)) -> Result<Row> {
        let mut own = OwnAttention::new(device, host.config(), batch, (tokens, FIRST + self.steps));
        let mut times = Times::new(batch);
        for _ in 0..FIRST + self.steps {
            times.begin();
            let positions = vec![own.length(); batch];
            let stream =
                host.decoder().forward(times.tokens(), &positions, &mut |layer, rows| own.attend(layer, rows))?;
            own.step();
            times.submitted();
            times.end(host.decoder().largest(stream)?);
        }
        Ok(times.row((tokens, "burn"), None))
    }

    /// Steps with kvpack's.
    fn packed(&self, backend: &Wgpu, host: &mut Host, (recipe, batch, tokens): (&str, usize, usize)) -> Result<Row> {
        let mut cache = filled(backend, host, &recipe.parse()?, (batch, tokens, FIRST + self.steps + 1))?;
        let mut times = Times::new(batch);
        for _ in 0..FIRST + self.steps {
            times.begin();
            let batch = begun(&mut cache, times.tokens())?;
            let stream = host.stream(&cache, &batch)?;
            times.submitted();
            let next = host.decoder().largest(stream)?;
            cache.commit()?;
            times.end(next);
        }
        begun(&mut cache, times.tokens())?;
        let attention = host.attention_ms(&cache);
        cache.abandon();
        Ok(times.row((tokens, recipe), Some(attention?)))
    }
}

/// Opens the step of a token for every sequence.
fn begun(cache: &mut ModelCache<Wgpu>, tokens: &[u32]) -> Result<Batch> {
    let of = |(sequence, &token): (usize, &u32)| -> Result<BatchRun> {
        let (run, start) = (TokenRun::decode(sequence), cache.length(sequence)?);
        Ok(BatchRun { request: sequence, run, start, tokens: vec![token], answers: true })
    };
    let batch = Batch::new(tokens.iter().enumerate().map(of).collect::<Result<_>>()?);
    block_on(cache.reserve_for_append(&batch.token_runs()))?;
    cache.begin_append(&batch.token_runs())?;
    Ok(batch)
}

/// A cache that holds contexts of random keys and values, with room for `more` tokens.
fn filled(
    backend: &Wgpu,
    host: &Host,
    recipe: &ModelRecipe,
    (sequences, tokens, more): (usize, usize, usize),
) -> Result<ModelCache<Wgpu>> {
    let shape = host.config().attention;
    let budget = Budget::unlimited().growing(Growth::Exact);
    let mut cache = ModelCache::new(backend, &host.config().cache_layers(recipe), sequences)?.with_budget(budget);
    let mut seed = 11;
    let mut random = || {
        let elements = tiny::random(&mut seed, tokens * shape.kv_heads() * shape.head_dim(), 1.7);
        block_on(backend.upload(Elements::F32(&elements)))
    };
    let (keys, values) = (random()?, random()?);
    let rows = RowLayout::token_major(tokens, &shape);
    let spans = [PromptSpan::packed(TokenRange::new(0, tokens)?)];
    let all = |room: &StoreRoom| StoreRoom { pages: room.pages * sequences, spans: room.spans * sequences };
    let rooms: Vec<StoreRoom> = cache.room_for_prefill(0, &spans)?.iter().map(all).collect();
    block_on(cache.reserve(&rooms))?;
    for sequence in 0..sequences {
        block_on(cache.reserve_for_prefill(&spans))?;
        cache.begin_prefill(sequence, tokens, &spans)?;
        for layer in 0..cache.layers() {
            block_on(cache.store_prompt(layer, rows, &keys, &values, &spans))?;
        }
        cache.commit()?;
    }
    let later: Vec<TokenRun> = (0..sequences).map(|sequence| TokenRun::chunk(sequence, more)).collect();
    block_on(cache.reserve_for_append(&later))?;
    Ok(cache)
}

/// Writes a greedy text with kvpack's attention in f16 and one with burn's own, and compares them.
fn greedy(device: &Device, backend: &Wgpu, host: &mut Host, (gguf, output): (&Gguf, usize)) -> Result<bool> {
    let prompt = gguf.tokenizer.encode_text(PROMPT)?;
    let mut own = OwnAttention::new(device, host.config(), 1, (0, prompt.len() + output));
    let expected = continued(&prompt, output, |token, position| {
        let stream = host.decoder().forward(&[token], &[position], &mut |layer, rows| own.attend(layer, rows))?;
        own.step();
        host.decoder().largest(stream)
    })?;
    let mut cache = ModelCache::new(backend, &host.config().cache_layers(&"f16".parse()?), 1)?;
    let given = continued(&prompt, output, |token, _| {
        let batch = begun(&mut cache, &[token])?;
        let stream = host.stream(&cache, &batch)?;
        let next = host.decoder().largest(stream)?;
        cache.commit()?;
        Ok(next)
    })?;
    let same = given.iter().zip(&expected).take_while(|(given, expected)| given == expected).count();
    let verdict = if same == output { "equal" } else { "DIFFERENT" };
    println!("greedy text of {output} tokens, kvpack in f16 and burn in f32: the first {same} are equal: {verdict}\n");
    Ok(same == output)
}

/// The tokens that follow a prompt, which is read token by token.
fn continued(prompt: &[u32], output: usize, mut next: impl FnMut(u32, usize) -> Result<Vec<u32>>) -> Result<Vec<u32>> {
    let mut text = prompt.to_vec();
    for at in 0..prompt.len() + output - 1 {
        let largest = next(text[at], at)?;
        if at + 1 >= prompt.len() {
            text.extend(largest);
        }
    }
    Ok(text.split_off(prompt.len()))
}

fn push(rows: &mut Vec<Row>, row: Row) {
    let attention = row.attention_ms.map_or("–".into(), |ms| format!("{ms:.2}"));
    println!(
        "| {} × {} | {} | {:.1} | {:.2} | {attention} | {:.2} |",
        row.batch, row.tokens, row.recipe, row.tokens_per_second, row.step_ms, row.submitted_ms
    );
    rows.push(row);
}

/// Times of steps, and the tokens of the next one.
struct Times {
    tokens: Vec<u32>,
    begun: Instant,
    submitted: f64,
    steps: Vec<f64>,
    submissions: Vec<f64>,
}

impl Times {
    fn new(batch: usize) -> Self {
        let tokens = (0..batch as u32).map(|sequence| 7 + 13 * sequence % 400).collect();
        Self { tokens, begun: Instant::now(), submitted: 0.0, steps: Vec::new(), submissions: Vec::new() }
    }

    fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    fn begin(&mut self) {
        self.begun = Instant::now();
    }

    fn milliseconds(&self) -> f64 {
        self.begun.elapsed().as_secs_f64() * 1e3
    }

    fn submitted(&mut self) {
        self.submitted = self.milliseconds();
    }

    /// The tokens have arrived.
    fn end(&mut self, tokens: Vec<u32>) {
        self.steps.push(self.milliseconds());
        self.submissions.push(self.submitted);
        self.tokens = tokens;
    }

    fn row(&self, (tokens, recipe): (usize, &str), attention_ms: Option<f64>) -> Row {
        let middle = |of: &[f64]| {
            let mut of = of.get(FIRST..).unwrap_or_default().to_vec();
            of.sort_unstable_by(f64::total_cmp);
            of.get(of.len() / 2).copied().unwrap_or(f64::NAN)
        };
        let (step_ms, batch) = (middle(&self.steps), self.tokens.len());
        Row {
            batch,
            tokens,
            recipe: recipe.into(),
            tokens_per_second: batch as f64 / step_ms * 1e3,
            step_ms,
            submitted_ms: middle(&self.submissions),
            attention_ms,
        }
    }
}
