//! The kernels in CUDA C++, for NVIDIA GPUs of compute capability 8.0 and up.
//!
//! The library does not link CUDA. The driver and NVRTC are loaded at run time, and [`driver_present`] reports whether
//! there is a driver. The kernel sources are part of the library. They are compiled on first use, and the binaries are
//! kept in a directory (see [`KernelCache`]).
//!
//! Building does not need CUDA either. Where a toolkit is installed, its version selects the driver bindings, and it
//! must be 11.8 or newer. The driver must support CUDA 11.8, or 12.8 to measure durations with bindings of CUDA 13.
//!
//! | kernel | file | does |
//! | --- | --- | --- |
//! | `ranges_span`, `ranges_tile`, `quantize` | of the same names | pack rows of dense tensors into pages |
//! | `hadamard` | of the same name | rotates dense rows, and rows that were read back |
//! | `code_rows` | of the same name | turns rotated rows into the fields of sketches and of levels with norms of their own, and signs back |
//! | `key_mean`, `key_mean_of_step`, `centre_keys`, `uncentre_keys` | `key_mean.cu`, and of the same names | the centre of a sequence's keys, of rows of a call or of a step; rows minus their centre, and with it again |
//! | `append`, `copy_page`, `pack_windows` | of the same names | what a step stores, by a table on the device: single tokens, copies of shared pages, full pages of f16 packed |
//! | `step_tables` | of the same name | brings the tables of a step to its parts, and finds where its pages lie in every layer's stores |
//! | `dequantize`, `find_non_finite` | of the same names | dense rows of a span; the search for what cannot be stored |
//! | `attend` | `attend.cu`, `prepare_query.cu`, `merge_states.cu` | one launch per segment format: prepares the query, attends, and the last block of a sequence to arrive merges |
//! | `attend_run` | `attend_run.cu`, `merge_run.cu` | the same for up to 256 rows of queries and query heads of a run; a launch of its own merges |
//! | `attend_run_pipelined` | `attend_run_pipelined.cu`, `merge_run.cu` | `attend_run` for many rows on compute capability 9.0, over f16 pages or unpacked tiles: a warpgroup copies, two or three others multiply |
//! | `attend_drafts` | `attend_drafts.cu`, `merge_run.cu` | `attend_run` for up to 64 rows over packed pages on compute capability 9.0: codes are unpacked once, in the registers of the warps that multiply them |
//! | `unpack_tiles` | of the same name | packed tiles as halves, where many rows read them several times |
//! | `uncentre_lse`, `merge_pair` | of the same names | log-sum-exps over centred keys become those over the keys; states over two sets of tokens are joined |
//! | `merge_parts`, `reduce_parts` | of the same names | states over several parts of the tokens are joined into an engine's tensor; elements of several ranks are reduced |
//! | `exchange_states`, `exchange_elements` | of the same names | what ranks exchange through each other's memory: attention states, merged as they arrive, and elements |
//! | `attention_row_stats`, `attention_column_stats`, `sum_partials` | `select/`, of the same names | statistics of attention: row maxima and log-sum-exps, column sums, counts |
//! | `token_scores`, `top_k`, `evicted`, `gather`, `nearest_kept`, `merge_members`, `merge_tokens` | `select/`, of the same names | scores of tokens and the best of them, the others, kept tokens copied, evicted ones merged into them |
//! | `chunk_similarity`, `reorder_chunks` | `select/chunk_similarity.cu`, `select/gather.cu` | chunks compared with a query, and put in another order |
//! | `read_bandwidth`, `compute_guard` | of the same names | what measurements are compared with |
//!
//! # What is served
//!
//! Every format, head dimension and group size of the library is supported, calibrated or not, and all are multiplied
//! by MMAs: f16 directly, codes with a range per channel or per token, codebook levels and sketch signs as bytes, and
//! codes with ranges of groups as halves. Keys with levels and a sketch are scored twice, with two queries. The query
//! always keeps 16 bits: [`QueryPrecision::Int8`](crate::backend::QueryPrecision::Int8) is a permission that this
//! backend does not use.
//!
//! A calibrated segment takes two launches of `attend`: the first finds the extremes of its scores, the second maps and
//! weighs them.
//!
//! # Streams, allocation, graphs
//!
//! A [`Cuda`] works on the stream it was created with, and so does everything that it allocates. Memory is freed in the
//! order of that stream, and backends on other streams refuse it. [`Tensor::from_address`] wraps an engine's memory.
//! [`AttendStep`] is decided from lengths alone. [`AttendStep::bind`] allocates and copies tables.
//! [`BoundAttendStep::launch`] only launches kernels and clears the extremes of calibrated scores, so that a CUDA graph
//! can capture it.
//!
//! # Storage
//!
//! Tiles are in [`TileOrder::MmaFragment`](crate::format::TileOrder::MmaFragment). For each KV head in turn, a page
//! holds the tile of keys, the tile of values, and the tile ranges of keys and of values. Tiles of head dimension 80
//! have 96 channels, because fragments take 32 at a time. The last 16 are zeros.

mod attend;
mod backend;
mod cache;
mod device;
mod measure;
mod model_step;
#[cfg(feature = "nccl")]
pub mod nccl;
mod pack;
pub mod peer;
mod rank_end;
mod select;
mod sources;
mod step_launches;
mod table_upload;

pub use attend::attend_step::{AttendStep, AttendTensors};
pub use attend::launch::BoundAttendStep;
pub use backend::Cuda;
pub use cudarc;
pub use device::indices::Indices;
pub use device::kernels::Kernels;
pub use device::libraries::driver_present;
pub use device::program::KernelCache;
pub use device::span_bytes::SpanReads;
pub use device::store::Store;
pub use device::tensor::Tensor;
pub use measure::{AttendTiming, compute_guard, read_bandwidth, time_launches, time_steps};
pub use model_step::{LaunchMemory, LayerTensors, ModelStep, WrittenStep};
pub use pack::non_finite_flags::NonFiniteFlags;
pub use pack::store_step::{BoundStoreStep, StoreStep};
pub use pack::write_memory::WriteMemory;
pub use rank_end::DEADLINE;
pub use select::{
    AttentionStats, AttentionStatsPlan, BoundMerge, ChunkSimilarityPlan, EvictedPlan, GatherPlan, Launches, MergePlan,
    ReorderChunksPlan, TokenScoresPlan, TopKPlan, Words,
};
pub use step_launches::StepLaunches;
