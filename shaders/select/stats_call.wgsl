// Arguments of the kernels that measure attention, and the rows they read.
//
// gives: call, LOWEST, stage_queries, load_tile, sees
// binds: 0 call

struct StatsCall {
    // Index of the first element of each tensor within its binding.
    first_key: u32,
    key_token_stride: u32,
    key_head_stride: u32,
    first_query: u32,
    query_token_stride: u32,
    query_head_stride: u32,
    tokens: u32,
    // Query rows of a head.
    rows: u32,
    kv_heads: u32,
    // Query heads of a KV head.
    group: u32,
    // Tiles of keys in a part. A workgroup measures a part of the keys of one KV head.
    part_tiles: u32,
    // Places of log-sum-exps, and of the sums of a head, in elements.
    first_lse: u32,
    lse_row_stride: u32,
    lse_head_stride: u32,
    sum_stride: u32,
    // 1 / √HEAD_DIM.
    scale: f32,
    // ln of the counting threshold.
    log_threshold: f32,
    // Positions of the query rows, ascending.
    positions: array<u32>,
}

@group(0) @binding(0) var<storage, read> call: StatsCall;

// Below every score.
const LOWEST: f32 = -3.4028234e38f;

// import rows = pack/rows/f32.wgsl
// import queries = select/queries/f32.wgsl
// import select/resident_rows.wgsl

// Stages keys, starting at `token`. Keys that do not exist are zeros.
fn stage_keys(token: u32, kv_head: u32, invocation: u32) {
    for (var i = invocation; i < STAGED_VECTORS; i += RESIDENT) {
        var vector = vec4<f32>();
        let row = token + i / VECTORS;
        if (row < call.tokens) {
            let at = call.first_key + row * call.key_token_stride + kv_head * call.key_head_stride + i % VECTORS * 4u;
            vector = vec4<f32>(element(at), element(at + 1u), element(at + 2u), element(at + 3u));
        }
        staged[i] = vector;
    }
}

// Stages scaled query rows, starting at `first`. Rows that do not exist are zeros.
fn stage_queries(first: u32, query_head: u32, invocation: u32) {
    for (var i = invocation; i < STAGED_VECTORS; i += RESIDENT) {
        var vector = vec4<f32>();
        let row = first + i / VECTORS;
        if (row < call.rows) {
            let at = call.first_query + row * call.query_token_stride + query_head * call.query_head_stride
                + i % VECTORS * 4u;
            vector = vec4<f32>(
                query_element(at), query_element(at + 1u), query_element(at + 2u), query_element(at + 3u)
            ) * call.scale;
        }
        staged[i] = vector;
    }
}

// Makes the keys of the tile that begins at `tile` resident.
fn load_tile(tile: u32, kv_head: u32, invocation: u32) {
    for (var first = 0u; first < RESIDENT; first += STAGED) {
        workgroupBarrier();
        stage_keys(tile + first, kv_head, invocation);
        workgroupBarrier();
        take_resident(first, invocation);
    }
}

// Whether query row `row` sees a token. Rows that do not exist see nothing.
fn sees(row: u32, token: u32) -> bool {
    return row < call.rows && token < call.tokens && token <= call.positions[min(row, call.rows - 1u)];
}
