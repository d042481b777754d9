//! Whole models on candle with kvpack as their attention and cache: the command's decoder, which reads the same GGUF
//! files, and the scheduler of `hosts/serving`.

mod attention;
pub mod checks;
mod filled;
mod host;
mod own;
mod prompt;
mod rig;
mod serve;
mod study;
pub mod weights;

pub use attention::{CpuRig, CpuSteps, Layers, Steps};
pub use host::Host;
pub use rig::{Arriving, Rig};
pub use serve::ServeArgs;
pub use study::Study;
