//! Kernel `find_non_finite`.

use super::tile_call::{self, TileCall};
use crate::format::{AttentionShape, KeyOrValue, TensorFormat};
use crate::plan::{ElementType, RowLayout};
use crate::wgpu::device::launch::{Launch, flat_grid};
use crate::wgpu::device::{Kernels, Tensor, Variant, buffers};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use crate::{Error, Result};

/// Elements that an invocation checks, unless there are more than a dispatch can reach.
const ELEMENTS_PER_INVOCATION: u64 = 16;

/// The word that means that nothing was found.
const NOTHING: u32 = u32::MAX;

/// Searches for an element that is NaN, infinite or too large. The plan decides everything except the tensor.
#[derive(Clone, Debug)]
pub struct FindNonFinitePlan {
    shape: AttentionShape,
    rows: RowLayout,
    largest: f32,
    elements: u64,
}

/// The dispatch, and the word that it writes.
#[derive(Clone, Debug)]
pub struct FindNonFinite {
    /// The dispatch.
    pub launch: Launch,
    /// One word with the usages `STORAGE | COPY_SRC`: see [`FindNonFinitePlan::position`]. It is reset when bound, so
    /// the dispatch runs once per binding.
    pub found: wgpu::Buffer,
}

/// The position of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElementPosition {
    /// Token of the tensor.
    pub token: usize,
    /// KV head.
    pub kv_head: usize,
    /// Channel.
    pub channel: usize,
}

impl FindNonFinitePlan {
    /// Plans a search of all rows for elements beyond ±`largest`.
    ///
    /// # Errors
    /// [`Error::Limit`] when there are more elements than a 32-bit index can count.
    pub fn new(shape: &AttentionShape, rows: RowLayout, largest: f32) -> Result<Self> {
        let elements = (rows.tokens as u64).saturating_mul((shape.kv_heads() * shape.head_dim()) as u64);
        if elements >= u64::from(NOTHING) {
            return Err(Error::Limit {
                what: "the elements of a tensor".into(),
                needed: elements,
                allowed: u64::from(NOTHING) - 1,
                hint: "pass fewer tokens at once",
            });
        }
        Ok(Self { shape: *shape, rows, largest, elements })
    }

    /// Binds the tensor to search.
    ///
    /// # Errors
    /// [`Error::Elements`] when the tensor, named `what`, is shorter than its rows; [`Error::Limit`] when it is too
    /// large for a binding.
    pub fn bind(&self, kernels: &Kernels, what: &'static str, tensor: &Tensor) -> Result<FindNonFinite> {
        self.rows.check(what, tensor.elements(), &self.shape)?;
        let device = kernels.device();
        let rows = tensor.element_binding(&device.limits())?;
        let call =
            TileCall::new(&self.shape, &TensorFormat::F16, KeyOrValue::Key).with_rows(&self.rows, &self.shape)?;
        let tokens = self.rows.tokens as u32;
        let call = TileCall { first_element: rows.first_element, tokens, largest: self.largest, ..call };
        let call = call.upload(device, &[])?;
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
        let found = buffers::create_filled(device, "position of a non-finite element", &NOTHING.to_le_bytes(), usage)?;
        let bindings = [
            ("call", call.as_entire_buffer_binding()),
            ("rows", rows.buffer),
            ("first", found.as_entire_buffer_binding()),
        ];
        let grid = flat_grid(self.elements.div_ceil(ELEMENTS_PER_INVOCATION), &device.limits())?;
        let launch = planned(kernels, &variant_of(tensor.element_type()), &bindings, grid)?;
        Ok(FindNonFinite { launch, found })
    }

    /// Decodes the word that the dispatch wrote.
    pub fn position(&self, found: u32) -> Option<ElementPosition> {
        let row = found as usize / self.shape.head_dim();
        (found != NOTHING).then(|| ElementPosition {
            token: row / self.shape.kv_heads(),
            kv_head: row % self.shape.kv_heads(),
            channel: found as usize % self.shape.head_dim(),
        })
    }
}

fn variant_of(element_type: ElementType) -> Variant {
    tile_call::with_rows(Variant::new(&SHADERS, "find_non_finite"), element_type.into())
}

/// Every variant that a plan uses.
pub(crate) fn variants() -> Vec<Variant> {
    ElementType::ALL.map(variant_of).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_sizes_are_refused() {
        let shape = AttentionShape::new(2, 2, 64).unwrap();
        let rows = RowLayout { tokens: usize::MAX, token_stride: 0, head_stride: 0 };
        assert!(matches!(FindNonFinitePlan::new(&shape, rows, 1.0), Err(Error::Limit { .. })));
    }
}
