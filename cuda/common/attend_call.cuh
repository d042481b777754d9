// What a launch of `attend` is told, and how its work is cut. The host's side is `attend::launch`, and that of items
// `attend::segment`.
//
// Query heads share the 8 columns of an MMA: up to 4, two columns each (WIDE 0), or up to 8 with a second MMA (WIDE 1).
// STEP_TOKENS tokens are copied at once, and a warp holds the scores of PASS_TOKENS of them at once. BLOCKS_PER_SM
// blocks share a multiprocessor; an item has QUERIES queries at most.

#pragma once

#include "common/elements.cuh"

// A run of tokens of one span for some neighbouring queries, attended by one block for each KV head and chunk of query
// heads. Several queries share a block with all their heads. Where blocks form clusters, `cluster` items in a row are
// of one query and share a row of states.
struct Item {
    // First entry of the page table.
    u32 first_page;
    u32 tokens;
    u32 range_slot;
    // Row of the first query in the tensor of queries.
    u32 row;
    // Row of states that its first query writes.
    u32 state;
    // Rows of its first query: the first, and how many. Every query of the item has as many.
    u32 first_state;
    u32 states;
    // Where the extremes of its scores lie, where they are calibrated; the item then has one query.
    u32 extremes;
    u32 queries;
    // Rows of states from one query to the next.
    u32 stride;
    // Tokens of the item that its first query sees, those before the item less; each query sees one more than the one
    // before it, up to all of them. Read where an item is of many queries (attend_run.cu); others see all.
    int seen;
};

struct AttendCall {
    // Address of every page, and the mark FRESH_PAGE.
    const u64* pages;
    const Item* items;
    // [row][query head][channel]; rows lie their strides apart.
    const void* queries;
    void* output;
    // Natural log-sum-exp [row][query head], where it is asked for.
    float* lse;
    // [slot][kv head][channel] of (scale, minimum), where ranges are per channel.
    const float2* key_ranges;
    const float2* value_ranges;
    // [row][query head][channel] of channels as they are stored, and the base-2 log-sum-exp [row][query head].
    float* states;
    float* state_lse;
    // States written so far, [row][kv head][chunk]; zero between steps.
    u32* arrivals;
    // Extremes of calibrated scores, [query over a span][query head]; see common/calibration.cuh.
    u32* extremes;
    // Elements from the queries, and from the outputs, of one sequence to those of the next.
    u64 query_stride;
    u64 output_stride;
    u32 kv_heads;
    // Query heads of a KV head, and chunks of them.
    u32 group;
    u32 chunks;
    // log2(e) / √head_dim.
    float score_scale;
    // Types of queries and output.
    u32 query_type;
    u32 output_type;
    // Blocks of a cluster, 1 where there are none.
    u32 cluster;
    // Offsets of the calibration, times log2(e).
    float tau1;
    float tau2;
    // Blocks that have items, where the launch runs beside the one before it, which it has nothing to do with; 0 where
    // it waits for that.
    u32 beside;
    // Whether the launch begins beside the kernels before it, which store what its layer appends.
    u32 early;
    u32 unused;
};

// One head's output over an item, and the base-2 log-sum-exp of its scores.
struct ItemState {
    float out;
    float lse;
};

// Where the loads of a pass begin in shared memory; those of top bits, where there are such.
struct PassLoads {
    u32 at;
    u32 tops;
};

// A head of a block: which of the item's queries it is of, and which query head.
struct BlockHead {
    u32 query;
    u32 head;
};

__device__ __forceinline__ BlockHead block_head(const AttendCall& call, u32 first_head, u32 head) {
    if (QUERIES == 1) return {0, first_head + head};
    return {head / call.group, first_head + head % call.group};
}

// Query heads of a chunk, and those whose scores one lane holds.
constexpr int CHUNK_HEADS = WIDE ? 8 : 4;
constexpr int LANE_HEADS = WIDE ? 2 : 1;

constexpr int STEP_PASSES = STEP_TOKENS / PASS_TOKENS;
constexpr int PASS_BLOCKS = PASS_TOKENS / BLOCK_TOKENS;
constexpr int STEPS_PER_TILE = TILE_TOKENS / STEP_TOKENS;
constexpr int PASS_KEY_LOADS = PASS_BLOCKS * KEY_BLOCKS / KEY_PLANES;
constexpr int PASS_VALUE_LOADS = PASS_TOKENS / VALUE_RUN * VALUE_BLOCKS / VALUE_PLANES;
constexpr int KEY_LOADS = STEP_PASSES * PASS_KEY_LOADS;
constexpr int VALUE_LOADS = STEP_PASSES * PASS_VALUE_LOADS;
// Loads of the top bits of 3-bit codes; the others are of the low two.
constexpr int PASS_KEY_TOPS = KEY_BITS == 3 ? PASS_BLOCKS * KEY_BLOCKS / TOP_PLANES : 0;
constexpr int PASS_VALUE_TOPS = VALUE_BITS == 3 ? PASS_TOKENS / VALUE_RUN * VALUE_BLOCKS / TOP_PLANES : 0;
constexpr int KEY_TOPS = STEP_PASSES * PASS_KEY_TOPS;
constexpr int VALUE_TOPS = STEP_PASSES * PASS_VALUE_TOPS;
static_assert(STEP_PASSES * PASS_TOKENS == STEP_TOKENS, "a step must be whole passes");
static_assert(PASS_KEY_LOADS * KEY_PLANES == PASS_BLOCKS * KEY_BLOCKS, "a pass must be whole loads of keys");
static_assert(PASS_VALUE_LOADS * VALUE_PLANES * VALUE_RUN == PASS_TOKENS * VALUE_BLOCKS, "and of values");
static_assert(KEY_BITS != 3 || PASS_KEY_TOPS * TOP_PLANES == PASS_BLOCKS * KEY_BLOCKS, "and of top bits of keys");
static_assert(VALUE_BITS != 3 || PASS_VALUE_TOPS * TOP_PLANES * VALUE_RUN == PASS_TOKENS * VALUE_BLOCKS, "of values");

// Ranges beside a tile that a step needs: rows of bytes, which lie `RANGE_ROW_STRIDE` apart in the tile. Those
// of groups of tokens are one row for all channels and groups of the step; those of tokens are one for each
// group of channels.
template <int TOKENS, int CHANNELS>
constexpr u32 RANGE_ROWS = TOKENS == 0 ? 0 : CHANNELS == 1 ? 1 : (HEAD_DIM + CHANNELS - 1) / (CHANNELS + !CHANNELS);
template <int TOKENS, int CHANNELS>
constexpr u32 RANGE_ROW_BYTES =
    CHANNELS == 1 ? 4 * HEAD_DIM * (STEP_TOKENS > TOKENS ? STEP_TOKENS / (TOKENS + !TOKENS) : 1) : 4 * STEP_TOKENS;
constexpr u32 RANGE_ROW_STRIDE = 4 * TILE_TOKENS;
// Where those of a step begin among the ranges of the tile.
template <int TOKENS, int CHANNELS>
__device__ __forceinline__ u32 ranges_at(int part) {
    return CHANNELS == 1 ? part * STEP_TOKENS / (TOKENS + !TOKENS) * (4 * HEAD_DIM) : part * (4 * STEP_TOKENS);
}
constexpr u32 KEY_RANGE_ROWS = RANGE_ROWS<KEY_GROUP_TOKENS, KEY_GROUP_CHANNELS>;
constexpr u32 VALUE_RANGE_ROWS = RANGE_ROWS<VALUE_GROUP_TOKENS, VALUE_GROUP_CHANNELS>;
constexpr u32 KEY_RANGE_ROW_BYTES = RANGE_ROW_BYTES<KEY_GROUP_TOKENS, KEY_GROUP_CHANNELS>;
constexpr u32 VALUE_RANGE_ROW_BYTES = RANGE_ROW_BYTES<VALUE_GROUP_TOKENS, VALUE_GROUP_CHANNELS>;

// A stage of a warp's ring: loads of keys, loads of values, each with those of top bits behind; ranges of keys,
// ranges of values.
constexpr u32 STAGE_KEY_TOPS_AT = KEY_LOADS * LOAD_BYTES;
constexpr u32 STAGE_VALUES_AT = STAGE_KEY_TOPS_AT + KEY_TOPS * LOAD_BYTES;
constexpr u32 STAGE_VALUE_TOPS_AT = STAGE_VALUES_AT + VALUE_LOADS * LOAD_BYTES;
constexpr u32 STAGE_KEY_RANGES_AT = STAGE_VALUE_TOPS_AT + VALUE_TOPS * LOAD_BYTES;
constexpr u32 STAGE_VALUE_RANGES_AT = STAGE_KEY_RANGES_AT + KEY_RANGE_ROWS * KEY_RANGE_ROW_BYTES;
constexpr u32 STAGE_COPIED_BYTES = STAGE_VALUE_RANGES_AT + VALUE_RANGE_ROWS * VALUE_RANGE_ROW_BYTES;
// The copy engine asks the L2 cache for whole lines of 128 bytes only where source and target are aligned to them, and
// for two or four parts of every line otherwise.
constexpr u32 LINE_BYTES = 128;
constexpr u32 STAGE_BYTES = (STAGE_COPIED_BYTES + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
static_assert(STEPS_PER_TILE > 1 || STAGE_COPIED_BYTES == HEAD_BYTES, "a whole tile is copied as it lies in the page");
