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
mod shader;

use std::path::Path;

use anyhow::{Context, Result};

use crate::files;
use crate::outcome::Outcome;

/// Packed key-value caches: what this machine has, whether the kernels are right on it, how fast they are, and what a
/// format does to real keys and values.
///
/// Exit codes: 0 passed, 1 a check failed, 2 wrong usage, unreadable input, output that cannot be written or a device
/// that cannot do it, 141 standard output was closed before the end.
#[derive(clap::Parser)]
#[command(name = "kvpack", version)]
pub enum Command {
    /// List the GPU adapters with their drivers, features and limits.
    List(list::ListArgs),
    /// Run the conformance checks of every kernel; exit code 1 if any fails.
    Check(check::CheckArgs),
    /// Time decode steps over packed caches, each checked against f64 first.
    Bench(bench::BenchArgs),
    /// Measure what each format does to the attention outputs of a dump of keys, values and queries.
    Eval(eval::EvalArgs),
    /// Show in a minute what packing costs on real keys and values, and what this device can do.
    Demo(demo::DemoArgs),
    /// Put reports of devices or builds beside each other in one page.
    Compare(compare::CompareArgs),
    /// Write text with a GGUF model whose cache is packed.
    Generate(generate::GenerateArgs),
    /// Write the keys, values and queries of a GGUF model over a text as a dump for `kvpack eval`.
    Capture(capture::CaptureArgs),
    /// Run golden vectors and compare with the outputs that others got.
    Golden(golden::GoldenArgs),
    /// Print the WGSL of a kernel, with the file that each part comes from.
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

/// Reads a text, or takes the one that kvpack brings.
fn text(path: Option<&Path>) -> Result<Text> {
    let Some(path) = path else {
        let name = "Alice's Adventures in Wonderland, chapters I and II (Lewis Carroll, public domain)".into();
        return Ok(Text { name, content: include_str!("../../../data/alice.txt").into() });
    };
    let read = || Ok::<_, anyhow::Error>(String::from_utf8(files::read(path, MOST_TEXT_BYTES)?)?);
    let content = read().with_context(|| format!("cannot read the text {}", path.display()))?;
    Ok(Text { name: path.display().to_string(), content })
}

/// Tokens of a chunk of a context, where nothing else is said.
const CHUNK_TOKENS: usize = 32;

/// What is wrong with an option about chunks beside recipes that have none.
fn no_chunks(option: &str, recipes: &dyn std::fmt::Display) -> String {
    format!("{option}: recipe {recipes} stores no context in chunks; leave it out, or take cocktail or mix=…")
}
