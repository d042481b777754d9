// Adds what the workgroups that share a tile of a product found: y = unit · (s0 + s1 + ...), in f32 and in this order.
//
// An invocation has four outputs of a row. It reads SPLITS vectors of four, and writes four outputs.
//
// In bounds: OUTPUTS is a multiple of 4, and `sums` has SPLITS times the rows of the outputs. Invocations behind the last
// four outputs end at once.

// import output = linear/output.wgsl#f32
// import unit = linear/unit.wgsl#one

const OUTPUTS: u32 = 4096u;
const SPLITS: u32 = 2u;

const FOURS: u32 = OUTPUTS / 4u;

// [split][row][4 outputs]
@group(0) @binding(2) var<storage, read> sums: array<vec4<f32>>;

@compute @workgroup_size(256)
fn add_splits(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let at = (workgroup.y * workgroups.x + workgroup.x) * 256u + invocation;
    let all = bound_rows() * FOURS;
    if (at >= all) {
        return;
    }
    var sum = sums[at];
    // unroll
    for (var i = 0u; i < SPLITS - 1u; i++) {
        sum += sums[(i + 1u) * all + at];
    }
    let row = at / FOURS;
    store(row, at % FOURS * 4u, unit(row) * sum);
}
