// Arguments of the kernels that measure attention by cooperative matrices, and how they cut the query rows of a group.
//
// gives: Half4, call, HEAD_DIM, QUERY_PARTS, SUBGROUPS, COLUMNS, TILE, VECTORS, COLUMN_VECTORS, Chunk, chunk_of
// binds: 0 call
// set by plans: HEAD_DIM, QUERY_PARTS, SUBGROUPS

struct MatrixCall {
    // Where elements begin within a binding, and their strides: of keys in vectors of four, of queries in elements.
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
    // Heads of a chunk, and rows of each of them, at most.
    chunk_heads: u32,
    chunk_rows: u32,
    // Chunks that a head's rows are cut into: more than one only where chunks have one head.
    row_chunks: u32,
    // Chunks of a group.
    chunks: u32,
    // Tiles of keys of a part.
    part_tiles: u32,
    // 1 / √HEAD_DIM.
    scale: f32,
    // ln of the threshold that is counted by.
    log_threshold: f32,
    // Positions of the query rows, ascending.
    positions: array<u32>,
}

alias Half4 = vec4<f16>;

@group(0) @binding(0) var<storage, read> call: MatrixCall;

const HEAD_DIM: u32 = 128u;
// Summands in f16 of an element of a query row: 1 where it is given in 16 bits, else 2.
const QUERY_PARTS: u32 = 1u;
// Subgroups of 32 of a workgroup that measures.
const SUBGROUPS: u32 = 7u;
// Columns of a chunk.
const COLUMNS: u32 = SUBGROUPS * 32u;
// Keys of a tile.
const TILE: u32 = 32u;
// Vectors of four elements of a row, and of a prepared one.
const VECTORS: u32 = HEAD_DIM / 4u;
const COLUMN_VECTORS: u32 = QUERY_PARTS * VECTORS;

// Some query rows of a group: `rows` of each of `heads` heads.
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
