// evicted: the tokens of every KV head that are not kept, in ascending order.
//
// One thread owns a token. It finds the number of kept tokens before it by binary search, since kept tokens ascend, and
// writes the token that many places earlier. Kept tokens are read from the cache, and the result is written nearly
// coalesced.
//
// In bounds: threads beyond the tokens write nothing, and none writes beyond tokens - kept, whatever the kept tokens
// are; memory was checked on the host.

#pragma once

#include "common/ptx.cuh"

struct EvictedCall {
    // [kv_head][kept], ascending, and [kv_head][tokens - kept].
    u64 kept;
    u64 evicted;
    u32 tokens;
    u32 count;
};

extern "C" __global__ void evicted(const EvictedCall call) {
    const u32 token = blockIdx.x * blockDim.x + threadIdx.x;
    const u32* kept = (const u32*)call.kept + (u64)blockIdx.y * call.count;
    u32 before = 0;
    u32 remaining = call.count;
    while (remaining > 0) {
        const u32 half = remaining / 2;
        if (kept[before + half] < token) {
            before += half + 1;
            remaining -= half + 1;
        } else {
            remaining = half;
        }
    }
    const bool stays = before < call.count && kept[before] == token;
    const u32 others = call.tokens - call.count;
    if (token >= call.tokens || stays || token - before >= others) return;
    ((u32*)call.evicted)[(u64)blockIdx.y * others + token - before] = token;
}
