//! `decode`: steps of decoding of a GGUF file's model, with kvpack's attention over contexts of random keys and values,
//! and with burn's own. Greedy texts of both are compared.

use std::path::PathBuf;

use burn::tensor::Device;
use kvpack::cache::ModelCache;
use kvpack::wgpu::Wgpu;
use kvpack_serving::Contexts;
use serde::Serialize;

use crate::decoder::Decoder;
use crate::gguf::Gguf;
use crate::host::Host;
use crate::own::OwnAttention;
use crate::steps::{self, FIRST, StepTime, begun, filled};
use crate::{Result, own, report};

/// What greedy texts continue.
const PROMPT: &str = "The history of the lighthouse begins with a storm that nobody in the village expected.";

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
    #[serde(flatten)]
    time: StepTime,
}

impl DecodeArgs {
    /// Runs the study. False where texts differ.
    pub fn run(&self, device: &Device, backend: &Wgpu) -> Result<bool> {
        let mut gguf = Gguf::open(&self.model)?;
        let config = gguf.config.clone();
        let decoder = Decoder::load(device, config, &mut gguf)?;
        let most = self.batches.iter().copied().max().unwrap_or(1);
        let mut host = Host::new(backend, decoder, most, None)?;
        report::heading(backend, "decode", &gguf.name);
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
                    let time = own::decode(device, &host, (batch, tokens), self.steps)?;
                    push(&mut rows, Row::new((batch, tokens, "burn"), time));
                } else {
                    println!("| {batch} × {tokens} | burn | does not fit |");
                }
                for recipe in &self.recipes {
                    push(&mut rows, self.packed(backend, &mut host, (recipe, batch, tokens))?);
                    // Whoever stops the program keeps what was measured.
                    report::write(self.json.as_deref(), backend, ("decode", &gguf.name), &rows)?;
                }
            }
        }
        Ok(same)
    }

    /// Steps with kvpack's.
    fn packed(&self, backend: &Wgpu, host: &mut Host, (recipe, batch, tokens): (&str, usize, usize)) -> Result<Row> {
        let of = Contexts { sequences: batch, tokens, more: FIRST + self.steps + 1 };
        let mut cache = filled(backend, host, &recipe.parse()?, of, None)?;
        Ok(Row::new((batch, tokens, recipe), steps::decode(host, &mut cache, self.steps)?))
    }
}

impl Row {
    fn new((batch, tokens, recipe): (usize, usize, &str), time: StepTime) -> Self {
        Self { batch, tokens, recipe: recipe.into(), tokens_per_second: batch as f64 / time.step_ms * 1e3, time }
    }
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
    let attention = row.time.attention_ms.map_or("–".into(), |ms| format!("{ms:.2}"));
    println!(
        "| {} × {} | {} | {:.1} | {:.2} | {attention} | {:.2} |",
        row.batch, row.tokens, row.recipe, row.tokens_per_second, row.time.step_ms, row.time.submitted_ms
    );
    rows.push(row);
}
