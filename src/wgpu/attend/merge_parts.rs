//! Kernel `merge_parts`: merges the states of the same queries over several parts of their tokens.

use super::parts::output_file;
use super::recipe::LseOutput;
use crate::backend::AttentionStates;
use crate::counts::in_32_bits;
use crate::format::{AttentionShape, HEAD_DIMS};
use crate::plan::ElementType;
use crate::wgpu::device::launch::{FLAT_WORKGROUP, flat_grid};
use crate::wgpu::device::{Kernels, Launch, Tensor, Variant, buffers};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use crate::{Error, Result};

/// Merges the states of several parts. The plan decides everything except the tensors.
#[derive(Clone, Copy, Debug)]
pub struct MergePartsPlan {
    shape: AttentionShape,
    parts: usize,
    rows: usize,
}

impl MergePartsPlan {
    /// Plans the merge of `parts` parts of `rows` rows of states for layers of `shape`.
    ///
    /// # Errors
    /// [`Error::NoTokens`] for no parts or no rows, [`Error::Limit`] when 32-bit indices cannot address all elements.
    pub fn new(shape: AttentionShape, parts: usize, rows: usize) -> Result<Self> {
        if parts == 0 || rows == 0 {
            return Err(Error::NoTokens { what: "merge of states", hint: "merge at least one part of one row" });
        }
        let plan = Self { shape, parts, rows };
        in_32_bits("elements of the states of all parts", plan.elements(parts, shape.head_dim()))?;
        Ok(plan)
    }

    /// The kernel variants for an output of this type, for [`Kernels::prepare`]: without log-sum-exps of the result, and
    /// with them.
    pub fn variants(&self, output: ElementType) -> [Variant; 2] {
        [LseOutput::None, LseOutput::F32].map(|lse| variant_of(self.shape.head_dim(), output, lse))
    }

    /// Binds the parts, which lie one after the other, and the tensors for the result, which must lie in other buffers.
    /// All may be longer.
    ///
    /// # Errors
    /// [`Error::Elements`] for a tensor that is too short, [`Error::Buffer`] for states that are not f32,
    /// [`Error::Plan`] when the result shares a buffer with the parts.
    pub fn bind(
        &self,
        kernels: &Kernels,
        states: &AttentionStates<Tensor>,
        output: &Tensor,
        lse: Option<&Tensor>,
    ) -> Result<Launch> {
        let (limits, head_dim) = (kernels.device().limits(), self.shape.head_dim());
        let part = |what, tensor: &Tensor, parts, channels| -> Result<Tensor> {
            let (given, expected) = (tensor.elements(), self.elements(parts, channels));
            if given < expected {
                let heads = self.shape.query_heads();
                let shape = format!("{parts} parts × {} rows × {heads} query heads × {channels}", self.rows);
                return Err(Error::Elements { what, given, expected, shape });
            }
            tensor.check_aligned(what, &limits)?;
            tensor.slice(0, expected)
        };
        let outputs = part("outputs of the parts", &states.outputs, self.parts, head_dim)?;
        let part_lse = part("log-sum-exps of the parts", &states.lse, self.parts, 1)?;
        let merged = part("merged outputs", output, 1, head_dim)?;
        let merged_lse = lse.map(|lse| part("merged log-sum-exps", lse, 1, 1)).transpose()?;
        let floats = [("outputs of the parts", &outputs), ("log-sum-exps of the parts", &part_lse)];
        let of_result = merged_lse.iter().map(|lse| ("merged log-sum-exps", lse));
        for (what, tensor) in floats.into_iter().chain(of_result) {
            if tensor.element_type() != ElementType::F32 {
                let reason = format!("are {:?}, but states are f32", tensor.element_type());
                return Err(Error::Buffer { what, reason });
            }
        }
        let call = (self.parts as u32).to_le_bytes();
        let call = buffers::create_filled(kernels.device(), "arguments", &call, wgpu::BufferUsages::STORAGE)?;
        let mut bound = vec![
            ("call", call.as_entire_buffer_binding()),
            ("part_outputs", outputs.binding()),
            ("part_lse", part_lse.binding()),
            ("outputs", merged.binding()),
        ];
        bound.extend(merged_lse.iter().map(|lse| ("lse_rows", lse.binding())));
        let grid = flat_grid(self.elements(1, 1) as u64 * u64::from(FLAT_WORKGROUP), &limits)?;
        let [without_lse, with_lse] = self.variants(output.element_type());
        planned(kernels, if lse.is_some() { &with_lse } else { &without_lse }, &bound, grid)
    }

    fn elements(&self, parts: usize, channels: usize) -> usize {
        [self.rows, self.shape.query_heads(), channels].iter().fold(parts, |all, &n| all.saturating_mul(n))
    }
}

fn variant_of(head_dim: usize, output: ElementType, lse: LseOutput) -> Variant {
    let variant = Variant::new(&SHADERS, "merge_parts").constant("HEAD_DIM", head_dim);
    let variant = variant.import("output", output_file(output));
    match lse {
        LseOutput::None => variant,
        LseOutput::F32 => variant.import("lse", "attend/lse.wgsl#f32"),
    }
}

/// Every variant that a plan uses.
pub(crate) fn variants() -> Vec<Variant> {
    let both = [LseOutput::None, LseOutput::F32];
    let of = |(i, head_dim)| {
        let types = ElementType::ALL.into_iter().zip(i..);
        types.map(move |(output, i): (_, usize)| variant_of(head_dim, output, both[i % 2]))
    };
    HEAD_DIMS.into_iter().enumerate().flat_map(of).collect()
}
