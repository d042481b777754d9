// copy_page: copies one part of pages: tiles or their ranges, of keys or values.
//
// One invocation owns one word; neighbours own neighbouring words.
//
// In bounds: invocations beyond the words of all places return; pages were checked against the buffers when the step's
// table was made for the layout that they were bound to. Divisors are sizes of a checked shape.
//
// gives: target_words
// binds: 2 target_words

// import pack/flat.wgsl
// import pack/call.wgsl
// import source = pack/source.wgsl#same

@group(0) @binding(2) var<storage, read_write> target_words: array<u32>;

@compute @workgroup_size(64)
fn copy_page(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = flat_index(group, groups, invocation);
    let page_words = call.kv_heads * call.tile_words;
    let copy = index / page_words;
    if (copy >= place_count() || !has_place(copy)) {
        return;
    }
    let place = place_at(copy);
    target_words[place.page * page_words + index % page_words] = source_word(place.token * page_words + index % page_words);
}
