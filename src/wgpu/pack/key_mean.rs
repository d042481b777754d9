//! Kernel `key_mean`: computes the mean of some keys as the centre of a sequence.

use super::tile_call::{BoundRows, TileCall, with_rows};
use super::write_launch::{Binder, WriteKernel, WriteLaunch};
use crate::backend::NewCentre;
use crate::format::{AttentionShape, KeyOrValue, TensorFormat};
use crate::plan::{ElementType, TableSection};
use crate::wgpu::device::launch::{Launch, flat_grid};
use crate::wgpu::device::{Kernels, Store, Tensor, Variant};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use crate::{Error, Result};

/// Writes the mean of some keys into a slot of a store's centres. One dispatch. The plan decides everything except the
/// buffers.
#[derive(Clone, Copy, Debug)]
pub struct KeyMeanPlan {
    shape: AttentionShape,
    centre: NewCentre,
}

impl KeyMeanPlan {
    /// Plans a centre for a store of this shape.
    ///
    /// # Errors
    /// [`Error::Plan`] when the tokens lie beyond the rows.
    pub fn new(shape: &AttentionShape, centre: NewCentre) -> Result<Self> {
        if centre.tokens.end() > centre.rows.tokens {
            let reason = format!("tokens up to {} of {}", centre.tokens.end(), centre.rows.tokens);
            return Err(Error::Plan { what: "key mean", reason });
        }
        Ok(Self { shape: *shape, centre })
    }

    /// The kernel variant for keys of this type, for [`Kernels::prepare`].
    pub fn variant(&self, keys: ElementType) -> Variant {
        variant_of(keys)
    }

    /// Binds the store and the keys.
    ///
    /// # Errors
    /// [`Error::Plan`] when the store has another shape or lacks the slot, [`Error::Elements`] when the keys are
    /// shorter than their rows, [`Error::Limit`] when they are too large for a binding.
    pub fn bind(&self, kernels: &Kernels, store: &Store, keys: &Tensor) -> Result<Launch> {
        let NewCentre { rows, tokens, slot, largest } = self.centre;
        store.check_planned("key mean", &self.shape, store.format())?;
        store.check_centre("key mean", Some(slot))?;
        rows.check("keys", keys.elements(), &self.shape)?;
        let bound = BoundRows::new(keys, None, &kernels.device().limits())?;
        let total = self.shape.kv_heads() * self.shape.head_dim();
        let call = TileCall {
            first_element: bound.elements.first_element,
            first_token: tokens.start() as u32,
            tokens: tokens.len() as u32,
            range_slot: slot as u32,
            total: total as u32,
            shrink: 1.0 / tokens.len() as f32,
            largest,
            ..TileCall::new(&self.shape, &TensorFormat::F16, KeyOrValue::Key).with_rows(&rows, &self.shape)?
        };
        let call = call.upload(kernels.device(), &[])?;
        let grid = flat_grid(total as u64, &kernels.device().limits())?;
        let own = [("call", call.as_entire_buffer_binding()), ("centres", store.centres_binding()?)];
        let buffers: Vec<_> = own.into_iter().chain(bound.bindings()).collect();
        planned(kernels, &variant_of(keys.element_type()), &buffers, grid)
    }
}

/// The centres of sequences that begin with a step, in one store.
pub(super) fn bind_centres(bind: &Binder<'_>, store: usize) -> Result<WriteLaunch> {
    let input = bind.input()?;
    let shape = bind.layout.shape();
    let rows = input.keys.element_binding(&bind.limits)?;
    let section = TableSection::Centres(store);
    let total = shape.kv_heads() * shape.head_dim();
    let call = TileCall {
        first_element: rows.first_element,
        total: total as u32,
        largest: bind.layout.largest_centred(),
        section: bind.layout.first_entry(section) as u32,
        ..TileCall::new(shape, &TensorFormat::F16, KeyOrValue::Key).with_rows(&input.rows, shape)?
    };
    let centres = bind.stores[store].centres_binding()?;
    let buffers = vec![("rows", rows.buffer), ("table", bind.memory.table()), ("centres", centres)];
    let variant = of_step(input.keys.element_type());
    bind.launch(WriteKernel { variant, call, buffers }, (section, total as u64))
}

/// The mean of the tokens of a call.
fn variant_of(keys: ElementType) -> Variant {
    with_rows(Variant::new(&SHADERS, "key_mean"), keys.into())
}

/// The means that a step's table lists.
pub(super) fn of_step(keys: ElementType) -> Variant {
    variant_of(keys).import("mean", "pack/mean.wgsl#of_step")
}

/// Every variant that a plan uses.
pub(crate) fn variants() -> Vec<Variant> {
    ElementType::ALL.into_iter().flat_map(|keys| [variant_of(keys), of_step(keys)]).collect()
}
