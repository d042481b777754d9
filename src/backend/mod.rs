//! Backends: the layer below [`KvCache`](crate::KvCache).
//!
//! All decisions (which page, which span, which query) are made above, in [`plan`](crate::plan) and the cache. A
//! backend stores and computes. It implements five families: a [`Device`] holds tensors, a [`Storage`] holds pages, the
//! kernels of [`Packing`] write pages, those of [`Attention`] attend to them, and those of [`TokenSelection`] measure
//! attention and carry out decisions about tokens. The CPU, wgpu and CUDA implement all five.
//!
//! [`Forward`] derives a backend from another that differs in a method or two, for example to count calls, to fail on
//! purpose or to record.

mod attention;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod checks;
mod device;
mod filled;
mod forward;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod model_step;
mod open_step;
mod packing;
mod selection;
mod storage;

pub use attention::{
    Arithmetic, AttendArithmetic, AttendOptions, Attention, AttentionStates, QueryBytes, QueryPrecision, RowCentres,
    StateParts,
};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) use checks::{TypedTensor, check_index, check_indices, check_output};
pub use device::Device;
pub use filled::{FilledSpan, FilledStores, NewSpan, SpanSource};
pub use forward::{Forward, Forwarding};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub use model_step::AttendTensors;
#[cfg(feature = "wgpu")]
pub(crate) use model_step::PartLayers;
#[cfg(feature = "cuda")]
pub(crate) use model_step::StepClasses;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) use model_step::{
    BoundClass, BoundPart, BoundParts, ByPart, StepLayers, StepTensors, WrittenPart, of_layer,
};
pub use open_step::{LayerTensors, OpenStep, StagedSpan, StepKind, StepKinds, StoredLayers};
pub use packing::{FlaggedToken, LARGEST_CENTRED_KEY, NewCentre, NonFinite, Packing, SpanRead, SpanWrite, WriteInput};
pub use selection::{
    KeptAndEvicted, MeasuredAttention, MergedTokens, NewQueries, QueriesAndKeys, RowStatistics, ScoredTokens,
    TensorRows, TokenSelection,
};
pub use storage::{SpanBytes, SpanPlace, Storage};

pub use crate::plan::{TokenWrite, WindowMove};

/// A device that stores packed keys and values and attends to them: all five families.
pub trait Backend: Packing + Attention + TokenSelection {}

impl<B: Packing + Attention + TokenSelection> Backend for B {}
