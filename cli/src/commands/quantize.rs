//! `kvpack quantize`: the weights of a model in 2 to 8 bits.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use kvpack_weights::checkpoint::WrittenFormat;
use kvpack_weights::quantize::{ColumnOrder, GptqOptions, Grid, OutOfRange, ScaleType, Shrinkage, Symmetry};
use kvpack_weights::{Bits, GroupSize};

use crate::model::{Calibration, Method, Model, Projection, QuantizedModel, Remarks};
use crate::outcome::Outcome;
use crate::print::{self, say};

/// Quantise the weights of a model's linear layers.
///
/// The layers are quantised one after the other, for the inputs that a text gives them. The output is a folder with the
/// quantised layers in model.safetensors, their configuration, and a copy of the model's file for everything else.
/// `kvpack eval --model FOLDER` and `kvpack generate --model FOLDER` read it, and run on the dequantised weights. Layers
/// have the names of the GGUF file, so other programs read the layers, but not the folder as a model.
#[derive(clap::Args)]
pub struct QuantizeArgs {
    /// A GGUF file.
    model: PathBuf,
    /// The folder to write; if it exists, it must be empty.
    #[arg(short, long, value_name = "FOLDER")]
    output: PathBuf,
    /// How weights are quantised; docs/weights.md says which method to take.
    #[arg(long, value_enum, default_value_t = Method::Gptq)]
    method: Method,
    /// Bits of a code: 2, 3, 4 or 8.
    #[arg(long, default_value_t = 4)]
    bits: u32,
    /// Inputs that share a scale; -1 for all inputs of an output.
    #[arg(long, default_value_t = 128)]
    group: i64,
    /// Zeros in the middle of the codes, instead of where the range of a group wants them.
    #[arg(long)]
    symmetric: bool,
    /// Round inputs with large activations first (gptq and gptaq).
    #[arg(long)]
    act_order: bool,
    /// Widen the range of a group until no weight is clamped (gptq and gptaq).
    #[arg(long)]
    no_clipping: bool,
    /// Shrink the correlations between inputs, more so with fewer tokens (gptq and gptaq).
    #[arg(long)]
    shrink: bool,
    /// The layout of the layers.
    #[arg(long, value_enum, default_value_t = Layout::Gptq)]
    layout: Layout,
    /// The text, which every method but rtn reads [default: the bundled chapters of Alice in Wonderland].
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Tokens of the text that are read, in sequences of 2048 [default: 2048].
    #[arg(long)]
    tokens: Option<usize>,
}

/// The layout of the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Layout {
    /// GPTQ, version 2.
    Gptq,
    /// AutoAWQ gemm; 4 bits, groups that divide the inputs, no act-order.
    Awq,
}

/// Runs the command.
pub fn run(args: &QuantizeArgs) -> Result<Outcome> {
    let grid = Grid {
        bits: Bits::new(args.bits.into())?,
        group: GroupSize::new(args.group)?,
        symmetry: if args.symmetric { Symmetry::Symmetric } else { Symmetry::Asymmetric },
        scales: ScaleType::F16,
    };
    let for_gptq = [("--act-order", args.act_order), ("--no-clipping", args.no_clipping), ("--shrink", args.shrink)];
    for (option, given) in for_gptq {
        if given && !matches!(args.method, Method::Gptq | Method::Gptaq) {
            bail!("{option} is for --method gptq and gptaq; leave it out");
        }
    }
    let for_text = [("--text", args.text.is_some()), ("--tokens", args.tokens.is_some())];
    if let Some((option, _)) = for_text.iter().find(|(_, given)| *given && args.method == Method::Rtn) {
        bail!("{option} is about the text, which --method rtn does not read; leave it out");
    }
    let options = GptqOptions {
        order: if args.act_order { ColumnOrder::Activations } else { ColumnOrder::Natural },
        out_of_range: if args.no_clipping { OutOfRange::Widened } else { OutOfRange::Clamped },
        shrinkage: if args.shrink { Shrinkage::ByTokens } else { Shrinkage::Never },
        ..GptqOptions::new(grid)
    };
    // An interrupted run leaves an empty folder.
    let is_free = !args.output.exists() || fs::read_dir(&args.output).is_ok_and(|mut files| files.next().is_none());
    if !is_free {
        bail!("{} exists; name a new folder", args.output.display());
    }
    let mut model = Model::load(&args.model)?;
    if args.model.is_dir() {
        bail!("{} is a folder; name a GGUF file", args.model.display());
    }
    let tokens = read_tokens(args, &model)?;
    // Before minutes are spent.
    fs::create_dir_all(&args.output).with_context(|| format!("cannot make the folder {}", args.output.display()))?;
    let written = quantize(args, &Calibration { method: args.method, options }, &mut model, &tokens);
    if written.is_err() {
        // Nobody else writes there.
        let _ = fs::remove_dir_all(&args.output);
    }
    let (bits, remarks) = written?;
    print_remarks(&remarks)?;
    say!("wrote {} layers with {bits:.2} bits per weight to {}", model.config.layers, args.output.display())?;
    say!("next: kvpack eval --model {}", args.output.display())?;
    Ok(Outcome::Passed)
}

/// The text; none where it is not needed.
fn read_tokens(args: &QuantizeArgs, model: &Model) -> Result<Vec<u32>> {
    if args.method == Method::Rtn {
        return Ok(Vec::new());
    }
    let text = super::text(args.text.as_deref())?;
    let mut tokens = model.tokenizer.encode_text(&text.content)?;
    let wanted = args.tokens.unwrap_or(2048);
    if wanted == 0 || tokens.len() < wanted {
        bail!("{} has {} tokens; --tokens is {wanted}: give 1 and up to those of the text", text.name, tokens.len());
    }
    tokens.truncate(wanted);
    Ok(tokens)
}

/// What GPTQ met.
fn print_remarks(remarks: &Remarks) -> Result<()> {
    for (name, damping) in &remarks.damped {
        say!("{name}: the damping rose to {damping}, because the Hessian had no Cholesky factor")?;
    }
    for (name, inputs) in &remarks.dead {
        say!("{name}: {inputs} inputs were 0 in the whole text; their weights became 0")?;
    }
    if remarks.clamped > 0 {
        say!("{} weights lay outside the range of their group", remarks.clamped)?;
    }
    Ok(())
}

/// Quantises and writes; returns the bits per weight.
fn quantize(
    args: &QuantizeArgs,
    calibration: &Calibration,
    model: &mut Model,
    tokens: &[u32],
) -> Result<(f64, Remarks)> {
    let format = match args.layout {
        Layout::Gptq => WrittenFormat::GptqV2,
        Layout::Awq => WrittenFormat::AwqGemm,
    };
    let mut into = QuantizedModel::new(format, calibration.options.grid.group);
    let progress = ProgressBar::new((model.config.layers * Projection::ALL.len()) as u64).with_style(print::bar());
    let quantized = calibration.quantize(model, tokens, &mut into, &mut |name| {
        progress.set_message(name.to_owned());
        progress.inc(1);
    });
    progress.finish_and_clear();
    let remarks = quantized?;
    into.write(&args.output, &args.model)?;
    Ok((into.bits_per_weight(), remarks))
}
