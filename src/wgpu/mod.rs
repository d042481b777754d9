//! Storage and kernels through wgpu. No other module uses wgpu: it holds the capabilities, the shader builder, the
//! pipelines and the encode functions.
//!
//! Every kernel has a plan, which is pure and checks everything that can be checked without a device. `bind` joins the
//! plan with buffers. `encode` records the dispatches into an open pass and does nothing else.

mod attend;
mod backend;
mod device;
pub mod measure;
mod model_step;
mod pack;
mod select;
mod table_slots;

pub use attend::{AttendStep, AttendTensors, MergePairPlan, Scratch, ScratchBytes, UncentreLsePlan};
pub use backend::Wgpu;
pub use device::shader;
pub use device::{
    Capabilities, Checks, ElementBinding, Indices, KernelLimits, Kernels, Launch, Launches, Path, Requirements, Store,
    StoreBuffer, SubgroupSizes, Tensor, Timestamps, Variant, adapters, choose_adapter, max_shard_pages,
    offers_matrices, open_device,
};
pub use model_step::{LayerTensors, ModelStep, WrittenStep};
pub use pack::{
    BoundStoreStep, DequantizePlan, ElementPosition, FindNonFinite, FindNonFinitePlan, HadamardPlan, KeyMeanPlan,
    NonFiniteFlags, QuantizePlan, StoreStep, WriteMemory,
};

pub use select::{
    AttentionStats, AttentionStatsPlan, BoundMerge, ChunkSimilarityPlan, EvictedPlan, GatherPlan, MergePlan,
    ReorderChunksPlan, StatsBuffer, TokenScoresPlan, TopKPlan, Words,
};

/// Every kernel variant that plans of this module use, for tests that translate them all. Variants that differ only in
/// numbers appear once.
#[doc(hidden)]
pub fn variants() -> Vec<Variant> {
    [pack::variants(), attend::variants(), measure::variants(), select::variants()].concat()
}
