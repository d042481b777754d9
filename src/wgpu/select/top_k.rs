//! Kernel `top_k`.

use super::{check_index, check_indices};
use crate::plan::{ElementType, IndexShape};
use crate::wgpu::device::launch::Launches;
use crate::wgpu::device::{Indices, Kernels, Tensor, Variant};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use crate::{Error, Result};

/// Selects the best scores of every KV head. One dispatch. The plan decides everything except the buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopKPlan {
    /// Scores of each head.
    n: usize,
    /// `[kv_heads, k]`.
    chosen: IndexShape,
}

/// `TopKCall` of `select/top_k.wgsl`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct TopKCall {
    n: u32,
    k: u32,
    first_score: u32,
}

impl TopKPlan {
    /// Plans the selection of the `k` largest of `n` scores for each of `kv_heads` heads. Ties go to the lower index,
    /// −0 equals +0, and NaN ranks below −∞.
    ///
    /// # Errors
    /// [`Error::TopK`] when `k` is larger than `n`; [`Error::NoTokens`] when `k` or the number of heads is 0;
    /// [`Error::Limit`] when there are more heads than a layer has, or more scores than a 32-bit index can count.
    pub fn new(kv_heads: usize, n: usize, k: usize) -> Result<Self> {
        if k > n {
            return Err(Error::TopK { k, n });
        }
        if k == 0 || kv_heads == 0 {
            return Err(Error::NoTokens { what: "top_k", hint: "choose at least one score" });
        }
        check_index("the scores of all heads", (kv_heads as u64).saturating_mul(n as u64))?;
        // If 32 bits count the scores of all heads, they count those of one.
        Ok(Self { n, chosen: IndexShape::new(kv_heads, k, n as u32)? })
    }

    /// The shape of the result.
    pub const fn indices(&self) -> IndexShape {
        self.chosen
    }

    /// The kernel variants, for [`Kernels::prepare`].
    pub fn variants(&self) -> Vec<Variant> {
        variants()
    }

    /// Binds the f32 scores to read, `[kv_heads, n]`, and the indices to write, `[kv_heads, k]`,
    /// ascending for each head.
    ///
    /// # Errors
    /// [`Error::Elements`] or [`Error::Buffer`] when a buffer does not fit the plan, [`Error::Plan`] when the output
    /// shares a buffer with an input, [`Error::Limit`] when a buffer is too large or the device cannot dispatch enough
    /// workgroups.
    pub fn bind(&self, kernels: &Kernels, scores: &Tensor, chosen: &Indices) -> Result<Launches> {
        let limits = kernels.device().limits();
        if scores.elements() != self.chosen.kv_heads() * self.n {
            let (given, expected) = (scores.elements(), self.chosen.kv_heads() * self.n);
            return Err(Error::Elements {
                what: "scores",
                given,
                expected,
                shape: format!("[{}, {}]", self.chosen.kv_heads(), self.n),
            });
        }
        if scores.element_type() != ElementType::F32 {
            return Err(Error::Buffer { what: "scores", reason: "they must be f32".into() });
        }
        check_indices("chosen indices", chosen, self.chosen.kv_heads(), self.chosen.count())?;
        let rows = scores.element_binding(&limits)?;
        let call = TopKCall { n: self.n as u32, k: self.chosen.count() as u32, first_score: rows.first_element };
        let call = super::upload_call(kernels.device(), &call, &[])?;
        let buffers =
            [("call", call.as_entire_buffer_binding()), ("scores", rows.buffer), ("chosen", chosen.binding())];
        let launch =
            planned(kernels, &Variant::new(&SHADERS, "top_k"), &buffers, [self.chosen.kv_heads() as u32, 1, 1])?;
        Ok([launch].into_iter().collect())
    }
}

/// The one variant.
pub(super) fn variants() -> Vec<Variant> {
    vec![Variant::new(&SHADERS, "top_k")]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::MOST_HEADS;

    /// Products of these sizes would wrap around to small numbers.
    #[test]
    fn absurd_sizes_are_refused() {
        let plan = TopKPlan::new(0x0fff_ffff_0000_0010_u64 as usize, 0x1000_0001, 0x1000_0001);
        assert!(matches!(plan, Err(Error::Limit { .. })), "{plan:?}");
        for (kv_heads, n) in [(MOST_HEADS + 1, 1), (MOST_HEADS, 0x1_0002), (1, usize::MAX)] {
            let plan = TopKPlan::new(kv_heads, n, 1);
            assert!(matches!(plan, Err(Error::Limit { .. })), "{kv_heads}, {n}: {plan:?}");
        }
        assert!(TopKPlan::new(MOST_HEADS, 0x1_0001, 1).is_ok());
    }
}
