// merge_states: the output of a sequence from the states of its items, a stage of `attend`.
//
//   out = Σ_i 2^(lse_i − M) out_i / Σ_i 2^(lse_i − M),  M = max_i lse_i
//
// The last block of a sequence, KV head and chunk to arrive merges; the counter is back at zero afterwards, so that the
// next step, or the next replay of a graph, finds it so. A thread owns every (threads)-th output. States are read past
// the L1 cache, which may hold older ones.
//
// In bounds: rows first_state .. first_state + states belong to the sequence and were sized by the plan.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/attend_call.cuh"

__device__ __forceinline__ void write_output(const AttendCall& call, u64 index, float x) {
    if (call.output_f16) {
        ((u16*)call.output)[index] = (u16)half_bits(x);
    } else {
        ((float*)call.output)[index] = x;
    }
}

// True in all threads of the last block to arrive.
__device__ __forceinline__ bool last_to_arrive(u32* arrivals, u32 expected) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrivals, 1u) + 1u == expected;
        if (last) *arrivals = 0u;
    }
    __syncthreads();
    if (last) __threadfence();
    return last;
}

__device__ __forceinline__ void merge_states(const AttendCall& call, const Item& item, u32 first_head, int heads) {
    const u32 query_heads = call.kv_heads * call.group;
    for (int e = threadIdx.x; e < heads * HEAD_DIM; e += WARPS * 32) {
        const u32 head = first_head + e / HEAD_DIM;
        const float* lse = call.state_lse + (u64)item.first_state * query_heads + head;
        const float* out = call.states + ((u64)item.first_state * query_heads + head) * HEAD_DIM + e % HEAD_DIM;
        float largest = __ldcg(lse);
        for (u32 i = 1; i < item.states; i++) largest = fmaxf(largest, __ldcg(lse + (u64)i * query_heads));
        float weight = 0.0f;
        float sum = 0.0f;
#pragma unroll 8
        for (u32 i = 0; i < item.states; i++) {
            const float w = exp2_approx(__ldcg(lse + (u64)i * query_heads) - largest);
            weight += w;
            sum += w * __ldcg(out + (u64)i * query_heads * HEAD_DIM);
        }
        write_output(call, ((u64)item.sequence * query_heads + head) * HEAD_DIM + e % HEAD_DIM, sum / weight);
    }
}
