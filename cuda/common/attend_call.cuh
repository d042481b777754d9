// The arguments of a launch of `attend`, and how its work is cut. On the host these are `attend::launch` and, for
// items, `attend::segment`.
//
// Query heads share the 8 columns of an MMA: up to 4, with two columns each (WIDE 0), or up to 8 with a second MMA
// (WIDE 1). ROW_WARPS warps, a team, attend to the same tokens, each for its own of a block's heads. STEP_TOKENS tokens
// are copied at once, and a warp holds the scores of PASS_TOKENS of them at once. BLOCKS_PER_SM blocks share a
// multiprocessor. An item has up to QUERIES queries. If they are MOVING, each may see one more token than the one before
// it, and a window begins one token later. Otherwise they see the same tokens.

#pragma once

#include "common/elements.cuh"

// Whether a KV head has one query head, whose 1-bit keys are multiplied as bits (common/key_bits.cuh).
#ifndef LONE_HEAD
#define LONE_HEAD 0
#endif

// Consecutive tokens of one span for some neighbouring queries. One block for each KV head and chunk of query heads
// attends to them. Several queries share a block with all their heads. If blocks form clusters, `cluster` consecutive
// items belong to one query and share a row of states.
struct Item {
    // First entry of the page table.
    u32 first_page;
    u32 tokens;
    u32 range_slot;
    // Row of the first query in the tensor of queries.
    u32 row;
    // Row of states that its first query writes.
    u32 state;
    // State rows of its first query: the first row, and their number. Every query of the item has the same number.
    u32 first_state;
    u32 states;
    // The place of the extremes of the scores of its first query, if they are calibrated. Those of the next follow.
    u32 extremes;
    u32 queries;
    // Distance in state rows between consecutive queries.
    u32 stride;
    // Number of tokens that its first query sees, minus those before the item. Each query sees one more than the
    // previous one, up to all of the item. Used if queries move (MOVING, attend_run.cu), and by masked items
    // (common/logits.cuh). Otherwise queries see all.
    int seen;
    // The first token of the item that its first query sees, negative before the item; each query begins one later.
    // Read where queries move and have a window.
    int from;
    // Of an item with a tree, which of the tokens from `seen` on its query sees, the lowest bit of the first word first.
    u32 tree[TILE_TOKENS / 32];
};

struct AttendCall {
    // Address of every page, with the mark FRESH_PAGE.
    const u64* pages;
    const Item* items;
    // [row][query head][channel]. Rows are `query_stride` apart.
    const void* queries;
    void* output;
    // Natural log-sum-exp [row][query head], if requested.
    float* lse;
    // [slot][kv head][channel] of (scale, minimum), if ranges are per channel.
    const float2* key_ranges;
    const float2* value_ranges;
    // [row][query head][channel] for channels as stored, and the base-2 log-sum-exp [row][query head].
    float* states;
    float* state_lse;
    // Number of states written so far, [row][kv head][chunk]; zero between steps.
    u32* arrivals;
    // Extremes of calibrated scores, [query over a span][query head]; see common/calibration.cuh.
    u32* extremes;
    // Logits of the sinks [query head], in units of log2, where SINKS.
    const float* sinks;
    // Tiles of a section of the KV heads as halves, [page][head of the section] (unpack_tiles.cu).
    u8* halves;
    // Elements between the queries, and between the outputs, of consecutive sequences.
    u64 query_stride;
    u64 output_stride;
    u32 kv_heads;
    // Query heads of a KV head, and chunks of them.
    u32 group;
    u32 chunks;
    // The softmax scale, times log2(e).
    float score_scale;
    // Types of queries and output.
    u32 query_type;
    u32 output_type;
    // Blocks of a cluster, 1 without clusters.
    u32 cluster;
    // Offsets of the calibration, times log2(e).
    float tau1;
    float tau2;
    // Number of blocks with items, if the launch overlaps with the previous one, on which it does not depend; 0 if it
    // waits for that.
    u32 beside;
    // Whether the launch overlaps with the kernels that store what its layer appends.
    u32 early;
    // The soft cap, times log2(e), where CAPPED.
    float soft_cap;
    // Items that tables have room for, and parts of their rows that a block takes one after the other
    // (attend_run_pipelined.cu).
    u32 item_room;
    u32 row_parts;
    // The KV heads of the launch, all or a section (attend_run_pipelined.cu).
    u32 first_head;
    u32 section_heads;
};

// One head's output over an item, and the base-2 log-sum-exp of its scores.
struct ItemState {
    float out;
    float lse;
};

// Addresses of the loads of a pass in shared memory, and of those of top bits, if there are any.
struct PassLoads {
    u32 at;
    u32 tops;
};

// A head of a block: its query in the item, and its query head.
struct BlockHead {
    u32 query;
    u32 head;
};

__device__ __forceinline__ BlockHead block_head(const AttendCall& call, u32 first_head, u32 head) {
    if (QUERIES == 1) return {0, first_head + head};
    return {head / call.group, first_head + head % call.group};
}

// Heads of a warp, those whose scores one lane holds, and those of a block.
constexpr int WARP_HEADS = WIDE ? 8 : 4;
constexpr int LANE_HEADS = WIDE ? 2 : 1;
constexpr int BLOCK_HEADS = ROW_WARPS * WARP_HEADS;

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

// Tile ranges that a step needs: rows of bytes that lie `RANGE_ROW_STRIDE` apart in the tile. Groups of tokens have one
// row for all channels and groups of the step. Tokens have one row for each group of channels.
template <int TOKENS, int CHANNELS>
constexpr u32 RANGE_ROWS = TOKENS == 0 ? 0 : CHANNELS == 1 ? 1 : (HEAD_DIM + CHANNELS - 1) / (CHANNELS + !CHANNELS);
template <int TOKENS, int CHANNELS>
constexpr u32 RANGE_ROW_BYTES =
    CHANNELS == 1 ? 4 * HEAD_DIM * (STEP_TOKENS > TOKENS ? STEP_TOKENS / (TOKENS + !TOKENS) : 1) : 4 * STEP_TOKENS;
constexpr u32 RANGE_ROW_STRIDE = 4 * TILE_TOKENS;
// The place of a step's ranges among the ranges of the tile.
template <int TOKENS, int CHANNELS>
__device__ __forceinline__ u32 ranges_at(int part) {
    return CHANNELS == 1 ? part * STEP_TOKENS / (TOKENS + !TOKENS) * (4 * HEAD_DIM) : part * (4 * STEP_TOKENS);
}
constexpr u32 KEY_RANGE_ROWS = RANGE_ROWS<KEY_GROUP_TOKENS, KEY_GROUP_CHANNELS>;
constexpr u32 VALUE_RANGE_ROWS = RANGE_ROWS<VALUE_GROUP_TOKENS, VALUE_GROUP_CHANNELS>;
constexpr u32 KEY_RANGE_ROW_BYTES = RANGE_ROW_BYTES<KEY_GROUP_TOKENS, KEY_GROUP_CHANNELS>;
constexpr u32 VALUE_RANGE_ROW_BYTES = RANGE_ROW_BYTES<VALUE_GROUP_TOKENS, VALUE_GROUP_CHANNELS>;

// A stage of a warp's ring: loads of keys, loads of values, each followed by those of top bits; ranges of keys, ranges
// of values.
constexpr u32 STAGE_KEY_TOPS_AT = KEY_LOADS * LOAD_BYTES;
constexpr u32 STAGE_VALUES_AT = STAGE_KEY_TOPS_AT + KEY_TOPS * LOAD_BYTES;
constexpr u32 STAGE_VALUE_TOPS_AT = STAGE_VALUES_AT + VALUE_LOADS * LOAD_BYTES;
constexpr u32 STAGE_KEY_RANGES_AT = STAGE_VALUE_TOPS_AT + VALUE_TOPS * LOAD_BYTES;
constexpr u32 STAGE_VALUE_RANGES_AT = STAGE_KEY_RANGES_AT + KEY_RANGE_ROWS * KEY_RANGE_ROW_BYTES;
constexpr u32 STAGE_COPIED_BYTES = STAGE_VALUE_RANGES_AT + VALUE_RANGE_ROWS * VALUE_RANGE_ROW_BYTES;
// The copy engine requests whole lines of 128 bytes from the L2 cache only if source and target are aligned to them.
// Otherwise it requests two or four parts of every line.
constexpr u32 LINE_BYTES = 128;
constexpr u32 STAGE_BYTES = (STAGE_COPIED_BYTES + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
static_assert(STEPS_PER_TILE > 1 || STAGE_COPIED_BYTES == HEAD_BYTES, "a whole tile is copied as it lies in the page");
