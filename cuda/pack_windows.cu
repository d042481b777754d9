// pack_windows: packs full f16 pages into pages of another format. Each page is a span of its own.
//
// the result of quantize for the rows that the pages hold
//
// A block owns WINDOW_TOKENS tokens of a tile of one KV head: keys in the first row of blocks, values in the second. It
// takes tiles in turns. Where ranges span tokens, its warps first find the ranges of the whole tile. All blocks of a
// tile do this, and store the same ranges. Then a warp packs one row after the other (common/put_row.cuh).
//
// With programmatic serialisation, blocks begin while the previous kernel still runs, and wait for it. Windows that
// were full before the step do not depend on its tokens. They are packed concurrently with `append`, which admits this
// kernel once all work before the step is done. Blocks without work end after `append`, so that later kernels wait for
// both.
//
// In bounds: items stay below the entries of the section · KV heads · parts; pages and slots were checked on the host
// when the table was made for the layout that the stores were bound to.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/step_call.cuh"
#include "common/put_row.cuh"

constexpr int WINDOW_WARPS = 16;
constexpr int WINDOW_THREADS = 32 * WINDOW_WARPS;
// Tokens that a block packs, and tokens whose extremes a warp finds.
constexpr u32 WINDOW_TOKENS = 32;
constexpr u32 WINDOW_PARTS = TILE_TOKENS / WINDOW_TOKENS;
constexpr u32 EXTREME_TOKENS = TILE_TOKENS / WINDOW_WARPS;

// A tile of f16: its bytes, and the place of values in the part of a page that belongs to a KV head.
constexpr u32 F16_TILE_BYTES = TILE_TOKENS * HEAD_DIM * 2;
constexpr u32 F16_HEAD_BYTES = 2 * F16_TILE_BYTES;

template <bool VALUE>
constexpr bool SPAN_RANGES = VALUE ? VALUE_SPAN_RANGES : KEY_SPAN_RANGES;
// Whether ranges span tokens: those of a span do, and those of groups of tokens in a tile.
template <bool VALUE>
constexpr bool RANGES_SPAN_TOKENS = SPAN_RANGES<VALUE> || (TILE_RANGES<VALUE> && GROUP_TOKENS<VALUE> > 1);

// An element of a tile of f16: the inverse of `field_of`.
template <bool VALUE>
__device__ __forceinline__ float f16_element(const u8* part, u32 token, u32 channel) {
    const u16* const tile = (const u16*)(part + (VALUE ? F16_TILE_BYTES : 0));
    if (VALUE) {
        const u32 matrix = token / 16 * (HEAD_DIM / 4) + channel / 8 * 2 + token / 8 % 2;
        return half_value(tile[matrix * 64 + channel % 8 * 8 + token % 8]);
    }
    return half_value(tile[(token / 8 * (HEAD_DIM / 8) + channel / 8) * 64 + token % 8 * 8 + channel % 8]);
}

template <bool VALUE>
__device__ __forceinline__ void load_window_row(float (&row)[LANE_CHANNELS], const u8* part, u32 token, int lane) {
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const u32 channel = lane + 32 * i;
        row[i] = channel < TENSOR_CHANNELS ? f16_element<VALUE>(part, token, channel) : 0.0f;
    }
    rotate<VALUE>(row, lane);
}

// Writes ranges over all tokens of a tile, or over groups of them, into the span's slot or to the tile. `lows` and
// `highs` are [WINDOW_WARPS][HEAD_DIM].
template <bool VALUE>
__device__ __forceinline__ void window_ranges(const u8* from, u8* part, float2* span_ranges, float shrink, float* lows,
                                              float* highs) {
    const u32 warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float low[LANE_CHANNELS];
    float high[LANE_CHANNELS];
    load_window_row<VALUE>(low, from, warp * EXTREME_TOKENS, lane);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) high[i] = low[i];
#pragma unroll
    for (u32 token = 1; token < EXTREME_TOKENS; token++) {
        float row[LANE_CHANNELS];
        load_window_row<VALUE>(row, from, warp * EXTREME_TOKENS + token, lane);
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            low[i] = fminf(low[i], row[i]);
            high[i] = fmaxf(high[i], row[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        lows[warp * HEAD_DIM + lane + 32 * i] = low[i];
        highs[warp * HEAD_DIM + lane + 32 * i] = high[i];
    }
    __syncthreads();
    constexpr u32 group_tokens = SPAN_RANGES<VALUE> ? TILE_TOKENS : GROUP_TOKENS<VALUE>;
    constexpr u32 warps = group_tokens / EXTREME_TOKENS;
    for (u32 i = threadIdx.x; i < TILE_TOKENS / group_tokens * HEAD_DIM; i += WINDOW_THREADS) {
        const u32 group = i / HEAD_DIM;
        const u32 channel = i % HEAD_DIM;
        float smallest = lows[group * warps * HEAD_DIM + channel];
        float largest = highs[group * warps * HEAD_DIM + channel];
        for (u32 other = 1; other < warps; other++) {
            smallest = fminf(smallest, lows[(group * warps + other) * HEAD_DIM + channel]);
            largest = fmaxf(largest, highs[(group * warps + other) * HEAD_DIM + channel]);
        }
        if constexpr (SPAN_RANGES<VALUE>) {
            span_ranges[channel] = code_range<VALUE>(smallest, largest, shrink);
        } else {
            ((u32*)(part + TILE_RANGES_AT<VALUE>))[i] = range_word<VALUE>(smallest, largest, shrink);
        }
    }
    __syncthreads();
}

// `staged` and `highs` are [WINDOW_WARPS][HEAD_DIM], as are `fields`.
template <bool VALUE>
__device__ __forceinline__ void pack_window_part(const WriteCall& call, u32 item, float* staged, float* highs,
                                                 u16* fields) {
    const u32 kv_head = item / WINDOW_PARTS % call.kv_heads;
    const uint4 entry = entry_at(call, item / WINDOW_PARTS / call.kv_heads);
    const u64 from_shard = call.from_shards[entry.w & 0xffffu];
    const u8* from = (const u8*)from_shard + ((u64)entry.x * call.kv_heads + kv_head) * F16_HEAD_BYTES;
    u8* part = page_part(call, entry.w >> 16, entry.y, kv_head);
    const float shrink = VALUE ? call.value_shrink : call.key_shrink;
    float2* span_ranges = VALUE ? call.value_ranges : call.key_ranges;
    if constexpr (SPAN_RANGES<VALUE>) span_ranges += ((u64)entry.z * call.kv_heads + kv_head) * HEAD_DIM;
    if constexpr (RANGES_SPAN_TOKENS<VALUE>) window_ranges<VALUE>(from, part, span_ranges, shrink, staged, highs);
    const u32 warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const StagedRow of_warp = {staged + warp * HEAD_DIM, fields + warp * HEAD_DIM};
    for (u32 i = warp; i < WINDOW_TOKENS; i += WINDOW_WARPS) {
        const u32 token = item % WINDOW_PARTS * WINDOW_TOKENS + i;
        float row[LANE_CHANNELS];
        load_window_row<VALUE>(row, from, token, lane);
        put_row<VALUE>(part, token, row, shrink, span_ranges, of_warp, lane);
    }
    // The next item overwrites memory that the warps share.
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(WINDOW_THREADS) pack_windows(const WriteCall call) {
    __shared__ float staged[WINDOW_WARPS * HEAD_DIM];
    __shared__ float highs[WINDOW_WARPS * HEAD_DIM];
    __shared__ u16 fields[WINDOW_WARPS * HEAD_DIM];
    admit_later_kernels();
    // The table was written before the step was launched.
    const u32 items = entry_count(call) * call.kv_heads * WINDOW_PARTS;
    const u32 blocks = call.beside != 0u ? call.beside : gridDim.x;
    if (call.beside == 0u || blockIdx.x == blocks) await_earlier_kernels();
    if (blockIdx.x == blocks) return;
    for (u32 item = blockIdx.x; item < items; item += blocks) {
        if (blockIdx.y == 0) {
            pack_window_part<false>(call, item, staged, highs, fields);
        } else {
            pack_window_part<true>(call, item, staged, highs, fields);
        }
    }
}
