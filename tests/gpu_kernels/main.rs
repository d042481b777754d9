//! The kernels of the wgpu backend, one by one.
#![cfg(feature = "wgpu")]

mod append;
mod engine_tensors;
mod expected;
#[path = "../gpu_device/mod.rs"]
mod gpu_device;
mod hadamard;
mod lost;
mod measure;
mod memory;
mod non_finite;
mod quantize;
#[path = "../random_rows/mod.rs"]
mod random_rows;
mod step;
#[path = "../step_writes/mod.rs"]
mod step_writes;
mod tensor;
mod twin;
mod windows;
mod words;
