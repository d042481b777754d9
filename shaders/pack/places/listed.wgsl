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
