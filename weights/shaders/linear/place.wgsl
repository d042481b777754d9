// -------- in_order --------

// Places of a layer whose inputs lie in order.

fn input_at(place: u32) -> u32 {
    return place;
}

// -------- ordered --------

// Places of a layer with an order of its inputs; 0xFFFFFFFF where there is none.

@group(0) @binding(0) var<storage, read> order: array<u32>;

fn input_at(place: u32) -> u32 {
    return order[place];
}
