//! Kernel `dequantize`.

use super::hadamard::{self, DirectedRotation, rotate_in_place};
use super::levels::with_level_fields;
use super::tile_call::{self, PlacedPage, ShardPlaces, TileCall};
use super::uncentre_keys;
use crate::backend::SpanRead;
use crate::format::sketch::sketch_level;
use crate::format::{AttentionShape, Direction, KeyOrValue, Rotation, SegmentFormat, TILE_TOKENS, TensorFormat};
use crate::plan::{ElementType, Page};
use crate::wgpu::device::launch::{Launch, Launches, flat_grid};
use crate::wgpu::device::{Kernels, Store, StoreBuffer, Tensor, Variant};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use crate::{Error, Result};

/// Decodes the keys and the values of a span into dense f32 rows `[kv_heads, tokens, head_dim]`. The plan decides
/// everything except the buffers. There is one dispatch for each of keys and values and every shard that the span
/// touches, and one more for each of them that is rotated. Keys with sketches take two of each, and centred keys one
/// more.
#[derive(Clone, Debug)]
pub struct DequantizePlan {
    shape: AttentionShape,
    format: SegmentFormat,
    pages: Vec<Page>,
    tokens: usize,
    range_slot: usize,
    centre: Option<usize>,
}

impl DequantizePlan {
    /// Plans `read` of a store of this shape and format.
    ///
    /// # Errors
    /// [`Error::Format`] when the format does not fit the shape; [`Error::Plan`] when the number of pages does not
    /// match the tokens.
    pub fn new(shape: &AttentionShape, format: &SegmentFormat, read: &SpanRead<'_>) -> Result<Self> {
        format.check(shape)?;
        tile_call::check_span("dequantize", read.tokens, read.pages)?;
        let pages = read.pages.to_vec();
        let SpanRead { tokens, range_slot, centre, .. } = *read;
        Ok(Self { shape: *shape, format: *format, pages, tokens, range_slot, centre })
    }

    /// Elements of each of the two outputs.
    pub fn elements(&self) -> usize {
        self.shape.kv_heads() * self.tokens * self.shape.head_dim()
    }

    /// The kernel variants, for [`Kernels::prepare`].
    pub fn variants(&self) -> Vec<Variant> {
        let of = |which| {
            let stages = stages(self.format.tensor(which), which, self.shape.head_dim()).into_iter();
            stages.flat_map(|stage| {
                let back =
                    stage.back.into_iter().map(|rotation| DirectedRotation { rotation, direction: Direction::Inverse });
                std::iter::once(stage.variant).chain(back.map(|turn| hadamard::in_place(self.shape.head_dim(), turn)))
            })
        };
        let centre = self.centre.map(|_| uncentre_keys::variant());
        of(KeyOrValue::Key).chain(of(KeyOrValue::Value)).chain(centre).collect()
    }

    /// Binds the store and the two f32 tensors to write. Their offsets must be multiples of the device's alignment of
    /// storage bindings.
    ///
    /// # Errors
    /// [`Error::Plan`] when the store does not have the planned shape and format, or lacks a page or the range slot;
    /// [`Error::Elements`] or [`Error::Buffer`] when an output does not fit the plan; [`Error::Limit`] when it is too
    /// large.
    pub fn bind(&self, kernels: &Kernels, store: &Store, keys: &Tensor, values: &Tensor) -> Result<Launches> {
        store.check_planned("dequantize", &self.shape, &self.format)?;
        store.check_pages("dequantize", &self.pages)?;
        store.check_slot("dequantize", self.range_slot)?;
        store.check_centre("dequantize", self.centre)?;
        let outputs = [(KeyOrValue::Key, "dequantized keys", keys), (KeyOrValue::Value, "dequantized values", values)];
        let mut launches = Vec::new();
        for (which, what, output) in outputs {
            self.check_output(what, output, &kernels.device().limits())?;
            for stage in stages(self.format.tensor(which), which, self.shape.head_dim()) {
                for shard in tile_call::places_by_shard(&PlacedPage::of_span(&self.pages, self.range_slot)) {
                    launches.push(self.bind_shard(kernels, store, (which, output, &stage.variant), &shard)?);
                }
                for rotation in stage.back {
                    let turn = DirectedRotation { rotation, direction: Direction::Inverse };
                    let rows = self.shape.kv_heads() * self.tokens;
                    launches.push(rotate_in_place(kernels, turn, &self.shape, rows, output.binding())?);
                }
            }
            if let Some(slot) = self.centre.filter(|_| which == KeyOrValue::Key) {
                launches.push(uncentre_keys::uncentre(kernels, store, slot, self.tokens, output)?);
            }
        }
        Ok(launches.into_iter().collect())
    }

    fn check_output(&self, what: &'static str, output: &Tensor, limits: &wgpu::Limits) -> Result<()> {
        if output.elements() != self.elements() {
            let shape = format!("[{}, {}, {}]", self.shape.kv_heads(), self.tokens, self.shape.head_dim());
            return Err(Error::Elements { what, given: output.elements(), expected: self.elements(), shape });
        }
        if output.element_type() != ElementType::F32 {
            let reason = format!("it holds {:?}, but the kernel writes F32", output.element_type());
            return Err(Error::Buffer { what, reason });
        }
        output.check_aligned(what, limits)
    }

    fn bind_shard(
        &self,
        kernels: &Kernels,
        store: &Store,
        (which, output, variant): (KeyOrValue, &Tensor, &Variant),
        shard: &ShardPlaces,
    ) -> Result<Launch> {
        let format = self.format.tensor(which);
        let per_page = (self.shape.kv_heads() * TILE_TOKENS * self.shape.head_dim()) as u64;
        let total = shard.places.len() as u64 * per_page;
        let grid = flat_grid(total, &kernels.device().limits())?;
        let call = TileCall {
            tokens: self.tokens as u32,
            range_slot: self.range_slot as u32,
            total: total as u32,
            ..TileCall::new(&self.shape, format, which)
        };
        let call = call.upload(kernels.device(), &shard.places)?;
        let mut buffers = vec![
            ("call", call.as_entire_buffer_binding()),
            ("tiles", store.shard_binding(shard.shard, StoreBuffer::tiles(which))?),
            ("output", output.binding()),
        ];
        buffers.extend(store.ranges_binding(shard.shard, which)?.map(|ranges| ("ranges", ranges)));
        planned(kernels, variant, &buffers, grid)
    }
}

/// A pass over all elements, and the rotations that are undone after it.
struct Stage {
    variant: Variant,
    back: Vec<Rotation>,
}

/// One stage. For keys with sketches two: the first writes the signs, the second adds the levels.
fn stages(format: &TensorFormat, which: KeyOrValue, head_dim: usize) -> Vec<Stage> {
    let rotation = || format.rotation().into_iter().collect();
    let Some(sketched) = format.sketched() else {
        return vec![Stage { variant: variant_of(format, which, head_dim), back: rotation() }];
    };
    let of = |field| {
        tile_call::with_layout(Variant::new(&SHADERS, "dequantize"), format.element_bits(), which)
            .import("field", field)
    };
    let signs = of("pack/field.wgsl#sketch").float("SKETCH_LEVEL", sketch_level(head_dim));
    let levels = with_level_fields(of("pack/field.wgsl#codebook"), sketched, head_dim).constant("ADDS", 1);
    vec![
        Stage { variant: signs, back: sketched.sketch_rotations(head_dim).rev().collect() },
        Stage { variant: levels, back: format.rotation().into_iter().collect() },
    ]
}

fn variant_of(format: &TensorFormat, which: KeyOrValue, head_dim: usize) -> Variant {
    let variant = tile_call::with_layout(Variant::new(&SHADERS, "dequantize"), format.element_bits(), which);
    tile_call::with_fields(variant, format, head_dim)
}

/// Every variant that a plan uses.
pub(crate) fn variants() -> Vec<Variant> {
    let each = [KeyOrValue::Key, KeyOrValue::Value];
    let of = |format: &TensorFormat| each.map(|which| variant_of(format, which, 128));
    let sketched = tile_call::sketched_formats(128);
    let sketched = sketched.iter().flat_map(|format| stages(format, KeyOrValue::Key, 128)).map(|stage| stage.variant);
    tile_call::distinct_formats(128).iter().flat_map(of).chain(sketched).collect()
}
