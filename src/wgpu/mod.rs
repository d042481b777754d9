//! The only room that touches wgpu: capabilities, shader builder, pipelines, encode functions.

mod kernels;
pub mod shader;
mod sources;

pub use kernels::{Checks, Kernel, Kernels};
pub use shader::Variant;
