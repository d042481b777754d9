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
mod tensor;
mod twin;
mod windows;
mod words;
