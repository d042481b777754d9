// key_mean: the mean of some keys, as the centre of a sequence. The keys are the tokens of a call, or the first tokens
// of sequences that begin with a step.
//
//   m = (k_1 + … + k_n) · 1 / n
//
// One thread owns one channel of a KV head and adds its elements in token order; neighbours own neighbouring channels,
// so rows are read coalesced. Elements that are not finite, or exceed the largest, count as 0. 1 / n comes from the
// host.
//
// In a step, threads take the channels of its means in turns. With programmatic serialisation, blocks begin while the
// previous kernel still runs, and wait for it.
//
// In bounds: threads beyond the channels of the KV heads return, and indices stay below the entries of the section ·
// those channels; rows and slots were checked on the host, those of a step when its table was made for the layout that
// the store was bound to.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"
#include "common/step_call.cuh"

// `key(token)` is a channel of a token, relative to the first token of the mean.
template <typename Key>
__device__ __forceinline__ float mean_of(u32 tokens, float largest, float factor, const Key& key) {
    float sum = 0.0f;
    for (u32 token = 0; token < tokens; token++) {
        const float x = key(token);
        // False for NaN.
        if (fabsf(x) <= largest) sum = __fadd_rn(sum, x);
    }
    return __fmul_rn(sum, factor);
}

extern "C" __global__ void key_mean(const RowsCall call) {
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= call.kv_heads * TENSOR_CHANNELS) return;
    const auto key = [&](u32 token) {
        return element(call, token, index / TENSOR_CHANNELS, index % TENSOR_CHANNELS);
    };
    call.centre[index] = mean_of(call.tokens, call.largest, call.shrink, key);
}

// An entry holds the first token, the bits of 1 / n, and a word with n and, from bit 8 on, the slot of the centre.
extern "C" __global__ void key_mean_of_step(const WriteCall call) {
    admit_later_kernels();
    await_earlier_kernels();
    const u32 channels = call.kv_heads * TENSOR_CHANNELS;
    const u64 total = (u64)entry_count(call) * channels;
    const u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x; index < total; index += threads) {
        const uint4 entry = entry_at(call, (u32)(index / channels));
        const u32 of_centre = (u32)(index % channels);
        const u64 in_row = (u64)(of_centre / TENSOR_CHANNELS) * call.head_stride + of_centre % TENSOR_CHANNELS;
        const auto key = [&](u32 token) {
            return load_element(call.keys, call.key_type, (u64)(entry.x + token) * call.token_stride + in_row);
        };
        call.centres[(u64)centre_slot(entry) * channels + of_centre] =
            mean_of(entry.z & 0xffu, call.key_largest, __uint_as_float(entry.y), key);
    }
}
