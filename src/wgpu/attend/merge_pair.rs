//! Kernel `merge_pair`: merges the states of the same queries over two sets of tokens.

use crate::backend::AttentionStates;
use crate::format::{AttentionShape, HEAD_DIMS};
use crate::plan::ElementType;
use crate::wgpu::device::launch::{FLAT_WORKGROUP, flat_grid};
use crate::wgpu::device::{Kernels, Launch, Tensor, Variant};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use crate::{Error, Result};

/// Merges attention states. The plan decides everything except the tensors.
#[derive(Clone, Copy, Debug)]
pub struct MergePairPlan {
    shape: AttentionShape,
    rows: usize,
}

impl MergePairPlan {
    /// Plans the merge of `rows` rows of states for layers of `shape`.
    pub const fn new(shape: AttentionShape, rows: usize) -> Self {
        Self { shape, rows }
    }

    /// The kernel variant, for [`Kernels::prepare`].
    pub fn variant(&self) -> Variant {
        variant_of(self.shape.head_dim())
    }

    /// Binds both parts and the merged states, which must lie in other buffers.
    ///
    /// # Errors
    /// [`Error::Elements`] or [`Error::Buffer`] when a tensor is not f32 or does not have the planned rows,
    /// [`Error::Plan`] when merged states share a buffer with a part.
    pub fn bind(
        &self,
        kernels: &Kernels,
        first: &AttentionStates<Tensor>,
        second: &AttentionStates<Tensor>,
        joined: &AttentionStates<Tensor>,
    ) -> Result<Launch> {
        let heads = self.rows.saturating_mul(self.shape.query_heads());
        for (what, tensor, channels) in [
            ("outputs of the first states", &first.outputs, self.shape.head_dim()),
            ("log-sum-exps of the first states", &first.lse, 1),
            ("outputs of the second states", &second.outputs, self.shape.head_dim()),
            ("log-sum-exps of the second states", &second.lse, 1),
            ("outputs of the joined states", &joined.outputs, self.shape.head_dim()),
            ("log-sum-exps of the joined states", &joined.lse, 1),
        ] {
            let expected = heads.saturating_mul(channels);
            if tensor.elements() != expected {
                let given = tensor.elements();
                let shape = format!("{} rows × {} query heads × {channels}", self.rows, self.shape.query_heads());
                return Err(Error::Elements { what, given, expected, shape });
            }
            if tensor.element_type() != ElementType::F32 {
                let reason = format!("is {:?}, but states are f32", tensor.element_type());
                return Err(Error::Buffer { what, reason });
            }
            tensor.check_aligned(what, &kernels.device().limits())?;
        }
        let buffers = [
            ("first_outputs", first.outputs.binding()),
            ("first_lse", first.lse.binding()),
            ("second_outputs", second.outputs.binding()),
            ("second_lse", second.lse.binding()),
            ("outputs", joined.outputs.binding()),
            ("lse", joined.lse.binding()),
        ];
        let grid = flat_grid(heads as u64 * u64::from(FLAT_WORKGROUP), &kernels.device().limits())?;
        planned(kernels, &self.variant(), &buffers, grid)
    }
}

fn variant_of(head_dim: usize) -> Variant {
    Variant::new(&SHADERS, "merge_pair").constant("HEAD_DIM", head_dim)
}

/// Every variant that a plan uses.
pub(crate) fn variants() -> Vec<Variant> {
    HEAD_DIMS.into_iter().map(variant_of).collect()
}
