//! The kernels of the wgpu backend, one by one.
#![cfg(feature = "wgpu")]

mod append;
mod expected;
#[path = "../gpu_device/mod.rs"]
mod gpu_device;
mod hadamard;
mod lost;
mod measure;
mod memory;
mod non_finite;
mod one_buffer;
mod quantize;
mod tensor;
mod twin;
mod windows;
mod words;
