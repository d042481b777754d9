//! The step that an engine encodes itself.

use crate::plan::{AttendPlan, StepTable};

/// A step that is open in layers that share their books: what they store, and what their queries attend to. It is the same
/// for all of them, but for the stores.
///
/// A cache hands it out ([`ModelCache::encode`](crate::cache::ModelCache::encode)); `wgpu::ModelStep` and `cuda::ModelStep`
/// take it. `S` and `F` are the stores and the flags of the backend.
#[derive(Debug)]
pub struct OpenStep<'a, S, F> {
    /// The numbers of the layers in their model.
    pub layers: &'a [usize],
    /// What the step stores.
    pub table: &'a StepTable,
    /// What its queries attend to.
    pub plan: &'a AttendPlan,
    /// The stores of every layer, as table and plan name them.
    pub stores: Vec<Vec<&'a S>>,
    /// The flags of all layers of the model, by their numbers.
    pub flags: &'a F,
}
