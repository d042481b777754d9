//! The kernels of the wgpu backend, one by one.

mod append;
mod engine_tensors;
mod expected;
mod hadamard;
mod lost;
mod measure;
mod memory;
mod non_finite;
mod quantize;
mod step;
mod tensor;
mod twin;
mod windows;
mod words;
