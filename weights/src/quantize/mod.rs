//! Quantisers: weights and activations in, a [`QuantizedLinear`](crate::QuantizedLinear) out.
//!
//! | function | source | needs |
//! | --- | --- | --- |
//! | [`round_to_nearest`] | | weights |
//! | [`gptq()`] | Frantar et al., arXiv 2210.17323, Algorithm 1 | a [`Hessian`] of the layer's inputs |
//! | [`gptaq()`] | Li et al., arXiv 2504.02692, eq. 15-17 | a [`PairedHessian`] of its inputs in both models |
//! | [`awq()`] | Lin et al., arXiv 2306.00978, eq. 4-5 | the inputs themselves |
//!
//! Weights are `[N, K]` (outputs, inputs), activations `[tokens, K]`, both row-major in f32. Sums run in f64.

mod awq;
mod gptaq;
mod gptq;
mod grid;
mod hessian;
mod matrix;
mod rounding;
mod sweep;

pub use awq::{Awq, AwqOptions, AwqScales, Clip, awq, awq_scaled, awq_scales};
pub use gptaq::{GptaqOptions, gptaq};
pub use gptq::{ColumnOrder, Gptq, GptqOptions, GptqReport, OutOfRange, Shrinkage, gptq};
pub use grid::{Grid, ScaleType, Symmetry};
pub use hessian::{Hessian, PairedHessian};
pub use matrix::Matrix;
pub use rounding::round_to_nearest;
