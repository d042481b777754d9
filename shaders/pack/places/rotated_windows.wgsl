// Full pages that a step packs, whose rows were rotated into dense rows: 128 per page, in order.
//
// needs: Place, TILE_TOKENS
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
    return Place(index * TILE_TOKENS, entry.y, 0u, entry.z);
}
