//! A step that an engine encodes itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{QueryPrecision, SpanRead, SpanWrite};
use crate::Result;
use crate::format::AttentionShape;
use crate::plan::{
    AttendPlan, LayerAttention, Page, RowLayout, Rows, StoreFormat, TokenRange, WriteLayout, WriteTable,
};

/// An open step of layers that share their page tables: what it stores, and what its queries attend to. Only the stores
/// differ between the layers.
///
/// A cache hands it out ([`ModelCache::open_steps`](crate::cache::ModelCache::open_steps)); `wgpu::ModelStep` and
/// `cuda::ModelStep` take it. `S` and `F` are the stores and the flags of the backend.
#[derive(Debug)]
pub struct OpenStep<'a, S, F> {
    /// The indices of the layers in their model.
    pub layers: &'a [usize],
    /// The tokens that the step stores.
    pub table: &'a WriteTable,
    /// Parts of prompts that the table stores in f16 and that are packed from there, once it is written.
    pub staged: &'a [StagedSpan],
    /// The tokens that its queries attend to.
    pub plan: &'a AttendPlan,
    /// Query precision that the recipe of the layers asks for.
    pub query: QueryPrecision,
    /// The stores of every layer, in the order of table and plan.
    pub stores: Vec<Vec<&'a S>>,
    /// The flags of all layers of the model, by layer index.
    pub flags: &'a F,
    /// Which layers of the model have stored their tokens. The step can be committed when all have.
    pub stored: &'a StoredLayers,
}

/// A part of a prompt that a step stores in f16 pages, to which its queries attend, and packs from there as one span.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedSpan {
    /// Tokens.
    pub tokens: usize,
    /// Its pages in the f16 store, the first one.
    pub staged: Vec<Page>,
    /// Slot of the centre of the sequence's keys, the same in all stores.
    pub centre: Option<usize>,
    /// The store that it is packed into, as a place among the stores.
    pub store: usize,
    /// Its pages there.
    pub pages: Vec<Page>,
    /// Slot of its ranges there, if the format has them.
    pub range_slot: usize,
}

impl StagedSpan {
    /// Its f16 form as dense rows.
    pub fn read(&self) -> SpanRead<'_> {
        SpanRead { pages: &self.staged, tokens: self.tokens, range_slot: 0, centre: self.centre }
    }

    /// Its packed form, of the rows that [`StagedSpan::read`] gives.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) when it has more tokens than a sequence may have.
    pub fn write<I>(&self, shape: &AttentionShape) -> Result<SpanWrite<'_, I>> {
        let tokens = Rows::Run(TokenRange::new(0, self.tokens)?);
        let (rows, pages) = (RowLayout::head_major(self.tokens, shape), &self.pages);
        Ok(SpanWrite { rows, tokens, pages, range_slot: self.range_slot, centre: self.centre })
    }
}

/// Which layers of a model have stored the tokens of the open step, by their numbers.
#[derive(Debug)]
pub struct StoredLayers(Vec<AtomicBool>);

impl StoredLayers {
    /// For a step of `layers` layers, none of which has stored its tokens yet.
    pub(crate) fn none_of(layers: usize) -> Self {
        Self((0..layers).map(|_| AtomicBool::new(false)).collect())
    }

    /// Notes that the commands which store a layer's tokens are encoded or launched. `ModelStep` does so by itself; an
    /// engine that encodes a step without it calls this. Does nothing if there is no such layer.
    pub fn mark(&self, layer: usize) {
        if let Some(stored) = self.0.get(layer) {
            stored.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a layer has stored its tokens.
    pub fn has(&self, layer: usize) -> bool {
        self.0.get(layer).is_some_and(|stored| stored.load(Ordering::Relaxed))
    }

    /// The first layer that has not.
    pub fn first_missing(&self) -> Option<usize> {
        (0..self.0.len()).find(|&layer| !self.has(layer))
    }
}

/// What all steps of a layer have in common, and those of every layer that shares its page table: for compiling
/// kernels before a model is served.
#[derive(Clone, Copy, Debug)]
pub struct StepKind<'a> {
    /// How their tables are laid out. It changes when a store grows.
    pub layout: &'a Arc<WriteLayout>,
    /// The stores of the recipe.
    pub stores: &'a [StoreFormat],
    /// Precision of the queries that the recipe asks for.
    pub query: QueryPrecision,
    /// How the layers attend.
    pub attention: &'a LayerAttention,
}

/// What has steps of one kind or several: a [`ModelCache`](crate::cache::ModelCache), of all its layers, or one kind.
/// `ModelStep` prepares its kernels for all of them.
pub trait StepKinds {
    /// The kinds of steps, each once.
    fn step_kinds(&self) -> Vec<StepKind<'_>>;
}

impl StepKinds for StepKind<'_> {
    fn step_kinds(&self) -> Vec<StepKind<'_>> {
        vec![*self]
    }
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
