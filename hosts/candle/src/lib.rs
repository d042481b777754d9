//! Whole models on candle with kvpack as their attention and cache: the command's decoder, which reads the same GGUF
//! files, and the scheduler of `hosts/serving`.

mod attention;
pub mod checks;
mod host;
mod serve;
mod study;

pub use attention::{CpuSteps, Steps};
pub use host::{Host, cache_layers};
pub use serve::ServeArgs;
pub use study::{Shape, StudyArgs};
