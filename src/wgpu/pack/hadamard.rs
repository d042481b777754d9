//! Kernel `hadamard`.

use super::tile_call::{BoundRows, RowsKind, TileCall, with_rows};
use crate::format::sketch::Sketch;
use crate::format::{AttentionShape, Direction, HEAD_DIMS, KeyOrValue, Rotation, TensorFormat};
use crate::plan::{ElementType, RowLayout};
use crate::wgpu::device::launch::{FLAT_WORKGROUP, Launch, Launches, flat_grid};
use crate::wgpu::device::{Kernels, Tensor, Variant};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use crate::{Error, Result};

/// Rotates the rows of a dense tensor, forward or inverse. One dispatch. The plan decides everything except the
/// buffers.
#[derive(Clone, Debug)]
pub struct HadamardPlan {
    shape: AttentionShape,
    rows: RowLayout,
    turn: DirectedRotation,
}

/// A rotation and its direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirectedRotation {
    pub rotation: Rotation,
    pub direction: Direction,
}

impl HadamardPlan {
    /// Plans the rotation of all rows of a tensor.
    ///
    /// # Errors
    /// [`Error::Format`] when the rotation does not fit the shape, [`Error::NoTokens`] when there are no rows.
    pub fn new(shape: &AttentionShape, rows: RowLayout, rotation: Rotation, direction: Direction) -> Result<Self> {
        rotation.check(shape)?;
        if rows.tokens == 0 {
            return Err(Error::NoTokens { what: "hadamard", hint: "pass at least one token" });
        }
        Ok(Self { shape: *shape, rows, turn: DirectedRotation { rotation, direction } })
    }

    /// Elements of the output, `[tokens, kv_heads, head_dim]`. Saturates at the largest number.
    pub fn elements(&self) -> usize {
        self.rows.tokens.saturating_mul(self.shape.kv_heads() * self.shape.head_dim())
    }

    /// The kernel variant for input of this type, for [`Kernels::prepare`].
    pub fn variants(&self, input: ElementType) -> Vec<Variant> {
        vec![from_rows(self.shape.head_dim(), self.turn, input.into())]
    }

    /// Binds the tensor to read and the f32 tensor to write, which must lie in another buffer.
    ///
    /// # Errors
    /// [`Error::Elements`] or [`Error::Buffer`] when a tensor does not fit the plan, [`Error::Plan`] when both lie in
    /// one buffer, [`Error::Limit`] when one is too large.
    pub fn bind(&self, kernels: &Kernels, input: &Tensor, output: &Tensor) -> Result<Launches> {
        let limits = kernels.device().limits();
        self.rows.check("rows to rotate", input.elements(), &self.shape)?;
        if output.elements() != self.elements() {
            let shape = format!("[{}, {}, {}]", self.rows.tokens, self.shape.kv_heads(), self.shape.head_dim());
            let (given, expected) = (output.elements(), self.elements());
            return Err(Error::Elements { what: "rotated rows", given, expected, shape });
        }
        if output.element_type() != ElementType::F32 {
            return Err(Error::Buffer {
                what: "rotated rows",
                reason: "it does not hold f32, but the kernel writes f32".into(),
            });
        }
        output.check_aligned("rotated rows", &limits)?;
        let rows = BoundRows::new(input, None, &limits)?;
        let call = TileCall::new(&self.shape, &TensorFormat::F16, KeyOrValue::Key);
        let call = TileCall {
            tokens: self.rows.tokens as u32,
            first_element: rows.elements.first_element,
            ..call.with_rows(&self.rows, &self.shape)?
        };
        Ok([rotate(kernels, self.turn, call, &rows, output.binding())?].into_iter().collect())
    }
}

/// Rotates `call.tokens` rows of every KV head, starting at `call.first_token`, into `[tokens, kv_heads, head_dim]`.
pub(crate) fn rotate(
    kernels: &Kernels,
    turn: DirectedRotation,
    call: TileCall,
    rows: &BoundRows<'_>,
    output: wgpu::BufferBinding<'_>,
) -> Result<Launch> {
    let variant = from_rows(call.head_dim as usize, turn, rows.kind());
    let buffers: Vec<_> = rows.bindings().chain([("output", output)]).collect();
    launch(kernels, &variant, call, &buffers)
}

/// Rotates `rows` rows of `head_dim` f32 channels in place.
pub(crate) fn rotate_in_place(
    kernels: &Kernels,
    turn: DirectedRotation,
    shape: &AttentionShape,
    rows: usize,
    output: wgpu::BufferBinding<'_>,
) -> Result<Launch> {
    let one_head = AttentionShape::new(1, 1, shape.head_dim())?;
    let call = TileCall::new(&one_head, &TensorFormat::F16, KeyOrValue::Key);
    let call = call.with_rows(&RowLayout::token_major(rows, &one_head), &one_head)?;
    let call = TileCall { tokens: rows as u32, ..call };
    launch(kernels, &in_place(shape.head_dim(), turn), call, &[("output", output)])
}

/// The variant of [`rotate_in_place`].
pub(crate) fn in_place(head_dim: usize, turn: DirectedRotation) -> Variant {
    variant(head_dim, turn).import("rows", "pack/rows.wgsl#in_place")
}

/// The variant of [`rotate`].
pub(crate) fn from_rows(head_dim: usize, turn: DirectedRotation, rows: RowsKind) -> Variant {
    with_rows(variant(head_dim, turn), rows)
}

fn launch(
    kernels: &Kernels,
    variant: &Variant,
    call: TileCall,
    buffers: &[(&str, wgpu::BufferBinding<'_>)],
) -> Result<Launch> {
    let total = u64::from(call.tokens) * u64::from(call.kv_heads);
    let grid = flat_grid(total * u64::from(FLAT_WORKGROUP), &kernels.device().limits())?;
    let call = TileCall { total: total as u32, ..call }.upload(kernels.device(), &[])?;
    let buffers: Vec<_> =
        std::iter::once(("call", call.as_entire_buffer_binding())).chain(buffers.iter().cloned()).collect();
    planned(kernels, variant, &buffers, grid)
}

fn variant(head_dim: usize, turn: DirectedRotation) -> Variant {
    with_turn(Variant::new(&SHADERS, "hadamard").constant("HEAD_DIM", head_dim), turn, head_dim)
}

/// The constants of `common/rotation.wgsl#rotate_row`.
pub(crate) fn with_turn(variant: Variant, turn: DirectedRotation, head_dim: usize) -> Variant {
    variant
        .constant("ROTATION_BLOCKS", turn.rotation.dealt_blocks(head_dim))
        .constant("ROTATION_ORDER", turn.rotation.order())
        .float("ROTATION_SCALE", turn.rotation.scale())
        .constant("ROTATION_SIGNED", usize::from(turn.rotation.seed().is_some()))
        .constant("ROTATION_SEED", turn.rotation.seed().unwrap_or(0) as usize)
        .constant("ROTATION_BACK", usize::from(turn.direction == Direction::Inverse))
}

/// The constants of `common/rotation.wgsl#sketch_row`; order and scale are those of the row's own rotation.
pub(crate) fn with_sketch(variant: Variant, sketch: Sketch, order: usize, head_dim: usize) -> Variant {
    variant
        .constant("SKETCH_BLOCKS", head_dim / order)
        .constant("SKETCH_SEED", sketch.seed as usize)
        .constant("SKETCH_ROUNDS", Sketch::rounds(order, head_dim))
}

/// Variants of every head dimension, direction and kind of input.
pub(crate) fn variants() -> Vec<Variant> {
    let mut found = Vec::new();
    for head_dim in HEAD_DIMS {
        let order = Rotation::largest_order(head_dim);
        for rotation in [Rotation::hadamard(order), Rotation::randomized(order, 1), Rotation::dealt(order, 1)] {
            for direction in [Direction::Forward, Direction::Inverse] {
                let turn = DirectedRotation { rotation, direction };
                found.extend(RowsKind::all().map(|rows| from_rows(head_dim, turn, rows)));
                found.push(in_place(head_dim, turn));
            }
        }
    }
    found
}
