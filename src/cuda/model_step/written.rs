//! A step whose tables are queued.

use std::sync::Arc;

use super::part::{ModelLaunches, PartClass};
use crate::backend::{ByPart, StagedSpan, WrittenPart};
use crate::cuda::backend::Cuda;
use crate::cuda::device::driver::is_capturing;
use crate::cuda::device::store::Store;
use crate::{Error, Result};

/// A step whose tables are queued, ready to be launched or captured. Layers are counted over all parts of the step, in
/// the order of their indices in the model: where the step has all layers of a model, a layer's place is its index.
#[derive(Clone, Debug)]
pub struct WrittenStep<'a> {
    pub(super) backend: &'a Cuda,
    pub(in crate::cuda) parts: ByPart<Part<'a>>,
    pub(super) class: u64,
    pub(super) bound_anew: bool,
}

/// Layers of the step that share their page tables.
pub(in crate::cuda) type Part<'a> = WrittenPart<'a, PartClass, PackedParts<'a>>;

/// The parts of prompts that a part of a step packs.
#[derive(Clone, Debug)]
pub(in crate::cuda) struct PackedParts<'a> {
    pub(super) staged: &'a [StagedSpan],
    /// The stores of every layer; none where there is nothing to pack.
    pub(super) stores: Vec<Vec<&'a Store>>,
}

/// Keeps alive the memory that the launches of a step read and write. Hold it for as long as a graph that captured them
/// is replayed.
#[derive(Clone, Debug)]
pub struct LaunchMemory(#[expect(dead_code, reason = "held only to keep the launches alive")] Vec<Arc<ModelLaunches>>);

impl WrittenStep<'_> {
    /// Whether this step allocated memory, so that a graph must be captured again. Its class is a new one then.
    pub const fn bound_anew(&self) -> bool {
        self.bound_anew
    }

    /// The number of the step's class. Steps of one class have as many rows and the same launches, and therefore the same
    /// graph. A step that stores nothing is in no class with one that stores. A number is never used twice.
    pub const fn class(&self) -> u64 {
        self.class
    }

    /// Launches the writes of a layer and, right behind them, its attention, by its place among the layers of the step.
    /// Does not wait. It allocates as [`WrittenStep::launch_store`] does. Keys, values and queries must be complete
    /// before: attention may overlap with the storing kernels, which saves up to a few microseconds compared with
    /// [`WrittenStep::launch_store`] and [`WrittenStep::launch_attend`].
    ///
    /// # Errors
    /// As [`WrittenStep::launch_store`].
    pub fn launch(&self, layer: usize) -> Result<()> {
        self.launch_store(layer)?;
        let (part, place) = self.parts.of_layer(layer)?;
        let attention = part.class().launches().attention(place)?;
        let beside = part.class().beside() && self.is_for_graphs() && !attention.writes_unseen_rows();
        if beside { attention.launch_beside_storing() } else { attention.launch() }
    }

    /// Launches the writes of a layer, by its place among the layers of the step. Does not wait, and does not allocate
    /// unless the step packs a part of a prompt as a span: such a step is [not for
    /// graphs](WrittenStep::is_for_graphs).
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer, or a graph is captured that cannot hold the step; errors of the
    /// driver from a launch; [`Error::OutOfMemory`].
    pub fn launch_store(&self, layer: usize) -> Result<()> {
        if !self.is_for_graphs() && is_capturing(self.backend.stream())? {
            let reason = "it packs a part of a prompt as a span; launch such steps without a graph".into();
            return Err(Error::Plan { what: "graph of a step", reason });
        }
        let (part, place) = self.parts.of_layer(layer)?;
        part.class().launches().store(place)?.launch()?;
        if let Some(stores) = part.with.stores.get(place) {
            part.with.staged.iter().try_for_each(|span| self.backend.pack_staged(stores, span))?;
        }
        part.mark(place);
        Ok(())
    }

    /// Whether a graph may capture the launches, and be replayed for steps of the class. It may not where the step packs
    /// a part of a prompt as a span ([`TokenRun::prompt`](crate::cache::TokenRun::prompt) in a recipe that keeps appended
    /// tokens in f16): the pages of spans are no table.
    pub fn is_for_graphs(&self) -> bool {
        self.parts.iter().all(|part| part.with.staged.is_empty())
    }

    /// Notes that a graph which captured these launches was replayed for this step: all its layers have stored their
    /// tokens, and the step can be committed. Notes nothing for a step that is [not for
    /// graphs](WrittenStep::is_for_graphs).
    pub fn replayed(&self) {
        if !self.is_for_graphs() {
            return;
        }
        self.parts.iter().for_each(WrittenPart::mark_all);
    }

    /// Launches the attention of a layer, by its place among the layers of the step. It reads what the step stores, so
    /// [`WrittenStep::launch_store`] of the same step and layer must precede it on the stream. Does not allocate or
    /// wait.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer; errors of the driver from a launch.
    pub fn launch_attend(&self, layer: usize) -> Result<()> {
        let (part, place) = self.parts.of_layer(layer)?;
        part.class().launches().attention(place)?.launch()
    }

    /// Keeps the memory of the launches alive. Hold it as long as a graph that captured them may be replayed.
    pub fn memory(&self) -> LaunchMemory {
        LaunchMemory(self.parts.iter().map(|part| part.class().launches().clone()).collect())
    }
}
