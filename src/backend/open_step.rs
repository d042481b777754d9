//! A step that an engine encodes itself.

use crate::plan::{AttendPlan, WriteTable};

/// An open step of layers that share their page tables: what it stores, and what its queries attend to. Only the stores
/// differ between the layers.
///
/// A cache hands it out ([`ModelCache::encode`](crate::cache::ModelCache::encode)); `wgpu::ModelStep` and
/// `cuda::ModelStep` take it. `S` and `F` are the stores and the flags of the backend.
#[derive(Debug)]
pub struct OpenStep<'a, S, F> {
    /// The indices of the layers in their model.
    pub layers: &'a [usize],
    /// The tokens that the step stores.
    pub table: &'a WriteTable,
    /// The tokens that its queries attend to.
    pub plan: &'a AttendPlan,
    /// The stores of every layer, in the order of table and plan.
    pub stores: Vec<Vec<&'a S>>,
    /// The flags of all layers of the model, by layer index.
    pub flags: &'a F,
}

/// The tensors of one layer's step, large enough for the largest step. A step of fewer tokens uses the first rows.
/// Layers that run one after the other may share all tensors. `T` is the backend's tensor.
#[derive(Clone, Debug)]
pub struct LayerTensors<T> {
    /// Keys of the new tokens, after rotary embedding.
    pub keys: T,
    /// Values of the new tokens.
    pub values: T,
    /// Queries `[rows, query_heads, head_dim]`, after rotary embedding, not scaled.
    pub queries: T,
    /// The attention outputs, `[rows, query_heads, head_dim]`.
    pub output: T,
}
