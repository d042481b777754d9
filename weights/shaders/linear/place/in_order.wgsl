// Places of a layer whose inputs lie in order.

fn input_at(place: u32) -> u32 {
    return place;
}
