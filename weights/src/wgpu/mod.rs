//! Layers on a wgpu device, and their product with activations.
//!
//! [`Linear::upload`] stores a layer in the order of `docs/weights.md`. [`Linear::bind`] joins it with tensors, and
//! [`BoundLinear::encode`] records the product into an open compute pass: it does not submit, wait or allocate. The
//! same inputs give the same bits. [`Linear::dequantize_weights`] gives the weights in f16 to an engine's own product.

mod backend;
mod dequantize;
mod linear;
mod matrices;
mod product;
mod sources;
mod splits;

pub use backend::Wgpu;
pub use dequantize::BoundWeights;
pub use linear::Linear;
pub use product::BoundLinear;
