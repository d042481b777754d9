// read_bandwidth: reads a buffer once and sums its words, to measure how fast the device reads.
//
// A workgroup of 256 reads a block of LOADS · 256 groups of 16 bytes; neighbours read neighbouring groups. The host
// knows the sum modulo 2^32 and compares it, so that no compiler can leave a load out.
//
// In bounds: the buffer is a whole number of blocks, one per workgroup of the grid, which is folded into two
// dimensions; workgroups beyond the last block do nothing.
//
// binds: 0 words, 1 sum

const LOADS: u32 = 16u;
const INVOCATIONS: u32 = 256u;

@group(0) @binding(0) var<storage, read> words: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> sum: atomic<u32>;

var<workgroup> workgroup_sum: atomic<u32>;

@compute @workgroup_size(256)
fn read_bandwidth(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    if (invocation == 0u) {
        atomicStore(&workgroup_sum, 0u);
    }
    workgroupBarrier();
    let block = group.y * groups.x + group.x;
    if (block < arrayLength(&words) / (LOADS * INVOCATIONS)) {
        let start = block * LOADS * INVOCATIONS + invocation;
        var total = vec4<u32>(0u);
        // unroll
        for (var i = 0u; i < LOADS; i++) {
            total += words[start + i * INVOCATIONS];
        }
        atomicAdd(&workgroup_sum, total.x + total.y + total.z + total.w);
    }
    workgroupBarrier();
    if (invocation == 0u) {
        atomicAdd(&sum, atomicLoad(&workgroup_sum));
    }
}
