// The weights [N, K] of a layer whose inputs do not lie in order, or are padded, in f16 and in the order of the inputs.
//
// An invocation has two neighbouring weights, and finds their codes by `homes`, which names the place of each input.

// import codes = linear/codes.wgsl#four
// import scales = linear/scales.wgsl#half
// import linear/weights.wgsl

const CHUNKS: u32 = 128u;
const GROUP_CHUNKS: u32 = 4u;
const GROUPS: u32 = CHUNKS / GROUP_CHUNKS;
const OUTPUTS: u32 = 4096u;
const INPUTS: u32 = 4096u;

@group(0) @binding(2) var<storage, read> homes: array<u32>;
@group(0) @binding(3) var<storage, read_write> weights: array<u32>;

fn weight(at: u32) -> f32 {
    let output = at / INPUTS;
    let home = min(homes[at % INPUTS], 32u * CHUNKS - 1u);
    let chunk = home / 32u;
    let scale = load_scale(output * GROUPS + chunk / GROUP_CHUNKS);
    let values = octet_weights(load_codes(output * CHUNKS + chunk), home / 8u % 4u, scale);
    let four = select(values.low, values.high, home % 8u >= 4u);
    return four[home % 4u];
}

@compute @workgroup_size(64)
fn dequantize_places(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let pair = (workgroup.y * workgroups.x + workgroup.x) * 64u + invocation;
    if (pair >= OUTPUTS * INPUTS / 2u) {
        return;
    }
    weights[pair] = pack2x16float(vec2<f32>(weight(2u * pair), weight(2u * pair + 1u)));
}
