//! `kvpack capture`: the keys, values and queries of a model over a text, as a dump for `kvpack eval`.

use std::collections::HashMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Tensor};
use half::f16;
use indicatif::ProgressBar;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::dump;
use crate::files::{self, Replacement};
use crate::model::{Attention, CHUNK_TOKENS, Chunk, ExactAttention, Model};
use crate::outcome::Outcome;
use crate::print::{self, say};

/// Write a dump for `kvpack eval`: keys, values and queries of a GGUF model over a text.
///
/// The model runs with full-precision attention. The dump holds f16 in the format that `kvpack eval --help` describes.
/// The first --tokens tokens of the text are the prompt: the dump gets their keys and values, and the queries of the
/// last --queries of them. The queries of the next --queries tokens are the decode queries. The same model, text and
/// options give the same bytes.
#[derive(clap::Args)]
pub struct CaptureArgs {
    /// The dump to write.
    output: PathBuf,
    /// A GGUF file, or a folder of `kvpack quantize`; scripts/fetch-model.sh fetches the default.
    #[arg(long, value_name = "FILE", default_value = super::DEFAULT_MODEL)]
    model: PathBuf,
    /// The text [default: the bundled chapters of Alice in Wonderland].
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Layers to write [default: the first, the middle and the last].
    #[arg(long, value_delimiter = ',', value_name = "N,N")]
    layers: Vec<usize>,
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 1024)]
    tokens: usize,
    /// Queries of each kind.
    #[arg(long, default_value_t = 32)]
    queries: usize,
}

/// Runs the command.
pub fn run(args: &CaptureArgs) -> Result<Outcome> {
    files::check_apart(&args.output, [args.model.as_path()].into_iter().chain(args.text.as_deref()))?;
    let model = Model::load(&args.model)?;
    let layers = layers(args, model.config.layers)?;
    let text = super::text(args.text.as_deref())?;
    let tokens = model.tokenizer.encode_text(&text.content)?;
    if args.queries == 0 || args.queries > args.tokens {
        bail!("--queries {} of --tokens {}: from one query to as many as there are tokens", args.queries, args.tokens);
    }
    let needed = args.tokens.saturating_add(args.queries);
    if tokens.len() < needed {
        bail!("{} has {} tokens, {needed} are needed (--tokens and --queries)", text.name, tokens.len());
    }
    model.check_context(needed)?;
    if let Some((layer, left)) = model.config.first_local(layers.iter().copied(), needed) {
        bail!(
            "layer {layer} sees {left} positions before a query's own, and a dump says that all are seen: name other \
             layers (--layers), or fewer tokens (--tokens and --queries)"
        );
    }
    let mut output = Replacement::new(&args.output)?;

    let mut capture = Capture::new(&model, &layers, args);
    let progress = ProgressBar::new(needed as u64).with_style(print::bar());
    let mut position = 0;
    for part in [&tokens[..args.tokens], &tokens[args.tokens..needed]] {
        for chunk in part.chunks(CHUNK_TOKENS) {
            model.forward(chunk, position, &mut capture)?;
            position += chunk.len();
            progress.set_position(position as u64);
        }
    }
    progress.finish_and_clear();
    output.write(&capture.dump(&model, &text.name)?)?;
    output.commit()?;
    say!("wrote {} tokens of layers {layers:?} to {}", args.tokens, args.output.display())?;
    say!("next: kvpack eval {}", args.output.display())?;
    Ok(Outcome::Passed)
}

fn layers(args: &CaptureArgs, of: usize) -> Result<Vec<usize>> {
    let mut layers = if args.layers.is_empty() { vec![0, of / 2, of - 1] } else { args.layers.clone() };
    layers.sort_unstable();
    layers.dedup();
    match layers.iter().find(|&&layer| layer >= of) {
        Some(layer) => bail!("--layers names layer {layer}; the model has layers 0..{of}"),
        None => Ok(layers),
    }
}

/// Exact attention that keeps the queries of the last prompt tokens and of those after them.
struct Capture<'a> {
    args: &'a CaptureArgs,
    exact: ExactAttention,
    /// Queries so far by layer, from the first that is kept on, `[tokens, query_heads, head_dim]`.
    queries: HashMap<usize, Vec<Tensor>>,
    /// Tokens so far by layer.
    seen: HashMap<usize, usize>,
}

impl<'a> Capture<'a> {
    fn new(model: &Model, layers: &[usize], args: &'a CaptureArgs) -> Self {
        Self {
            args,
            exact: ExactAttention::new(&model.config),
            queries: layers.iter().map(|&layer| (layer, Vec::new())).collect(),
            seen: HashMap::new(),
        }
    }

    /// The bytes of the dump.
    fn dump(&self, model: &Model, text: &str) -> Result<Vec<u8>> {
        let args = self.args;
        let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
        let mut push = |name: String, tensor: Tensor| -> Result<()> {
            let elements = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
            let halves: Vec<f16> = elements.iter().map(|&x| f16::from_f32(x)).collect();
            tensors.push((name, tensor.dims().to_vec(), bytemuck::cast_slice(&halves).to_vec()));
            Ok(())
        };
        for (&layer, queries) in &self.queries {
            let (keys, values) = self.exact.layer(layer).context("the layer saw no tokens")?;
            push(format!("layer{layer}.key"), keys.narrow(1, 0, args.tokens)?)?;
            push(format!("layer{layer}.value"), values.narrow(1, 0, args.tokens)?)?;
            let queries = Tensor::cat(queries, 0)?.transpose(0, 1)?.contiguous()?;
            push(format!("layer{layer}.query_prompt"), queries.narrow(1, 0, args.queries)?)?;
            push(format!("layer{layer}.query_decode"), queries.narrow(1, args.queries, args.queries)?)?;
        }
        let views = tensors
            .iter()
            .map(|(name, shape, bytes)| Ok((name.clone(), TensorView::new(Dtype::F16, shape.clone(), bytes)?)));
        let metadata = [("model", model.config.name.as_str()), ("text", text), ("mask", "causal")];
        dump::write(views.collect::<Result<Vec<_>>>()?, metadata)
    }
}

impl Attention for Capture<'_> {
    fn attend(&mut self, chunk: &Chunk) -> Result<Tensor> {
        let tokens = chunk.queries.dim(0)?;
        let seen = self.seen.entry(chunk.layer).or_default();
        let first_kept = self.args.tokens - self.args.queries;
        if let Some(queries) = self.queries.get_mut(&chunk.layer)
            && *seen + tokens > first_kept
        {
            let skipped = first_kept.saturating_sub(*seen);
            queries.push(chunk.queries.narrow(0, skipped, tokens - skipped)?);
        }
        *seen += tokens;
        self.exact.attend(chunk)
    }
}
