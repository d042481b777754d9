//! Kernel `append`: the tokens of a step, the rows of windows that are stored one by one, and rows whose sketches need
//! the whole row.

use super::hadamard::{DirectedRotation, with_sketch, with_turn};
use super::levels::{with_codebook_fields, with_level_fields};
use super::tile_call::{self, RowsKind, TileCall};
use super::write_launch::{Binder, WriteKernel, WriteLaunch};
use crate::Result;
use crate::format::{AttentionShape, Direction, HEAD_DIMS, KeyOrValue, NormRule, SegmentFormat, TensorFormat};
use crate::plan::{ElementType, TableSection};
use crate::wgpu::device::launch::FLAT_WORKGROUP;
use crate::wgpu::device::{StoreBuffer, Variant};
use crate::wgpu::sources::SHADERS;

/// Tokens of a step for one shard of a store: one dispatch for keys and values, or one for each if the device binds too
/// few buffers. Tokens of one page may share words of values. Their threads change such words bit by bit.
pub(super) fn bind_tokens(bind: &Binder<'_>, store: usize, shard: u32) -> Result<Vec<WriteLaunch>> {
    let section = TableSection::Tokens(store);
    let per_entry = bind.layout.shape().kv_heads() as u64 * u64::from(FLAT_WORKGROUP);
    let of = |which| tokens_of(bind, store, shard, which);
    let (keys, values) = (of(KeyOrValue::Key)?, of(KeyOrValue::Value)?);
    let of_both = buffers_of_both(bind.stores[store].format(), bind.layout.has_centres(store));
    if of_both <= bind.kernels.storage_buffers() {
        return Ok(vec![bind.launch_beside(keys, values, (section, per_entry))?]);
    }
    [keys, values].into_iter().map(|kernel| bind.launch(kernel, (section, per_entry))).collect()
}

fn tokens_of<'a>(bind: &Binder<'a>, store: usize, shard: u32, which: KeyOrValue) -> Result<WriteKernel<'a>> {
    let input = bind.input()?;
    let tensor = match which {
        KeyOrValue::Key => input.keys,
        KeyOrValue::Value => input.values,
    };
    let (shape, of) = (bind.layout.shape(), bind.stores[store]);
    let format = of.format().tensor(which);
    let rows = tensor.element_binding(&bind.limits)?;
    let call = TileCall {
        first_element: rows.first_element,
        tokens: u32::try_from(input.rows.tokens).unwrap_or(u32::MAX),
        largest: bind.layout.largest_element(store, which),
        section: bind.layout.first_entry(TableSection::Tokens(store)) as u32,
        shards: shard,
        ..TileCall::new(shape, format, which).with_rows(&input.rows, shape)?
    };
    let mut buffers = vec![
        ("rows", rows.buffer),
        ("tiles", of.shard_binding(shard, StoreBuffer::tiles(which))?),
        ("table", bind.memory.table()),
        ("flag", input.flags.binding(input.layer, which)?),
    ];
    buffers.extend(of.ranges_binding(shard, which)?.map(|ranges| ("ranges", ranges)));
    let centred = bind.layout.has_centres(store);
    if centred && which == KeyOrValue::Key {
        buffers.push(("centres", of.centres_binding()?));
    }
    let variant = of_tokens(shape, format, which, tensor.element_type(), centred);
    Ok(WriteKernel { variant, call, buffers })
}

/// Number of storage buffers of a dispatch that stores both keys and values of a step's tokens.
fn buffers_of_both(format: &SegmentFormat, centred: bool) -> u32 {
    let of = |which| match format.tensor(which).grouping() {
        None => TOKEN_BUFFERS,
        Some(_) => TOKEN_BUFFERS + 1,
    };
    1 + of(KeyOrValue::Key) + of(KeyOrValue::Value) + u32::from(centred)
}

/// Number of buffers that keys, or values, bind in addition to the step's table and their ranges: arguments, rows,
/// tiles and the flag.
const TOKEN_BUFFERS: u32 = 4;

/// The kernels that store the tokens of a step in a store of this format, for keys and values of these types, on a
/// device that binds `storage_buffers` storage buffers to a kernel.
pub(super) fn variants_of_tokens(
    storage_buffers: u32,
    shape: &AttentionShape,
    format: &SegmentFormat,
    [keys, values]: [ElementType; 2],
    centred: bool,
) -> Vec<Variant> {
    let of = |which, rows| of_tokens(shape, format.tensor(which), which, rows, centred);
    let (keys, values) = (of(KeyOrValue::Key, keys), of(KeyOrValue::Value, values));
    match buffers_of_both(format, centred) <= storage_buffers {
        true => vec![keys.beside(values)],
        false => vec![keys, values],
    }
}

/// Tokens of a step, for a store whose keys are centred or not. If they are, the step's table names centres next to
/// slots, for values too.
fn of_tokens(
    shape: &AttentionShape,
    format: &TensorFormat,
    which: KeyOrValue,
    rows: ElementType,
    centred: bool,
) -> Variant {
    let places = if centred { "pack/places.wgsl#centred_tokens" } else { "pack/places.wgsl#tokens" };
    let finite = match centred && which == KeyOrValue::Key {
        true => "pack/finite.wgsl#centred",
        false => "pack/finite.wgsl#flagged",
    };
    variant_of(shape, format, which, rows.into()).import("places", places).import("finite", finite)
}

/// The rows of windows.
pub(super) fn of_windows(shape: &AttentionShape, format: &TensorFormat, which: KeyOrValue) -> Variant {
    let variant = variant_of(shape, format, which, ElementType::F32.into());
    tile_call::with_f16_tiles(variant, which).import("places", "pack/places.wgsl#window_rows")
}

/// Contiguous rows that were already checked, into listed places.
pub(super) fn variant_of(shape: &AttentionShape, format: &TensorFormat, which: KeyOrValue, rows: RowsKind) -> Variant {
    let variant = Variant::new(&SHADERS, "append").constant("HEAD_DIM", shape.head_dim());
    let variant = match which {
        KeyOrValue::Key => variant,
        KeyOrValue::Value => variant.import("words", "pack/words.wgsl#of_value"),
    };
    let variant = tile_call::with_rows(tile_call::with_layout(variant, format.element_bits(), which), rows);
    let variant = match format.rotation() {
        None => variant,
        Some(rotation) => {
            let turn = DirectedRotation { rotation, direction: Direction::Forward };
            with_turn(variant.import("row", "pack/row.wgsl#rotated"), turn, shape.head_dim())
        }
    };
    match format {
        TensorFormat::F16 => variant,
        TensorFormat::Affine(affine) => tile_call::with_range_rule(variant, format)
            .import("field", "pack/field.wgsl#codes")
            .import("ranges", ROW_RANGES)
            .import("row_ranges", ROW_RANGES)
            .constant("GROUPING", tile_call::grouping_constant(affine.grouping)),
        TensorFormat::Codebook(codebook) => match codebook.sketch {
            None => {
                let row_norm = match codebook.norms {
                    NormRule::Row => "pack/row_ranges.wgsl#norm",
                    NormRule::Renormalized => "pack/row_ranges.wgsl#renormalized",
                };
                let variant = with_codebook_fields(variant, codebook, shape.head_dim());
                variant.import("norms", row_norm).import("row_ranges", row_norm)
            }
            Some(sketch) => {
                let variant = with_level_fields(variant, codebook, shape.head_dim());
                with_sketch(variant, sketch, codebook.rotation.order(), shape.head_dim())
                    .import("field", ROW_SKETCH)
                    .import("row_ranges", ROW_SKETCH)
            }
        },
    }
}

/// Ranges that are computed for a row and used by its codes.
const ROW_RANGES: &str = "pack/row_ranges.wgsl#affine";

/// The norms, codes and sketch of a row.
const ROW_SKETCH: &str = "pack/row_ranges.wgsl#sketch";

/// Every variant that a plan uses.
pub(crate) fn variants() -> Vec<Variant> {
    let mut found = Vec::new();
    for head_dim in HEAD_DIMS {
        let Ok(shape) = AttentionShape::new(1, 1, head_dim) else { continue };
        let formats = tile_call::distinct_formats(head_dim).into_iter().chain(tile_call::sketched_formats(head_dim));
        for format in formats.filter(TensorFormat::takes_single_tokens) {
            let each = [KeyOrValue::Key, KeyOrValue::Value].into_iter();
            for which in each.filter(|which| *which == KeyOrValue::Key || format.sketched().is_none()) {
                found.extend(RowsKind::all().map(|rows| variant_of(&shape, &format, which, rows)));
                for centred in [false, true] {
                    found.extend(ElementType::ALL.map(|rows| of_tokens(&shape, &format, which, rows, centred)));
                }
                found.push(of_windows(&shape, &format, which));
            }
            // Values of the next type; f16 if values cannot have the format of the keys.
            let values = if format.sketched().is_none() { format } else { TensorFormat::F16 };
            for (rows, centred) in [(0, false), (1, true), (2, false)] {
                let of = |format, which, rows: usize| {
                    of_tokens(&shape, format, which, ElementType::ALL[rows % ElementType::ALL.len()], centred)
                };
                let (keys, values) = (of(&format, KeyOrValue::Key, rows), of(&values, KeyOrValue::Value, rows + 1));
                found.push(keys.beside(values));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_counted_as_they_are_bound() {
        let shape = AttentionShape::new(8, 2, 128).unwrap();
        for format in [SegmentFormat::F16, SegmentFormat::saw_int4()] {
            for centred in [false, true] {
                let count = buffers_of_both(&format, centred);
                let of = |storage_buffers| {
                    variants_of_tokens(storage_buffers, &shape, &format, [ElementType::F16; 2], centred)
                };
                let [both] = &of(count)[..] else { panic!("two kernels where one fits") };
                assert_eq!(both.source().unwrap().bindings.len(), count as usize, "{}", both.label());
                assert_eq!(of(count - 1).len(), 2);
            }
        }
    }
}
