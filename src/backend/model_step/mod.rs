//! What the steps of a model are on every backend that binds them: which tensors they have, which layers are in which
//! part, what is bound for a part and how long it is kept. Backends bind, write and launch, and keep what that takes.

mod bound_classes;
mod bound_parts;
#[cfg(feature = "cuda")]
mod step_classes;
mod step_layers;
mod tensors;

pub(crate) use bound_classes::BoundClasses;
pub(crate) use bound_parts::{BoundClass, BoundPart, BoundParts, WrittenPart};
#[cfg(feature = "cuda")]
pub(crate) use step_classes::StepClasses;
pub(crate) use step_layers::{ByPart, PartLayers, StepLayers, of_layer};
pub use tensors::AttendTensors;
pub(crate) use tensors::StepTensors;
