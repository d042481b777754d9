//! Kernels in CUDA C++: the driver, memory on the device, and kernels from source to function.
//!
//! The library does not link CUDA. The driver and NVRTC are loaded at run time, and [`driver_present`] reports whether
//! there is a driver. A library hands its files in as [`KernelSources`]. A [`Program`] names files among them and the
//! macros that specialise them. [`Kernels`] compiles programs on first use, and a [`KernelCache`] keeps the binaries.
//! Every launch is `unsafe` ([`KernelLaunch::run`]): CUDA has no run-time checks.

pub mod driver;
mod kept_file;
pub mod kernels;
pub mod launch;
pub mod libraries;
pub mod memory;
pub mod pinned;
pub mod program;
pub mod sources;
pub mod tensor;
pub mod tensor_map;

pub use cudarc;
pub use driver::DeviceFacts;
pub use kernels::Kernels;
pub use launch::KernelLaunch;
pub use libraries::driver_present;
pub use memory::Memory;
pub use program::{KernelCache, Program};
pub use sources::KernelSources;
pub use tensor::Tensor;
pub use tensor_map::TensorMap;
