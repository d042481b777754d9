//! Kernel `copy_page`: copies pages within their store.

use super::tile_call::TileCall;
use super::write_launch::{Binder, WriteKernel, WriteLaunch};
use crate::Result;
use crate::format::KeyOrValue;
use crate::plan::TableSection;
use crate::wgpu::device::{StoreBuffer, Variant};
use crate::wgpu::sources::SHADERS;

/// Copies from one shard of a store to another or the same one: one dispatch for each part of a page.
pub(super) fn bind_copies(bind: &Binder<'_>, store: usize, [from, to]: [u32; 2]) -> Result<Vec<WriteLaunch>> {
    let mut launches = Vec::new();
    for which in [KeyOrValue::Key, KeyOrValue::Value] {
        launches.extend(bind_part(bind, store, [from, to], which, StoreBuffer::tiles(which))?);
        launches.extend(bind_part(bind, store, [from, to], which, StoreBuffer::ranges(which))?);
    }
    Ok(launches)
}

fn bind_part(
    bind: &Binder<'_>,
    store: usize,
    [from, to]: [u32; 2],
    which: KeyOrValue,
    part: StoreBuffer,
) -> Result<Option<WriteLaunch>> {
    let of = bind.stores[store];
    let page_words = of.page_part_bytes(part) / 4;
    if page_words == 0 {
        return Ok(None);
    }
    let section = TableSection::Copies(store);
    let shape = bind.layout.shape();
    let call = TileCall {
        tile_words: (page_words / shape.kv_heads() as u64) as u32,
        section: bind.layout.first_entry(section) as u32,
        shards: from | to << 16,
        ..TileCall::new(shape, of.format().tensor(which), which)
    };
    let mut buffers = vec![("target_words", of.shard_binding(to, part)?), ("table", bind.memory.table())];
    if from != to {
        buffers.push(("source_words", of.shard_binding(from, part)?));
    }
    bind.launch(WriteKernel { variant: variant(from == to), call, buffers }, (section, page_words)).map(Some)
}

/// Within one shard, or from one to another.
fn variant(within: bool) -> Variant {
    let variant = Variant::new(&SHADERS, "copy_page").import("places", "pack/places.wgsl#copies");
    if within { variant } else { variant.import("source", "pack/source.wgsl#other") }
}

/// Both variants.
pub(super) fn variants() -> Vec<Variant> {
    vec![variant(true), variant(false)]
}
