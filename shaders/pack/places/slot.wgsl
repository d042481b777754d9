// Slot `places`: the places that tokens go to, or come from.
//
// Every choice has
//   fn place_count() -> u32
//   fn place_at(index: u32) -> Place
//     one of so many
//
// gives: has_place

// Whether the dispatch takes a place.
fn has_place(index: u32) -> bool {
    return true;
}
