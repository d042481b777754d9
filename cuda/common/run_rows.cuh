// The rows of attend_run_pipelined.cu: queries into shared memory, and outputs from registers.
//
// A row is a query and a query head. Four warps have 64 of them, each 16. Queries are halves: f16 as it is, other types
// times a power of two. Where keys are packed, queries are rotated like them, and multiplied by the scales of the span.
// Where values are packed, outputs are rotated back.

#pragma once

#include "common/attend_call.cuh"
#include "common/halves.cuh"
#include "common/reduce.cuh"
#include "common/rotation.cuh"
#include "common/run_softmax.cuh"
#include "common/warpgroup.cuh"

constexpr int WARP_ROWS = 16;
constexpr int GROUP_ROWS = 64;
constexpr int ROWS = WARPS * WARP_ROWS;
// The queries of four warps as matrices: [16 channels][8 rows][8 channels].
constexpr u32 GROUP_QUERY_BYTES = GROUP_ROWS * HEAD_DIM * 2;

// The output of a lane's two rows, g and g + 8: [8 channels][row, channels 2 c and 2 c + 1].
using RowValues = float[2 * CHANNEL_STEPS][4];

// The query of a row, counted from the first of the part, and its query head in the group. They do not depend on the
// item.
struct PlacedRow {
    u32 both;

    PlacedRow() = default;
    __device__ __forceinline__ PlacedRow(u32 row, u32 group) : both(row / group | row % group << 16) {}
    __device__ __forceinline__ u32 query() const { return both & 0xffffu; }
    __device__ __forceinline__ u32 head() const { return both >> 16; }
};

// Elements from the queries' beginning to those of a row. Rows beyond those of the item have its last query.
__device__ __forceinline__ u64 query_offset(const AttendCall& call, const Item& item, u32 kv_head, u32 first, PlacedRow row) {
    const u64 of = item.row + min(first + row.query(), item.queries - 1u);
    return of * call.query_stride + (u64)(kv_head * call.group + row.head()) * TENSOR_CHANNELS;
}

// Where 8 channels of a row of the block lie among the matrices.
__device__ __forceinline__ u32 chunk_place(int row, int chunk) {
    const u32 of_row = row / GROUP_ROWS * GROUP_QUERY_BYTES + row % GROUP_ROWS / 8 * 256 + row % 8 * 16;
    return of_row + chunk / 2 * (GROUP_ROWS * 32) + chunk % 2 * MATRIX_BYTES;
}

// Loads of ranges behind it do not begin before it: all at once they would not fit the registers.
__device__ __forceinline__ void keep_loads_behind() { __syncwarp(); }

// The signs of rotations, for the channels that a lane has of a query and of an output: [32 channels][lane].
struct RowSigns {
    static constexpr int WORDS = (HEAD_DIM / 4 + 31) / 32;

    u32 keys[WORDS][32];
    u32 values[WORDS][32];

    // By one warp, before a barrier of the block.
    __device__ __forceinline__ void fill(int lane) {
#pragma unroll
        for (int word = 0; word < WORDS; word++) {
            if (ROTATION_SIGNED<false>) keys[word][lane] = sign_bits<ChunksOfFour>(ROTATION_SEED<false>, word, lane);
            if (ROTATION_SIGNED<true>) values[word][lane] = sign_bits<PairsOfFour>(ROTATION_SEED<true>, word, lane);
        }
    }

    template <int COUNT>
    static __device__ __forceinline__ void flip(float (&row)[COUNT], const u32 (&signs)[WORDS][32], int lane) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) row[i] = flip_sign(row[i], signs[i / 32][lane], i);
    }
};

// Eight elements of a row, as their type has them: u32 for f32, u16 for f16 and bf16.
template <typename Bits>
struct EightElements {
    static constexpr int WORDS = 2 * sizeof(Bits);

    u32 words[WORDS];

    // `aligned` tells that 16 bytes can be loaded at once.
    __device__ __forceinline__ void load(const Bits* from, bool exists, bool aligned) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) words[i] = 0u;
        if (!exists) return;
        if (aligned) {
#pragma unroll
            for (int i = 0; i < WORDS / 4; i++) {
                const uint4 loaded = ((const uint4*)from)[i];
                words[4 * i] = loaded.x;
                words[4 * i + 1] = loaded.y;
                words[4 * i + 2] = loaded.z;
                words[4 * i + 3] = loaded.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) words[i * WORDS / 8] |= (u32)from[i] << (WORDS == 4 ? 16 * (i % 2) : 0);
        }
    }

    // Those that were copied to shared memory.
    __device__ __forceinline__ void take(const uint4* from) {
        const uint4 loaded = *from;
        words[0] = loaded.x;
        words[1] = loaded.y;
        words[2] = loaded.z;
        words[3] = loaded.w;
    }

    // Those of eight places that channels were dealt to.
    __device__ __forceinline__ void load_dealt(const Bits* row, int place) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) words[i] = 0u;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int channel = dealt_channel<ROTATION_ORDER<false> + !ROTATION_ORDER<false>>(place + i);
            if (channel < TENSOR_CHANNELS) words[i * WORDS / 8] |= (u32)row[channel] << (WORDS == 4 ? 16 * (i % 2) : 0);
        }
    }

    __device__ __forceinline__ float at(int i, u32 type) const {
        if (WORDS == 8) return __uint_as_float(words[i % WORDS]);
        return element_value(type, words[i / 2] >> 16 * (i % 2) & 0xffffu);
    }

    // The elements as halves, after a multiplication.
    __device__ __forceinline__ uint4 halves(u32 type, float factor) const {
        if (type == ELEMENTS_F16) return {words[0], words[1], words[2], words[3]};
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = half_pair(at(2 * i, type) * factor, at(2 * i + 1, type) * factor);
        return {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
};

// The queries of a warp's rows, on their way to shared memory. Eight lanes have eight rows, and four of them a row.
struct WarpQueries {
    static constexpr int LANE_CHUNKS = HEAD_DIM / 32;

    const AttendCall& call;
    u8* queries;
    RowConstants* constants;
    const RowSigns& signs;
    int warp;
    int lane;

    // `rows` are those of the lane, `first` the first query of the part in its item. `copied` tells that their elements
    // lie where they belong.
    template <typename Bits>
    __device__ __forceinline__ void move(const Item& item, u32 kv_head, u32 first, const PlacedRow (&rows)[2], bool copied) const {
        if (KEY_BITS == 16 && copied && call.query_type == ELEMENTS_F16) {
            if (lane < WARP_ROWS) constants[warp * WARP_ROWS + lane] = {row_delta(1.0f, call.score_scale), 0.0f};
            return;
        }
        const bool aligned = (((u64)call.queries | call.query_stride * sizeof(Bits)) & 15u) == 0u;
        // As many rows of a lane as registers have room for.
        constexpr int at_once = HEAD_DIM * sizeof(Bits) <= (KEY_BITS == 16 ? 512 : 256) ? 2 : 1;
#pragma unroll
        for (int h = 0; h < 2; h += at_once) {
            EightElements<Bits> of[at_once][LANE_CHUNKS];
#pragma unroll
            for (int k = 0; k < at_once; k++) {
                const int row = warp * WARP_ROWS + 8 * (h + k) + lane % 8;
                const Bits* const from = (const Bits*)call.queries + query_offset(call, item, kv_head, first, rows[h + k]);
#pragma unroll
                for (int i = 0; i < LANE_CHUNKS; i++) {
                    const int channel = 8 * (4 * i + lane / 8);
                    if constexpr (ROTATION_DEALT<false>) {
                        of[k][i].load_dealt(from, channel);
                    } else if (sizeof(Bits) == 2 && copied) {
                        of[k][i].take(place(row, i));
                    } else {
                        of[k][i].load(from + channel, channel < TENSOR_CHANNELS, aligned);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < at_once; k++) {
                const int row = warp * WARP_ROWS + 8 * (h + k) + lane % 8;
                if constexpr (KEY_BITS == 16) {
                    put(of[k], row);
                } else {
                    put_for_codes(of[k], call.key_ranges + ((u64)item.range_slot * call.kv_heads + kv_head) * HEAD_DIM, row);
                }
            }
        }
    }

    // The element type of this width.
    template <typename Bits>
    __device__ __forceinline__ u32 type() const {
        return sizeof(Bits) == 4 ? ELEMENTS_F32 : call.query_type;
    }

    // Where the lane's chunk `i` of a row lies among the matrices: it is chunk 4 i + lane / 8 of the row.
    __device__ __forceinline__ uint4* place(int row, int i) const {
        return (uint4*)(queries + chunk_place(row, lane / 8) + i * (2 * GROUP_ROWS * 32));
    }

    // The power of two that makes halves up to 2^15 of a row, whose largest element of the lane is given. The range of
    // exponents leaves room for the inverse.
    static __device__ __forceinline__ u32 exponent_of(float largest) {
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 8));
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 16));
        return min(max(__float_as_uint(largest) >> 23, 40u), 240u) - 14u;
    }

    static __device__ __forceinline__ float factor(u32 exponent) { return __uint_as_float((254u - exponent) << 23); }

    // Stores the lane's part of a row as matrices.
    template <typename Bits>
    __device__ __forceinline__ void put(const EightElements<Bits> (&of)[LANE_CHUNKS], int row) const {
        u32 exponent = 127u;
        if (type<Bits>() != ELEMENTS_F16) {
            float largest = 0.0f;
#pragma unroll
            for (int i = 0; i < 8 * LANE_CHUNKS; i++) largest = fmaxf(largest, fabsf(of[i / 8].at(i % 8, type<Bits>())));
            exponent = exponent_of(largest);
        }
#pragma unroll
        for (int i = 0; i < LANE_CHUNKS; i++) *place(row, i) = of[i].halves(type<Bits>(), factor(exponent));
        if (lane < 8) constants[row] = {row_delta(__uint_as_float(exponent << 23), call.score_scale), 0.0f};
    }

    // The same for packed keys, whose ranges over the span are given.
    template <typename Bits>
    __device__ __forceinline__ void put_for_codes(const EightElements<Bits> (&of)[LANE_CHUNKS], const float2* ranges,
                                                  int row) const {
        float x[8 * LANE_CHUNKS];
#pragma unroll
        for (int i = 0; i < 8 * LANE_CHUNKS; i++) x[i] = of[i / 8].at(i % 8, type<Bits>());
        if constexpr (ROTATION_ORDER<false> != 0) {
            if constexpr (ROTATION_SIGNED<false>) RowSigns::flip(x, signs.keys, lane);
            transform<ROTATION_ORDER<false>, ChunksOfFour>(x, lane);
        }
        float base = 0.0f;
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < 8 * LANE_CHUNKS; i++) {
            if (KEY_SPAN_RANGES) {
                if (i % 16 == 0) keep_loads_behind();
                const float2 range = ranges[ChunksOfFour::channel(i, lane)];
                base = __fmaf_rn(x[i], __fmaf_rn(KEY_CENTRE, range.x, range.y), base);
                x[i] *= range.x;
            }
            largest = fmaxf(largest, fabsf(x[i]));
        }
        if (KEY_SPAN_RANGES) {
            base += __shfl_xor_sync(ALL_LANES, base, 8);
            base = (base + __shfl_xor_sync(ALL_LANES, base, 16)) * call.score_scale;
        }
        const u32 exponent = exponent_of(largest);
#pragma unroll
        for (int i = 0; i < LANE_CHUNKS; i++) {
            u32 even[2], odd[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const float* const four = x + 8 * i + 4 * k;
                even[k] = half_pair(four[0] * factor(exponent), four[2] * factor(exponent));
                odd[k] = half_pair(four[1] * factor(exponent), four[3] * factor(exponent));
            }
            // Lanes l and l + 8 have 16 channels. One takes the even channels of both, the other the odd ones.
            const bool takes_odd = lane & 8;
            const u32 other[2] = {__shfl_xor_sync(ALL_LANES, takes_odd ? even[0] : odd[0], 8),
                                  __shfl_xor_sync(ALL_LANES, takes_odd ? even[1] : odd[1], 8)};
            *place(row, i) = takes_odd ? uint4{other[0], other[1], odd[0], odd[1]}
                                       : uint4{even[0], even[1], other[0], other[1]};
        }
        if (lane < 8) {
            const float unit = __uint_as_float(exponent << 23) * halves_unit(KEY_LEVEL_UNIT, false);
            constants[row] = {row_delta(unit, call.score_scale), base};
        }
    }
};

// From the sums of a lane's row `h` to means of values, whose ranges over the span are given: times `factor`, and rotated
// back.
__device__ __forceinline__ void to_values(RowValues& sums, int h, float factor, const float2* ranges, const RowSigns& signs,
                                          int lane) {
    float row[PairsOfFour::COUNT];
#pragma unroll
    for (int i = 0; i < PairsOfFour::COUNT; i++) {
        row[i] = sums[i / 2][2 * h + i % 2] * (factor * halves_unit(VALUE_LEVEL_UNIT, false));
        if (VALUE_SPAN_RANGES) {
            if (i % 16 == 0) keep_loads_behind();
            const float2 range = ranges[PairsOfFour::channel(i, lane)];
            row[i] = __fmaf_rn(range.x, row[i] + VALUE_CENTRE, range.y);
        }
    }
    if constexpr (ROTATION_ORDER<true> != 0) {
        transform<ROTATION_ORDER<true>, PairsOfFour>(row, lane);
        if constexpr (ROTATION_SIGNED<true>) RowSigns::flip(row, signs.values, lane);
    }
#pragma unroll
    for (int i = 0; i < PairsOfFour::COUNT; i++) sums[i / 2][2 * h + i % 2] = row[i];
}

// Where a lane writes its part of a row: an output, or a state in single precision.
struct RowTarget {
    void* to;
    u32 type;
    int channels;
    bool exists;
    // Whether pairs of f32, or four elements of 16 bits, can be stored at once.
    bool aligned;

    // Channels 8 n + 2 c and the one after. Neighbouring lanes exchange words of 16 bits, so that four lanes write whole
    // sectors of 32 bytes.
    __device__ __forceinline__ void write(const RowValues& sums, int h, float factor, int lane) const {
        const int c = lane & 3;
        if constexpr (ROTATION_DEALT<true>) {
#pragma unroll
            for (int i = 0; i < PairsOfFour::COUNT; i++) {
                const int channel = dealt_channel<ROTATION_ORDER<true> + !ROTATION_ORDER<true>>(PairsOfFour::channel(i, lane));
                if (exists && channel < channels) store_element(to, type, channel, sums[i / 2][2 * h + i % 2] * factor);
            }
            return;
        }
        if (type == ELEMENTS_F32) {
#pragma unroll
            for (int n = 0; n < 2 * CHANNEL_STEPS; n++) {
                const int channel = 8 * n + 2 * c;
                const float2 pair = {sums[n][2 * h] * factor, sums[n][2 * h + 1] * factor};
                if (!exists || channel >= channels) continue;
                float* const at = (float*)to + channel;
                if (aligned) {
                    *(float2*)at = pair;
                } else {
                    at[0] = pair.x;
                    at[1] = pair.y;
                }
            }
            return;
        }
#pragma unroll
        for (int n = 0; n < 2 * CHANNEL_STEPS; n += 2) {
            const u32 first = pair_bits(sums[n][2 * h] * factor, sums[n][2 * h + 1] * factor);
            const u32 second = pair_bits(sums[n + 1][2 * h] * factor, sums[n + 1][2 * h + 1] * factor);
            const u32 other = __shfl_xor_sync(ALL_LANES, c & 1 ? first : second, 1);
            const int channel = 8 * (n + (c & 1)) + 2 * (c & 2);
            if (!exists || channel >= channels) continue;
            const u32 words[2] = {c & 1 ? other : first, c & 1 ? second : other};
            u16* const at = (u16*)to + channel;
            if (aligned) {
                *(uint2*)at = {words[0], words[1]};
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) at[i] = (u16)(words[i / 2] >> 16 * (i % 2));
            }
        }
    }

    __device__ __forceinline__ u32 pair_bits(float low, float high) const {
        return type == ELEMENTS_F16 ? half_pair(low, high) : bfloat_bits(low) | bfloat_bits(high) << 16;
    }
};
