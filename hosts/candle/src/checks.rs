//! Small models with random weights as GGUF files, and what a device computes with them against the CPU.

use std::io::Cursor;
use std::time::Duration;

use anyhow::Result;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use kvpack::backend::Backend;
use kvpack::cache::{Budget, Growth, ModelCache};
use kvpack::cpu::nmse;
use kvpack_cli::Model;
use kvpack_serving::tiny::{self, FAMILIES, LogitsFile, RECIPES, Tiny};
use kvpack_serving::{Figures, Prompt, Request, Scheduler, Settings};

use crate::attention::Steps;
use crate::host::Host;
use crate::rig::Rig;
use crate::weights;

/// Rows of the steps of a check.
const ROWS: usize = 260;

/// The largest error of logits where nothing is packed: sums in f32 are taken in another order.
const LARGEST: f64 = 1e-6;

/// The same where some keys are therefore rounded to the neighbouring code, and queries to bytes.
const LARGEST_PACKED: f64 = 5e-4;

/// The bytes of a GGUF file.
fn gguf(family: &str) -> Result<Vec<u8>> {
    let Tiny { config, tensors } = Tiny::new(family)?;
    let number = |value: usize| Value::U32(value as u32);
    let key = |name: &str| format!("{family}.{name}");
    let piece = |token: usize| Value::String(char::from(33 + token as u8).to_string());
    let mut metadata: Vec<(String, Value)> = vec![
        ("general.architecture".into(), Value::String(family.into())),
        (key("block_count"), number(config.layers)),
        (key("context_length"), number(1000)),
        (key("embedding_length"), number(config.width)),
        (key("feed_forward_length"), number(config.feed_forward)),
        (key("attention.head_count"), number(config.attention.query_heads())),
        (key("attention.head_count_kv"), number(config.attention.kv_heads())),
        (key("attention.layer_norm_rms_epsilon"), Value::F32(config.norm_epsilon as f32)),
        ("tokenizer.ggml.model".into(), Value::String("gpt2".into())),
        ("tokenizer.ggml.pre".into(), Value::String("smollm".into())),
        ("tokenizer.ggml.merges".into(), Value::Array(vec![Value::String("! \"".into())])),
    ];
    let mut pieces: Vec<Value> = (0..config.vocabulary - 1).map(piece).collect();
    pieces.push(Value::String("!\"".into()));
    metadata.push(("tokenizer.ggml.tokens".into(), Value::Array(pieces)));
    if let Some(local) = config.local {
        metadata.push((key("attention.sliding_window"), number(local.left + 1)));
    }
    let mut quantized: Vec<(String, QTensor)> = Vec::new();
    for (name, (shape, elements)) in tensors {
        let tensor = Tensor::from_vec(elements, shape, &Device::Cpu)?;
        quantized.push((name, QTensor::quantize(&tensor, GgmlDType::F32)?));
    }
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let quantized: Vec<(&str, &QTensor)> = quantized.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut bytes = Cursor::new(Vec::new());
    gguf_file::write(&mut bytes, &metadata, &quantized)?;
    Ok(bytes.into_inner())
}

/// A small model of a family, read from the bytes of a file.
///
/// # Errors
/// None: the file is readable.
pub fn model(family: &str) -> Result<Model> {
    Model::read(Cursor::new(gguf(family)?))
}

/// Eight requests, the prompts of which begin alike.
pub fn requests() -> Vec<Request> {
    let request = |at: usize| {
        let prompt = Prompt::Length { tokens: 140 + 40 * at, shared: 135, seed: at + 1 };
        let arrival = Duration::from_millis(at as u64 / 3);
        Request { arrival, prompt: prompt.drawn(63).unwrap_or_default(), output: 20 + at }
    };
    (0..8).map(request).collect()
}

/// Compares logits with those of the CPU, and a queue of eight requests with each alone, on any device. False where
/// something differs.
///
/// # Errors
/// What the device reports.
pub fn run<R: Rig>(rig: &R) -> Result<bool> {
    let backend = rig.backend();
    let host = |model: Model| -> Result<Host<R::Steps>> {
        let model = rig.on_device(model, DType::F32)?;
        let steps = rig.steps(&model, model.config.layers, ROWS)?;
        Ok(Host::new(model, steps))
    };
    let expected = LogitsFile::expected()?.logits;
    let mut passed = weights::check(rig)?;
    for family in FAMILIES {
        let mut host = host(model(family)?)?;
        for recipe in RECIPES {
            let layers = host.model().config.cache_layers(&recipe.parse()?)?;
            let mut cache = ModelCache::new(backend, &layers, 1)?;
            let given = tiny::last_logits(&mut cache, |cache, batch| -> Result<Vec<f32>> {
                Ok(host.logits(cache, batch)?.get(0)?.to_vec1()?)
            })?;
            let expected: Vec<f64> = expected[family][recipe].iter().map(|&x| f64::from(x)).collect();
            let error = nmse(&given, &expected);
            let largest = if recipe == "f16" { LARGEST } else { LARGEST_PACKED };
            passed &= error <= largest;
            let verdict = if error <= largest { "ok" } else { "FAILED" };
            println!(
                "{family}, {recipe}: NMSE {error:.1e} of logits against the CPU backend (at most {largest:.0e}): {verdict}"
            );
        }
    }
    for (family, recipe, prefixes) in [("llama", "f16", 2), ("llama", "saw-int4", 2), ("gemma3", "kivi:4", 0)] {
        passed &= queue(backend, &mut host(model(family)?)?, (family, recipe, prefixes))?;
    }
    Ok(passed)
}

/// Serves eight requests one by one, together, and together within 60 % of the memory.
fn queue<B: Backend + Clone, S: Steps<B>>(
    backend: &B,
    host: &mut Host<S>,
    (family, recipe, prefixes): (&str, &str, usize),
) -> Result<bool> {
    let layers = host.model().config.cache_layers(&recipe.parse()?)?;
    let settings = |sequences, prefixes| Settings { sequences, prefixes, rows: ROWS, chunk: 128 };
    let mut serve = |requests: Vec<Request>, settings: Settings, budget: Budget| -> Result<(Vec<Vec<u32>>, Figures)> {
        let cache = ModelCache::new(backend, &layers, settings.sequences + settings.prefixes)?.with_budget(budget);
        let served = Scheduler::new(cache, settings, requests)?.serve(host, |_| {})?;
        Ok((served.texts, served.figures))
    };
    let unlimited = Budget::unlimited().growing(Growth::Exact);
    let mut expected = Vec::new();
    for request in requests() {
        let alone = Request { arrival: Duration::ZERO, ..request };
        expected.extend(serve(vec![alone], settings(1, 0), unlimited)?.0);
    }
    let (texts, figures) = serve(requests(), settings(4, prefixes), unlimited)?;
    let budget = Budget::of_bytes(figures.pages.allocated_bytes * 6 / 10).growing(Growth::Exact);
    let (texts_within, figures) = serve(requests(), settings(4, prefixes), budget)?;
    let passed = texts == expected && texts_within == expected && figures.preemptions > 0;
    let verdict = if passed { "ok" } else { "FAILED" };
    println!("eight requests to {family}, {recipe}, within 60 % of the memory: texts as of each alone: {verdict}");
    println!("{figures}");
    Ok(passed)
}
