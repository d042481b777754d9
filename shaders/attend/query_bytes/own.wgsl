// Query bytes in memory of their own, computed next to the weights of the previous step.
//
// needs: STEP_QUERY_VECTORS, make_query_bytes
// gives: put_query_word, query_vector, prepare_keys

var<workgroup> group_query: array<vec4<u32>, STEP_QUERY_VECTORS>;

fn put_query_word(vector: u32, word: u32, bytes: u32) {
    group_query[vector][word] = bytes;
}

fn query_vector(vector: u32) -> vec4<u32> {
    return group_query[vector];
}

fn prepare_keys(first: u32, tiles: u32, team: u32, lane: u32) {
    make_query_bytes(first, tiles, team, lane);
}
