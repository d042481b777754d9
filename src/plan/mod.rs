//! Plans: what a decode step computes, decided on the CPU from lengths alone, before any kernel runs.
//!
//! A plan is pure data. It cuts the spans of every sequence into [`WorkItem`]s of about equal size, gives each a row
//! of attention states to write, and tells the merge which rows belong to which sequence. Every backend runs the same
//! plan.

mod decode;
mod pages;
mod rows;
mod tokens;

pub use decode::{DecodePlan, Dispatch, PlannedSpan, SegmentPlan, SpanView, Split, StoreView, WorkItem};
pub use pages::{Page, PageAllocator};
pub use rows::{ElementType, Elements, RowLayout, TokenRange};
pub use tokens::{IndexShape, Rows, TokenIndices};
