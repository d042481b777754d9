// Arguments of the kernels that select tokens.

// -------- stats_call --------

// Arguments of the kernels that measure attention, and the rows they read.
//
// gives: call, LOWEST, stage_queries, load_tile, sees
// binds: 0 call

// import rows = pack/rows.wgsl#f32
// import queries = select/queries.wgsl#f32
// import select/rows.wgsl#resident_rows

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

// -------- matrix_call --------

// Arguments of the kernels that measure attention with cooperative matrices, and the cut of a group's query rows.
//
// gives: Half4, call, HEAD_DIM, QUERY_PARTS, SUBGROUPS, COLUMNS, TILE, VECTORS, COLUMN_VECTORS, Chunk, chunk_of
// binds: 0 call
// set by plans: HEAD_DIM, QUERY_PARTS, SUBGROUPS

struct MatrixCall {
    // Offsets of the first elements within a binding, and their strides: in vectors of four for keys, in elements for
    // queries.
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
    // Maximum heads of a chunk, and maximum rows of each of them.
    chunk_heads: u32,
    chunk_rows: u32,
    // Chunks per head. It exceeds 1 only where chunks have one head.
    row_chunks: u32,
    // Chunks of a group.
    chunks: u32,
    // Tiles of keys of a part.
    part_tiles: u32,
    // 1 / √HEAD_DIM.
    scale: f32,
    // ln of the counting threshold.
    log_threshold: f32,
    // Positions of the query rows, ascending.
    positions: array<u32>,
}

alias Half4 = vec4<f16>;

@group(0) @binding(0) var<storage, read> call: MatrixCall;

const HEAD_DIM: u32 = 128u;
// f16 summands per element of a query row: 1 for 16-bit elements, otherwise 2.
const QUERY_PARTS: u32 = 1u;
// Subgroups of 32 in a measuring workgroup.
const SUBGROUPS: u32 = 7u;
// Columns of a chunk.
const COLUMNS: u32 = SUBGROUPS * 32u;
// Keys of a tile.
const TILE: u32 = 32u;
// Vectors of four elements in a row, and in a prepared row.
const VECTORS: u32 = HEAD_DIM / 4u;
const COLUMN_VECTORS: u32 = QUERY_PARTS * VECTORS;

// Some query rows of a group: `rows` rows of each of `heads` heads.
struct Chunk {
    first_head: u32,
    heads: u32,
    first_row: u32,
    rows: u32,
    columns: u32,
}

fn chunk_of(index: u32) -> Chunk {
    let first_head = index / call.row_chunks * call.chunk_heads;
    let first_row = index % call.row_chunks * call.chunk_rows;
    let heads = min(call.chunk_heads, call.group - first_head);
    let rows = min(call.chunk_rows, call.rows - first_row);
    return Chunk(first_head, heads, first_row, rows, heads * rows);
}

// -------- merge_call --------

// Arguments of the kernels that merge evicted tokens into kept ones.
//
// gives: call, row_start
// binds: 0 call

// import rows = pack/rows.wgsl#f32

struct MergeCall {
    // Index of the first element of the rows within their binding.
    first_element: u32,
    token_stride: u32,
    head_stride: u32,
    tokens: u32,
    kv_heads: u32,
    // Kept and evicted tokens of each head.
    kept: u32,
    evicted: u32,
}

@group(0) @binding(0) var<storage, read> call: MergeCall;

// Index of the first element of a row. Tokens that do not exist are clamped.
fn row_start(token: u32, kv_head: u32) -> u32 {
    return call.first_element + min(token, call.tokens - 1u) * call.token_stride + kv_head * call.head_stride;
}
