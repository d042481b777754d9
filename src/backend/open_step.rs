//! The step that an engine encodes itself.

use crate::plan::{AttendPlan, WriteTable};

/// A step that is open in layers that share their page tables: what they store, and what their queries attend to. It is
/// the same for all of them, but for the stores.
///
/// A cache hands it out ([`ModelCache::encode`](crate::cache::ModelCache::encode)); `wgpu::ModelStep` and
/// `cuda::ModelStep` take it. `S` and `F` are the stores and the flags of the backend.
#[derive(Debug)]
pub struct OpenStep<'a, S, F> {
    /// The numbers of the layers in their model.
    pub layers: &'a [usize],
    /// What the step stores.
    pub table: &'a WriteTable,
    /// What its queries attend to.
    pub plan: &'a AttendPlan,
    /// The stores of every layer, as table and plan name them.
    pub stores: Vec<Vec<&'a S>>,
    /// The flags of all layers of the model, by their numbers.
    pub flags: &'a F,
}

/// The tensors of one layer's step, with room for the largest step: a step of fewer tokens uses the first rows. Layers
/// that run one after the other may share all of them. `T` is the tensor of the backend.
#[derive(Clone, Debug)]
pub struct LayerTensors<T> {
    /// Keys of the new tokens, after rotary embedding.
    pub keys: T,
    /// Values of the new tokens.
    pub values: T,
    /// Queries `[rows, query_heads, head_dim]`, after rotary embedding, not scaled.
    pub queries: T,
    /// Where the attention outputs go, `[rows, query_heads, head_dim]`.
    pub output: T,
}
