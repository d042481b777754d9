//! Dumps of keys, values and queries, as safetensors files.
//!
//! For each layer `N`:
//!
//! | tensor | shape | |
//! | --- | --- | --- |
//! | `layerN.key` | `[kv_heads, tokens, head_dim]` | after position encoding |
//! | `layerN.value` | `[kv_heads, tokens, head_dim]` | |
//! | `layerN.query_prompt` | `[query_heads, queries, head_dim]` | optional: the queries of the last prompt tokens |
//! | `layerN.query_decode` | `[query_heads, queries, head_dim]` | optional: queries of tokens after the prompt |
//!
//! At least one of the two query tensors is needed. Elements are F16, BF16 or F32. Scores are `q·k / √head_dim`.
//! Other tensors are ignored.
//!
//! Metadata, all optional: `model` and `text` are shown. `mask` is `causal` (the default: the prompt queries are those
//! of the last tokens, and each sees the tokens up to its own) or `none` (every query sees every token, because all of
//! them come later), which may be followed by a colon and a remark.

mod error;
mod read;
mod write;

use std::path::Path;

use anyhow::{Context, Result};
use kvpack::AttentionShape;

pub use error::DumpError;
pub use read::{parse, read};
pub use write::write;

/// The bundled dump: three layers of SmolLM2-135M over 1152 tokens of Moby Dick; cli/data/README.md says how it was
/// made.
const BUNDLED: &[u8] = include_bytes!("../../data/smollm2_kv.safetensors");

/// What reports call the bundled dump.
const BUNDLED_NAME: &str = "smollm2_kv";

/// A dump and what to call it.
pub struct NamedDump {
    /// Its path; the bundled dump has a name alone.
    pub name: String,
    /// The dump.
    pub dump: Dump,
}

/// Reads the dump of this path, or the bundled one.
///
/// # Errors
/// [`DumpError`], with the path.
pub fn open(path: Option<&Path>) -> Result<NamedDump> {
    Ok(match path {
        Some(path) => {
            let name = path.display().to_string();
            NamedDump { dump: read(path).with_context(|| name.clone())?, name }
        }
        None => NamedDump { name: BUNDLED_NAME.into(), dump: parse(BUNDLED)? },
    })
}

/// A whole dump.
pub struct Dump {
    /// The model, where the file names it.
    pub model: Option<String>,
    /// The text behind the tokens, where the file names it.
    pub text: Option<String>,
    /// The layers in ascending order, at least one.
    pub layers: Vec<Layer>,
}

/// Which tokens the prompt queries of a dump see. Decode queries see all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// They are the queries of the last tokens, and each sees the tokens up to its own.
    Causal,
    /// They come later than all tokens and see all.
    None,
}

/// One layer of a dump.
pub struct Layer {
    /// Its number in the model.
    pub index: u32,
    /// Heads and head dimension.
    pub shape: AttentionShape,
    /// Tokens whose keys and values are there.
    pub tokens: usize,
    /// What its prompt queries see.
    pub mask: Mask,
    /// Keys, `[kv_heads, tokens, head_dim]`.
    pub keys: Vec<f32>,
    /// Values, `[kv_heads, tokens, head_dim]`.
    pub values: Vec<f32>,
    /// Queries of the last prompt tokens, each `[query_heads, head_dim]`; may be empty.
    pub prompt_queries: Vec<Vec<f32>>,
    /// Queries of tokens after the prompt, each `[query_heads, head_dim]`; empty only if there are prompt queries.
    pub decode_queries: Vec<Vec<f32>>,
}

impl Layer {
    /// How many tokens a prompt query sees.
    pub fn visible_to(&self, prompt_query: usize) -> usize {
        match self.mask {
            Mask::None => self.tokens,
            Mask::Causal => self.tokens - self.prompt_queries.len() + prompt_query + 1,
        }
    }
}
