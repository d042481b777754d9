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
