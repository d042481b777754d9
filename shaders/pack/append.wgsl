// append: stores single tokens in pages of one shard, as f16 or as codes whose ranges belong to single tokens.
//
// One workgroup owns one token of one KV head. It reads the row, rotates it if the format does, computes and stores its
// ranges, and then writes its words. The words of a key belong to it alone; those of a value also hold other tokens.
// Tokens are read and keys are written coalesced; values are written in words 16 bytes apart. Keys of tokens beyond
// `tokens` are zero bits with a range of zero.
//
// In bounds: workgroups beyond the places · kv_heads return; pages, slots and the rows of the tokens read were checked
// against the buffers when they were bound, or when a step's table was made for the layout that they were bound to.
// Loops are bounded by HEAD_DIM; divisors are sizes of a checked shape.
//
// gives: INVOCATIONS, HEAD_DIM
// set by plans: HEAD_DIM

// import pack/call.wgsl
// import pack/tile.wgsl#places
// import pack/half.wgsl#conversions
// import rows = pack/rows.wgsl#f32
// import row = pack/row.wgsl#plain
// import row_ranges = pack/row_ranges.wgsl
// import field = pack/field.wgsl#f16
// import finite = pack/finite.wgsl#unchecked
// import words = pack/words.wgsl#of_key

const INVOCATIONS: u32 = 64u;
const HEAD_DIM: u32 = 128u;

@compute @workgroup_size(64)
fn append(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = group.y * groups.x + group.x;
    if (index / call.kv_heads >= place_count() || !has_place(index / call.kv_heads)) {
        return;
    }
    let place = place_at(index / call.kv_heads);
    let kv_head = index % call.kv_heads;
    let start = row_start(place.token, kv_head);
    let exists = place.token < call.tokens;
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        var x = 0f;
        if (exists) {
            x = storable(element_bits(start + channel), place, kv_head, channel);
        }
        put_channel(channel, x);
    }
    finish_row(invocation);
    store_row_ranges(place, kv_head, invocation);
    store_row(place, kv_head, exists, invocation);
}
