//! Storage and kernels through wgpu.
//!
//! An engine hands over its own device; [`Requirements`] names the features and limits to create it with. Without one,
//! [`Wgpu::open`] opens the best adapter:
//!
//! ```no_run
//! use kvpack::cache::{ModelCache, ModelRecipe};
//! use kvpack::wgpu::Wgpu;
//! # async fn example() -> kvpack::Result<()> {
//! // SAFETY: see wgpu::ExperimentalFeatures. It allows cooperative matrices, with which prompts are faster.
//! let experimental = unsafe { wgpu::ExperimentalFeatures::enabled() };
//! let backend = Wgpu::open(None, experimental).await?;
//! let shape = kvpack::AttentionShape::new(32, 8, 128)?;
//! let recipe = "saw-int4+sink=128".parse::<ModelRecipe>()?;
//! let layers: Vec<_> = (0..32).map(|layer| (shape, recipe.layer(layer, &shape))).collect();
//! let cache = ModelCache::new(&backend, &layers, 8)?;
//! # Ok(())
//! # }
//! ```
//!
//! - **Devices**: [`adapters`], [`choose_adapter`], [`open_device`], [`Requirements`]; what a device can do:
//!   [`Capabilities`], [`Path`], [`SubgroupSizes`], [`KernelLimits`], [`offers_matrices`], [`Timestamps`].
//! - **The backend**: [`Wgpu`] and what it computes on: [`Tensor`], [`Store`], [`Indices`], [`NonFiniteFlags`].
//! - **Steps of an engine**, encoded into its own pass: [`ModelStep`], [`LayerTensors`], [`WrittenStep`]; the pieces of
//!   one layer: [`StoreStep`], [`BoundStoreStep`], [`WriteMemory`], [`AttendStep`], [`AttendTensors`], [`Scratch`],
//!   [`ScratchBytes`].
//! - **Kernels one by one.** Every kernel has a plan, which is pure and checks everything that can be checked without a
//!   device. `bind` joins the plan with buffers. `encode` records the dispatches into an open pass and does nothing else.
//!   They pack ([`QuantizePlan`], [`DequantizePlan`], [`FindNonFinitePlan`], [`HadamardPlan`], [`KeyMeanPlan`]), merge
//!   ([`MergePairPlan`], [`MergePartsPlan`], [`UncentreLsePlan`]) and select ([`AttentionStatsPlan`],
//!   [`TokenScoresPlan`], [`TopKPlan`], [`GatherPlan`], [`EvictedPlan`], [`MergePlan`], [`ChunkSimilarityPlan`],
//!   [`ReorderChunksPlan`]).
//! - **Compiled kernels**: [`Kernels`], [`Checks`], [`Launch`], [`Launches`], [`Variant`], and their text in [`shader`].
//! - **Time on the device**: [`measure`].

mod attend;
mod backend;
mod cache;
mod device;
pub mod measure;
mod model_step;
mod pack;
mod planned;
mod select;
mod sources;

pub use attend::{
    AttendStep, AttendTensors, MergePairPlan, MergePartsPlan, STATE_BUFFERS, Scratch, ScratchBytes, UncentreLsePlan,
};
pub use backend::{Recorded, Wgpu};
pub use device::shader;
pub use device::{
    Capabilities, Checks, ElementBinding, Indices, KernelLimits, Kernels, Launch, Launches, Path, Requirements,
    SpanReads, Store, StoreBuffer, SubgroupSizes, Tensor, Timestamps, Variant, adapters, choose_adapter,
    max_shard_pages, offers_matrices, open_device,
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
