//! Conformance: the one registry of cases that tests, `kvpack check` and `kvpack bench` share.
//!
//! A [`Case`] is plain data: heads, formats, ragged lengths, what the keys and values look like. [`run_case`] stores it
//! through a [`Backend`](crate::Backend), compares what is stored with the CPU twin bit for bit, attends, and compares
//! the output with an f64 attention over **the stored data** (never over the original data, which would hide layout
//! mistakes behind quantisation error).
//!
//! Every sequence has a planted *sink*: a token whose score is [`SINK_NATS`] above the level of all others, for every
//! other query head. Random data do not show what a sink breaks, and a sink hides what random data show, so each case
//! has both.

mod accuracy;
mod batch_format;
mod case;
mod data;
mod decode;
mod format_cases;
mod many_heads;
mod query_cases;
mod reference;
mod registry;
mod report;
mod run;
mod stored;
mod workload;

pub use batch_format::{BatchFormat, BatchPart};
pub use case::{Case, DataKind, Fill, InputLayout, Paging, RowOrder, SegmentCase, SinkPlace, SpanCase};
pub use data::{DataRecipe, HostTensor, SINK_NATS, SequenceData, sequences};
pub use decode::{BatchLengths, DecodeData, DecodeShape, PageOrder, decode_formats, decode_mixes, decode_shapes};
pub use registry::cases;
pub use report::{Failure, Limits, Mismatch, OutputError, Report};
pub use run::run_case;
pub use workload::Workload;
