//! The wgpu backend on whatever adapter `WGPU_ADAPTER_NAME` names, or the best one there is. `KVPACK_PATH` forces a path.
#![cfg(feature = "wgpu")]

mod append;
mod devices;
mod expected;
mod lost;
mod measure;
mod memory;
mod non_finite;
mod quantize;
mod tensor;
mod twin;
