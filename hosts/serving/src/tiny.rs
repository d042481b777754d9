//! A small decoder with random weights, for tests, and logits that the command's CPU backend computes with it.

use std::collections::BTreeMap;

use kvpack::AttentionShape;
use kvpack::backend::Backend;
use kvpack::cache::{ModelCache, TokenRun};
use pollster::block_on;
use serde::{Deserialize, Serialize};

use crate::batch::{Batch, BatchRun};
use crate::decoder::{Activation, Config, LocalLayers, RopePairs, Tensors};

/// The families that there are.
pub const FAMILIES: [&str; 3] = ["llama", "qwen2", "gemma3"];

/// One recipe of every kind: nothing packed, tokens as they arrive, tiles that leave a window, prompts as spans.
pub const RECIPES: [&str; 4] = ["f16", "saw-int4", "kivi:4", "calibquant:4"];

/// The parts in which [`prompt`] is computed, the last six tokens as decoded ones.
pub const PARTS: [usize; 9] = [128, 128, 44, 1, 1, 1, 1, 1, 1];

/// Positions before its own that a query of a local layer sees.
pub const LEFT: usize = 39;

/// Tokens that the model knows.
pub const VOCABULARY: usize = 64;

const HEADS: usize = 2;
const WIDTH: usize = 128;
const INNER: usize = 160;

/// A decoder with random weights.
#[derive(Clone, Debug)]
pub struct Tiny {
    /// Its shape.
    pub config: Config,
    /// Its tensors by name, with their shapes.
    pub tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

/// Logits after [`prompt`], by family and recipe.
pub type Logits = BTreeMap<String, BTreeMap<String, Vec<f32>>>;

/// Names and versions a file of [`Logits`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LogitsFile {
    /// What wrote it.
    pub written_by: String,
    /// The logits.
    pub logits: Logits,
}

impl LogitsFile {
    /// The logits that the command's CPU backend computes. A test of `hosts/candle` keeps the file up to date.
    ///
    /// # Errors
    /// When the file cannot be parsed.
    pub fn expected() -> Result<Self, serde_json::Error> {
        serde_json::from_str(include_str!("../golden/tiny_logits.json"))
    }
}

/// The tokens that [`Logits`] follow.
pub fn prompt() -> Vec<u32> {
    let tokens: usize = PARTS.iter().sum();
    (0..tokens).map(|i| ((i * i + 3 * i) % VOCABULARY) as u32).collect()
}

/// The logits after [`prompt`], which an empty cache gets in parts. `logits` returns those of the last row of a batch
/// whose step is open.
///
/// # Errors
/// What `logits` and the cache report.
pub fn last_logits<B: Backend, E: From<kvpack::Error>>(
    cache: &mut ModelCache<B>,
    mut logits: impl FnMut(&mut ModelCache<B>, &Batch) -> Result<Vec<f32>, E>,
) -> Result<Vec<f32>, E> {
    let (tokens, mut start, mut last) = (prompt(), 0, Vec::new());
    for part in PARTS {
        let run = if part == 1 { TokenRun::decode(0) } else { TokenRun::prompt(0, part) };
        let tokens = tokens[start..start + part].to_vec();
        let batch = Batch::new(vec![BatchRun { request: 0, run, start, tokens, answers: true }]);
        block_on(cache.reserve_for_append(&[run]))?;
        cache.begin_append(&[run])?;
        last = logits(cache, &batch)?;
        cache.commit()?;
        start += part;
    }
    Ok(last)
}

impl Tiny {
    /// A decoder of a family.
    ///
    /// # Errors
    /// [`kvpack::Error`] never: the shape has kernels.
    pub fn new(family: &str) -> kvpack::Result<Self> {
        let is_gemma = family == "gemma3";
        let attention = AttentionShape::new(HEADS, 1, WIDTH / HEADS)?;
        let config = Config {
            layers: if is_gemma { 6 } else { 2 }, // Gemma's sixth layer is the first that sees all
            width: WIDTH,
            feed_forward: INNER,
            attention,
            vocabulary: VOCABULARY,
            norm_epsilon: f64::from(1e-5f32),
            rope_base: 10_000.0,
            rope_pairs: if family == "llama" { RopePairs::Neighbours } else { RopePairs::Halves },
            activation: if is_gemma { Activation::Gelu } else { Activation::Silu },
            embedding_scale: if is_gemma { (WIDTH as f64).sqrt() } else { 1.0 },
            local: is_gemma.then_some(LocalLayers { left: LEFT, every: 6, rope_base: 10_000.0 }),
        };
        let mut tensors = BTreeMap::new();
        let mut seed = 7;
        let mut push = |name: String, shape: &[usize], scale| {
            tensors.insert(name, (shape.to_vec(), random(&mut seed, shape.iter().product(), scale)));
        };
        push("token_embd.weight".into(), &[VOCABULARY, WIDTH], 1.0);
        push("output_norm.weight".into(), &[WIDTH], 1.0);
        for layer in 0..config.layers {
            let name = |part: &str| format!("blk.{layer}.{part}");
            push(name("attn_norm.weight"), &[WIDTH], 1.0);
            push(name("ffn_norm.weight"), &[WIDTH], 1.0);
            for (part, outputs, inputs) in [
                ("attn_q", WIDTH, WIDTH),
                ("attn_k", WIDTH / HEADS, WIDTH),
                ("attn_v", WIDTH / HEADS, WIDTH),
                ("attn_output", WIDTH, WIDTH),
                ("ffn_gate", INNER, WIDTH),
                ("ffn_up", INNER, WIDTH),
                ("ffn_down", WIDTH, INNER),
            ] {
                push(name(&format!("{part}.weight")), &[outputs, inputs], 0.3);
                if family == "qwen2" && ["attn_q", "attn_k", "attn_v"].contains(&part) {
                    push(name(&format!("{part}.bias")), &[outputs], 0.5);
                }
            }
            if is_gemma {
                for part in ["attn_q_norm.weight", "attn_k_norm.weight"] {
                    push(name(part), &[WIDTH / HEADS], 1.0);
                }
                for part in ["post_attention_norm.weight", "post_ffw_norm.weight"] {
                    push(name(part), &[WIDTH], 1.0);
                }
            }
        }
        Ok(Self { config, tensors })
    }
}

impl Tensors for Tiny {
    fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String> {
        let (given, elements) = self.tensors.get(name).ok_or_else(|| format!("there is no tensor {name}"))?;
        if given != shape {
            return Err(format!("tensor {name}: its shape is {given:?}, {shape:?} is needed"));
        }
        Ok(elements.clone())
    }
}

/// Numbers of a fixed sequence, from -scale to scale.
pub fn random(seed: &mut u64, count: usize, scale: f32) -> Vec<f32> {
    let next = |_| {
        *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((*seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
    };
    (0..count).map(next).collect()
}
