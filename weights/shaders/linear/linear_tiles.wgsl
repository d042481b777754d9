// The product of many rows of activations with packed weights, in tiles of 64 rows by 64 outputs: y = x · Wᵀ.
//
// A workgroup dequantises a chunk of 32 inputs of its outputs into its memory, with the activations of its rows, and an
// invocation multiplies four rows by four outputs. Weights and sums are f32, and sums run in the order of the inputs.
//
// In workgroup memory part p of four inputs of row r lies at part p ^ (r / 4 % 8), so that neighbouring invocations
// read from different banks.

// import codes = linear/codes.wgsl#four
// import scales = linear/scales.wgsl#half
// import input = linear/input.wgsl#f16
// import output = linear/output.wgsl#f32
// import linear/weights.wgsl

const CHUNKS: u32 = 128u;
const GROUP_CHUNKS: u32 = 4u;
const GROUPS: u32 = CHUNKS / GROUP_CHUNKS;
const OUTPUTS: u32 = 4096u;

const TILE: u32 = 64u;

// [row][part] and [output][part].
var<workgroup> x_tile: array<vec4<f32>, 512>;
var<workgroup> w_tile: array<vec4<f32>, 512>;

fn part_at(row: u32, part: u32) -> u32 {
    return row * 8u + (part ^ (row / 4u % 8u));
}

@compute @workgroup_size(256)
fn linear_tiles(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let rows = bound_rows();
    let first_output = (workgroup.y * workgroups.x + workgroup.x) * TILE;
    let first_row = workgroup.z * TILE;
    // What the invocation loads: an octet of a row and of an output.
    let line = invocation / 4u;
    let q = invocation % 4u;
    let row = min(first_row + line, rows - 1u);
    let output = min(first_output + line, OUTPUTS - 1u);
    // What it multiplies.
    let own_row = invocation / 16u * 4u;
    let own_output = invocation % 16u * 4u;
    var sums: array<vec4<f32>, 4>;
    for (var chunk = 0u; chunk < CHUNKS; chunk++) {
        let x = load_inputs(row * (4u * CHUNKS) + 4u * chunk + q);
        let scale = load_scale(output * GROUPS + chunk / GROUP_CHUNKS);
        let w = octet_weights(load_codes(output * CHUNKS + chunk), q, scale);
        workgroupBarrier();
        x_tile[part_at(line, 2u * q)] = x.low;
        x_tile[part_at(line, 2u * q + 1u)] = x.high;
        w_tile[part_at(line, 2u * q)] = w.low;
        w_tile[part_at(line, 2u * q + 1u)] = w.high;
        workgroupBarrier();
        for (var part = 0u; part < 8u; part++) {
            let w0 = w_tile[part_at(own_output, part)];
            let w1 = w_tile[part_at(own_output + 1u, part)];
            let w2 = w_tile[part_at(own_output + 2u, part)];
            let w3 = w_tile[part_at(own_output + 3u, part)];
            // unroll
            for (var m = 0u; m < 4u; m++) {
                let of_row = x_tile[part_at(own_row + m, part)];
                sums[m] += vec4<f32>(dot(of_row, w0), dot(of_row, w1), dot(of_row, w2), dot(of_row, w3));
            }
        }
    }
    if (first_output >= OUTPUTS) {
        return;
    }
    // unroll
    for (var m = 0u; m < 4u; m++) {
        if (first_row + own_row + m < rows) {
            store(first_row + own_row + m, first_output + own_output, sums[m]);
        }
    }
}
