//! Studies of whole models with packed caches, as papers make them: what they time, print and write.
//!
//! A host implements [`Measure`] and takes the options. Each study is then one function: [`throughput()`], [`decode()`],
//! [`policy()`], [`context()`].

mod context;
mod decode;
mod measure;
mod options;
mod policy;
mod report;
mod shape;
mod step_time;
mod throughput;

use kvpack::AttentionShape;
use kvpack::cache::Recipe;

pub use context::{ContextOptions, context};
pub use decode::{DecodeOptions, decode};
pub use measure::{Measure, ReadPrompt};
pub use options::{RandomModel, StudyOptions};
pub use policy::{PolicyOptions, policy, prompt_text};
pub use report::StudyReport;
pub use shape::{Shape, VOCABULARY};
pub use step_time::{StepColumns, StepTime, first_tokens, median};
pub use throughput::{ThroughputOptions, throughput};

/// What greedy texts continue.
pub const PROMPT: &str = "The history of the lighthouse begins with a storm that nobody in the village expected.";

/// Tokens that a cache has room for behind its contexts, in addition to those of timed steps: hosts decode a few first.
pub const FURTHER_TOKENS: usize = 8;

/// Bytes of the keys and values of some tokens in f16, in these layers.
pub fn f16_bytes(layers: &[(AttentionShape, Recipe)], tokens: usize) -> u64 {
    let of_layer = |(shape, _): &(AttentionShape, Recipe)| 2 * shape.kv_heads() * shape.head_dim() * 2 * tokens;
    layers.iter().map(of_layer).sum::<usize>() as u64
}
