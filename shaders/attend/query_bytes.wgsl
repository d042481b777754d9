// Slot `query_bytes`: the memory of the bytes that a step multiplies with keys that have ranges of groups, and when
// those of the next step are computed. Every choice calls `make_query_bytes` either from `prepare_keys` or from
// `prepare_keys_late` (attend/step_scores.wgsl).
//
// Every choice has
//   fn put_query_word(vector: u32, word: u32, bytes: u32)
//     one of the four words of one of STEP_QUERY_VECTORS vectors
//   fn query_vector(vector: u32) -> vec4<u32>
//     all four

// -------- of_weights --------

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

// -------- own --------

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
