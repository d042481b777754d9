//! Kernels in WGSL through wgpu: adapters and their capabilities, memory, and kernels from source to launch.
//!
//! A library hands its shader files in as [`ShaderSources`]. A [`Variant`] names a kernel among them and the choices
//! that specialise it. [`Kernels`] compiles variants and keeps them. A [`Launch`] is a kernel with its buffers and its
//! grid:
//!
//! - [`Launch::checked`] is safe. The kernel has all run-time checks of wgpu.
//! - [`Launch::trusted`] is `unsafe`. The kernel has the checks that its [`Kernels`] were made with, by default none.
//!   The caller vouches that the kernel stays within the buffers and ends.

mod adapters;
mod assembly;
mod beside;
pub mod buffers;
pub mod capabilities;
mod counted;
mod deferred;
pub mod encoded;
pub mod guard;
pub mod kernels;
pub mod launch;
pub mod shader;
pub mod sources;
pub mod tensor;
mod unroll;

pub use adapters::{adapters, choose_adapter, open_device};
pub use capabilities::{Capabilities, KernelLimits, Path, Requirements, SubgroupSizes, Timestamps, offers_matrices};
pub use kernels::{Checks, Kernels};
pub use launch::{Launch, Launches};
pub use shader::Variant;
pub use sources::ShaderSources;
pub use tensor::{ElementBinding, Tensor};
