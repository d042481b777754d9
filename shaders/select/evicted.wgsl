// evicted: the tokens of every KV head that are not kept, in ascending order.
//
// One invocation owns a token. It finds the number of kept tokens before it by binary search, since kept tokens ascend,
// and writes the token that many places earlier. Kept tokens are read from the cache, and the result is written nearly
// coalesced.
//
// In bounds: invocations beyond the tokens write nothing, and none writes beyond tokens - kept, whatever the kept
// tokens are; both arrays were checked against the call when they were bound. The loop halves what is left.
//
// binds: 0 call, 1 kept, 2 others

struct EvictedCall {
    tokens: u32,
    // Kept tokens of each head.
    count: u32,
}

@group(0) @binding(0) var<storage, read> call: EvictedCall;
// [kv_head][count], ascending.
@group(0) @binding(1) var<storage, read> kept: array<u32>;
// [kv_head][tokens - count].
@group(0) @binding(2) var<storage, read_write> others: array<u32>;

@compute @workgroup_size(256)
fn evicted(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) invocation: u32) {
    let token = workgroup.x * 256u + invocation;
    let first = workgroup.y * call.count;
    var before = 0u;
    var remaining = call.count;
    while (remaining > 0u) {
        let half = remaining / 2u;
        if (kept[first + before + half] < token) {
            before += half + 1u;
            remaining -= half + 1u;
        } else {
            remaining = half;
        }
    }
    var stays = false;
    if (before < call.count) {
        stays = kept[first + before] == token;
    }
    let own = token - before;
    if (token < call.tokens && !stays && own < call.tokens - call.count) {
        others[workgroup.y * (call.tokens - call.count) + own] = token;
    }
}
