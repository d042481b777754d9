// The single tokens of full pages that a step packs: those of `places/windows.wgsl`.
//
// needs: Place, TILE_TOKENS, call
// gives: place_count, has_place, place_at

// import pack/step_table.wgsl

fn place_count() -> u32 {
    return entry_count() * TILE_TOKENS;
}

fn has_place(index: u32) -> bool {
    return has_entry(index / TILE_TOKENS);
}

fn place_at(index: u32) -> Place {
    let entry = entry_at(index / TILE_TOKENS);
    let slot = index % TILE_TOKENS;
    return Place(entry.x * call.kv_heads * TILE_TOKENS + slot, entry.y, slot, entry.z);
}
