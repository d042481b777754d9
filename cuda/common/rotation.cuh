// Rotations of rows: `format::Rotation`, bit for bit. A warp holds a row, lane l the channels l, l + 32, …
//
// forward y = H (s ⊙ x) / √ORDER, inverse x = s ⊙ (H y) / √ORDER, for blocks of ORDER channels; s are signs, or all 1
//
// A rotation of dealt channels first deals them out to the blocks in turns: of m blocks, channel c goes to block c % m,
// place c / m. Channels beyond the head stay in place. The macros are those of `PageFormat::defines`.

#pragma once

// Channels of a block, 0 if rows are not rotated.
template <bool VALUE>
constexpr int ROTATION_ORDER = VALUE ? VALUE_ROTATION_ORDER : KEY_ROTATION_ORDER;
template <bool VALUE>
constexpr bool ROTATION_SIGNED = VALUE ? VALUE_ROTATION_SIGNED : KEY_ROTATION_SIGNED;
template <bool VALUE>
constexpr bool ROTATION_DEALT = VALUE ? VALUE_ROTATION_DEALT : KEY_ROTATION_DEALT;
template <bool VALUE>
constexpr u32 ROTATION_SEED = VALUE ? VALUE_ROTATION_SEED : KEY_ROTATION_SEED;

// 1/√ORDER, rounded.
template <int ORDER>
constexpr float ROTATION_SCALE = 0.5f * ROTATION_SCALE<ORDER / 4>;
template <>
constexpr float ROTATION_SCALE<1> = 1.0f;
template <>
constexpr float ROTATION_SCALE<2> = 0.70710678118654752f;

__device__ __forceinline__ bool sign_flips(u32 seed, u32 channel) {
    u32 x = seed + 0x9e3779b9u * (channel + 1u);
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return (x ^ x >> 16) & 1u;
}

__device__ __forceinline__ void flip_signs(float (&row)[LANE_CHANNELS], u32 seed, int lane) {
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        if (sign_flips(seed, lane + 32 * i)) row[i] = -row[i];
    }
}

// Fills every place with the channel that `source(place)` names.
template <typename Source>
__device__ __forceinline__ void permute_channels(float (&row)[LANE_CHANNELS], int lane, Source source) {
    float from[LANE_CHANNELS];
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) from[i] = row[i];
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const int channel = source(lane + 32 * i);
#pragma unroll
        for (int k = 0; k < LANE_CHANNELS; k++) {
            const float x = __shfl_sync(ALL_LANES, from[k], channel % 32);
            if (channel / 32 == k) row[i] = x;
        }
    }
}

template <int ORDER>
__device__ __forceinline__ void deal(float (&row)[LANE_CHANNELS], int lane) {
    constexpr int blocks = TENSOR_CHANNELS / ORDER;
    if constexpr (blocks > 1) {
        permute_channels(row, lane,
                         [](int place) { return place < TENSOR_CHANNELS ? place % ORDER * blocks + place / ORDER : place; });
    }
}

template <int ORDER>
__device__ __forceinline__ void deal_back(float (&row)[LANE_CHANNELS], int lane) {
    constexpr int blocks = TENSOR_CHANNELS / ORDER;
    if constexpr (blocks > 1) {
        permute_channels(row, lane, [](int channel) {
            return channel < TENSOR_CHANNELS ? channel % blocks * ORDER + channel / blocks : channel;
        });
    }
}

template <int ORDER>
__device__ __forceinline__ void transform(float (&row)[LANE_CHANNELS], int lane) {
    // Bits of 2^-50: smaller elements count as 0.
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const bool small = (__float_as_uint(row[i]) & 0x7fffffffu) < 0x26800000u;
        row[i] = small ? 0.0f : __fmul_rn(row[i], ROTATION_SCALE<ORDER>);
    }
    // Channels of other lanes, then those of the lane itself.
#pragma unroll
    for (int half = 1; half < ORDER && half < 32; half *= 2) {
        const float sign = lane & half ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            const float other = __shfl_xor_sync(ALL_LANES, row[i], half);
            row[i] = __fadd_rn(other, sign * row[i]);
        }
    }
#pragma unroll
    for (int half = 32; half < ORDER; half *= 2) {
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            if (i & half / 32) continue;
            const float low = row[i];
            const float high = row[i + half / 32];
            row[i] = __fadd_rn(low, high);
            row[i + half / 32] = __fsub_rn(low, high);
        }
    }
}

template <bool VALUE>
__device__ __forceinline__ void rotate(float (&row)[LANE_CHANNELS], int lane) {
    if constexpr (ROTATION_ORDER<VALUE> != 0) {
        if constexpr (ROTATION_DEALT<VALUE>) deal<ROTATION_ORDER<VALUE>>(row, lane);
        if constexpr (ROTATION_SIGNED<VALUE>) flip_signs(row, ROTATION_SEED<VALUE>, lane);
        transform<ROTATION_ORDER<VALUE>>(row, lane);
    }
}

template <bool VALUE>
__device__ __forceinline__ void rotate_back(float (&row)[LANE_CHANNELS], int lane) {
    if constexpr (ROTATION_ORDER<VALUE> != 0) {
        transform<ROTATION_ORDER<VALUE>>(row, lane);
        if constexpr (ROTATION_SIGNED<VALUE>) flip_signs(row, ROTATION_SEED<VALUE>, lane);
        if constexpr (ROTATION_DEALT<VALUE>) deal_back<ROTATION_ORDER<VALUE>>(row, lane);
    }
}

// A warp rotates an output back in shared memory, in place.
__device__ __forceinline__ void rotate_output(float* output, int lane) {
    float row[LANE_CHANNELS];
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) row[i] = output[lane + 32 * i];
    rotate_back<true>(row, lane);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) output[lane + 32 * i] = row[i];
}
