// The weights [N, K] of a layer in f16, in the order of its inputs.
//
// A weight is scale · (code - zero), rounded once: code - zero and its product with a scale in f16 are exact before.
//
// dequantize_chunks is for layers whose inputs lie in order: a thread has a chunk. dequantize_places is for the others:
// a thread has a weight, and finds its code by `homes`, which names the place of each input.
//
// Macros beside those of codes.cuh: INPUTS.

#include "codes.cuh"

struct WeightsCall {
    u64 codes;
    u64 scales;
    u64 homes;
    u64 weights;
};

extern "C" __global__ void __launch_bounds__(128) dequantize_chunks(const __grid_constant__ WeightsCall call) {
    const size_t at = static_cast<size_t>(blockIdx.x) * 128 + threadIdx.x;
    if (at >= static_cast<size_t>(OUTPUTS) * CHUNKS) return;
    const size_t output = at / CHUNKS;
    const u32 chunk = at % CHUNKS;
    const Chunk codes = load_chunk(call.codes, chunk_at(output, chunk));
    const float2 scale = load_scale(call.scales, scale_at(output, chunk / GROUP_CHUNKS));
    uint4* const row = reinterpret_cast<uint4*>(call.weights) + output * (4 * CHUNKS);
#pragma unroll
    for (int octet = 0; octet < 4; octet++) row[octet_at(chunk, octet)] = rounded_octet(codes, octet, scale);
}

// Code `place` of a chunk.
__device__ __forceinline__ u32 code_at(u64 codes, size_t chunk, u32 place) {
    const u32* const words = reinterpret_cast<const u32*>(codes) + chunk * BITS;
    const u32 pair = place / 2, half = place % 2 * 16;
    if (BITS == 3 && pair == 15) {
        u32 code = 0;
        for (u32 bit = 0; bit < 3; bit++) code |= (__ldg(words + bit) >> (half + 15) & 1u) << bit;
        return code;
    }
    // Pairs of a word.
    constexpr u32 PAIRS = 16 / BITS;
    return __ldg(words + pair / PAIRS) >> (half + BITS * (pair % PAIRS)) & ((1u << BITS) - 1u);
}

extern "C" __global__ void __launch_bounds__(256) dequantize_places(const __grid_constant__ WeightsCall call) {
    constexpr u32 BLOCKS = (INPUTS + 255) / 256;
    const size_t output = blockIdx.x / BLOCKS;
    const u32 input = blockIdx.x % BLOCKS * 256 + threadIdx.x;
    if (output >= OUTPUTS || input >= INPUTS) return;
    const u32 home = min(__ldg(reinterpret_cast<const u32*>(call.homes) + input), 32u * CHUNKS - 1u);
    const u32 chunk = home / 32;
    const float2 scale = load_scale(call.scales, scale_at(output, chunk / GROUP_CHUNKS));
    const float level = static_cast<float>(code_at(call.codes, chunk_at(output, chunk), home % 32)) - scale.y;
    reinterpret_cast<unsigned short*>(call.weights)[output * INPUTS + input] =
        static_cast<unsigned short>(halves_of(scale.x * level, 0.0f));
}
