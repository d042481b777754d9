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
