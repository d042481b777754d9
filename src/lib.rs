//! kvpack packs the key-value cache of a transformer and computes attention on the packed form.
#![warn(missing_docs)]

pub mod backend;
pub mod conformance;
pub mod cpu;
mod error;
pub mod format;
pub mod plan;

pub use backend::Backend;
pub use error::{Error, Result};
pub use format::{AttentionShape, Bits, Calibration, SegmentFormat, TILE_TOKENS};
