// Loads the queries of a block of attend_run.cu, or of attend_drafts.cu, from tensors into halves in shared memory.
//
// A row is a query and a query head. Warps prepare the same number of rows each. Rows are rotated like the keys of their
// format, multiplied by the scales of a span, and scaled by a power of two so that halves can hold them.

#pragma once

#include "common/attend_call.cuh"
#include "common/halves.cuh"
#include "common/pairs.cuh"
#include "common/reduce.cuh"
#include "common/rotation.cuh"
#include "common/run_softmax.cuh"

// Rows of a warp, and of a block: DRAFT_ROWS, if that is not 0.
constexpr int WARP_ROWS = 16;
constexpr int ROWS = DRAFT_ROWS > 0 ? DRAFT_ROWS : WARPS * WARP_ROWS / TOKEN_PARTS;

// Number of warps that multiply together, and their rows.
constexpr int GROUP_WARPS = WARPGROUPS ? 4 : 1;
constexpr int GROUP_ROWS = DRAFT_ROWS > 0 ? DRAFT_ROWS : GROUP_WARPS * WARP_ROWS;

// The queries of these rows in shared memory: as matrices of 8 rows and 8 channels, [16 channels][8 rows][8 channels],
// or as A fragments, [16 channels][lane], 16 bytes each.
constexpr u32 GROUP_QUERY_ROOM = GROUP_ROWS * HEAD_DIM * 2;

// Warps that prepare rows, rows of each of them, and rows that it prepares at once, so that their loads and sums overlap.
constexpr int PREPARING_WARPS = DRAFT_ROWS > 0 ? 8 : WARPS;
constexpr int PREPARED_ROWS = ROWS / PREPARING_WARPS;
constexpr int ROWS_AT_ONCE = PREPARED_ROWS < 8 ? PREPARED_ROWS : 8;

// The query of a row of the block, and its head.
struct BlockRow {
    u32 query;
    u32 head;
};

__device__ __forceinline__ BlockRow block_row(const AttendCall& call, u32 kv_head, u32 row) {
    return {row / call.group, kv_head * call.group + row % call.group};
}

// Bytes from the queries' beginning to a channel of the first row, and from there to the same channel of row `row`.
__device__ __forceinline__ u32 channel_bytes(int channel) {
    const ChannelPlace place = channel_place(channel % 16);
#if WARPGROUPS
    return (channel / 16 * (GROUP_ROWS / 4) + place.second) * 128 + place.column * 4 + place.high * 2;
#else
    return (channel / 16 * 32 + place.column) * 16 + place.second * 8 + place.high * 2;
#endif
}

__device__ __forceinline__ u32 row_bytes(int row) {
    const u32 group = row / GROUP_ROWS * GROUP_QUERY_ROOM;
#if WARPGROUPS
    return group + row % GROUP_ROWS / 8 * 256 + row % 8 * 16;
#else
    return group + row % 8 * 64 + row % GROUP_ROWS / 8 * 4;
#endif
}

// A query as it was stored: the inverse of its factor, and the sum of its channels, of which the lane has a part.
struct StoredQuery {
    float unit;
    float sum;
};

// Stores the channels of a row, lane + 32 · i in `row`, at the place of its fragments: as halves up to 2^15. 16-bit
// queries stay exact, since the factor is a power of two. So is what compensates for the places of kept bits.
__device__ __forceinline__ StoredQuery put_query(u8* to, const u32 (&places)[LANE_CHANNELS],
                                                 const float (&channels)[LANE_CHANNELS]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) largest = fmaxf(largest, fabsf(channels[i]));
    largest = warp_max(largest);
    // Bits of a power of two; the range leaves room for its inverse.
    const u32 exponent = min(max(__float_as_uint(largest) >> 23, 40u), 240u) - 14u;
    const float factor = __uint_as_float((254u - exponent) << 23);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const float raised = KEY_BITS_KEPT && KEY_LEVEL_UNIT == 0 ? (float)(1 << key_place(i)) : 1.0f;
        const u32 half = half_bits(channels[i] * (factor / raised));
        *(u16*)(to + places[i]) = (u16)half;
        sum = __fmaf_rn(half_value(half), raised, sum);
    }
    return {__uint_as_float(exponent << 23), sum};
}

// The bits of the elements of ROWS_AT_ONCE rows, starting at `first`. The type decides once for all of them, so that
// their loads are in flight together and not one after the other.
template <typename Bits>
__device__ __forceinline__ void load_rows(u32 (&rows)[ROWS_AT_ONCE][LANE_CHANNELS], const AttendCall& call, const Item& item,
                                          u32 kv_head, int first, int lane) {
    const u32 last = item.queries * call.group - 1u;
    // A lane knows the place of one of the rows.
    const BlockRow of = block_row(call, kv_head, min((u32)(first + lane % ROWS_AT_ONCE), last));
    const u64 of_lane = (item.row + of.query) * call.query_stride + (u64)of.head * TENSOR_CHANNELS;
#pragma unroll
    for (int r = 0; r < ROWS_AT_ONCE; r++) {
        const u64 at = __shfl_sync(ALL_LANES, of_lane, r) + lane;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            rows[r][i] = lane + 32 * i < TENSOR_CHANNELS ? ((const Bits*)call.queries)[at + 32 * i] : 0u;
        }
    }
}

// Prepares PREPARED_ROWS rows of the block, starting at `first_row`.
__device__ __forceinline__ void prepare_rows(u8* queries, RowConstants* constants, const AttendCall& call, const Item& item,
                                             u32 kv_head, int first_row, int lane) {
    float2 ranges[LANE_CHANNELS];
    if (KEY_SPAN_RANGES) {
        const float2* from = call.key_ranges + ((u64)item.range_slot * call.kv_heads + kv_head) * HEAD_DIM + lane;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) ranges[i] = from[32 * i];
    }
    u32 places[LANE_CHANNELS];
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) places[i] = channel_bytes(lane + 32 * i);
#pragma unroll 1
    for (int first = first_row; first < first_row + PREPARED_ROWS; first += ROWS_AT_ONCE) {
        u32 rows[ROWS_AT_ONCE][LANE_CHANNELS];
        if (call.query_type == ELEMENTS_F32) {
            load_rows<u32>(rows, call, item, kv_head, first, lane);
        } else {
            load_rows<u16>(rows, call, item, kv_head, first, lane);
        }
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; r++) {
            float row[LANE_CHANNELS];
#pragma unroll
            for (int i = 0; i < LANE_CHANNELS; i++) row[i] = query_value(call.query_type, rows[r][i]);
            rotate<false>(row, lane);
            float base = 0.0f;
            if (KEY_SPAN_RANGES) {
#pragma unroll
                for (int i = 0; i < LANE_CHANNELS; i++) {
                    base = __fmaf_rn(row[i], __fmaf_rn(KEY_CENTRE, ranges[i].x, ranges[i].y), base);
                    row[i] *= ranges[i].x;
                }
            }
            const StoredQuery stored = put_query(queries + row_bytes(first + r), places, row);
            // Kept codes are not centred. The base subtracts the centre, times the query as it was rounded.
            if (KEY_BITS_KEPT && KEY_SPAN_RANGES) base = __fmaf_rn(-KEY_CENTRE * stored.unit, stored.sum, base);
            if (KEY_SPAN_RANGES) base = warp_sum(base) * call.score_scale;
            // Minimums of tokens count with the sum of the query, in the unit of its products.
            if (KEY_FOLDED) base = warp_sum(stored.sum) / KEPT_UNIT;
            const float unit = halves_unit(KEY_LEVEL_UNIT, KEY_FOLDED) * (KEY_BITS_KEPT ? KEPT_UNIT : 1.0f);
            if (lane == 0) constants[first + r] = {row_delta(stored.unit * unit, call.score_scale), base};
        }
    }
}
