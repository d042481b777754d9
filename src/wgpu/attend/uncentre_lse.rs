//! Kernel `uncentre_lse`: log-sum-exps over centred keys become those over the keys.

use super::parts::input_file;
use crate::backend::RowCentres;
use crate::format::{AttentionShape, HEAD_DIMS};
use crate::plan::ElementType;
use crate::wgpu::device::launch::flat_grid;
use crate::wgpu::device::{Kernels, Launch, Store, Tensor, Variant, buffers};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use crate::{Error, Result};

/// Adds `scale · q·m` to log-sum-exps: decided, but for the tensors. One dispatch.
#[derive(Clone, Debug)]
pub struct UncentreLsePlan {
    shape: AttentionShape,
    /// The slot of the centre of every query.
    slots: Vec<u32>,
    scale: f32,
}

/// The head of the arguments; the slots follow it. The layout is that of `attend/uncentre_lse.wgsl`.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Call {
    query_heads: u32,
    kv_heads: u32,
    scale: f32,
}

impl UncentreLsePlan {
    /// Plans it for queries whose sequences have their centres in these slots.
    ///
    /// # Errors
    /// [`Error::NoTokens`] when there are none.
    pub fn new(shape: &AttentionShape, centres: RowCentres<'_>) -> Result<Self> {
        let RowCentres { slots, scale } = centres;
        if slots.is_empty() {
            return Err(Error::NoTokens { what: "uncentring", hint: "pass at least one query" });
        }
        Ok(Self { shape: *shape, slots: slots.to_vec(), scale })
    }

    /// The kernel variant for queries of this type, for [`Kernels::prepare`].
    pub fn variant(&self, queries: ElementType) -> Variant {
        variant_of(self.shape.head_dim(), queries)
    }

    /// Binds a store that has the centres, the queries, and the log-sum-exps to change.
    ///
    /// # Errors
    /// [`Error::Elements`] or [`Error::Buffer`] when a tensor does not have one row per slot, or log-sum-exps are not
    /// f32; [`Error::Plan`] when the store has another shape or lacks a slot, or log-sum-exps lie in the buffer of the
    /// queries.
    pub fn bind(&self, kernels: &Kernels, store: &Store, queries: &Tensor, lse: &Tensor) -> Result<Launch> {
        let (heads, head_dim) = (self.shape.query_heads(), self.shape.head_dim());
        store.check_planned("uncentring", &self.shape, store.format())?;
        self.slots.iter().try_for_each(|&slot| store.check_centre("uncentring", Some(slot as usize)))?;
        let limits = kernels.device().limits();
        for (what, tensor, elements) in [("queries", queries, heads * head_dim), ("log-sum-exps", lse, heads)] {
            let (given, expected) = (tensor.elements(), self.slots.len() * elements);
            if given != expected {
                let shape = format!("{} rows of {heads} query heads × {head_dim} channels", self.slots.len());
                return Err(Error::Elements { what, given, expected, shape });
            }
            tensor.check_aligned(what, &limits)?;
        }
        if lse.element_type() != ElementType::F32 {
            let reason = format!("is {:?}, log-sum-exps are f32", lse.element_type());
            return Err(Error::Buffer { what: "log-sum-exps", reason });
        }
        let (query_heads, kv_heads) = (heads as u32, self.shape.kv_heads() as u32);
        let mut bytes = bytemuck::bytes_of(&Call { query_heads, kv_heads, scale: self.scale }).to_vec();
        bytes.extend_from_slice(bytemuck::cast_slice(&self.slots));
        let call = buffers::create_filled(kernels.device(), "arguments", &bytes, wgpu::BufferUsages::STORAGE)?;
        let buffers = [
            ("call", call.as_entire_buffer_binding()),
            ("centres", store.centres_binding()?),
            ("inputs", queries.binding()),
            ("lse", lse.binding()),
        ];
        let grid = flat_grid(lse.elements() as u64, &limits)?;
        planned(kernels, &self.variant(queries.element_type()), &buffers, grid)
    }
}

fn variant_of(head_dim: usize, queries: ElementType) -> Variant {
    Variant::new(&SHADERS, "uncentre_lse").constant("HEAD_DIM", head_dim).import("input", input_file(queries))
}

/// Every variant that a plan uses.
pub(crate) fn variants() -> Vec<Variant> {
    HEAD_DIMS.into_iter().flat_map(|head_dim| ElementType::ALL.map(|queries| variant_of(head_dim, queries))).collect()
}
