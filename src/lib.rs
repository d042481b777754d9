//! kvpack packs the key-value cache of a transformer and computes attention on the packed form.
#![warn(missing_docs)]

pub mod backend;
pub mod cache;
pub mod conformance;
pub mod cpu;
mod error;
pub mod format;
pub mod plan;
#[cfg(feature = "wgpu")]
pub mod wgpu;

pub use backend::Backend;
pub use cache::{KvCache, Recipe};
pub use error::{Error, Result};
pub use format::{AttentionShape, Bits, Calibration, SegmentFormat, TILE_TOKENS};
