//! The kernels in CUDA C++, for NVIDIA GPUs of compute capability 8.0 and up.
//!
//! The library links nothing of CUDA: the driver and NVRTC are loaded at run time, [`driver_present`] says whether there
//! is a driver, and the sources, which are part of the library, are compiled on first use and kept in a directory (see
//! [`KernelCache`]).
//!
//! Building needs nothing of CUDA either. Where a toolkit is installed its version chooses the bindings of the driver, and
//! must be 11.8 or newer.
//!
//! | kernel | file | does |
//! | --- | --- | --- |
//! | `ranges_span`, `ranges_tile`, `quantize` | of the same names | pack rows of dense tensors into pages |
//! | `hadamard` | of the same name | rotates dense rows, and rows that were read back |
//! | `append`, `dequantize`, `find_non_finite` | of the same names | single tokens; dense rows of a span; the search for what cannot be stored |
//! | `attend` | `attend.cu`, `prepare_query.cu`, `merge_states.cu` | one launch per segment format: prepares the query, attends, and the last block of a sequence to arrive merges |
//! | `read_bandwidth`, `compute_guard` | of the same names | what measurements are held against |
//!
//! # What is served
//!
//! Keys and values in f16, or in codes of 1, 2, 4 or 8 bits, each independently: affine with any grouping of ranges, rotated
//! or not, and codebooks of up to 4 bits; head dimensions 64, 96, 128 and 256; any group size. MMAs multiply all of them:
//! f16 as it is, codes with a range per channel or per token and levels of codebooks as bytes, codes with ranges of groups as
//! halves. Everything else, which is 3-bit codes, sketches, head dimension 80 and calibration, is refused with
//! [`Error::Unsupported`](crate::Error::Unsupported) when a store is made or a step is planned. The query always keeps 16 bits:
//! [`QueryPrecision::Int8`](crate::backend::QueryPrecision::Int8) is a permission that this backend does not use.
//!
//! # Streams, allocation, graphs
//!
//! A [`Cuda`] works on the stream it was made with. [`StepPlan`] decides from lengths alone, [`StepPlan::bind`] allocates
//! and copies tables, and [`BoundStep::launch`] only launches kernels, so that a CUDA graph can capture it.
//!
//! # Storage
//!
//! Tiles are in [`TileOrder::MmaFragment`](crate::format::TileOrder::MmaFragment). A page holds, for one KV head after the other, the tile of keys,
//! the tile of values, and the ranges of keys and of values that lie beside tiles.

mod backend;
mod device;
mod kernels;
mod measure;
mod memory;
mod page_format;
mod program;
mod rows;
mod sources;
mod split;
mod step;
mod store;
mod tensor;
mod variant;

pub use backend::Cuda;
pub use cudarc;
pub use device::driver_present;
pub use kernels::Kernels;
pub use measure::{StepTiming, compute_guard, read_bandwidth, time_steps};
pub use page_format::HEAD_DIMS;
pub use program::KernelCache;
pub use step::{BoundStep, StepPlan};
pub use store::Store;
pub use tensor::Tensor;
