// Arguments of the kernels that move rows of dense tensors into tiles and back.
//
// gives: Place, call, TILE_TOKENS, row_start, rounded
// binds: 0 call

// import tokens = pack/tokens.wgsl#run
// import places = pack/places.wgsl#listed

struct Place {
    // First token, relative to the first of the span.
    token: u32,
    // The page within its shard.
    page: u32,
    // Slot of the token in the page, if the place is a single token's.
    slot: u32,
    // Range slot of the span that the page belongs to.
    range_slot: u32,
}

struct Call {
    // Index of the dense tensor's first element within its binding.
    first_element: u32,
    token_stride: u32,
    head_stride: u32,
    // First token of the span in the dense tensor.
    first_token: u32,
    // Tokens of the span.
    tokens: u32,
    kv_heads: u32,
    head_dim: u32,
    range_slot: u32,
    tile_words: u32,
    // Words of one load of a tile.
    vector: u32,
    // Tokens or channels that share a range.
    group: u32,
    ranges_per_tile: u32,
    // Number of invocations with work, or of rows, unless the places determine it.
    total: u32,
    shrink: f32,
    // 0, in a form that the compiler cannot know.
    zero: u32,
    place_count: u32,
    // Indices per KV head of gathered tokens, and their exclusive upper bound.
    index_stride: u32,
    below: u32,
    // The largest valid element, for kernels that check elements.
    largest: f32,
    // The section of a step's table that counts and lists the places, and the shards that this dispatch takes from it.
    section: u32,
    shards: u32,
    places: array<Place>,
}

@group(0) @binding(0) var<storage, read> call: Call;

const TILE_TOKENS: u32 = 128u;

// Index of a row's first element within the dense tensor's binding. Tokens are relative to the first of the span.
fn row_start(token: u32, kv_head: u32) -> u32 {
    return call.first_element + token_of(token, kv_head) * call.token_stride + kv_head * call.head_stride;
}

// `x` as rounded. Compilers may fuse a product with the sum that takes it, but not through this function.
fn rounded(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) ^ call.zero);
}
