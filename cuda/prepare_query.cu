// prepare_query: the queries of a block's heads as B fragments, a stage of `attend`.
//
//   packed keys, a range per channel:  q' = q · scale_c · log2(e)/√d,  score = δ Σ q16 · code + Σ q · min_c · log2(e)/√d
//   packed keys, a range per token:    q' = q · log2(e)/√d,            score = scale_t · δ Σ q16 · code + min_t · Σ q'
//   codes of a codebook:               q' = q · log2(e)/√d,            score = norm_t · unit · (δ Σ q16 · byte + ½ δ Σ q16)
//   signs of a sketch, above these:    the same of q rotated once more, with the other norm_t, added to the score
//   f16 keys:                          q' = q · log2(e)/√d,            score = δ Σ (high + low) · key
//   packed keys, ranges of groups:     q' = q · log2(e)/√d,            see common/scores_grouped.cuh
//
// with q' ≈ δ · q16, where q16 = 256 · high + low is an integer of 16 bits in two signed bytes. For f16 keys and ranges
// of groups, high and low are two halves whose sum is q' / δ. The rounding error of the query, Σ q' − δ q16, is added
// times the middle code: the common part of all codes then carries no error, and a range far from zero costs no
// accuracy. If keys are rotated, q is rotated first.
//
// One warp owns a head, and a lane every 32nd channel. Queries and ranges are loaded before the prefetch of keys and
// values, so that they do not queue behind it, and are used after it.
//
// In bounds: heads beyond the group and channels beyond the head are not read, they are zero; HEAD_DIM is a
// multiple of 32.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/attend_call.cuh"
#include "common/rotation.cuh"
#include "common/reduce.cuh"
#include "common/sketch.cuh"
#include "common/level_bytes.cuh"

constexpr bool QUERY_HALVES = KEY_BITS == 16 || KEY_GROUPED;
constexpr int QUERY_BYTES = QUERY_HALVES ? 2 : 1;
// Rows of the B operands: (high, low) of every head, or all high rows and then all low ones.
constexpr int QUERY_ROWS = WIDE ? 16 : 8;
// Padded so that the 8 rows of a fragment lie in different banks.
constexpr int QUERY_ROW_BYTES = HEAD_DIM * QUERY_BYTES + 16;
// Blocks of channels that one MMA multiplies, and B fragments of a lane: those of its column, followed by a second
// part. With WIDE this is the low part. With ranges of groups, columns of low parts are followed by the high part.
constexpr int QUERY_BLOCKS = HEAD_DIM / (QUERY_HALVES ? 16 : 32);
constexpr int QUERY_PARTS = WIDE || KEY_GROUPED ? 2 : 1;
constexpr int QUERY_REGISTERS = QUERY_PARTS * QUERY_BLOCKS;

// At 1 bit the first three planes of a nibble are read as code − 1 (see `key_block`). The pattern of affected blocks of
// channels repeats after this many blocks of tokens.
constexpr int KEY_VARIANTS = KEY_BITS != 1 || KEY_BLOCKS % 4 == 0 ? 1 : KEY_BLOCKS % 2 == 0 ? 2 : 4;
constexpr int HEADS_PER_WARP = (BLOCK_HEADS + WARPS - 1) / WARPS;

// Start value of integer sums of bytes. As a float it is 1.5 · 2^23, and adding an integer to the bits adds it to the
// float.
constexpr int SUM_START = 0x4b400000;
constexpr float SUM_START_FLOAT = 12582912.0f;
// Added to a float so that its nearest integer appears in the low bits.
constexpr float INTEGER_START_FLOAT = 8388608.0f;
// Sums of both bytes of the query over codes of 1 bit stay below 2^22, so high ones can be added to low ones as
// integers.
constexpr bool KEY_SUMS_FIT = KEY_BITS == 1 && HEAD_DIM <= 128;
// Codes of 4 and 2 bits enter the sums as their unit times the code; up to 128 of them stay below 2^22.
constexpr bool KEYS_AT_TOP = (KEY_BITS == 4 || KEY_BITS == 2) && HEAD_DIM <= 128 && !KEY_LEVELS && !KEY_SKETCHED;

// Scores are multiples of norms, without minimums.
constexpr bool KEY_NORMS = KEY_LEVEL_UNIT != 0 || KEY_SKETCHED;
// Whether fields are only the sign of a sketch.
constexpr bool SIGNS_ALONE = KEY_SKETCHED && KEY_BITS == 1;
// Queries of a head: one, or one for levels and one for the signs above them.
constexpr int KEY_QUERIES = KEY_SKETCHED && !SIGNS_ALONE ? 2 : 1;

// The values of the bytes of codes, or of signs: UNIT · (code − the middle code), times LEVEL where there are norms.
// The byte of a level lacks ½, and its middle is between −1 and 0. Signs of a sketch lie at the top of their bytes, and
// a code of one bit below, which is flipped.
constexpr bool ONE_BIT_BELOW_SIGNS = KEY_SKETCHED && KEY_LEVEL_BITS == 1;
template <bool SIGNS>
constexpr float KEY_UNIT = KEYS_AT_TOP ? (float)(1 << (8 - KEY_BITS)) : ONE_BIT_BELOW_SIGNS ? 64.0f : 1.0f;
template <>
constexpr float KEY_UNIT<true> = KEY_BITS == 1 ? 1.0f : 128.0f;
template <bool SIGNS>
constexpr float MIDDLE_KEY = ONE_BIT_BELOW_SIGNS ? 0.5f : KEY_LEVELS ? -0.5f : ((1 << (KEY_BITS % 16)) - 1) * 0.5f;
template <>
constexpr float MIDDLE_KEY<true> = 0.5f;
template <bool SIGNS>
__device__ __forceinline__ float key_level() {
    if (SIGNS) return 2.0f * __uint_as_float(KEY_SKETCH_LEVEL);
    const float level = __uint_as_float(KEY_LEVEL_UNIT);
    return ONE_BIT_BELOW_SIGNS ? -level : level;
}

// The constants of a head's scores, in addition to the sum of products.
struct HeadConstants {
    float delta;
    float base[KEY_VARIANTS];
    float query_sum;
};

// Start values of sums, and tables: those of `key_block` for the bits of a nibble, or of a codebook's levels
// (common/level_bytes.cuh). Read from shared memory they stay in registers. The compiler would reload constants that it
// knows before every use.
struct SumConstants {
    int key_start[4];
    int level_start[4];
    u32 bit_tables[4];
    u32 level_tables[LEVEL_TABLES];
};

// The queries of a warp's heads, of codes or of signs.
struct QueryRows {
    alignas(16) u8 rows[QUERY_ROWS][QUERY_ROW_BYTES];
    HeadConstants heads[WARP_HEADS];
};

struct QueryShared {
    QueryRows queries[ROW_WARPS][KEY_QUERIES];
    // Σ q' of each group of channels, if keys have ranges of groups.
    float group_sums[ROW_WARPS][KEY_ROW_GROUPS][WARP_HEADS];
    alignas(16) SumConstants constants;
};

// Channels lane, lane + 32, … of the heads that this warp prepares.
struct QueryLoads {
    float query[HEADS_PER_WARP][LANE_CHANNELS];
    float2 range[LANE_CHANNELS];
};

__device__ __forceinline__ QueryLoads load_query(const AttendCall& call, const Item& item, u32 kv_head, u32 first_head,
                                                 int heads, int warp, int lane) {
    QueryLoads loads;
    if (KEY_SPAN_RANGES) {
        const float2* ranges = call.key_ranges + ((u64)item.range_slot * call.kv_heads + kv_head) * HEAD_DIM + lane;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) loads.range[i] = ranges[32 * i];
    }
#pragma unroll
    for (int k = 0; k < HEADS_PER_WARP; k++) {
        const int head = warp + k * WARPS;
        const BlockHead of = block_head(call, first_head, head);
        const u64 row = (item.row + of.query) * call.query_stride + (u64)of.head * TENSOR_CHANNELS + lane;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            float x = 0.0f;
            if (head < heads && lane + 32 * i < TENSOR_CHANNELS) {
                x = load_element(call.queries, call.query_type, row + 32 * i);
            }
            loads.query[k][i] = x;
        }
    }
    return loads;
}

// Whether levels are looked up in the words directly.
constexpr bool KEY_LEVEL_WORDS = KEY_LEVELS && (KEY_BITS != 3 || KEY_SKETCHED);

// Whether the planes of a load are blocks of channels of the same tokens. Then bytes of levels need not be sorted by
// plane, and the query is in their order instead.
template <bool SIGNS>
constexpr bool QUERY_MIXES_PLANES = !SIGNS && KEY_LEVEL_WORDS && KEY_BLOCKS % KEY_PLANES == 0;

// The place of a channel in a row of the query.
template <bool SIGNS>
__device__ __forceinline__ int query_place(int channel) {
    if (KEY_GROUPED) {
        // If codes become pairs of halves, channel 4 c + e of a block is element 2 c + (e >> 1) of an MMA, in the upper
        // half for odd e (common/scores_grouped.cuh).
        return (channel & ~15) + 8 * (channel & 1) + (channel >> 1 & 6) + (channel >> 1 & 1);
    }
    if (QUERY_MIXES_PLANES<SIGNS>) {
        // Byte by byte as in `level_bytes`: block `pair + PLANES / 2 · (e >> 1)` of the load, channels 4 c + e of
        // planes `pair` and `pair + PLANES / 2` in turn.
        constexpr int pairs = KEY_PLANES > 1 ? KEY_PLANES / 2 : 1;
        const int plane = channel / 32 % KEY_PLANES;
        const int block = channel / 32 - plane + plane % pairs + pairs * (channel >> 1 & 1);
        return 32 * block + (channel & 28) + 2 * (channel & 1) + plane / pairs;
    }
    return channel;
}

// One head's rows of bytes and its constants, from q' in `scaled`. `offset` is part of all its scores.
template <bool SIGNS>
__device__ __forceinline__ void prepare_head(QueryRows& shared, int head, const float (&scaled)[LANE_CHANNELS],
                                             float offset, int lane) {
    float largest = 0.0f;
    float query_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        largest = fmaxf(largest, fabsf(scaled[i]));
        if (KEY_TOKEN_RANGES) query_sum += scaled[i];
    }
    largest = warp_max(largest);
    if (KEY_TOKEN_RANGES) query_sum = warp_sum(query_sum);
    const int high_row = WIDE ? head : 2 * head;
    const int low_row = WIDE ? WARP_HEADS + head : 2 * head + 1;
    HeadConstants constants;
    constants.query_sum = query_sum;
    if (QUERY_HALVES) {
        constants.delta = largest == 0.0f ? 1.0f : largest;
        constants.base[0] = 0.0f;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            const float x = scaled[i] / constants.delta;
            const u32 high = half_bits(x);
            const int place = query_place<SIGNS>(lane + 32 * i);
            ((u16*)shared.rows[high_row])[place] = (u16)high;
            ((u16*)shared.rows[low_row])[place] = (u16)half_bits(x - half_value(high));
        }
    } else {
        // 127 · 256: the high byte stays within a signed byte for every low byte.
        constants.delta = largest / 32512.0f;
        const float inverse = constants.delta == 0.0f ? 0.0f : 1.0f / constants.delta;
        float taken = 0.0f;
        int sums[KEY_VARIANTS];
#pragma unroll
        for (int v = 0; v < KEY_VARIANTS; v++) sums[v] = 0;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            const int query = __float2int_rn(fminf(fmaxf(scaled[i] * inverse, -32512.0f), 32512.0f));
            taken += __fmaf_rn((float)-query, constants.delta, scaled[i]);
            const int low = (int)(signed char)(query & 0xff);
            const int place = query_place<SIGNS>(lane + 32 * i);
            shared.rows[high_row][place] = (u8)((query - low) >> 8);
            shared.rows[low_row][place] = (u8)low;
            // The difference between the bytes of `key_block` and the codes.
#pragma unroll
            for (int v = 0; v < KEY_VARIANTS; v++) {
                if (KEY_BITS == 8) sums[v] += 128 * query;
                if (KEY_BITS == 1 && (LONE_HEAD || (v * KEY_BLOCKS + i) % 4 != 3)) sums[v] += query;
            }
        }
        if (KEY_NORMS) offset -= MIDDLE_KEY<SIGNS> * query_sum;
        offset += MIDDLE_KEY<SIGNS> * warp_sum(taken);
#pragma unroll
        for (int v = 0; v < KEY_VARIANTS; v++) {
            const int lacking = KEY_BITS == 8 || KEY_BITS == 1 ? __reduce_add_sync(ALL_LANES, sums[v]) : 0;
            constexpr float start = LONE_HEAD ? 0.0f : SUM_START_FLOAT / KEY_UNIT<SIGNS>;
            constants.base[v] = constants.delta * ((float)lacking - start) + offset;
        }
        constants.delta /= KEY_UNIT<SIGNS>;
        if (KEY_NORMS) {
            constants.delta *= key_level<SIGNS>();
#pragma unroll
            for (int v = 0; v < KEY_VARIANTS; v++) constants.base[v] *= key_level<SIGNS>();
        }
    }
    if (lane == 0) shared.heads[head] = constants;
}

// Bytes that the bits of a nibble select, see `key_block`.
__device__ __forceinline__ u32 bit_table(int bit) {
    return bit == 0 ? 0xff00ff00u : bit == 1 ? 0xffff0000u : bit == 2 ? 0xffffffffu : 0x01010101u;
}

__device__ __forceinline__ void prepare_query(QueryShared& shared, QueryLoads& loads, float score_scale, int warp, int lane) {
    if (warp == 0 && lane < 4) {
        shared.constants.key_start[lane] = KEY_SUMS_FIT && !WIDE && lane % 2 == 0 ? 0 : SUM_START;
        shared.constants.level_start[lane] = SUM_START;
        shared.constants.bit_tables[lane] = bit_table(lane);
    }
    if (warp == 0 && lane < LEVEL_TABLES) shared.constants.level_tables[lane] = level_table(lane);
#pragma unroll
    for (int k = 0; k < HEADS_PER_WARP; k++) {
        if (warp + k * WARPS >= BLOCK_HEADS) continue;
        const int of_warp = (warp + k * WARPS) / WARP_HEADS;
        const int head = (warp + k * WARPS) % WARP_HEADS;
        float scaled[LANE_CHANNELS];
        float offset = 0.0f;
        rotate<false>(loads.query[k], lane);
        if constexpr (SIGNS_ALONE) rotate_for_sketch<false>(loads.query[k], lane);
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            const float x = loads.query[k][i] * score_scale;
            scaled[i] = x;
            if (KEY_SPAN_RANGES) {
                scaled[i] = x * loads.range[i].x;
                offset += x * loads.range[i].y;
            }
        }
        if (KEY_SPAN_RANGES) offset = warp_sum(offset);
        if constexpr (KEY_GROUPED && KEY_GROUP_CHANNELS > 1) {
            constexpr int channels = KEY_GROUP_CHANNELS;
            for (int group = 0; group < KEY_ROW_GROUPS; group++) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < LANE_CHANNELS; i++) {
                    if ((lane + 32 * i) / channels == group) sum += scaled[i];
                }
                sum = warp_sum(sum);
                if (lane == 0) shared.group_sums[of_warp][group][head] = sum;
            }
        }
        prepare_head<SIGNS_ALONE>(shared.queries[of_warp][0], head, scaled, offset, lane);
        if constexpr (KEY_QUERIES == 2) {
            rotate_for_sketch<false>(scaled, lane);
            prepare_head<true>(shared.queries[of_warp][1], head, scaled, 0.0f, lane);
        }
    }
}

__device__ __forceinline__ SumConstants load_constants(const QueryShared& shared) {
    SumConstants constants;
    const u32 from = shared_address(&shared.constants);
    const uint4 key_start = load_shared_16(from);
    const uint4 level_start = load_shared_16(from + 16);
    const uint4 bit_tables = load_shared_16(from + 32);
    const u32 words[12] = {key_start.x,  key_start.y,  key_start.z,  key_start.w,  level_start.x, level_start.y,
                           level_start.z, level_start.w, bit_tables.x, bit_tables.y, bit_tables.z, bit_tables.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        constants.key_start[i] = (int)words[i];
        constants.level_start[i] = (int)words[4 + i];
        constants.bit_tables[i] = words[8 + i];
    }
#pragma unroll
    for (int i = 0; i < LEVEL_TABLES; i++) {
        constants.level_tables[i] = KEY_LEVELS || VALUE_LEVELS ? load_shared_4(from + 48 + 4 * i) : 0u;
    }
    return constants;
}

// Queries in the form that this lane multiplies with.
struct LaneQuery {
    // Registers of the B fragments: block f of channels at 2f and 2f + 1, followed by those of QUERY_PARTS.
    u32 fragments[2 * QUERY_REGISTERS];
    float delta[LANE_HEADS];
    float base[KEY_VARIANTS][LANE_HEADS];
    float sum[LANE_HEADS];

    // Register i of the second part.
    __device__ __forceinline__ u32 low(int i) const {
        return fragments[(2 * QUERY_BLOCKS + i) % (2 * QUERY_REGISTERS)];
    }

    __device__ __forceinline__ void load(const QueryRows& shared, int lane) {
        const int row = lane >> 2;
        const int column = lane & 3;
#pragma unroll
        for (int part = 0; part < QUERY_PARTS; part++) {
#pragma unroll
            for (int f = 0; f < QUERY_BLOCKS; f++) {
                const u32* words = (const u32*)shared.rows[WIDE ? row + 8 * part : row & ~part];
                const bool there = WIDE || part == 0 || row % 2 == 1;
                const int at = part * QUERY_BLOCKS + f;
                // A block is 8 words of a row: 4 for each register.
                fragments[2 * at] = there ? words[8 * f + column] : 0u;
                fragments[2 * at + 1] = there ? words[8 * f + 4 + column] : 0u;
            }
        }
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) {
            const HeadConstants& head = shared.heads[LANE_HEADS * column + h];
            delta[h] = head.delta;
            sum[h] = head.query_sum;
#pragma unroll
            for (int v = 0; v < KEY_VARIANTS; v++) base[v][h] = head.base[v];
        }
    }
};
