//! Quantised weights of transformers: GPTQ, AWQ and compressed-tensors checkpoints are read into one form, written from
//! it, made by quantisers, and multiplied with.
//!
//! A layer is `y = x · Wᵀ` with weights W `[N, K]` (N outputs, K inputs) and activations x `[rows, K]`, all row-major.
//! [`QuantizedLinear`] holds W as codes of 2, 3, 4 or 8 bits with a scale and a zero for each group of inputs of an
//! output: `W[n, k] = scale · (code - zero)`.
//!
//! | part | does |
//! | --- | --- |
//! | [`Checkpoint`] | reads folders of safetensors files in the formats of [`mod@format`] |
//! | [`checkpoint::NewCheckpoint`] | writes GPTQ v2 and AutoAWQ gemm |
//! | [`mod@format`] | the stored tensors of one layer, to the bit |
//! | [`quantize`] | round to nearest, GPTQ, GPTAQ, AWQ |
//! | [`QuantizedLinear::linear`], [`QuantizedLinear::dequantize`] | the CPU reference, in f32 and f64 |
//!
//! With the feature `wgpu` or `cuda`, a module of the same name multiplies rows of activations on a GPU, and
//! dequantises weights there, and `conformance` holds the checks of it. The crate knows nothing of key-value caches, and
//! kvpack knows nothing of it.
//!
//! # Quantise a layer and use it
//!
//! ```
//! use kvpack_weights::checkpoint::{NewCheckpoint, WrittenFormat};
//! use kvpack_weights::quantize::{GptqOptions, Grid, Hessian, Matrix, ScaleType, Symmetry, gptq};
//! use kvpack_weights::{Bits, GroupSize};
//!
//! // W [32, 64] and 200 rows of what the layer meets.
//! let (outputs, inputs, tokens) = (32, 64, 200);
//! let weights: Vec<f32> = (0..outputs * inputs).map(|i| (i as f32 * 0.37).sin()).collect();
//! let seen: Vec<f32> = (0..tokens * inputs).map(|i| (i as f32 * 0.11).cos() + (i as f32 * 0.7).sin()).collect();
//!
//! let mut hessian = Hessian::new(inputs)?;
//! hessian.add(Matrix::new(tokens, inputs, &seen)?)?;
//! let group = GroupSize::Inputs(32);
//! let grid = Grid { bits: Bits::Four, group, symmetry: Symmetry::Asymmetric, scales: ScaleType::F16 };
//! let quantized = gptq(Matrix::new(outputs, inputs, &weights)?, &hessian, &GptqOptions::new(grid))?;
//!
//! // y [1, 32], in f32, for the first row.
//! let y = quantized.linear.linear(&seen[..inputs])?;
//! assert_eq!(y.len(), outputs);
//!
//! // What other programs read.
//! let mut checkpoint = NewCheckpoint::new(WrittenFormat::GptqV2, group);
//! checkpoint.add_layer("model.layers.0.mlp.up_proj", &quantized.linear)?;
//! # Ok::<(), kvpack_weights::Error>(())
//! ```
//!
//! # What a call may cost
//!
//! Sizes are checked before memory is taken: a file that promises more than it holds is refused. Reading a layer takes
//! a few times its bytes on disk. A [`Hessian`](quantize::Hessian) takes 8·K² bytes, and [`gptq`](quantize::gptq())
//! three times as many and 8·N·K. Threads are those of rayon's current pool. Results do not depend on their number.

mod algebra;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod backend;
pub mod checkpoint;
mod codes;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub mod conformance;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
pub mod format;
mod linear;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod path;
mod product;
pub mod quantize;
mod shape;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod stored;
#[cfg(feature = "wgpu")]
pub mod wgpu;

pub use checkpoint::Checkpoint;
pub use codes::PackedCodes;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub use cpu::Cpu;
pub use error::{Error, Result};
pub use linear::QuantizedLinear;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub use path::Path;
pub use product::Real;
pub use shape::{Bits, GroupSize, Groups, LinearShape, MOST_FEATURES, MOST_WEIGHTS};

/// The most rows of activations of a product on a device.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub const MOST_ROWS: usize = 1 << 15;
