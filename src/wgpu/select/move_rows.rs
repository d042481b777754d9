//! Kernels `gather` and `reorder_chunks`.

use super::{check_index, check_indices, check_output, check_reach};
use crate::format::{AttentionShape, HEAD_DIMS};
use crate::plan::{ElementType, RowLayout};
use crate::policy::check_order;
use crate::wgpu::device::launch::{Launches, flat_grid};
use crate::wgpu::device::{Indices, Kernels, Tensor, Variant};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use crate::{Error, Result};

/// Copies the kept tokens of every KV head, in the order of their indices. One dispatch. The plan decides everything
/// except the buffers.
#[derive(Clone, Debug)]
pub struct GatherPlan(Moves);

/// Copies tokens chunk by chunk in another order. One dispatch. The plan decides everything except the buffers.
#[derive(Clone, Debug)]
pub struct ReorderChunksPlan {
    moves: Moves,
    order: Vec<u32>,
    chunk_tokens: usize,
}

/// The common part of both plans.
#[derive(Clone, Debug)]
struct Moves {
    shape: AttentionShape,
    rows: RowLayout,
    /// Rows of the result per head.
    count: usize,
}

/// `MoveCall` of `select/rows.wgsl#move_rows`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct MoveCall {
    first_element: u32,
    token_stride: u32,
    head_stride: u32,
    tokens: u32,
    kv_heads: u32,
    count: u32,
    chunk_tokens: u32,
    chunks: u32,
}

impl GatherPlan {
    /// Plans copies of `count` rows of every KV head. The device reads which rows they are. An index beyond the tokens
    /// is clamped to the last token.
    ///
    /// # Errors
    /// [`Error::NoTokens`] when there are no rows to read or to keep; [`Error::Limit`] when 32-bit indices cannot
    /// address all elements.
    pub fn new(shape: &AttentionShape, rows: RowLayout, count: usize) -> Result<Self> {
        Moves::new("gather", shape, rows, count).map(Self)
    }

    /// Elements of the result, `[kv_heads, count, head_dim]`.
    pub fn elements(&self) -> usize {
        self.0.elements()
    }

    /// The kernel variants, for [`Kernels::prepare`].
    pub fn variants(&self, element_type: ElementType) -> Vec<Variant> {
        vec![variant_of("gather", self.0.shape.head_dim(), element_type)]
    }

    /// Binds the rows to read, the indices `[kv_heads, count]` of the rows to keep, and the tensor to write. Both
    /// tensors have the same element type.
    ///
    /// # Errors
    /// [`Error::Elements`] or [`Error::Buffer`] when a buffer does not fit the plan, [`Error::Plan`] when the output
    /// shares a buffer with an input, [`Error::Limit`] when a buffer is too large.
    pub fn bind(&self, kernels: &Kernels, rows: &Tensor, kept: &Indices, gathered: &Tensor) -> Result<Launches> {
        check_indices("indices of kept tokens", kept, self.0.shape.kv_heads(), self.0.count)?;
        self.0.bind(kernels, "gather", rows, kept, gathered, [1, 0])
    }
}

impl ReorderChunksPlan {
    /// Plans copies of all rows. Chunk i of the result is chunk `order[i]`; tokens after the last whole chunk stay in
    /// place.
    ///
    /// # Errors
    /// [`Error::Chunks`] when the order does not name every whole chunk once, or chunks of this size are not supported;
    /// [`Error::NoTokens`] or [`Error::Limit`] as for [`GatherPlan::new`].
    pub fn new(shape: &AttentionShape, rows: RowLayout, chunk_tokens: usize, order: &[u32]) -> Result<Self> {
        check_order(rows.tokens, chunk_tokens, order)?;
        let moves = Moves::new("reorder_chunks", shape, rows, rows.tokens)?;
        Ok(Self { moves, order: order.to_vec(), chunk_tokens })
    }

    /// Elements of the result, `[kv_heads, tokens, head_dim]`.
    pub fn elements(&self) -> usize {
        self.moves.elements()
    }

    /// The kernel variants, for [`Kernels::prepare`].
    pub fn variants(&self, element_type: ElementType) -> Vec<Variant> {
        vec![variant_of("reorder_chunks", self.moves.shape.head_dim(), element_type)]
    }

    /// Binds the rows to read and the tensor to write. Both have the same element type.
    ///
    /// # Errors
    /// As [`GatherPlan::bind`].
    pub fn bind(&self, kernels: &Kernels, rows: &Tensor, reordered: &Tensor) -> Result<Launches> {
        // A binding holds at least one word.
        let order = if self.order.is_empty() { &[0][..] } else { &self.order };
        let below = order.len() as u32;
        let order = Indices::upload(kernels.device(), order, 1, below)?;
        let chunks = [self.chunk_tokens as u32, self.order.len() as u32];
        self.moves.bind(kernels, "reorder_chunks", rows, &order, reordered, chunks)
    }
}

impl Moves {
    fn new(what: &'static str, shape: &AttentionShape, rows: RowLayout, count: usize) -> Result<Self> {
        if rows.tokens == 0 || count == 0 {
            return Err(Error::NoTokens { what, hint: "pass at least one row" });
        }
        check_reach(&rows, shape.kv_heads(), shape.head_dim())?;
        let row = shape.kv_heads() * shape.head_dim();
        check_index("the elements of a result", count.saturating_mul(row) as u64)?;
        Ok(Self { shape: *shape, rows, count })
    }

    fn elements(&self) -> usize {
        self.count * self.shape.kv_heads() * self.shape.head_dim()
    }

    fn bind(
        &self,
        kernels: &Kernels,
        kernel: &'static str,
        rows: &Tensor,
        indices: &Indices,
        moved: &Tensor,
        [chunk_tokens, chunks]: [u32; 2],
    ) -> Result<Launches> {
        let limits = kernels.device().limits();
        self.rows.check("rows to copy", rows.elements(), &self.shape)?;
        check_output("copied rows", moved, self.elements(), rows.element_type(), &limits)?;
        let source = rows.element_binding(&limits)?;
        let call = MoveCall {
            first_element: source.first_element,
            token_stride: self.rows.token_stride as u32,
            head_stride: self.rows.head_stride as u32,
            tokens: self.rows.tokens as u32,
            kv_heads: self.shape.kv_heads() as u32,
            count: self.count as u32,
            chunk_tokens,
            chunks,
        };
        let call = super::upload_call(kernels.device(), &call, &[])?;
        let words = (self.elements() / per_word(rows.element_type())) as u64;
        let buffers = [
            ("call", call.as_entire_buffer_binding()),
            ("rows", source.buffer),
            ("indices", indices.binding()),
            ("moved", moved.binding()),
        ];
        let variant = variant_of(kernel, self.shape.head_dim(), rows.element_type());
        Ok([planned(kernels, &variant, &buffers, flat_grid(words, &limits)?)?].into_iter().collect())
    }
}

fn variant_of(kernel: &'static str, head_dim: usize, element_type: ElementType) -> Variant {
    Variant::new(&SHADERS, kernel).constant("HEAD_DIM", head_dim).constant("PER_WORD", per_word(element_type))
}

const fn per_word(element_type: ElementType) -> usize {
    4 / element_type.bytes()
}

/// Every variant that a plan can ask for.
pub(super) fn variants() -> Vec<Variant> {
    let mut found = Vec::new();
    for head_dim in HEAD_DIMS {
        for element_type in [ElementType::F32, ElementType::F16] {
            found.extend(["gather", "reorder_chunks"].map(|kernel| variant_of(kernel, head_dim, element_type)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_sizes_are_refused() {
        let shape = AttentionShape::new(2, 2, 64).unwrap();
        let rows = RowLayout::token_major(4, &shape);
        let endless = RowLayout { tokens: usize::MAX, ..rows };
        for (rows, count) in [(rows, usize::MAX), (endless, 1), (RowLayout { head_stride: usize::MAX, ..rows }, 1)] {
            let plan = GatherPlan::new(&shape, rows, count);
            assert!(matches!(plan, Err(Error::Limit { .. })), "{plan:?}");
        }
    }
}
