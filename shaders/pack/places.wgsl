// Slot `places`: the places that tokens go to, or come from.
//
// Every choice has
//   fn place_count() -> u32
//   fn place_at(index: u32) -> Place
//     the place of an index below that count
//
// gives: has_place

// Whether the dispatch takes a place.
fn has_place(index: u32) -> bool {
    return true;
}

// -------- centred_tokens --------

// Tokens that a step stores centred. The slot of the centre takes the place of the range slot.
//
// needs: Place
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
    return Place(entry.x, entry.y, entry.z & 0xffu, entry.z >> 8u);
}

// -------- copies --------

// Pages that a step copies. The page to read takes the place of the token.
//
// needs: Place
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
    return Place(entry.x, entry.y, 0u, 0u);
}

// -------- listed --------

// Places that follow the arguments.
//
// needs: Place, call
// gives: place_count, place_at

fn place_count() -> u32 {
    return call.place_count;
}

fn place_at(index: u32) -> Place {
    return call.places[index];
}

// -------- rotated_windows --------

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

// -------- tokens --------

// Tokens that a step stores.
//
// needs: Place
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
    return Place(entry.x, entry.y, entry.z, 0u);
}

// -------- window_rows --------

// The single tokens of full pages that a step packs: those of `places.wgsl#windows`.
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

// -------- windows --------

// Full pages that a step packs. Tokens are counted through the f16 pages that hold them, as their rows are
// (`rows.wgsl#key_tile`).
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
