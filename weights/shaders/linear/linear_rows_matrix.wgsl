// The product of up to 16 rows of f16 activations with packed weights, by cooperative matrices of 16 × 16 × 16: y = x ·
// Wᵀ.
//
// A workgroup has 16 · SLICES outputs and the inputs of its turns, of which each of its eight subgroups takes 64 of every
// 512. A subgroup dequantises a slice of 16 outputs into its part of workgroup memory, each weight rounded once to f16,
// and multiplies it with all rows. Weights are the left operand. The codes of the next turn are on their way meanwhile.
// Subgroups wait for each other only at the end, when their sums are added in a fixed order.
//
// SPLITS workgroups may share the outputs, each with its own turns. Then the sums of each have rows of their own, and
// `add_splits` adds them.
//
// Activations have 16 rows, of which those behind the last are 0 and are not written.
//
// In bounds: control flow around products depends on constants alone. CHUNKS is a multiple of 16 · SPLITS. Outputs beyond
// the last take the last again and are not written.

// import linear/matrices.wgsl

const SLICES: u32 = 4u;
const SPLITS: u32 = 1u;
const TURNS: u32 = CHUNKS / 16u / SPLITS;

// Rows of a slice lie this many vectors of four halves apart, so that matrices are read from different banks.
const STRIDE: u32 = 18u;
const SLICE: u32 = 16u * STRIDE;
const BLOCK: u32 = 16u * COLUMN;

// [16 rows][4 inputs]
@group(0) @binding(2) var<storage, read> inputs: array<Half4>;

// [2][subgroup][output][4 inputs]
var<workgroup> w_slices: array<Half4, 16u * SLICE>;
// [subgroup][row][output]
var<workgroup> staged: array<f32, 8u * BLOCK>;

// A chunk of an output of each slice, and its scale.
struct Loaded {
    codes: array<Codes, SLICES>,
    scales: array<vec2<f32>, SLICES>,
}

fn load(first: u32, chunk: u32) -> Loaded {
    var loaded: Loaded;
    // unroll
    for (var slice = 0u; slice < SLICES; slice++) {
        let output = min(first + 16u * slice, OUTPUTS - 1u);
        loaded.codes[slice] = load_codes(output * CHUNKS + chunk);
        loaded.scales[slice] = load_scale(output * GROUPS + chunk / GROUP_CHUNKS);
    }
    return loaded;
}

@compute @workgroup_size(256)
fn linear_rows_matrix(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let invocation = (subgroup * 32u + lane) % 256u;
    let team = invocation / 32u;
    let rows = bound_rows() / SPLITS;
    let split = workgroup.z;
    let first_turn = split * TURNS;
    let first_output = (workgroup.y * workgroups.x + workgroup.x) * (16u * SLICES);
    // Neighbouring lanes have neighbouring chunks of an output.
    let own = first_output + lane / 2u % 16u;
    let own_chunk = 2u * team + lane % 2u;
    let put_at = team * SLICE + lane / 2u % 16u * STRIDE + lane % 2u * 8u;
    var sums: array<Sums, SLICES>;
    // unroll
    for (var slice = 0u; slice < SLICES; slice++) {
        sums[slice] = Sums();
    }
    var loaded = load(own, first_turn * 16u + own_chunk);
    for (var turn = 0u; turn < TURNS; turn++) {
        let now = loaded;
        loaded = load(own, (first_turn + min(turn + 1u, TURNS - 1u)) * 16u + own_chunk);
        let x_at = (first_turn + turn) * 128u + team * 16u;
        let x0 = coopLoad<Right>(&inputs[x_at], 8u * CHUNKS);
        let x1 = coopLoad<Right>(&inputs[x_at + 4u], 8u * CHUNKS);
        let x2 = coopLoad<Right>(&inputs[x_at + 8u], 8u * CHUNKS);
        let x3 = coopLoad<Right>(&inputs[x_at + 12u], 8u * CHUNKS);
        // unroll
        for (var slice = 0u; slice < SLICES; slice++) {
            // Only this subgroup reads what it writes. Two buffers, so that one barrier a slice is enough.
            let buffer = (turn * SLICES + slice) % 2u * (8u * SLICE);
            // unroll
            for (var q = 0u; q < 4u; q++) {
                let w = octet_halves(now.codes[slice], q, now.scales[slice]);
                w_slices[buffer + put_at + 2u * q] = w.low;
                w_slices[buffer + put_at + 2u * q + 1u] = w.high;
            }
            subgroupBarrier();
            let slice_at = buffer + team * SLICE;
            let w0 = coopLoadT<Left>(&w_slices[slice_at], STRIDE);
            let w1 = coopLoadT<Left>(&w_slices[slice_at + 4u], STRIDE);
            let w2 = coopLoadT<Left>(&w_slices[slice_at + 8u], STRIDE);
            let w3 = coopLoadT<Left>(&w_slices[slice_at + 12u], STRIDE);
            sums[slice] = coopMultiplyAdd(w0, x0, sums[slice]);
            sums[slice] = coopMultiplyAdd(w1, x1, sums[slice]);
            sums[slice] = coopMultiplyAdd(w2, x2, sums[slice]);
            sums[slice] = coopMultiplyAdd(w3, x3, sums[slice]);
        }
    }
    // unroll
    for (var slice = 0u; slice < SLICES; slice++) {
        coopStore(sums[slice], &staged[team * BLOCK], COLUMN);
        workgroupBarrier();
        // An invocation adds and writes four outputs of a row.
        let row = invocation % 16u;
        let four = invocation / 16u * 4u;
        let output = first_output + 16u * slice + four;
        if (four < 16u && row < rows && output < OUTPUTS) {
            var sum = vec4<f32>();
            // unroll
            for (var of_team = 0u; of_team < 8u; of_team++) {
                let at = of_team * BLOCK + row * COLUMN + four;
                sum += vec4<f32>(staged[at], staged[at + 1u], staged[at + 2u], staged[at + 3u]);
            }
            store(split * rows + row, output, unit(row) * sum);
        }
        workgroupBarrier();
    }
}
