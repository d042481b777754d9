//! Operations that a device has as one kernel each.

use candle_core::{Result, Tensor};
use kvpack::AttentionShape;

use super::config::{Activation, RopePairs};

/// Operations that a device has as one kernel each.
pub trait Fused {
    /// x / √(mean x² + ε) · weight of every row; the weight has the type of `x`.
    ///
    /// # Errors
    /// Those of the device.
    fn norm(&self, x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor>;

    /// The sum of the stream and what is added to it, and the norm of the sum.
    ///
    /// # Errors
    /// Those of the device.
    fn add_and_norm(&self, stream: &Tensor, added: &Tensor, weight: &Tensor, epsilon: f64) -> Result<(Tensor, Tensor)>;

    /// Rotary position encoding of `[tokens, heads, head_dim]`; cosines and sines are `[tokens, 1, head_dim / 2]`.
    ///
    /// # Errors
    /// Those of the device.
    fn rotate(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, pairs: RopePairs) -> Result<Tensor>;

    /// Queries, keys and values `[tokens, heads, head_dim]` from rows that hold them behind one another. The former two
    /// are rotated.
    ///
    /// # Errors
    /// Those of the device.
    fn heads(
        &self,
        joined: &Tensor,
        shape: &AttentionShape,
        angles: (&Tensor, &Tensor),
        pairs: RopePairs,
    ) -> Result<[Tensor; 3]>;

    /// activation(gate) · up, from rows that hold both behind one another.
    ///
    /// # Errors
    /// Those of the device.
    fn gate(&self, joined: &Tensor, activation: Activation) -> Result<Tensor>;
}
