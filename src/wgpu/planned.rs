//! The one door from plans to launches.

use super::device::{Kernels, Launch, Variant};
use crate::Result;

/// Binds the buffers of a plan to one of its variants, by their names in the shader. Only plans call this: they have
/// checked what they bind, and chose the grid.
///
/// # Errors
/// Those of [`Launch::trusted`].
pub(super) fn planned(
    kernels: &Kernels,
    variant: &Variant,
    buffers: &[(&str, wgpu::BufferBinding<'_>)],
    workgroups: [u32; 3],
) -> Result<Launch> {
    // SAFETY: Kernels index within the buffers that plans bind, have no endless loop and never divide by zero, whatever
    // a buffer within a caller's reach contains. docs/in-bounds.md lists the facts, kernel by kernel. This function
    // stays within the backend, and only plans call it.
    unsafe { Launch::trusted(kernels, variant, buffers, workgroups) }
}
