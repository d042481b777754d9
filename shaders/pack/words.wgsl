// Slot `words`: the words of a tile that hold a token.
//
// Every choice has
//   fn store_row(place: Place, kv_head: u32, exists: bool, invocation: u32)
//     stores the row in workgroup memory, or zeros if there is no such token

// -------- of_key --------

// The words of a key, which belong to it alone. An invocation codes some channels, then writes some words.
//
// needs: HEAD_DIM, INVOCATIONS, Place, TILE_TOKENS, call, channel_value, field_bits, field_of, fields_of
// gives: store_row
// binds: 2 tiles

@group(0) @binding(2) var<storage, read_write> tiles: array<u32>;

var<workgroup> row_bits: array<u32, HEAD_DIM>;

fn store_row(place: Place, kv_head: u32, exists: bool, invocation: u32) {
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        row_bits[channel] = field_bits(channel_value(channel), place, kv_head, place.slot, channel);
    }
    workgroupBarrier();
    let tile = (place.page * call.kv_heads + kv_head) * call.tile_words;
    for (var word = invocation; word < call.tile_words / TILE_TOKENS; word += INVOCATIONS) {
        let at = (word / call.vector * TILE_TOKENS + place.slot) * call.vector + word % call.vector;
        tiles[tile + at] = select(0u, key_word(place.slot, word), exists);
    }
}

fn key_word(slot: u32, word: u32) -> u32 {
    var packed = 0u;
    for (var i = 0u; i < fields_of(word); i++) {
        let field = field_of(vec2<u32>(slot, word), i);
        if (field.channel < HEAD_DIM) {
            packed |= ((row_bits[field.channel] >> field.low) & field.mask) << field.shift;
        }
    }
    return packed;
}

// -------- of_value --------

// The words of a value, which also hold other tokens. Tokens of one word may be stored at the same time. Nobody else
// changes the bits of a token's field, so the kernel clears and sets them with atomics. It reads nothing, so nothing
// waits for memory.
//
// needs: BITS, FIELD_MASK, HEAD_DIM, INVOCATIONS, Place, call, channel_value, field_bits, place_of, top_place_of
// gives: store_row
// binds: 2 tiles

@group(0) @binding(2) var<storage, read_write> tiles: array<atomic<u32>>;

fn store_row(place: Place, kv_head: u32, exists: bool, invocation: u32) {
    let tile = (place.page * call.kv_heads + kv_head) * call.tile_words;
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

fn put_bits(word: u32, shift: u32, bits: u32, mask: u32) {
    atomicAnd(&tiles[word], ~(mask << shift));
    atomicOr(&tiles[word], (bits & mask) << shift);
}
