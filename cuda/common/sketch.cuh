// Rows that are coded whole, bit for bit: rows with sketches (`format::sketch`), and rows whose norms are divided by
// that of their levels (`format::codebook::renormalized`).
//
// In a sketched row, a field holds a sign above the code of the level, whose top bit is flipped. The sign is that of a
// channel of the residual of the levels, rotated once more. The bit is set if that channel is not below 0.

#pragma once

#include "common/codebook.cuh"
#include "common/rotation.cuh"

// The top bit of a code of levels.
template <bool VALUE>
constexpr u32 MIDDLE_LEVEL = LEVEL_BITS<VALUE> > 0 ? 1u << (LEVEL_BITS<VALUE> - 1) : 0u;
template <bool VALUE>
constexpr u32 SIGN_BIT = 1u << (FORMAT_BITS<VALUE> - 1);

// Number of rotations between the basis of levels and that of signs: one where a block is the whole head.
template <bool VALUE>
constexpr int SKETCH_ROUNDS = ROTATION_ORDER<VALUE> == TENSOR_CHANNELS ? 1 : 3;

template <bool VALUE>
__device__ __forceinline__ void rotate_for_sketch(float (&row)[LANE_CHANNELS], int lane) {
    if constexpr (SKETCHED<VALUE>) {
#pragma unroll
        for (int round = 0; round < SKETCH_ROUNDS<VALUE>; round++) {
            deal<ROTATION_ORDER<VALUE>>(row, lane);
            flip_signs(row, KEY_SKETCH_SEED + round, lane);
            transform<ROTATION_ORDER<VALUE>>(row, lane);
        }
    }
}

template <bool VALUE>
__device__ __forceinline__ void rotate_sketch_back(float (&row)[LANE_CHANNELS], int lane) {
    if constexpr (SKETCHED<VALUE>) {
#pragma unroll
        for (int round = SKETCH_ROUNDS<VALUE> - 1; round >= 0; round--) {
            transform<ROTATION_ORDER<VALUE>>(row, lane);
            flip_signs(row, KEY_SKETCH_SEED + round, lane);
            deal_back<ROTATION_ORDER<VALUE>>(row, lane);
        }
    }
}

// The value of a field's level.
template <bool VALUE>
__device__ __forceinline__ float sketched_level(u32 field, float norm) {
    if constexpr (LEVEL_BITS<VALUE> == 0) {
        return 0.0f;
    } else {
        return level_value<VALUE>((field & (SIGN_BIT<VALUE> - 1u)) ^ MIDDLE_LEVEL<VALUE>, norm);
    }
}

// The value of a field's sign, in the basis of signs.
template <bool VALUE>
__device__ __forceinline__ float sketched_sign(u32 field, float residual_norm) {
    const float level = __uint_as_float(SKETCH_LEVEL<VALUE>);
    return __fmul_rn(residual_norm, field & SIGN_BIT<VALUE> ? level : -level);
}

// Replaces a rotated row, in memory that the warp shares, by its fields. Returns the norm and that of the residual in
// their stored form.
template <bool VALUE>
__device__ __forceinline__ u32 sketch_row(float* row, int lane) {
    const auto at = [&](u32 channel) { return row[channel]; };
    const u32 norm_half = warp_norm(lane, at);
    const float norm = half_value(norm_half);
    float residual[LANE_CHANNELS];
    u32 fields[LANE_CHANNELS];
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const int channel = lane + 32 * i;
        residual[i] = row[channel];
        fields[i] = 0u;
        if constexpr (LEVEL_BITS<VALUE> > 0) {
            const u32 code = level_code<VALUE>(residual[i], norm);
            fields[i] = code ^ MIDDLE_LEVEL<VALUE>;
            residual[i] = channel < TENSOR_CHANNELS ? __fsub_rn(residual[i], level_value<VALUE>(code, norm)) : 0.0f;
        }
    }
    rotate_for_sketch<VALUE>(residual, lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) row[lane + 32 * i] = residual[i];
    __syncwarp();
    const u32 residual_half = warp_norm(lane, at);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        if (!(residual[i] < 0.0f)) fields[i] |= SIGN_BIT<VALUE>;
        row[lane + 32 * i] = __uint_as_float(fields[i]);
    }
    __syncwarp();
    return norm_half | residual_half << 16;
}

// Replaces such a row by its codes. Returns the norm divided by that of the levels, in its stored form.
template <bool VALUE>
__device__ __forceinline__ u32 renormalized_row(float* row, int lane) {
    const auto at = [&](u32 channel) { return row[channel]; };
    const float norm = half_value(warp_norm(lane, at));
    u32 codes[LANE_CHANNELS];
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) codes[i] = level_code<VALUE>(row[lane + 32 * i], norm);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const int channel = lane + 32 * i;
        row[channel] = channel < TENSOR_CHANNELS ? level_value<VALUE>(codes[i], 1.0f) : 0.0f;
    }
    __syncwarp();
    const float sum = warp_sum_of_squares(lane, at);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) row[lane + 32 * i] = __uint_as_float(codes[i]);
    __syncwarp();
    return nearest_root(__fmul_rn(norm, norm), sum);
}

// Replaces a row that is coded whole by its fields. Returns its range word.
template <bool VALUE>
__device__ __forceinline__ u32 code_row(float* row, int lane) {
    if constexpr (SKETCHED<VALUE>) {
        return sketch_row<VALUE>(row, lane);
    } else {
        return renormalized_row<VALUE>(row, lane);
    }
}
