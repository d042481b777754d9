// The end of a block of attend_run.cu, or of attend_drafts.cu: from sums of its rows in shared memory to states or
// outputs. TOKEN_PARTS parts of its warps have the sums of the same rows, each over its own tokens.

#pragma once

#include "common/attend_call.cuh"
#include "common/halves.cuh"
#include "common/rotation.cuh"
#include "common/run_queries.cuh"
#include "common/run_softmax.cuh"
#include "merge_states.cu"

// A row of outputs, padded so that the rows of a fragment lie in different banks.
constexpr int OUTPUT_ROW = HEAD_DIM + 8;

// The final sums of the rows in shared memory: products [row][OUTPUT_ROW], and their weight and reference.
struct BlockSums {
    float* rows;
    float2* totals;
    // What minimums of tokens add to all channels of a row, where VALUE_FOLDED.
    const float* minimums = nullptr;

    // A lane's channels of the mean of values of a row, over all parts of the tokens. Returns the log-sum-exp.
    __device__ __forceinline__ float mean(float (&mean)[LANE_CHANNELS], int row, int lane) const {
        float reference = totals[row].y;
#pragma unroll
        for (int part = 1; part < TOKEN_PARTS; part++) reference = fmaxf(reference, totals[row + part * ROWS].y);
        float weight = 0.0f;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) mean[i] = 0.0f;
#pragma unroll
        for (int part = 0; part < TOKEN_PARTS; part++) {
            const int at = row + part * ROWS;
            const float factor = exp2_approx(totals[at].y - reference);
            weight = __fmaf_rn(totals[at].x, factor, weight);
#pragma unroll
            for (int i = 0; i < LANE_CHANNELS; i++) {
                const float sum = rows[at * OUTPUT_ROW + lane + 32 * i] + (VALUE_FOLDED ? minimums[at] : 0.0f);
                mean[i] = __fmaf_rn(sum, factor, mean[i]);
            }
        }
        // A row that sees nothing of the item has neither.
        const float inverse = weight == 0.0f ? 0.0f : 1.0f / weight;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) mean[i] *= inverse;
        return weight == 0.0f ? NO_SCORE : reference + log2_approx(weight);
    }
};

// Writes PREPARED_ROWS rows of the block, starting at `first_row`: states, or the outputs themselves.
__device__ __forceinline__ void write_rows(const AttendCall& call, const Item& item, u32 kv_head, int first_row,
                                           const BlockSums& sums, int lane) {
    float2 ranges[LANE_CHANNELS];
    if (VALUE_SPAN_RANGES) {
        const float2* from = call.value_ranges + ((u64)item.range_slot * call.kv_heads + kv_head) * HEAD_DIM + lane;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) ranges[i] = from[32 * i];
    }
    constexpr float centre = VALUE_BITS_KEPT ? 0.0f : VALUE_CENTRE;
    const int end = min(first_row + PREPARED_ROWS, (int)(item.queries * call.group));
    const bool merged = item.states > 1u;
    const u32 query_heads = call.kv_heads * call.group;
    // A lane knows the place of one of the rows.
    const BlockRow of_lane = block_row(call, kv_head, first_row + lane % PREPARED_ROWS);
    const u64 row_of_lane =
        (u64)(merged ? item.state + of_lane.query * item.stride : item.row + of_lane.query) * query_heads + of_lane.head;
    const u64 output_of_lane = (item.row + of_lane.query) * call.output_stride + (u64)of_lane.head * TENSOR_CHANNELS;
#pragma unroll 4
    for (int r = first_row; r < end; r++) {
        float row[LANE_CHANNELS];
        float lse = sums.mean(row, r, lane);
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            row[i] *= halves_unit(VALUE_LEVEL_UNIT, VALUE_FOLDED);
            if (VALUE_SPAN_RANGES) row[i] = __fmaf_rn(ranges[i].x, row[i] + centre, ranges[i].y);
        }
        rotate_back<true>(row, lane);
        const u64 at = __shfl_sync(ALL_LANES, row_of_lane, r - first_row);
        if (merged) {
            if (lane == 0) call.state_lse[at] = lse;
#pragma unroll
            for (int i = 0; i < LANE_CHANNELS; i++) call.states[at * HEAD_DIM + lane + 32 * i] = row[i];
            continue;
        }
        const u32 head = __shfl_sync(ALL_LANES, of_lane.head, r - first_row);
        const float share = output_share(call, head, lse);
        if (lane == 0 && call.lse != nullptr) call.lse[at] = lse * 0.69314718f;
        const u64 output = __shfl_sync(ALL_LANES, output_of_lane, r - first_row);
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            if (lane + 32 * i >= TENSOR_CHANNELS) continue;
            store_element(call.output, call.output_type, output + lane + 32 * i, row[i] * share);
        }
    }
}
