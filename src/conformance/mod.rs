//! Conformance: the registry of checks that tests and `kvpack check` share, and the decode steps that `kvpack bench`
//! times.
//!
//! A [`Check`] is plain data: heads, formats, ragged lengths, the kind of keys and values. [`Check::run`] runs it on a
//! [`Backend`](crate::Backend). There are several kinds ([`Kind`]). Attention is compared with an f64 attention over
//! **the stored data**, never over the original data, which would hide layout mistakes behind quantisation error.
//! Everything else is compared with the CPU reference, bit for bit where nothing is rounded.
//!
//! Every sequence has a planted *sink*: a token whose score is [`SINK_NATS`] above the level of all others, for every
//! other query head. Random data do not reveal what a sink breaks, and a sink hides what random data reveal, so each
//! case has both.
//!
//! Spans lie between *guard pages* of a known pattern, and their range slots between guard slots. Every check that
//! stores anything therefore detects a kernel that writes outside its pages.
//!
//! | folder or file | holds |
//! | --- | --- |
//! | `check`, `registry` | what a check is; all of them |
//! | `attend/` | cases of attention and of its states, the f64 reference |
//! | `pack` | cases of packing |
//! | `select/` | cases of statistics, of the choice of tokens, of eviction, of chunks |
//! | `data`, `guards`, `report` | what all share: data from a seed, guard pages, what was found |
//! | `support` | which formats a backend serves, and how |
//! | `decode`, `batch_format`, `workload` | decode steps of realistic size, for timing |

mod attend;
mod batch_format;
mod check;
mod data;
mod decode;
mod guards;
mod merge;
mod pack;
mod registry;
mod report;
mod select;
mod support;
mod workload;

pub use attend::{
    AttendCase, DataKind, Fill, InputLayout, Paging, Queries, RowOrder, SinkPlace, SpanCase, StoreCase, attend_cases,
    state_cases,
};
pub use batch_format::{BatchFormat, BatchPart};
pub use check::{Check, Kind};
pub use data::{DataRecipe, SINK_NATS, SequenceData, sequences};
pub use decode::{
    BatchLengths, DecodeData, DecodeShape, PageOrder, decode_formats, decode_formats_of, decode_mixes, decode_shapes,
};
pub use merge::{EmptyParts, MergeCase, merge_cases};
pub use pack::{PackCase, pack_cases};
pub use registry::checks;
pub use report::{Accuracy, Failure, Limits, Mismatch, OutputError, Report};
pub use select::{
    ChunksCase, EvictionCase, EvictionKeys, Scores, StatisticsCase, TokenScoresCase, TopKCase, chunks_cases,
    eviction_cases, statistics_cases, token_scores_cases, top_k_cases,
};
pub use support::{Support, rounds_queries, support};
pub use workload::Workload;
