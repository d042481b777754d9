//! Whole models on candle with kvpack as their attention and cache: the command's decoder, which reads the same GGUF
//! files, and the scheduler of `hosts/serving`.

mod attention;
mod host;
mod serve;

pub use attention::{CpuSteps, Steps};
pub use host::{Host, cache_layers};
pub use serve::ServeArgs;
