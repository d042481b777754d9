// compute_guard: a fixed amount of integer arithmetic. Its time depends only on the clock of the device.
//
// Its times before and after a measurement show whether the clock fell in between. Every invocation computes ROUNDS
// dependent packed dot products in each of four chains, and writes one word.
//
// In bounds: the buffer has a word for every invocation of the grid.
//
// binds: 0 results

const ROUNDS: u32 = 16384u;

@group(0) @binding(0) var<storage, read_write> results: array<u32>;

@compute @workgroup_size(128)
fn compute_guard(@builtin(global_invocation_id) id: vec3<u32>) {
    var chains = vec4<i32>(vec4<u32>(id.x) + vec4<u32>(1u, 2u, 3u, 4u));
    for (var round = 0u; round < ROUNDS; round++) {
        chains.x += dot4I8Packed(bitcast<u32>(chains.x), 0x01020304u);
        chains.y += dot4I8Packed(bitcast<u32>(chains.y), 0x05060708u);
        chains.z += dot4I8Packed(bitcast<u32>(chains.z), 0x090a0b0cu);
        chains.w += dot4I8Packed(bitcast<u32>(chains.w), 0x0d0e0f10u);
    }
    results[id.x] = bitcast<u32>(chains.x ^ chains.y ^ chains.z ^ chains.w);
}
