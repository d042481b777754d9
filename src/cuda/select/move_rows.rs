//! Kernels `gather` and `reorder_chunks`.

use super::launch::{Kernel, Launch, Launches};
use super::{check_indices, check_output};
use crate::cuda::Cuda;
use crate::cuda::device::indices::Indices;
use crate::cuda::device::program::Program;
use crate::cuda::device::tensor::Tensor;
use crate::cuda::sources::SOURCES;
use crate::format::AttentionShape;
use crate::plan::RowLayout;
use crate::policy::check_order;
use crate::{Error, Result};

/// Threads of a block.
const THREADS: u32 = 256;

/// Copies the kept tokens of every KV head, in the order of their indices. One launch. The plan decides everything
/// except the memory.
#[derive(Clone, Debug)]
pub struct GatherPlan(Moves);

/// Copies tokens chunk by chunk in another order. One launch. The plan decides everything except the memory.
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

/// `MoveCall` of `select/gather.cu`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct MoveCall {
    rows: u64,
    indices: u64,
    moved: u64,
    token_stride: u64,
    head_stride: u64,
    tokens: u32,
    kv_heads: u32,
    count: u32,
    chunk_tokens: u32,
    chunks: u32,
    unused: u32,
}

impl GatherPlan {
    /// Plans copies of `count` rows of every KV head. The device reads which rows they are. An index beyond the tokens
    /// is clamped to the last token.
    ///
    /// # Errors
    /// [`Error::NoTokens`] when there are no rows to read or to keep.
    pub fn new(shape: &AttentionShape, rows: RowLayout, count: usize) -> Result<Self> {
        Moves::new("gather", shape, rows, count).map(Self)
    }

    /// Elements of the result, `[kv_heads, count, head_dim]`.
    pub fn elements(&self) -> usize {
        self.0.elements()
    }

    /// Binds the rows to read, the indices `[kv_heads, count]` of the rows to keep, and the tensor to write. Both
    /// tensors have the same element type.
    ///
    /// # Errors
    /// [`Error::Elements`] or [`Error::Buffer`] when a tensor does not fit the plan; errors of the driver.
    pub fn bind(&self, backend: &Cuda, rows: &Tensor, kept: &Indices, gathered: &Tensor) -> Result<Launches> {
        check_indices("indices of kept tokens", kept, self.0.shape.kv_heads(), self.0.count)?;
        self.0.bind(backend, "gather", rows, kept, gathered, [1, 0])
    }
}

impl ReorderChunksPlan {
    /// Plans copies of all rows. Chunk i of the result is chunk `order[i]`; tokens after the last whole chunk stay in
    /// place.
    ///
    /// # Errors
    /// [`Error::Chunks`] when the order does not name every whole chunk once, or chunks of this size are not supported;
    /// [`Error::NoTokens`] when there are no rows.
    pub fn new(shape: &AttentionShape, rows: RowLayout, chunk_tokens: usize, order: &[u32]) -> Result<Self> {
        check_order(rows.tokens, chunk_tokens, order)?;
        let moves = Moves::new("reorder_chunks", shape, rows, rows.tokens)?;
        Ok(Self { moves, order: order.to_vec(), chunk_tokens })
    }

    /// Elements of the result, `[kv_heads, tokens, head_dim]`.
    pub fn elements(&self) -> usize {
        self.moves.elements()
    }

    /// Binds the rows to read and the tensor to write. Both have the same element type.
    ///
    /// # Errors
    /// As [`GatherPlan::bind`].
    pub fn bind(&self, backend: &Cuda, rows: &Tensor, reordered: &Tensor) -> Result<Launches> {
        // There must be at least one index.
        let order = if self.order.is_empty() { &[0][..] } else { &self.order };
        let indices = Indices::upload(backend.stream(), order, 1, order.len() as u32)?;
        let chunks = [self.chunk_tokens as u32, self.order.len() as u32];
        self.moves.bind(backend, "reorder_chunks", rows, &indices, reordered, chunks)
    }
}

impl Moves {
    fn new(what: &'static str, shape: &AttentionShape, rows: RowLayout, count: usize) -> Result<Self> {
        if rows.tokens == 0 || count == 0 {
            return Err(Error::NoTokens { what, hint: "pass at least one row" });
        }
        Ok(Self { shape: *shape, rows, count })
    }

    fn elements(&self) -> usize {
        self.count * self.shape.kv_heads() * self.shape.head_dim()
    }

    fn bind(
        &self,
        backend: &Cuda,
        name: &'static str,
        rows: &Tensor,
        indices: &Indices,
        moved: &Tensor,
        [chunk_tokens, chunks]: [u32; 2],
    ) -> Result<Launches> {
        self.rows.check("rows to copy", rows.elements(), &self.shape)?;
        check_output("copied rows", moved, self.elements(), rows.element_type())?;
        let call = MoveCall {
            rows: rows.address(),
            indices: indices.address(),
            moved: moved.address(),
            token_stride: self.rows.token_stride as u64,
            head_stride: self.rows.head_stride as u64,
            tokens: self.rows.tokens as u32,
            kv_heads: self.shape.kv_heads() as u32,
            count: self.count as u32,
            chunk_tokens,
            chunks,
            unused: 0,
        };
        let defines = vec![("HEAD_DIM", self.shape.head_dim()), ("ELEMENT_BYTES", rows.element_type().bytes())];
        let program = Program { sources: &SOURCES, files: &["select/gather.cu"], defines };
        let grid = [self.elements().div_ceil(THREADS as usize), 1];
        let kernel = Kernel { program: &program, name, grid, block: THREADS, shared: 0 };
        let memory = [rows.memory(), indices.memory(), moved.memory()];
        Ok(Launches::new(vec![Launch::new(backend, kernel, &call, &memory)?]))
    }
}
