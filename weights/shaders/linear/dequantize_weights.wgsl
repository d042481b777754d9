// The weights [N, K] of a layer whose inputs lie in order, in f16.
//
// An invocation has eight weights. A weight is scale · (code - zero): code - zero is exact, and its product with the
// scale is rounded once to f32 if the scale is not f16, and once to f16.

// import codes = linear/codes.wgsl#four
// import scales = linear/scales.wgsl#half
// import linear/weights.wgsl

const CHUNKS: u32 = 128u;
const GROUP_CHUNKS: u32 = 4u;
const GROUPS: u32 = CHUNKS / GROUP_CHUNKS;
const OUTPUTS: u32 = 4096u;

@group(0) @binding(3) var<storage, read_write> weights: array<vec4<u32>>;

@compute @workgroup_size(64)
fn dequantize_weights(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let octet = (workgroup.y * workgroups.x + workgroup.x) * 64u + invocation;
    if (octet >= OUTPUTS * CHUNKS * 4u) {
        return;
    }
    let chunk = octet / 4u;
    let scale = load_scale(chunk / CHUNKS * GROUPS + chunk % CHUNKS / GROUP_CHUNKS);
    let values = octet_weights(load_codes(chunk), octet % 4u, scale);
    weights[octet] = vec4<u32>(
        pack2x16float(values.low.xy),
        pack2x16float(values.low.zw),
        pack2x16float(values.high.xy),
        pack2x16float(values.high.zw),
    );
}
