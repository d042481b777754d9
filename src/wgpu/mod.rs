//! The only room that touches wgpu: capabilities, shader builder, pipelines, encode functions.

mod attend;
mod capabilities;
mod kernels;
mod merge_states;
mod prepare_query;
pub mod shader;
mod sources;

pub use capabilities::{Capabilities, KernelLimits, Path, Requirements, SubgroupSizes, Timestamps};
pub use kernels::{Checks, Kernel, Kernels};
pub use shader::Variant;
