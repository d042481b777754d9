// ranges_span: one range per channel over all tokens of a span, in two launches over a zeroed slot.
//
//   scale = (max - min) · shrink / (2^bits - 1),  min = min · shrink
//
// ranges_span_extremes records the largest element and the largest negated element of every channel, by atomic maxima
// of their ordered bits (0 lies below every float's). ranges_span turns them into ranges in place. A thread of the
// first owns RANGE_CHUNK tokens of one channel; neighbours own neighbouring channels, so rows are read coalesced. Every
// element is read once, with two atomics per RANGE_CHUNK elements.
//
// In bounds: threads beyond the channels and chunks return; slot and rows were checked on the host.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"
#include "common/code_range.cuh"
#include "common/ordered.cuh"

constexpr u32 RANGE_CHUNK = 64;

extern "C" __global__ void ranges_span_extremes(const RowsCall call) {
    const u32 channels = call.kv_heads * HEAD_DIM;
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u32 channel = (u32)(index % channels);
    const u64 first = index / channels * RANGE_CHUNK;
    if (first >= call.tokens) return;
    const u32 end = min((u32)first + RANGE_CHUNK, call.tokens);
    u32 low = 0u;
    u32 high = 0u;
    for (u32 token = (u32)first; token < end; token++) {
        const float x = element(call, token, channel / HEAD_DIM, channel % HEAD_DIM);
        low = max(low, ordered_bits(-x));
        high = max(high, ordered_bits(x));
    }
    u32* range = (u32*)(call.ranges + channel);
    atomicMax(range, low);
    atomicMax(range + 1, high);
}

template <bool VALUE>
__device__ __forceinline__ void finish_ranges(const RowsCall& call) {
    const u32 channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= call.kv_heads * HEAD_DIM) return;
    u32* range = (u32*)(call.ranges + channel);
    call.ranges[channel] = code_range<VALUE>(-from_ordered(range[0]), from_ordered(range[1]), call.shrink);
}

extern "C" __global__ void ranges_span_keys(const RowsCall call) { finish_ranges<false>(call); }

extern "C" __global__ void ranges_span_values(const RowsCall call) { finish_ranges<true>(call); }
