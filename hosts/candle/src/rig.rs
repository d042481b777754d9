//! What commands need of a device.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use kvpack::backend::Backend;
use kvpack_cli::{Model, Product};
use kvpack_weights::QuantizedLinear;

use crate::attention::Steps;

/// Tokens on their way to the host. The call waits for them.
pub type Arriving = Box<dyn FnOnce() -> Result<Vec<u32>>>;

/// A device of candle with kvpack on it.
pub trait Rig {
    /// kvpack's backend.
    type Backend: Backend + Clone;
    /// Its steps.
    type Steps: Steps<Self::Backend>;

    /// kvpack's backend.
    fn backend(&self) -> &Self::Backend;

    /// candle's device.
    fn device(&self) -> &Device;

    /// The type of weights and activations that is fast here.
    fn dtype(&self) -> DType;

    /// A model on the device, in a type, with the operations that the device has.
    ///
    /// # Errors
    /// What the device reports.
    fn on_device(&self, model: Model, dtype: DType) -> Result<Model>;

    /// Products with a projection in codes, on the device.
    ///
    /// # Errors
    /// What the device reports.
    fn product(&self, linear: &QuantizedLinear) -> Result<Box<dyn Product>>;

    /// Steps of this many layers and up to this many rows, in the type of the model.
    ///
    /// # Errors
    /// What the device reports.
    fn steps(&self, model: &Model, layers: usize, rows: usize) -> Result<Self::Steps>;

    /// Begins to bring tokens to the host, behind what the device has been given so far. They do not wait for what it is
    /// given afterwards.
    ///
    /// # Errors
    /// What the device reports.
    fn bring(&self, tokens: &Tensor) -> Result<Arriving>;

    /// Softmax of the rows.
    ///
    /// # Errors
    /// What the device reports.
    fn softmax(&self, scores: &Tensor) -> Result<Tensor>;

    /// Bytes of the device that nothing holds; none where that does not matter.
    fn free_bytes(&self) -> Option<u64>;
}
