//! Layers on an NVIDIA GPU (compute capability 8.0 and up), and their product with activations.
//!
//! [`Linear::upload`] stores a layer in the order of `docs/weights.md`. [`Linear::bind`] joins it with tensors, and
//! [`BoundLinear::launch`] only launches kernels, so that a CUDA graph can capture it. The same inputs give the same
//! bits. [`Linear::dequantize_weights`] gives the weights in f16 to an engine's own product.

mod backend;
mod dequantize;
mod linear;
mod product;
mod sources;
mod strips;
mod tiles;

pub use backend::Cuda;
pub use dequantize::BoundWeights;
pub use linear::Linear;
pub use product::BoundLinear;
