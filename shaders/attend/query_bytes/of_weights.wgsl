// Query bytes in the memory of a step's weights. Scores are computed before a step has weights, and the bytes of the
// next step once its values are added. That takes two extra barriers per step, and two thirds of the workgroup memory.
//
// needs: make_query_bytes, weight_bytes
// gives: put_query_word, query_vector, prepare_keys_late

fn put_query_word(vector: u32, word: u32, bytes: u32) {
    weight_bytes[vector][word] = bytes;
}

fn query_vector(vector: u32) -> vec4<u32> {
    return weight_bytes[vector];
}

fn prepare_keys_late(first: u32, tiles: u32, team: u32, lane: u32) {
    if (first >= tiles) {
        return;
    }
    workgroupBarrier();
    make_query_bytes(first, tiles, team, lane);
    workgroupBarrier();
}
