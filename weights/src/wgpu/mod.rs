//! Layers on a wgpu device, and their product with up to 16 rows of activations.
//!
//! [`Linear::upload`] stores a layer in the order of `docs/weights.md`. [`Linear::bind`] joins it with tensors, and
//! [`BoundLinear::encode`] records the product into an open compute pass: it does not submit, wait or allocate. The same
//! inputs give the same bits.

mod linear;
mod sources;

pub use linear::{BoundLinear, Linear};
