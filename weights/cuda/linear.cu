// The product of activations with packed weights, a few rows at a time: y = x · Wᵀ.
//
// linear_fma takes every type and group, and any number of rows. Inputs are divided by f, so that
//     Σ x · code = Σ x / f · (1024 + f · code) - 1024 · Σ x / f,
// and a group adds scale · (Σ x · code - zero · Σ x) to its output.
//
// linear_mma takes up to 16 rows of f16 activations and groups of whole steps of 128 inputs. Weights are the rows of
// MMAs of 16 × 8 × 16: lane 4 · r + t of a warp loads chunk t of a step for the outputs r and r + 8, and its 16 pairs
// of codes are its part of eight MMAs. The order of inputs within an MMA does not matter, as activations are loaded in
// the same one. Weights enter as code - zero, which f16 holds.
//
// Macros beside those of codes.cuh: ALL_ROWS (by MMAs), ROWS (of a block of linear_fma, at most 4), INPUT and OUTPUT (0
// f32, 1 f16, 2 bf16), BY_MMA (1 for linear_mma and linear_strips).
//
// Sums are f32 and run in a fixed order.

#include "codes.cuh"

struct LinearCall {
    u64 codes;
    u64 scales;
    u64 inputs;
    u64 outputs;
    u32 rows;
};

__device__ __forceinline__ void store(u64 outputs, u32 row, u32 output, float x) {
    const size_t at = static_cast<size_t>(row) * OUTPUTS + output;
    if constexpr (OUTPUT == 0) {
        reinterpret_cast<float*>(outputs)[at] = x;
    } else if constexpr (OUTPUT == 1) {
        reinterpret_cast<unsigned short*>(outputs)[at] = static_cast<unsigned short>(halves_of(x, 0.0f));
    } else {
        unsigned short bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
        reinterpret_cast<unsigned short*>(outputs)[at] = bits;
    }
}

// Inputs 8 · octet onwards.
__device__ __forceinline__ void load_inputs(u64 inputs, size_t octet, float (&x)[8]) {
    if constexpr (INPUT == 0) {
        const float4* at = reinterpret_cast<const float4*>(inputs) + 2 * octet;
        const float4 low = __ldg(at), high = __ldg(at + 1);
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
        const uint4 read = __ldg(reinterpret_cast<const uint4*>(inputs) + octet);
        const u32 words[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (INPUT == 1) {
                const float2 pair = floats_of(words[i]);
                x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
            } else {
                x[2 * i] = __uint_as_float(words[i] << 16), x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
            }
        }
    }
}

#if !BY_MMA

// A block has four outputs and ROWS rows; 64 threads take the chunks in turn.
extern "C" __global__ void __launch_bounds__(64) linear_fma(const __grid_constant__ LinearCall call) {
    __shared__ float partial[4 * ROWS][64];
    const u32 first = 4 * blockIdx.x, first_row = ROWS * blockIdx.y;
    float sums[4][ROWS] = {};
    for (u32 chunk = threadIdx.x; chunk < CHUNKS; chunk += 64) {
        Chunk chunks[4];
        float2 scales[4];
        float dots[4][ROWS] = {}, plain[ROWS] = {}, divided[ROWS] = {};
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const size_t output = min(first + n, OUTPUTS - 1u);
            chunks[n] = load_chunk(call.codes, chunk_at(output, chunk));
            scales[n] = load_scale(call.scales, scale_at(output, chunk / GROUP_CHUNKS));
        }
#pragma unroll
        for (int q = 0; q < 4; q++) {
            float weights[4][8];
#pragma unroll
            for (int n = 0; n < 4; n++) {
#pragma unroll
                for (int pair = 0; pair < 4; pair++) {
                    const float2 both = floats_of(field(chunks[n], 4 * q + pair));
                    weights[n][2 * pair] = both.x, weights[n][2 * pair + 1] = both.y;
                }
            }
#pragma unroll
            for (int m = 0; m < ROWS; m++) {
                const u32 row = min(first_row + m, call.rows - 1u);
                float x[8];
                load_inputs(call.inputs, static_cast<size_t>(row) * (4 * CHUNKS) + octet_at(chunk, q), x);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float by = x[i] * (1.0f / (1 << log_factor(4 * q + i / 2)));
                    plain[m] += x[i];
                    divided[m] += by;
#pragma unroll
                    for (int n = 0; n < 4; n++) dots[n][m] += by * weights[n][i];
                }
            }
        }
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                sums[n][m] += scales[n].x * (dots[n][m] - (1024.0f * divided[m] + scales[n].y * plain[m]));
            }
        }
    }
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) partial[m * 4 + n][threadIdx.x] = sums[n][m];
    }
    __syncthreads();
    const u32 of = threadIdx.x, row = first_row + of / 4, output = first + of % 4;
    if (of < 4 * ROWS && row < call.rows && output < OUTPUTS) {
        float sum = 0.0f;
        for (u32 i = 0; i < 64; i++) sum += partial[of][(i + of) % 64];
        store(call.outputs, row, output, sum);
    }
}

#elif !IN_STRIPS

constexpr u32 WARPS = 8;
constexpr u32 STEPS = CHUNKS / 4;
constexpr u32 TILES = (ALL_ROWS + 7) / 8;

__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

struct Step {
    Chunk chunks[2];
    float2 scales[2];
};

__device__ __forceinline__ Step load_step(const LinearCall& call, const u32 (&outputs)[2], u32 step, u32 lane) {
    Step loaded;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        loaded.chunks[i] = load_chunk(call.codes, static_cast<size_t>(outputs[i]) * CHUNKS + 4 * step + lane % 4);
        loaded.scales[i] = load_scale(call.scales, static_cast<size_t>(outputs[i]) * GROUPS + 4 * step / GROUP_CHUNKS);
    }
    return loaded;
}

__device__ __forceinline__ void add_step(const LinearCall& call, const Step& loaded, u32 step, u32 lane,
                                         float (&sums)[TILES][4]) {
    float parts[TILES][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        // Eight pairs of each row of activations, one row a lane of four.
        uint4 inputs[TILES][2] = {};
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            const u32 row = 8 * tile + lane / 4;
            if (row < ALL_ROWS) {
                const size_t first = static_cast<size_t>(row) * (4 * CHUNKS);
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const u32 octet = octet_at(4 * step + lane % 4, 2 * half + i);
                    inputs[tile][i] = __ldg(reinterpret_cast<const uint4*>(call.inputs) + first + octet);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int pair = 8 * half + 2 * j;
            const u32 a0 = weights_of(loaded.chunks[0], pair, loaded.scales[0].y);
            const u32 a1 = weights_of(loaded.chunks[1], pair, loaded.scales[1].y);
            const u32 a2 = weights_of(loaded.chunks[0], pair + 1, loaded.scales[0].y);
            const u32 a3 = weights_of(loaded.chunks[1], pair + 1, loaded.scales[1].y);
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                const uint4 x = inputs[tile][j / 2];
                mma(parts[tile], a0, a1, a2, a3, j % 2 ? x.z : x.x, j % 2 ? x.w : x.y);
            }
        }
    }
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++) {
        sums[tile][0] += loaded.scales[0].x * parts[tile][0];
        sums[tile][1] += loaded.scales[0].x * parts[tile][1];
        sums[tile][2] += loaded.scales[1].x * parts[tile][2];
        sums[tile][3] += loaded.scales[1].x * parts[tile][3];
    }
}

// A block has 16 outputs and all rows; its warps take pairs of steps in turn.
extern "C" __global__ void __launch_bounds__(32 * WARPS) linear_mma(const __grid_constant__ LinearCall call) {
    __shared__ float partial[WARPS][TILES][16][8];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = 16 * blockIdx.x;
    const u32 outputs[2] = {min(first + lane / 4, OUTPUTS - 1u), min(first + lane / 4 + 8, OUTPUTS - 1u)};
    float sums[TILES][4] = {};
    for (u32 step = 2 * warp; step < STEPS; step += 2 * WARPS) {
        const bool has_next = step + 1 < STEPS;
        const Step one = load_step(call, outputs, step, lane);
        const Step next = load_step(call, outputs, has_next ? step + 1 : step, lane);
        add_step(call, one, step, lane, sums);
        if (has_next) add_step(call, next, step + 1, lane, sums);
    }
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++) {
        const u32 row = 2 * (lane % 4);
        partial[warp][tile][lane / 4][row] = sums[tile][0];
        partial[warp][tile][lane / 4][row + 1] = sums[tile][1];
        partial[warp][tile][lane / 4 + 8][row] = sums[tile][2];
        partial[warp][tile][lane / 4 + 8][row + 1] = sums[tile][3];
    }
    __syncthreads();
    const u32 output = threadIdx.x % 16, row = threadIdx.x / 16;
    if (row < ALL_ROWS && first + output < OUTPUTS) {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < WARPS; i++) sum += partial[i][row / 8][output][row % 8];
        store(call.outputs, row, first + output, sum);
    }
}

#endif
