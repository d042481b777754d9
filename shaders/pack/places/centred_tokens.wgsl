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
