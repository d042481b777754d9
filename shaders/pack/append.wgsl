// append: single tokens into open pages of one shard: f16, or codes whose ranges belong to single tokens.
//
// One workgroup owns one token of one KV head: it reads the row, rotates it where it is stored so, makes and stores its
// ranges, and then its words: those of a key belong to it alone; a value's word holds other tokens too, which are read
// and kept, and the plan puts tokens that share words into dispatches of their own. Tokens are read and keys are written
// coalesced, values in words 16 bytes apart. Keys of tokens beyond `tokens` are zero bits, with a range of zero.
//
// In bounds: workgroups beyond `total` = places · kv_heads return; pages, slots and the rows of the tokens read were
// checked against the buffers when they were bound. Loops are bounded by HEAD_DIM; divisors are sizes of a checked shape.
//
// gives: INVOCATIONS, HEAD_DIM
// binds: 2 tiles
// set by plans: HEAD_DIM

// import pack/call.wgsl
// import pack/tile.wgsl
// import pack/half.wgsl
// import rows = pack/rows/f32.wgsl

const INVOCATIONS: u32 = 64u;
const HEAD_DIM: u32 = 128u;

// import row = pack/row/plain.wgsl
// import row_ranges = pack/row_ranges/slot.wgsl
// import field = pack/field/f16.wgsl

@group(0) @binding(2) var<storage, read_write> tiles: array<u32>;

@compute @workgroup_size(64)
fn append(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = group.y * groups.x + group.x;
    if (index >= call.total) {
        return;
    }
    let place = call.places[index / call.kv_heads];
    let kv_head = index % call.kv_heads;
    let start = row_start(place.token, kv_head);
    let exists = place.token < call.tokens;
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        var x = 0f;
        if (exists) {
            x = element(start + channel);
        }
        put_channel(channel, x);
    }
    finish_row(invocation);
    store_row_ranges(place, kv_head, invocation);

    let tile = (place.page * call.kv_heads + kv_head) * call.tile_words;
    if (KEYS == 1u) {
        for (var word = invocation; word < call.tile_words / TILE_TOKENS; word += INVOCATIONS) {
            let at = (word / call.vector * TILE_TOKENS + place.slot) * call.vector + word % call.vector;
            tiles[tile + at] = select(0u, key_word(place, kv_head, word), exists);
        }
    } else {
        for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
            let at = place_of(place.slot, channel);
            let bits = field_bits(channel_value(channel), place, kv_head, place.slot, channel);
            put_bits(tile + at.x, at.y, bits, select(FIELD_MASK, 3u, BITS == 3u));
            if (BITS == 3u) {
                let top = top_place_of(place.slot, channel);
                put_bits(tile + top.x, top.y, bits >> 2u, 1u);
            }
        }
    }
}

fn put_bits(word: u32, shift: u32, bits: u32, mask: u32) {
    tiles[word] = (tiles[word] & ~(mask << shift)) | ((bits & mask) << shift);
}

fn key_word(place: Place, kv_head: u32, word: u32) -> u32 {
    var packed = 0u;
    for (var i = 0u; i < fields_of(word); i++) {
        let field = field_of(vec2<u32>(place.slot, word), i);
        if (field.channel < HEAD_DIM) {
            let bits = field_bits(channel_value(field.channel), place, kv_head, place.slot, field.channel);
            packed |= ((bits >> field.low) & field.mask) << field.shift;
        }
    }
    return packed;
}
