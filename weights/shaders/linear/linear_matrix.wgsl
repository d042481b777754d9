// The product of many rows of f16 activations with packed weights, in tiles of 128 rows by 128 outputs, by cooperative
// matrices of 16 × 16 × 16: y = x · Wᵀ.
//
// A workgroup dequantises a turn of one or two chunks of 32 inputs of its outputs into its memory, each weight rounded once
// to f16, with the activations of its rows. Each of eight subgroups multiplies 64 rows by 32 outputs. What comes next is
// on its way while a turn is multiplied. Sums are f32 and run in a fixed order.
//
// f32 activations come as PARTS = 2 numbers in f16, one part behind the other, and the sums of both are the product.
//
// SPLITS workgroups may share a tile, each with its own chunks. Then the sums of each have rows of their own, and
// `add_splits` adds them.
//
// In bounds: control flow around products depends on constants alone. Rows and outputs beyond the last take the last
// again and are not written.

// import linear/matrices.wgsl

const PARTS: u32 = 1u;
const SPLITS: u32 = 1u;
const ALL_CHUNKS: u32 = CHUNKS * PARTS;
// A multiple of SPLITS.
const SPLIT_CHUNKS: u32 = ALL_CHUNKS / SPLITS;

// Chunks of a turn, a divisor of SPLIT_CHUNKS.
const TURN: u32 = 1u;

const TILE: u32 = 128u;
// Rows of both tiles lie this many vectors of four halves apart, so that matrices are read from different banks.
const STRIDE: u32 = 8u * TURN + 2u;

// [part][row][4 inputs]
@group(0) @binding(2) var<storage, read> inputs: array<Half4>;

var<workgroup> x_tile: array<Half4, TILE * STRIDE>;
var<workgroup> w_tile: array<Half4, TILE * STRIDE>;
// Of each subgroup, a block of sums: [output][row].
var<workgroup> staged: array<f32, 2560>;

// What an invocation loads of a chunk: an octet of two rows and of two outputs.
struct Loaded {
    x: array<Half4, 4>,
    c0: Codes,
    c1: Codes,
    s0: vec2<f32>,
    s1: vec2<f32>,
}

fn load(rows: vec2<u32>, outputs: vec2<u32>, q: u32, at: u32) -> Loaded {
    let chunk = at % CHUNKS;
    let x = rows * (8u * ALL_CHUNKS) + 8u * at + 2u * q;
    let group = chunk / GROUP_CHUNKS;
    return Loaded(
        array<Half4, 4>(inputs[x.x], inputs[x.x + 1u], inputs[x.y], inputs[x.y + 1u]),
        load_codes(outputs.x * CHUNKS + chunk),
        load_codes(outputs.y * CHUNKS + chunk),
        load_scale(outputs.x * GROUPS + group),
        load_scale(outputs.y * GROUPS + group),
    );
}

fn put(line: u32, q: u32, of_turn: u32, loaded: Loaded) {
    let at = line * STRIDE + 8u * of_turn + 2u * q;
    x_tile[at] = loaded.x[0];
    x_tile[at + 1u] = loaded.x[1];
    x_tile[at + 64u * STRIDE] = loaded.x[2];
    x_tile[at + 64u * STRIDE + 1u] = loaded.x[3];
    let w0 = octet_halves(loaded.c0, q, loaded.s0);
    w_tile[at] = w0.low;
    w_tile[at + 1u] = w0.high;
    let w1 = octet_halves(loaded.c1, q, loaded.s1);
    w_tile[at + 64u * STRIDE] = w1.low;
    w_tile[at + 64u * STRIDE + 1u] = w1.high;
}

@compute @workgroup_size(256)
fn linear_matrix(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let invocation = (subgroup * 32u + lane) % 256u;
    let team = invocation / 32u;
    let rows = bound_rows() / SPLITS;
    let first_output = (workgroup.y * workgroups.x + workgroup.x) * TILE;
    let first_row = workgroup.z / SPLITS * TILE;
    let split = workgroup.z % SPLITS;
    let first_chunk = split * SPLIT_CHUNKS;
    let line = invocation / 4u;
    let q = invocation % 4u;
    let own_rows = min(vec2<u32>(first_row + line, first_row + line + 64u), vec2<u32>(rows - 1u));
    let own_outputs = min(vec2<u32>(first_output + line, first_output + line + 64u), vec2<u32>(OUTPUTS - 1u));
    // The rows and outputs that the subgroup multiplies.
    let team_row = team / 4u * 64u;
    let team_output = team % 4u * 32u;
    var sums: array<Sums, 8>;
    // unroll
    for (var i = 0u; i < 8u; i++) {
        sums[i] = Sums();
    }
    var loaded: array<Loaded, TURN>;
    // unroll
    for (var c = 0u; c < TURN; c++) {
        loaded[c] = load(own_rows, own_outputs, q, first_chunk + c);
    }
    for (var turn = 0u; turn < SPLIT_CHUNKS; turn += TURN) {
        // unroll
        for (var c = 0u; c < TURN; c++) {
            put(line, q, c, loaded[c]);
        }
        workgroupBarrier();
        let next = min(turn + TURN, SPLIT_CHUNKS - TURN);
        // unroll
        for (var c = 0u; c < TURN; c++) {
            loaded[c] = load(own_rows, own_outputs, q, first_chunk + next + c);
        }
        // unroll
        for (var k = 0u; k < 2u * TURN; k++) {
            let w0 = coopLoad<Right>(&w_tile[team_output * STRIDE + 4u * k], STRIDE);
            let w1 = coopLoad<Right>(&w_tile[(team_output + 16u) * STRIDE + 4u * k], STRIDE);
            // unroll
            for (var j = 0u; j < 4u; j++) {
                let x = coopLoadT<Left>(&x_tile[(team_row + 16u * j) * STRIDE + 4u * k], STRIDE);
                sums[2u * j] = coopMultiplyAdd(x, w0, sums[2u * j]);
                sums[2u * j + 1u] = coopMultiplyAdd(x, w1, sums[2u * j + 1u]);
            }
        }
        workgroupBarrier();
    }
    // unroll
    for (var i = 0u; i < 8u; i++) {
        coopStore(sums[i], &staged[team * (16u * COLUMN)], COLUMN);
        workgroupBarrier();
        // A lane writes two fours of outputs of a row.
        let row = first_row + team_row + 16u * (i / 2u) + lane % 16u;
        // unroll
        for (var j = 0u; j < 2u; j++) {
            let four = 4u * (lane / 16u + 2u * j);
            let block = team * (16u * COLUMN) + four * COLUMN + lane % 16u;
            let output = first_output + team_output + 16u * (i % 2u) + four;
            if (row < rows && output < OUTPUTS) {
                let sum = vec4<f32>(
                    staged[block],
                    staged[block + COLUMN],
                    staged[block + 2u * COLUMN],
                    staged[block + 3u * COLUMN],
                );
                store(split * rows + row, output, unit(row) * sum);
            }
        }
        workgroupBarrier();
    }
}
