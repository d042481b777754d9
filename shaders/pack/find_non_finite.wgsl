// find_non_finite: index, in token order, of the first element that cannot be stored: NaN, infinite or beyond ±largest.
//
//   first = min over such elements of (token · kv_heads + kv_head) · head_dim + channel
//
// Invocations take elements in turns; neighbours take neighbouring channels. An invocation that finds one records its
// index with an atomic minimum. Elements are compared as integers, since compilers may assume that no float is NaN.
//
// In bounds: indices stay below tokens · kv_heads · head_dim, the rows that the plan checked against the tensor. Loops
// are bounded by it; divisors are sizes of a checked shape.
//
// binds: 2 first

// import pack/flat.wgsl
// import pack/call.wgsl
// import rows = pack/rows.wgsl#f32

@group(0) @binding(2) var<storage, read_write> first: atomic<u32>;

@compute @workgroup_size(64)
fn find_non_finite(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let turns = groups.x * groups.y * FLAT_WORKGROUP;
    let count = call.tokens * call.kv_heads * call.head_dim;
    let largest = bitcast<u32>(call.largest);
    var index = flat_index(group, groups, invocation);
    while (index < count) {
        let row = index / call.head_dim;
        let start = row_start(row / call.kv_heads, row % call.kv_heads);
        if ((element_bits(start + index % call.head_dim) & 0x7fffffffu) > largest) {
            atomicMin(&first, index);
            // Later turns of this invocation have larger indices.
            return;
        }
        // `count` may lie within one turn of 2^32.
        if (count - index <= turns) {
            return;
        }
        index += turns;
    }
}
