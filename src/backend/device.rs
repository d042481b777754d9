//! Devices and their tensors.

use std::future::Future;

use crate::Result;
use crate::plan::{Elements, TokenIndices};

/// A device that holds tensors.
pub trait Device {
    /// A dense array of f32, f16 or bf16 elements on the device.
    type Tensor;
    /// Token numbers `[kv_heads, count]` on the device, for a [gather](crate::plan::Rows::Gather). Cheap to clone.
    type Indices: TokenIndices + Clone;

    /// The name of the device, for people.
    fn name(&self) -> String;

    /// Copies elements to the device.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory) or [`Limit`](crate::Error::Limit) when they do not fit.
    fn upload(&self, elements: Elements<'_>) -> impl Future<Output = Result<Self::Tensor>>;

    /// Copies a tensor to the host as f32. Waits for the work that writes it.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::Error::DeviceLost).
    fn download(&self, tensor: &Self::Tensor) -> impl Future<Output = Result<Vec<f32>>>;

    /// Copies token numbers, `[kv_heads, count]`, to the device.
    ///
    /// # Errors
    /// [`Plan`](crate::Error::Plan) when a number is not below `below`, [`Elements`](crate::Error::Elements) when the
    /// KV heads do not all have the same count, [`NoTokens`](crate::Error::NoTokens),
    /// [`OutOfMemory`](crate::Error::OutOfMemory).
    fn upload_indices(
        &self,
        tokens: &[u32],
        kv_heads: usize,
        below: u32,
    ) -> impl Future<Output = Result<Self::Indices>>;

    /// Copies token numbers to the host. Waits for the work that writes them.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::Error::DeviceLost).
    fn download_indices(&self, indices: &Self::Indices) -> impl Future<Output = Result<Vec<u32>>>;

    /// Number of elements of a tensor.
    fn elements(&self, tensor: &Self::Tensor) -> usize;
}
