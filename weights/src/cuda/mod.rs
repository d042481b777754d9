//! Layers on an NVIDIA GPU (compute capability 8.0 and up), and their product with up to 16 rows of activations.
//!
//! [`Linear::upload`] stores a layer in the order of `docs/weights.md`. [`Linear::bind`] joins it with tensors, and
//! [`BoundLinear::launch`] only launches kernels, so that a CUDA graph can capture it. The same inputs give the same
//! bits.

mod linear;
mod sources;
mod strips;

pub use linear::{BoundLinear, Linear};
