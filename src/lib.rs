//! kvpack packs the key-value cache of a transformer and computes attention on the packed form.
//!
//! # One idea
//!
//! **A cache is a list of segments. Attention over a cache is the merge of the attention states of its segments.**
//!
//! A *segment* is a set of tokens in one [`SegmentFormat`]: f16, or codes of 1 to 8 bits with their ranges. A kernel
//! that attends to a segment, or to a part of one, returns an *attention state*: the log-sum-exp of its scores and the
//! softmax-weighted sum of its values. States merge exactly and in any order. Text in f16 next to an image at 1 bit,
//! packed history with a recent f16 window, sequences of different lengths, and work split for a GPU are therefore all
//! the same thing: more segments, one merge. A method from a paper is a [`Recipe`]: a format, and which tokens go
//! where.
//!
//! # A first cache
//!
//! ```
//! use kvpack::cache::PromptSpan;
//! use kvpack::cpu::{Cpu, CpuTensor};
//! use kvpack::plan::{ElementType, RowLayout, TokenRange};
//! use kvpack::{AttentionShape, Bits, KvCache, Recipe};
//!
//! # futures::executor::block_on(async {
//! let shape = AttentionShape::new(8, 2, 64)?; // 8 query heads over 2 KV heads of 64 channels
//! let mut cache = KvCache::new(Cpu::new(), shape, 1, Recipe::calibquant(Bits::Two))?;
//!
//! // A prompt of [tokens, kv_heads, head_dim]: 40 text tokens in f16, then an image of 600 at 2 bits.
//! let keys = CpuTensor::F32((0..640 * 2 * 64).map(|i| (i as f32 * 0.3).sin()).collect());
//! let values = CpuTensor::F32((0..640 * 2 * 64).map(|i| (i as f32 * 0.7).cos()).collect());
//! let prompt = [PromptSpan::f16(TokenRange::new(0, 40)?), PromptSpan::packed(TokenRange::new(40, 640)?)];
//! cache.prefill(0, RowLayout::token_major(640, &shape), &keys, &values, &prompt).await?;
//!
//! // A decode step: the query of a token, [query_heads, head_dim], against everything stored.
//! let query = CpuTensor::F32(vec![0.1; 8 * 64]);
//! let output = cache.attend(&query, ElementType::F32).await?;
//! assert_eq!(output.to_f32().len(), 8 * 64);
//! assert!(cache.memory().packed()[0].bits_per_element() < 3.0);
//! # Ok::<(), kvpack::Error>(())
//! # }).unwrap();
//! ```
//!
//! With `kvpack::wgpu::Wgpu` instead of [`Cpu`](cpu::Cpu) and tensors on the device, the same calls run on a GPU. An
//! engine holds all layers in a [`ModelCache`](cache::ModelCache) and encodes its steps itself, with `wgpu::ModelStep`
//! or `cuda::ModelStep`: see the examples `serving`, `policies`, `engine_integration` and `engine_graph`. The page
//! [In an inference engine](https://github.com/kvpack/kvpack/blob/main/docs/engines.md) explains the calls.
//!
//! # Layers
//!
//! Each layer builds on those below it, and all are public:
//!
//! 1. [`KvCache`] keeps the page tables of a layer: spans, pages, lengths. Its calls are `prefill`, `append`, `attend`
//!    and `memory`. [`ModelCache`](cache::ModelCache) does so for all layers, and opens steps that an engine encodes.
//! 2. [`plan`] decides on the host what an attention call computes, from lengths alone: which queries see which spans.
//!    `wgpu::AttendStep` and `cuda::AttendStep` cut a plan into work, choose the kernels and size the scratch. A
//!    [`WriteTable`](plan::WriteTable) lists what a step stores. A bound step is encoded into the engine's compute pass
//!    or stream. **Encoding a step does not submit or wait. It allocates nothing, except on CUDA where a part of a
//!    prompt becomes a span.**
//! 3. A [`Backend`] has the stores and kernels of one device. Its methods are called one by one: `quantize`, `append`,
//!    `dequantize`, `key_mean`, `pack_windows`, `attend`, `uncentre_lse`, `merge`, and those that select tokens.
//!    `attend` runs `prepare_query`, `attend` or `scores` and `weighted_values`, and `merge_states`.
//! 4. [`format`](mod@format) has formats as plain data, and the meaning of their codes.
//!
//! # Modules
//!
//! | module | contents |
//! | --- | --- |
//! | [`format`](mod@format) | formats, ranges, codebooks, rotations, rounding, calibration, the layout of tiles, storage formats of other projects |
//! | [`plan`] | pages, layouts of dense rows, attention plans |
//! | [`policy`] | decisions about tokens: spans, scores, budgets, eviction, merging plans, the precision of chunks |
//! | [`backend`] | the interface of a backend |
//! | [`cpu`] | every kernel on the CPU: the reference of the tests, and the backend on machines without a GPU |
//! | `wgpu` | every kernel in WGSL, on an engine's own device |
//! | `cuda` | the kernels in CUDA C++, on an engine's own stream |
//! | [`cache`] | [`KvCache`], [`ModelCache`](cache::ModelCache), recipes |
//! | [`ranks`] | one sequence over several devices: which rank holds what, exchange and merge of attention states |
//! | [`conformance`] | the registry of checks that tests and `kvpack check` share, and the decode steps of `kvpack bench` |
//!
//! # Storage layout
//!
//! Codes lie in tiles of [`TILE_TOKENS`] tokens of one KV head. The tiles of all KV heads make up a page of a paged
//! cache. [`format::tile`] is the contract, to the bit, and [`format::LAYOUT_VERSION`] changes when the contract does.
//! The order of codes inside a tile is a [`format::TileOrder`]: CUDA uses another order than the CPU and WGSL. Stored
//! data decodes on every backend to the same bits as on the CPU, and attention is checked against an f64 attention over
//! the stored data.
//!
//! # Features
//!
//! | feature | default | adds |
//! | --- | --- | --- |
//! | `wgpu` | yes | the module `wgpu`. kvpack enables none of wgpu's own backends: the program chooses `vulkan`, `metal`, `dx12` or `webgpu` among the features of its wgpu 30 |
//! | `cuda` | no | the module `cuda`. Building does not need CUDA; the driver and NVRTC are loaded at run time |
//! | `nccl` | no | ranks over NCCL, which is loaded at run time, and `cuda`. Ranks over peer memory need `cuda` alone |
//!
//! Without them, the CPU backend is the only one.
//!
//! # Errors
//!
//! Every call returns the same [`Error`] type. Shapes, lengths and limits are reported before anything changes. A call
//! that fails leaves the tokens of a cache unchanged. A message names what was given, what is allowed and what to do.
//!
//! Keys and values must be finite and no larger than [their format
//! allows](format::TensorFormat::largest_element): ±65504 in f16, ±32752 in codes, and less in rotated rows.
//! [`KvCache::prefill`] and [`ModelCache::store_prompt`](cache::ModelCache::store_prompt) refuse other elements.
//! Appended tokens are not checked. A wrong element is stored as zero, and [`KvCache::non_finite`] reports its token.
//!
//! Queries are not checked, since that would make every step wait, and NaN propagates. The outputs of a query head that
//! holds a NaN or an infinity are NaN on every backend; the outputs of other heads are unaffected.

// docs.rs shows the feature that an item needs; only nightly compilers can.
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod backend;
pub mod cache;
pub mod conformance;
mod counts;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod format;
pub mod plan;
pub mod policy;
pub mod ranks;
#[cfg(feature = "wgpu")]
pub mod wgpu;

pub use backend::Backend;
pub use cache::{KvCache, Recipe};
pub use format::{AttentionShape, Bits, Calibration, SegmentFormat, TILE_TOKENS};
pub use kvpack_device::{Error, Result};

/// Compiles the examples of the README.
#[cfg(all(doctest, feature = "wgpu"))]
#[doc = include_str!("../README.md")]
struct Readme;

/// Compiles the example of the page about ranks.
#[cfg(doctest)]
#[doc = include_str!("../docs/ranks.md")]
struct RanksPage;
