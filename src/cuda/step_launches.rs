//! The launches of a step for tensors that are known only when a layer runs.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::attend::launch::Begins;
use super::device::tensor::Tensor;
use super::model_step::{LayerTensors, ModelLaunches, Part, WrittenStep};
use crate::backend::ByPart;
use crate::format::AttentionShape;
use crate::plan::RowLayout;
use crate::{Error, Result};

/// What a step launches, for engines that allocate the tensors of a layer when it runs, as frameworks in Python do.
/// [`WrittenStep::launches`] gives it.
///
/// Its calls do what those of [`WrittenStep`] do, from and to the tensors that they are given, on the stream that they
/// are given. Stores and tables belong to the stream of the backend: the caller orders that stream before the launches,
/// and after them before its next call of the cache. Nothing here borrows the cache, so nothing here marks layers as
/// stored: the caller does ([`OpenStep::stored`](crate::backend::OpenStep::stored), or [`WrittenStep::replayed`]).
///
/// It keeps alive the memory of the launches besides these tensors. Launches of a step that is over read and write what
/// the tables then hold, within the memory of the cache, and ask for tensors of as many rows.
#[derive(Clone, Debug)]
pub struct StepLaunches {
    shape: AttentionShape,
    parts: ByPart<PartLaunches>,
}

#[derive(Clone, Debug)]
struct PartLaunches {
    of: Arc<ModelLaunches>,
    /// When attention begins that follows the storing kernels of its layer.
    begins: Begins,
    /// Whether attention itself stores the tokens of the step.
    stores: bool,
}

impl WrittenStep<'_> {
    /// The launches of the step for tensors that are known only when a layer runs. Keys, values, queries and outputs
    /// are contiguous: `[rows, heads, head_dim]`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the step packs a part of a prompt as a span
    /// ([`WrittenStep::is_for_graphs`]), has queries that see no token, or was bound with a layout of queries or
    /// outputs.
    pub fn launches(&self) -> Result<StepLaunches> {
        let Some(shape) = self.parts.iter().next().map(|part| *part.class().plan().shape()) else {
            return Err(Error::Plan { what: "step of a model", reason: "it has no layers".into() });
        };
        let dense = self.parts.iter().all(|part| part.class().plan().has_dense_rows());
        let unseen = self.parts.iter().any(|part| part.class().launches().write_unseen_rows());
        if !dense || unseen || !self.is_for_graphs() {
            let what =
                "launches for tensors of a layer's own: the step packs a part of a prompt as a span, has queries \
                        that see no token, or layouts of its own"
                    .into();
            return Err(Error::Unsupported { what, hint: "launch it with the tensors that it was bound to".into() });
        }
        let of = |part: &Part<'_>| {
            let class = part.class();
            let begins = if class.beside() { Begins::BesideStoring } else { Begins::After };
            PartLaunches { of: class.launches().clone(), begins, stores: class.stores() }
        };
        Ok(StepLaunches { shape, parts: self.parts.map(of) })
    }
}

impl StepLaunches {
    /// Stores the keys and values of a layer, by its place among the layers of the step.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer; [`Error::Elements`] for tensors of fewer rows than the step; errors
    /// of the driver.
    pub fn store(&self, stream: &Arc<CudaStream>, layer: usize, keys: &Tensor, values: &Tensor) -> Result<()> {
        let (part, place) = self.parts.of_layer(layer)?;
        self.check_rows(part, keys, values)?;
        part.of.store(place)?.launch_on(stream, keys, values)
    }

    fn check_rows(&self, part: &PartLaunches, keys: &Tensor, values: &Tensor) -> Result<()> {
        let rows = RowLayout::token_major(part.of.rows(), &self.shape);
        rows.check("keys", keys.elements(), &self.shape)?;
        rows.check("values", values.elements(), &self.shape)
    }

    /// Attends to a layer, whose tokens of the step are stored.
    ///
    /// # Errors
    /// As [`StepLaunches::store`].
    pub fn attend(&self, stream: &Arc<CudaStream>, layer: usize, queries: &Tensor, output: &Tensor) -> Result<()> {
        self.attend_as(stream, layer, [queries, output], Begins::After)
    }

    /// Stores and attends in a row, which overlaps where the device can: see [`WrittenStep::launch`]. Where a step
    /// decodes one token of every sequence, one kernel may do both, to the same bits of the cache.
    ///
    /// # Errors
    /// As [`StepLaunches::store`].
    pub fn store_and_attend(&self, stream: &Arc<CudaStream>, layer: usize, tensors: &LayerTensors) -> Result<()> {
        let (part, place) = self.parts.of_layer(layer)?;
        if part.stores {
            let LayerTensors { keys, values, queries, output } = tensors;
            self.check_rows(part, keys, values)?;
            self.check_attended(part, [queries, output])?;
            return part.of.store_and_attend(place, stream, Some([[keys, values], [queries, output]]));
        }
        let begins = part.begins;
        self.store(stream, layer, &tensors.keys, &tensors.values)?;
        self.attend_as(stream, layer, [&tensors.queries, &tensors.output], begins)
    }

    fn attend_as(
        &self,
        stream: &Arc<CudaStream>,
        layer: usize,
        [queries, output]: [&Tensor; 2],
        begins: Begins,
    ) -> Result<()> {
        let (part, place) = self.parts.of_layer(layer)?;
        self.check_attended(part, [queries, output])?;
        part.of.attention(place)?.launch_on(stream, queries, output, begins)
    }

    fn check_attended(&self, part: &PartLaunches, [queries, output]: [&Tensor; 2]) -> Result<()> {
        let rows = part.of.rows();
        let expected = rows * self.shape.query_heads() * self.shape.head_dim();
        for (what, tensor) in [("queries", queries), ("output", output)] {
            if tensor.elements() < expected {
                let heads = self.shape.query_heads();
                let shape = format!("{rows} queries × {heads} query heads");
                return Err(Error::Elements { what, given: tensor.elements(), expected, shape });
            }
        }
        Ok(())
    }
}
