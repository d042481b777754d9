// Rotations of rows: `format::Rotation`, bit for bit. The lanes that hold a row share its channels as a layout says.
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

// A layout says how lanes share the channels of a row. A lane has COUNT of them. Each bit of a channel's number is a
// bit of the lane (`lane_bit`, else 0) or of the element in the lane (`element_bit`).
//
// A warp holds a row, lane l the channels l, l + 32, …
struct RowOfWarp {
    static constexpr int COUNT = LANE_CHANNELS;
    static __device__ constexpr int lane_bit(int half) { return half < 32 ? half : 0; }
    static __device__ constexpr int element_bit(int half) { return half / 32; }
    static __device__ __forceinline__ int channel(int i, int lane) { return lane + 32 * i; }
};

// Four lanes hold a row, each every fourth chunk of eight channels: lanes g, g + 8, g + 16 and g + 24.
struct ChunksOfFour {
    static constexpr int COUNT = HEAD_DIM / 4;
    static __device__ constexpr int lane_bit(int half) { return half == 8 || half == 16 ? half : 0; }
    static __device__ constexpr int element_bit(int half) { return half < 8 ? half : half / 4; }
    static __device__ __forceinline__ int channel(int i, int lane) { return i / 8 * 32 + lane / 8 * 8 + i % 8; }
};

// Four neighbouring lanes hold a row, each every fourth pair of channels: the products of an MMA.
struct PairsOfFour {
    static constexpr int COUNT = HEAD_DIM / 4;
    static __device__ constexpr int lane_bit(int half) { return half == 2 || half == 4 ? half / 2 : 0; }
    static __device__ constexpr int element_bit(int half) { return half < 2 ? half : half / 4; }
    static __device__ __forceinline__ int channel(int i, int lane) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
};

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

// The signs of a lane's channels, a bit each, for kernels that rotate many rows: word `word` of them.
template <typename Layout>
__device__ __forceinline__ u32 sign_bits(u32 seed, int word, int lane) {
    u32 bits = 0u;
    for (int i = 32 * word; i < min(32 * word + 32, Layout::COUNT); i++) {
        bits |= (u32)sign_flips(seed, Layout::channel(i, lane)) << i % 32;
    }
    return bits;
}

__device__ __forceinline__ float flip_sign(float x, u32 bits, int i) {
    return __uint_as_float(__float_as_uint(x) ^ (bits << (31 - i % 32) & 0x80000000u));
}

// The channel at a place of the blocks that channels were dealt to.
template <int ORDER>
__device__ __forceinline__ int dealt_channel(int place) {
    constexpr int blocks = TENSOR_CHANNELS / ORDER;
    return place < TENSOR_CHANNELS ? place % ORDER * blocks + place / ORDER : place;
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
    if constexpr (blocks > 1) permute_channels(row, lane, dealt_channel<ORDER>);
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

template <int ORDER, typename Layout = RowOfWarp>
__device__ __forceinline__ void transform(float (&row)[Layout::COUNT], int lane) {
    // Bits of 2^-50: smaller elements count as 0.
#pragma unroll
    for (int i = 0; i < Layout::COUNT; i++) {
        const bool small = (__float_as_uint(row[i]) & 0x7fffffffu) < 0x26800000u;
        row[i] = small ? 0.0f : __fmul_rn(row[i], ROTATION_SCALE<ORDER>);
    }
#pragma unroll
    for (int half = 1; half < ORDER; half *= 2) {
        const int of_lane = Layout::lane_bit(half);
        if (of_lane != 0) {
            const float sign = lane & of_lane ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < Layout::COUNT; i++) {
                const float other = __shfl_xor_sync(ALL_LANES, row[i], of_lane);
                row[i] = __fadd_rn(other, sign * row[i]);
            }
            continue;
        }
        const int bit = Layout::element_bit(half);
#pragma unroll
        for (int i = 0; i < Layout::COUNT; i++) {
            if (i & bit) continue;
            const float low = row[i];
            const float high = row[i + bit];
            row[i] = __fadd_rn(low, high);
            row[i + bit] = __fsub_rn(low, high);
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
