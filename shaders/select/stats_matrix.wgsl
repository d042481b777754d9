// Scores of a tile of keys with the query rows of a KV head's group, by cooperative matrices: 16 × 16 × 16 products of
// halves with f32 sums.
//
// The rows of all heads of a group form one list, head after head. A chunk is as many of them as a workgroup has
// invocations: the columns of right operands. A subgroup of 32 owns 32 of these columns. They stay in its registers
// while tiles of TILE keys, the rows of left operands, stream through workgroup memory. Scores are written to workgroup
// memory too, where an invocation finds those of a key or those of a column. Loads of the next tile start before the
// products of the current one.
//
// A prepared row is f16 (select/prepare_stats_queries.wgsl): QUERY_PARTS summands of the row divided by a unit.
//
// Workgroup memory holds keys in rows of KEY_ROW vectors and scores in columns of SCORE_COLUMN, so that simultaneous
// accesses fall into different banks. `MatrixCut::workgroup_bytes` counts it.
//
// In bounds: keys beyond the call's are not read; chunks, columns and KV heads are those of the grid and of the plan,
// which made `prepared` and `units` for them; sums over columns and heads end at those of the chunk.
//
// gives: Right, units, LOG2_E, LOWEST, INVOCATIONS, ROW_MATRICES, SCORE_COLUMN, scores, end_of_part, load_rows,
//   load_keys, store_keys, score_tile
// binds: 1 keys, 2 prepared, 3 units

// import select/calls.wgsl#matrix_call
// import attend/numbering.wgsl#subgroup

alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sums = coop_mat16x16<f32, C>;

@group(0) @binding(1) var<storage, read> keys: array<Half4>;
// [kv_head][chunk][column][part][channel], and the factors that turn products of a column into scores.
@group(0) @binding(2) var<storage, read> prepared: array<Half4>;
@group(0) @binding(3) var<storage, read> units: array<f32>;

const LOG2_E: f32 = 1.44269504f;
// Below every product.
const LOWEST: f32 = -3.4028234e38f;

const INVOCATIONS: u32 = COLUMNS;
// Blocks of 16 columns in a subgroup, and matrices in a block: 16 channels of a part each.
const OWN_BLOCKS: u32 = 2u;
const STEPS: u32 = HEAD_DIM / 16u;
const BLOCK_MATRICES: u32 = QUERY_PARTS * STEPS;
const ROW_MATRICES: u32 = OWN_BLOCKS * BLOCK_MATRICES;
const TOKEN_BLOCKS: u32 = TILE / 16u;
// Sizes in vectors of four: a key in workgroup memory, and a column of scores.
const KEY_ROW: u32 = VECTORS + 2u;
const SCORE_COLUMN: u32 = TILE / 4u + 1u;
// Vectors of a tile that an invocation moves.
const TILE_VECTORS: u32 = TILE * VECTORS;
const LOADS: u32 = (TILE_VECTORS + INVOCATIONS - 1u) / INVOCATIONS;

// [token][channel].
var<workgroup> key_tile: array<Half4, TILE * KEY_ROW>;
// [column][token].
var<workgroup> scores: array<vec4<f32>, COLUMNS * SCORE_COLUMN>;

// Loads of the invocation for the next tile.
var<private> arriving: array<Half4, LOADS>;

// The end of the tiles of a part.
fn end_of_part(part: u32) -> u32 {
    return min((part + 1u) * call.part_tiles, (call.tokens + TILE - 1u) / TILE);
}

// Loads the resident rows of a subgroup.
fn load_rows(rows: ptr<function, array<Right, ROW_MATRICES>>, chunk: u32, kv_head: u32, team: u32) {
    let first = (kv_head * call.chunks + chunk) * COLUMNS + team * (16u * OWN_BLOCKS);
    // unroll
    for (var block = 0u; block < OWN_BLOCKS; block++) {
        // unroll
        for (var m = 0u; m < BLOCK_MATRICES; m++) {
            let at = (first + block * 16u) * COLUMN_VECTORS + m * 4u;
            (*rows)[block * BLOCK_MATRICES + m] = coopLoad<Right>(&prepared[at], COLUMN_VECTORS);
        }
    }
}

// Loads the keys, starting at `tile`. Keys from `end` on are zeros.
fn load_keys(tile: u32, end: u32, kv_head: u32, invocation: u32) {
    let first = call.first_key + kv_head * call.key_head_stride;
    // unroll
    for (var i = 0u; i < LOADS; i++) {
        let at = i * INVOCATIONS + invocation;
        let token = tile + at / VECTORS;
        arriving[i] = Half4();
        if (at < TILE_VECTORS && token < end) {
            arriving[i] = keys[first + token * call.key_token_stride + at % VECTORS];
        }
    }
}

// Stores the loaded keys to workgroup memory.
fn store_keys(invocation: u32) {
    // unroll
    for (var i = 0u; i < LOADS; i++) {
        let at = i * INVOCATIONS + invocation;
        if (at < TILE_VECTORS) {
            key_tile[at / VECTORS * KEY_ROW + at % VECTORS] = arriving[i];
        }
    }
}

// Multiplies the tile with the subgroup's rows. The units are not applied yet.
fn score_tile(rows: ptr<function, array<Right, ROW_MATRICES>>, team: u32) {
    let own = team * (16u * OWN_BLOCKS) * SCORE_COLUMN;
    // unroll
    for (var block = 0u; block < TOKEN_BLOCKS; block++) {
        var first = Sums();
        var second = Sums();
        // unroll
        for (var step = 0u; step < STEPS; step++) {
            let k = coopLoadT<Left>(&key_tile[block * 16u * KEY_ROW + step * 4u], KEY_ROW);
            // unroll
            for (var part = 0u; part < QUERY_PARTS; part++) {
                first = coopMultiplyAdd(k, (*rows)[part * STEPS + step], first);
                second = coopMultiplyAdd(k, (*rows)[BLOCK_MATRICES + part * STEPS + step], second);
            }
        }
        coopStore(first, &scores[own + block * 4u], SCORE_COLUMN);
        coopStore(second, &scores[own + 16u * SCORE_COLUMN + block * 4u], SCORE_COLUMN);
    }
}
