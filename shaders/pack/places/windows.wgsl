// Full pages that a step packs. Tokens are counted through the f16 pages that hold them, as their rows are
// (`rows/key_tile.wgsl`).
//
// needs: Place, TILE_TOKENS, call
// gives: place_count, has_place, place_at

// import pack/step_table.wgsl

fn place_count() -> u32 {
    return entry_count();
}

fn has_place(index: u32) -> bool {
    return has_entry(index);
}

fn place_at(index: u32) -> Place {
    let entry = entry_at(index);
    return Place(entry.x * call.kv_heads * TILE_TOKENS, entry.y, 0u, entry.z);
}
