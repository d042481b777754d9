//! The only room that touches wgpu: capabilities, shader builder, pipelines, encode functions.
//!
//! Every kernel has a plan, which is pure and checks everything that can be checked without a device; `bind` joins it
//! with buffers; `encode` records the dispatches into an open pass and does nothing else.

mod adapters;
mod append;
mod attend;
mod attend_matrix;
mod attend_values;
mod backend;
mod buffers;
mod capabilities;
mod code_bytes;
mod copy_page;
mod dequantize;
mod find_non_finite;
mod group_ranges;
mod guard;
mod hadamard;
mod kernels;
mod launch;
mod levels;
pub mod measure;
mod merge_states;
mod pack_windows;
mod prepare_query;
mod quantize;
mod scratch;
pub mod shader;
mod sources;
mod step;
mod store;
mod tensor;
mod tile_call;

pub use adapters::{adapters, choose_adapter, open_device};
pub use append::AppendPlan;
pub use backend::Wgpu;
pub use capabilities::{Capabilities, KernelLimits, Path, Requirements, SubgroupSizes, Timestamps, offers_matrices};
pub use dequantize::DequantizePlan;
pub use find_non_finite::{ElementPosition, FindNonFinite, FindNonFinitePlan};
pub use hadamard::HadamardPlan;
pub use kernels::{Checks, Kernel, Kernels};
pub use launch::{Launch, Launches};
pub use pack_windows::PackWindowsPlan;
pub use quantize::QuantizePlan;
pub use scratch::{Scratch, ScratchBytes};
pub use shader::Variant;
pub use step::{StepPlan, StepTensors};
pub use store::{Store, StorePart, max_shard_pages};
pub use tensor::{ElementBinding, Tensor};

/// Every kernel variant that plans of this module can ask for, one of each that differ in more than numbers: for tests
/// that translate them all.
pub fn variants() -> Vec<Variant> {
    [
        append::variants(),
        dequantize::variants(),
        find_non_finite::variants(),
        hadamard::variants(),
        measure::variants(),
        quantize::variants(),
    ]
    .concat()
}
