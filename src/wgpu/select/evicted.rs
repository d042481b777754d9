//! Kernel `evicted`.

use super::check_indices;
use crate::Result;
use crate::plan::IndexShape;
use crate::wgpu::device::launch::Launches;
use crate::wgpu::device::{Indices, Kernels, Variant};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;

/// Invocations of a workgroup.
const INVOCATIONS: u32 = 256;

/// Lists the tokens of every KV head that are not kept. One dispatch. The plan decides everything except the buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvictedPlan {
    kept: IndexShape,
    evicted: IndexShape,
}

impl EvictedPlan {
    /// Plans the complement of kept tokens among those below [`IndexShape::below`].
    ///
    /// # Errors
    /// [`Error::NoTokens`](crate::Error::NoTokens) when nothing is evicted; [`Error::Limit`](crate::Error::Limit) when
    /// there are more evicted tokens than a 32-bit index can count.
    pub fn new(kept: IndexShape) -> Result<Self> {
        Ok(Self { kept, evicted: kept.others()? })
    }

    /// The shape of the result.
    pub const fn indices(&self) -> IndexShape {
        self.evicted
    }

    /// The kernel variants, for [`Kernels::prepare`].
    pub fn variants(&self) -> Vec<Variant> {
        variants()
    }

    /// Binds the kept tokens to read, `[kv_heads, kept]`, ascending in each head, and the evicted tokens to write.
    ///
    /// # Errors
    /// [`Error::Elements`](crate::Error::Elements) when the indices have other shapes;
    /// [`Error::Plan`](crate::Error::Plan) when both lie in one buffer; [`Error::Limit`](crate::Error::Limit) when the
    /// device cannot dispatch enough workgroups; [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn bind(&self, kernels: &Kernels, kept: &Indices, evicted: &Indices) -> Result<Launches> {
        let heads = self.kept.kv_heads();
        check_indices("positions of kept tokens", kept, heads, self.kept.count())?;
        check_indices("positions of evicted tokens", evicted, heads, self.evicted.count())?;
        let call = [self.kept.below(), self.kept.count() as u32];
        let call = super::upload_call(kernels.device(), &call, &[])?;
        let buffers =
            [("call", call.as_entire_buffer_binding()), ("kept", kept.binding()), ("others", evicted.binding())];
        let grid = [self.kept.below().div_ceil(INVOCATIONS), heads as u32, 1];
        Ok([planned(kernels, &Variant::new(&SHADERS, "evicted"), &buffers, grid)?].into_iter().collect())
    }
}

/// The only variant.
pub(super) fn variants() -> Vec<Variant> {
    vec![Variant::new(&SHADERS, "evicted")]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::format::MOST_HEADS;

    /// Few tokens are kept out of more than a 32-bit index can count.
    #[test]
    fn absurd_sizes_are_refused() {
        let plan = EvictedPlan::new(IndexShape::new(MOST_HEADS, 1, u32::MAX).unwrap());
        assert!(matches!(plan, Err(Error::Limit { .. })), "{plan:?}");
        let none = EvictedPlan::new(IndexShape::new(1, 4, 4).unwrap());
        assert!(matches!(none, Err(Error::NoTokens { .. })), "{none:?}");
    }
}
