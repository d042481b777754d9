//! Packs full f16 pages into pages of another store, directly from their tiles. The result is that of `quantize` on
//! their rows.

use super::hadamard::{self, DirectedRotation};
use super::tile_call::{self, TileCall};
use super::window_packing::WindowPacking;
use super::write_launch::{Binder, WriteKernel, WriteLaunch};
use super::{append, quantize};
use crate::Result;
use crate::format::{AttentionShape, Direction, KeyOrValue, Rotation, TILE_TOKENS, TensorFormat};
use crate::plan::{ElementType, TableSection};
use crate::wgpu::device::launch::FLAT_WORKGROUP;
use crate::wgpu::device::{StoreBuffer, Variant};

/// The kernels that pack keys or values of windows, in order.
pub(super) fn variants_of(shape: &AttentionShape, format: &TensorFormat, which: KeyOrValue) -> Vec<Variant> {
    let head_dim = shape.head_dim();
    let dense = ElementType::F32.into();
    let tiles = |place| {
        let ranges = match format.has_span_ranges() {
            true => Some(quantize::ranges_window(format, dense)),
            false => quantize::tile_ranges(format, dense),
        };
        let of_tiles = ranges.into_iter().chain([quantize::quantize(format, which, dense, head_dim)]);
        of_tiles.map(|variant| variant.import("places", place)).collect::<Vec<_>>()
    };
    match WindowPacking::of(format) {
        WindowPacking::Rows => vec![append::of_windows(shape, format, which)],
        WindowPacking::Tiles => {
            let tiles = tiles("pack/places.wgsl#windows").into_iter();
            tiles.map(|variant| tile_call::with_f16_tiles(variant, which)).collect()
        }
        WindowPacking::RotatedTiles(rotation) => {
            let turn = DirectedRotation { rotation, direction: Direction::Forward };
            let rotate = tile_call::with_f16_tiles(hadamard::from_rows(head_dim, turn, dense), which)
                .import("tokens", "pack/tokens.wgsl#windows");
            std::iter::once(rotate).chain(tiles("pack/places.wgsl#rotated_windows")).collect()
        }
    }
}

/// Windows of a pair of stores, from one shard to another, of keys or of values.
pub(super) fn bind_windows(
    bind: &Binder<'_>,
    pair: usize,
    [from, to]: [u32; 2],
    which: KeyOrValue,
) -> Result<Vec<WriteLaunch>> {
    let (shape, of) = (bind.layout.shape(), bind.layout.windows()[pair]);
    let (source, target) = (bind.stores[of.from], bind.stores[of.to]);
    let format = target.format().tensor(which);
    let (kv_heads, head_dim) = (shape.kv_heads() as u32, shape.head_dim() as u32);
    let section = TableSection::Windows(pair);
    let section_call = TileCall {
        tokens: u32::MAX,
        section: bind.layout.first_entry(section) as u32,
        shards: from | to << 16,
        ..TileCall::new(shape, format, which)
    };
    // Rows [page][kv_head][token][channel], as `pack/rows.wgsl#key_tile` counts them, and
    // [window][token][kv_head][channel].
    let in_tiles = TileCall { token_stride: head_dim, head_stride: TILE_TOKENS as u32 * head_dim, ..section_call };
    let rotated = TileCall { token_stride: kv_heads * head_dim, head_stride: head_dim, ..section_call };
    let halves = ("rows", source.shard_binding(from, StoreBuffer::tiles(which))?);
    let table = ("table", bind.memory.table());
    let mut launches = Vec::new();
    for variant in variants_of(shape, format, which) {
        let (call, rows) = match (WindowPacking::of(format), variant.kernel()) {
            (WindowPacking::RotatedTiles(_), kernel) if kernel != "hadamard" => {
                (rotated, ("rows", bind.memory.rotated()?))
            }
            _ => (in_tiles, halves.clone()),
        };
        let mut buffers = vec![rows, table.clone()];
        let of_tile = match variant.kernel() {
            "hadamard" => {
                buffers.push(("output", bind.memory.rotated()?));
                TILE_TOKENS as u32 * FLAT_WORKGROUP
            }
            "append" => {
                buffers.push(("tiles", target.shard_binding(to, StoreBuffer::tiles(which))?));
                TILE_TOKENS as u32 * FLAT_WORKGROUP
            }
            "quantize" => {
                buffers.push(("tiles", target.shard_binding(to, StoreBuffer::tiles(which))?));
                call.tile_words
            }
            "ranges_tile" => call.ranges_per_tile,
            _ => head_dim,
        };
        buffers.extend(target.ranges_binding(to, which)?.map(|ranges| ("ranges", ranges)));
        let rows = of.windows as u64 * u64::from(kv_heads) * TILE_TOKENS as u64;
        let call = TileCall { total: u32::try_from(rows).unwrap_or(u32::MAX), ..call };
        let per_entry = u64::from(kv_heads) * u64::from(of_tile);
        launches.push(bind.launch(WriteKernel { variant, call, buffers }, (section, per_entry))?);
    }
    Ok(launches)
}

/// Every variant that windows can use.
pub(super) fn variants() -> Vec<Variant> {
    let mut found = Vec::new();
    for head_dim in [80, 128] {
        let Ok(shape) = AttentionShape::new(1, 1, head_dim) else { continue };
        let rotated = tile_call::distinct_formats(head_dim).into_iter().filter_map(|format| match format {
            TensorFormat::Affine(affine) if affine.rotation.is_none() => {
                Some(TensorFormat::Affine(affine.rotated(Rotation::hadamard(16))))
            }
            _ => None,
        });
        for format in tile_call::distinct_formats(head_dim).into_iter().chain(rotated) {
            found
                .extend([KeyOrValue::Key, KeyOrValue::Value].map(|which| variants_of(&shape, &format, which)).concat());
        }
    }
    found
}
