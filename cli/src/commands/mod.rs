//! One file for each command.

mod bench;
mod capture;
mod check;
mod compare;
mod demo;
mod eval;
mod generate;
mod golden;
mod list;
mod quantize;
mod shader;

use std::path::Path;

use anyhow::{Context, Result};

use crate::files;
use crate::outcome::Outcome;
use crate::provenance;

/// Packs the key-value cache of a transformer: shows what this machine can do, checks and times the kernels, and
/// measures what packing costs.
///
/// Start with `kvpack demo`. Every command explains itself: `kvpack eval --help`.
///
/// Exit codes: 0 passed; 1 a check failed; 2 wrong usage, unreadable input, output that cannot be written, or a device
/// that cannot do what was asked; 141 standard output was closed early.
#[derive(clap::Parser)]
#[command(name = "kvpack", version = provenance::VERSION)]
// The variants have no comments: they would replace the whole help of the commands. Each summary is the first sentence
// of its arguments' comment.
pub enum Command {
    List(list::ListArgs),
    Check(check::CheckArgs),
    Bench(bench::BenchArgs),
    Eval(eval::EvalArgs),
    Demo(demo::DemoArgs),
    Compare(compare::CompareArgs),
    Generate(generate::GenerateArgs),
    Capture(capture::CaptureArgs),
    Golden(golden::GoldenArgs),
    Quantize(quantize::QuantizeArgs),
    Shader(shader::ShaderArgs),
}

impl Command {
    /// Runs the command.
    pub fn run(self) -> Result<Outcome> {
        match self {
            Self::List(args) => list::run(&args),
            Self::Check(args) => check::run(&args),
            Self::Bench(args) => bench::run(&args),
            Self::Eval(args) => eval::run(&args),
            Self::Demo(args) => demo::run(&args),
            Self::Compare(args) => compare::run(&args),
            Self::Generate(args) => generate::run(&args),
            Self::Capture(args) => capture::run(&args),
            Self::Golden(args) => golden::run(&args),
            Self::Quantize(args) => quantize::run(&args),
            Self::Shader(args) => shader::run(&args),
        }
    }
}

/// Where scripts/fetch-model.sh puts the default model.
const DEFAULT_MODEL: &str = "models/SmolLM2-135M-Instruct.Q4_1.gguf";

/// Bytes of the longest text that is read: 64 MiB, more than any context holds.
const MOST_TEXT_BYTES: u64 = 64 << 20;

/// A text and where it is from.
struct Text {
    name: String,
    content: String,
}

/// Reads a text, or takes the bundled one.
fn text(path: Option<&Path>) -> Result<Text> {
    let Some(path) = path else {
        let name = "Alice's Adventures in Wonderland, chapters I and II (Lewis Carroll, public domain)".into();
        return Ok(Text { name, content: include_str!("../../data/alice.txt").into() });
    };
    let read = || Ok::<_, anyhow::Error>(String::from_utf8(files::read(path, MOST_TEXT_BYTES)?)?);
    let content = read().with_context(|| format!("cannot read the text {}", path.display()))?;
    Ok(Text { name: path.display().to_string(), content })
}

/// Default tokens of a chunk of a context.
const CHUNK_TOKENS: usize = 32;

/// The message for an option about chunks when no recipe stores chunks.
fn no_chunks(option: &str, recipes: &dyn std::fmt::Display) -> String {
    format!("{option}: recipe {recipes} stores no context in chunks; leave the option out, or use cocktail or mix=…")
}
