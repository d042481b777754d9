// attend_drafts: attend_run for few rows over packed pages, on compute capability 9.0: drafts, and short ends of
// prompts.
//
//   score_rt = q_r · k_t scale log2(e)  for from_r <= t < seen_r,   out_r = Σ_t 2^(score_rt) v_t / Σ_t 2^(score_rt)
//
// A block owns an item, up to ROWS rows, for one KV head. Its warpgroups take the tiles of the item in turn, each
// through a ring of its own, and have sums of their own, which are merged at the end.
//
// Tokens are the rows of the products with keys, and channels those of the products with values, so that each warp
// unpacks codes into its own operands in registers, and each code is unpacked once for all rows:
//
//   products [tokens][row]  = keys [tokens][channels] · queries [channels][row]      a warp has 16 of every 64 tokens
//   sums [channels][row]   += values [channels][tokens] · weights [tokens][row]      a warp has 16 of every 64 channels
//
// Queries and weights lie in shared memory as matrices of 8 rows by 8 halves, which the tensor cores read. All four
// warps have the same rows, so references move for all of them: a barrier asks whether one of them is far.
//
// Memory: K and V of the item once, by the copy engine. Cost per tile and warpgroup: HEAD_DIM / 4 products of
// 64 × ROWS × 16, and ROWS exponentials a thread. Two elements with ranges of groups take 4 to 6 instructions. Other codes
// stay the subnormal halves that their bits are, one and a half instructions for two; levels are looked up as bytes.
// Where every token has a range, it is applied to products of keys, and to weights, two instructions for each.
//
// In bounds: items, pages, slots and queries were checked on the host. Rows beyond those of the item read the last query
// and write nothing; tokens beyond the item are hidden, and the data stored there are finite.

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rotation.cuh"
#include "common/reduce.cuh"
#include "common/attend_call.cuh"
#include "common/logits.cuh"
#include "common/tile_halves.cuh"
#include "common/run_queries.cuh"
#include "common/run_outputs.cuh"
#include "common/run_softmax.cuh"
#include "common/warpgroup.cuh"
#include "merge_states.cu"

constexpr int GROUPS = WARPS / 4;
// Blocks of 8 rows, and rows of a lane: 8 b + 2 c and the next.
constexpr int ROW_EIGHTS = ROWS / 8;
constexpr int LANE_ROWS = 2 * ROW_EIGHTS;
// Products of 64 tokens of a tile, and of 64 channels.
constexpr int TOKEN_SIXTY_FOURS = TILE_TOKENS / 64;
constexpr int CHANNEL_SIXTY_FOURS = HEAD_DIM / 64;
constexpr int TOKEN_STEPS = TILE_TOKENS / BLOCK_TOKENS;
// Steps of channels whose keys are in registers at once.
constexpr int KEY_STEPS = HEAD_DIM > 128 ? 8 : CHANNEL_STEPS;
// Of 64 channels, those whose values are in registers at once: some are unpacked while others are multiplied.
constexpr int VALUE_BUFFERS = HEAD_DIM > 128 ? 1 : CHANNEL_SIXTY_FOURS;
static_assert(HEAD_DIM % 64 == 0, "a warpgroup has whole products of channels");

// Matrices of 16 channels or tokens by all rows, which a product counts in 16 bytes.
constexpr u32 STEP_MATRICES_BYTES = ROW_EIGHTS * 2 * MATRIX_BYTES;
constexpr u32 STEP_SIXTEENS = STEP_MATRICES_BYTES / 16;
constexpr u32 WEIGHTS_BYTES = TOKEN_STEPS * STEP_MATRICES_BYTES;
// Shared memory: [GROUPS][STAGES] tiles, then the weights of every warpgroup, then the queries.
constexpr u32 WEIGHTS_AT = GROUPS * STAGES * STAGE_BYTES;
constexpr u32 QUERIES_AT = WEIGHTS_AT + GROUPS * WEIGHTS_BYTES;

// A lane's part of the products of 64 tokens, or of 64 channels: [8 rows][token or channel g, g + 8][rows 2 c, 2 c + 1].
using Products = float[ROW_EIGHTS][4];

// Numbers of the barriers of a warpgroup.
constexpr int FIRST_GROUP_BARRIER = 1;

// A fragments of a warp: of keys by steps of channels, of values by steps of tokens.
template <int STEPS>
struct Fragments {
    static constexpr int UNROLLED = STEPS;
    static constexpr bool KEEPS_BITS = true;

    u32 (&steps)[STEPS][4];
    // Where the tables of levels are.
    u32 level_tables;

    __device__ __forceinline__ void put_keys(int, int f, const u32 (&words)[4], int) const { put(f % STEPS, words); }
    __device__ __forceinline__ void put_values(int m, int, const u32 (&words)[4], int) const { put(m, words); }

    __device__ __forceinline__ void put(int step, const u32 (&words)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) steps[step][r] = words[r];
    }
};

// The tiles of a warpgroup: every GROUPS-th of the item, through its STAGES stages. One of its threads loads them.
struct GroupRing {
    u32 stages;
    u32 barriers;
    const u64* pages;
    // Offset of the head's part in a page.
    u64 head_at;
    int first;
    int tiles;

    __device__ __forceinline__ int tile(int turn) const { return turn * GROUPS + first; }
    __device__ __forceinline__ u32 stage(int turn) const { return stages + turn % STAGES * STAGE_BYTES; }

    __device__ __forceinline__ void start() const {
        for (int i = 0; i < STAGES; i++) barrier_init(barriers + 8 * i);
    }

    // Where a tile is, loaded ahead of its copy; 0 behind the last.
    __device__ __forceinline__ u64 address(int turn) const { return tile(turn) < tiles ? pages[tile(turn)] + head_at : 0; }

    __device__ __forceinline__ void issue(int turn, u64 address) const {
        if (address == 0) return;
        const u32 barrier = barriers + 8 * (turn % STAGES);
        barrier_expect(barrier, HEAD_BYTES);
        copy_bulk(stage(turn), (const void*)address, HEAD_BYTES, barrier);
    }

    __device__ __forceinline__ void wait(int turn) const { barrier_wait(barriers + 8 * (turn % STAGES), turn / STAGES & 1); }
};

// What compensates for the bits of 16 channels of values that were kept, and for their place.
__device__ __forceinline__ float value_unit(int block) {
    if (!VALUE_BITS_KEPT) return 1.0f;
    constexpr bool in_place = VALUE_PLANE_FIXED && VALUE_BITS != 3 && VALUE_LEVEL_UNIT == 0;
    return KEPT_UNIT / (float)(1 << (in_place ? VALUE_BITS * (block % VALUE_PLANES) : 0));
}

// The scale of a token and its minimum, which codebooks do not have.
template <u32 LEVEL_UNIT, int BITS>
__device__ __forceinline__ float2 token_range(u32 from) {
    const u32 range = load_shared_4(from);
    return {half_value(range & 0xffffu), LEVEL_UNIT == 0 ? half_value(range >> 16) : 0.0f};
}

// The least scale that counts: the least subnormal half.
constexpr float LEAST_SCALE = 5.9604645e-8f;

// What all warps of the block know of its rows, and what those of a warpgroup tell each other.
struct RowShared {
    alignas(16) u32 level_tables[LEVEL_TABLES];
    RowConstants constants[ROWS];
    // The tokens of the item that a row sees: from .. limit.
    int from[ROWS];
    int limit[ROWS];
    float tops[GROUPS][4][ROWS];
    float2 totals[GROUPS * ROWS];
    float minimums[VALUE_FOLDED ? GROUPS * ROWS : 1];
};

// A warp of a warpgroup, and its sums so far. Sums are products of channels. A lane has its own tokens' part of the
// weights.
struct DraftWarp {
    RowShared& shared;
    int group;
    // Of the warpgroup.
    int warp;
    int lane;
    u32 weights;
    Matrices weight_matrices;
    Matrices queries;
    float delta[LANE_ROWS];
    float reference[LANE_ROWS];
    float weight[LANE_ROWS];
    // Σ weight · minimum of the token, where VALUE_FOLDED.
    float minimum[LANE_ROWS];
    Products sums[CHANNEL_SIXTY_FOURS];

    __device__ __forceinline__ DraftWarp(RowShared& shared, u32 room, int warp, int lane)
        : shared(shared),
          group(warp / 4),
          warp(warp % 4),
          lane(lane),
          weights(room + WEIGHTS_AT + warp / 4 * WEIGHTS_BYTES),
          weight_matrices(weights, 2 * MATRIX_BYTES),
          queries(room + QUERIES_AT, 2 * MATRIX_BYTES) {
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            delta[i] = shared.constants[row(i)].delta;
            reference[i] = NO_SCORE;
            weight[i] = 0.0f;
            minimum[i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < CHANNEL_SIXTY_FOURS * ROW_EIGHTS * 4; i++) {
            sums[i / (4 * ROW_EIGHTS)][i / 4 % ROW_EIGHTS][i % 4] = 0.0f;
        }
    }

    __device__ __forceinline__ int row(int i) const { return 8 * (i / 2) + 2 * (lane & 3) + i % 2; }
    __device__ __forceinline__ void sync() const { group_sync(FIRST_GROUP_BARRIER + group, 128); }

    // The products of the tile in `stage` with the queries.
    __device__ __forceinline__ void multiply_keys(Products (&products)[TOKEN_SIXTY_FOURS], u32 stage) const {
#pragma unroll
        for (int j = 0; j < TOKEN_SIXTY_FOURS; j++) {
#pragma unroll
            for (int first = 0; first < CHANNEL_STEPS; first += KEY_STEPS) {
                u32 keys[KEY_STEPS][4];
                const Fragments<KEY_STEPS> to = {keys, shared_address(shared.level_tables)};
                const KeyBlocks blocks = {first / KEY_BLOCK_STEPS, 1, (first + KEY_STEPS) / KEY_BLOCK_STEPS};
                unpack_keys(to, stage, stage + KEY_RANGES_AT, 4 * j + warp, blocks, lane);
                warpgroup_begin();
#pragma unroll
                for (int f = 0; f < KEY_STEPS; f++) {
                    warpgroup_multiply(products[j], keys[f], queries.after((first + f) * STEP_SIXTEENS), first + f > 0);
                }
                warpgroup_commit();
                warpgroup_wait<0>(products[j]);
            }
        }
    }

    // The token of the tile of products [j][..][2 h ..].
    __device__ __forceinline__ int token(int j, int h) const { return 64 * j + 16 * warp + 8 * h + (lane >> 2); }

    // Applies the ranges of tokens to the products of their keys.
    __device__ __forceinline__ void apply_ranges(Products (&products)[TOKEN_SIXTY_FOURS], u32 stage) const {
        if constexpr (!KEY_FOLDED) return;
        float2 of_tokens[2 * TOKEN_SIXTY_FOURS];
#pragma unroll
        for (int t = 0; t < 2 * TOKEN_SIXTY_FOURS; t++) {
            of_tokens[t] = token_range<KEY_LEVEL_UNIT, KEY_BITS>(stage + KEY_RANGES_AT + 4 * token(t / 2, t % 2));
        }
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            const float sum = shared.constants[row(i)].base;
#pragma unroll
            for (int t = 0; t < 2 * TOKEN_SIXTY_FOURS; t++) {
                float& product = products[t / 2][i / 2][2 * (t % 2) + i % 2];
                if (KEY_LEVEL_UNIT != 0) {
                    product = __fmaf_rn(sum, -KEPT_MIDDLE<KEY_BITS>, product) * of_tokens[t].x;
                } else {
                    product = __fmaf_rn(sum, of_tokens[t].y, product * of_tokens[t].x);
                }
            }
        }
    }

    // Adds weights times values of the tile in `stage`.
    __device__ __forceinline__ void multiply_values(u32 stage) {
        u32 values[VALUE_BUFFERS][TOKEN_STEPS][4];
#pragma unroll
        for (int j = 0; j < CHANNEL_SIXTY_FOURS; j++) {
            if (j >= VALUE_BUFFERS) warpgroup_wait<0>(sums[j - VALUE_BUFFERS]);
            const Fragments<TOKEN_STEPS> to = {values[j % VALUE_BUFFERS], shared_address(shared.level_tables)};
#pragma unroll
            for (int run = 0; run < TILE_TOKENS / 32; run++) {
                const RunRanges of_run(stage + VALUE_RANGES_AT, run, lane);
                unpack_value_block(to, stage + VALUES_AT, stage + VALUE_RANGES_AT, of_run, run, 4 * j + warp, lane);
            }
            if (j == 0) {
                // All weights were written.
                shared_visible();
                sync();
            }
            warpgroup_begin();
#pragma unroll
            for (int m = 0; m < TOKEN_STEPS; m++) {
                warpgroup_multiply(sums[j], values[j % VALUE_BUFFERS][m], weight_matrices.after(m * STEP_SIXTEENS));
            }
            warpgroup_commit();
        }
#pragma unroll
        for (int j = 0; j < CHANNEL_SIXTY_FOURS; j++) warpgroup_wait<0>(sums[j]);
    }

    // Caps products, which are scores then, and hides tokens; `before` counts the tokens before the tile.
    template <bool SOME_HIDDEN>
    __device__ __forceinline__ void to_logits(const AttendCall& call, Products (&products)[TOKEN_SIXTY_FOURS],
                                              int before) const {
        const int first = before + 16 * warp + (lane >> 2);
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            const int from = SOME_HIDDEN ? shared.from[row(i)] - first : 0;
            const int limit = SOME_HIDDEN ? shared.limit[row(i)] - first : 0;
            const float base = CAPPED && !KEY_FOLDED ? shared.constants[row(i)].base : 0.0f;
#pragma unroll
            for (int j = 0; j < TOKEN_SIXTY_FOURS; j++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float& product = products[j][i / 2][2 * h + i % 2];
                    if constexpr (CAPPED) product = capped(call, __fmaf_rn(product, delta[i], base));
                    const int token = 64 * j + 8 * h;
                    if (SOME_HIDDEN && (token < from || token >= limit)) product = -__int_as_float(0x7f800000);
                }
            }
        }
    }

    // What turns a product of the lane's row `i` into its score: capped products are scores already. Without a cap
    // scores lack the base of their row, which is in the log-sum-exp at the end.
    __device__ __forceinline__ float scale(int i) const { return CAPPED ? 1.0f : delta[i]; }

    // The range of one of the lane's tokens, which weights take.
    __device__ __forceinline__ float2 value_range(u32 stage, int j, int h) const {
        if constexpr (!VALUE_FOLDED) return {1.0f, 0.0f};
        return token_range<VALUE_LEVEL_UNIT, VALUE_BITS>(stage + VALUE_RANGES_AT + 4 * token(j, h));
    }

    // The logarithms of the scales of the lane's tokens. Those of hidden tokens may be stale: their scores are minus
    // infinity.
    __device__ __forceinline__ void value_scales(float (&scales)[2 * TOKEN_SIXTY_FOURS], u32 stage) const {
#pragma unroll
        for (int t = 0; t < 2 * TOKEN_SIXTY_FOURS; t++) {
            scales[t] = VALUE_FOLDED ? log2_approx(fmaxf(value_range(stage, t / 2, t % 2).x, LEAST_SCALE)) : 0.0f;
        }
    }

    // The largest product of the lane's row `i`, of its tokens.
    __device__ __forceinline__ float largest(const Products (&products)[TOKEN_SIXTY_FOURS], int i) const {
        float top = fmaxf(products[0][i / 2][i % 2], products[0][i / 2][2 + i % 2]);
#pragma unroll
        for (int j = 1; j < TOKEN_SIXTY_FOURS; j++) {
            top = fmaxf(top, fmaxf(products[j][i / 2][i % 2], products[j][i / 2][2 + i % 2]));
        }
        return top;
    }

    // The largest exponent of what the lane's row `i` rounds to halves: weights times the scales of their tokens.
    __device__ __forceinline__ float largest_exponent(const Products (&products)[TOKEN_SIXTY_FOURS], int i,
                                                      const float (&scales)[2 * TOKEN_SIXTY_FOURS]) const {
        if constexpr (!VALUE_FOLDED) return largest(products, i) * scale(i);
        float top = __fmaf_rn(products[0][i / 2][i % 2], scale(i), scales[0]);
#pragma unroll
        for (int t = 1; t < 2 * TOKEN_SIXTY_FOURS; t++) {
            top = fmaxf(top, __fmaf_rn(products[t / 2][i / 2][2 * (t % 2) + i % 2], scale(i), scales[t]));
        }
        return top;
    }

    // Moves references to which an exponent is far, in all warps of the warpgroup.
    __device__ __forceinline__ void refer(const Products (&products)[TOKEN_SIXTY_FOURS], u32 stage) {
        float scales[2 * TOKEN_SIXTY_FOURS];
        value_scales(scales, stage);
        bool far = false;
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) far = far | (largest_exponent(products, i, scales) - reference[i] > MOST_WEIGHT);
        if (!group_any(FIRST_GROUP_BARRIER + group, 128, far)) return;
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            const float top = max_of_tokens(largest_exponent(products, i, scales));
            if (lane < 4) shared.tops[group][warp][row(i)] = top;
        }
        sync();
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            float top = shared.tops[group][0][row(i)];
#pragma unroll
            for (int w = 1; w < 4; w++) top = fmaxf(top, shared.tops[group][w][row(i)]);
            const float next = fmaxf(reference[i], ceilf(top - START_WEIGHT));
            const float factor = exp2_approx(reference[i] - next);
            reference[i] = next;
            weight[i] *= factor;
            minimum[i] *= factor;
#pragma unroll
            for (int j = 0; j < CHANNEL_SIXTY_FOURS; j++) {
                sums[j][i / 2][i % 2] *= factor;
                sums[j][i / 2][2 + i % 2] *= factor;
            }
        }
    }

    // The weights of the tile in shared memory. All warps have read those of the tile before.
    __device__ __forceinline__ void weigh(const Products (&products)[TOKEN_SIXTY_FOURS], u32 stage) {
#pragma unroll
        for (int j = 0; j < TOKEN_SIXTY_FOURS; j++) {
            float2 of_tokens[2];
#pragma unroll
            for (int h = 0; h < 2; h++) of_tokens[h] = value_range(stage, j, h);
            const u32 to = weights + (4 * j + warp) * STEP_MATRICES_BYTES;
#pragma unroll
            for (int b = 0; b < ROW_EIGHTS; b += 2) {
                u32 pairs[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int i = 2 * (b + k / 2);
                    const float* const of = products[j][b + k / 2] + 2 * (k % 2);
                    float low = exp2_approx(__fmaf_rn(of[0], scale(i), -reference[i]));
                    float high = exp2_approx(__fmaf_rn(of[1], scale(i + 1), -reference[i + 1]));
                    weight[i] += low;
                    weight[i + 1] += high;
                    if constexpr (VALUE_FOLDED) {
                        const float2 of = of_tokens[k % 2];
                        if (VALUE_LEVEL_UNIT == 0) {
                            minimum[i] = __fmaf_rn(low, of.y, minimum[i]);
                            minimum[i + 1] = __fmaf_rn(high, of.y, minimum[i + 1]);
                        }
                        low *= of.x;
                        high *= of.x;
                        if (VALUE_LEVEL_UNIT != 0) {
                            minimum[i] += low;
                            minimum[i + 1] += high;
                        }
                    }
                    pairs[k] = half_pair(low, high);
                }
                store_matrices_transposed(to + 2 * b * MATRIX_BYTES + 16 * lane, pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    }

    // Adds up what the warps of the warpgroup have of a number of each row. Warp 0 gets the sums.
    __device__ __forceinline__ void sum_of_group(float (&of_rows)[LANE_ROWS]) const {
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            const float own = sum_of_tokens(of_rows[i]);
            if (lane < 4) shared.tops[group][warp][row(i)] = own;
        }
        sync();
        if (warp == 0) {
#pragma unroll
            for (int i = 0; i < LANE_ROWS; i++) {
                of_rows[i] = 0.0f;
#pragma unroll
                for (int w = 0; w < 4; w++) of_rows[i] += shared.tops[group][w][row(i)];
            }
        }
        sync();
    }

    // Stores the sums of the warpgroup for the end of the block.
    __device__ __forceinline__ void put(const BlockSums& block) {
        const int first_row = group * ROWS;
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            float* const to = block.rows + (first_row + row(i)) * OUTPUT_ROW + 16 * warp + (lane >> 2);
#pragma unroll
            for (int j = 0; j < CHANNEL_SIXTY_FOURS; j++) {
                const float unit = value_unit(4 * j + warp);
                to[64 * j] = sums[j][i / 2][i % 2] * unit;
                to[64 * j + 8] = sums[j][i / 2][2 + i % 2] * unit;
            }
        }
        sum_of_group(weight);
        if (VALUE_FOLDED) sum_of_group(minimum);
        if (warp != 0 || lane >= 4) return;
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            const float base = CAPPED || KEY_FOLDED ? 0.0f : shared.constants[row(i)].base;
            block.totals[first_row + row(i)] = {weight[i], reference[i] + base};
            if (VALUE_FOLDED) {
                const float unit = VALUE_LEVEL_UNIT == 0 ? 1.0f : -KEPT_MIDDLE<VALUE_BITS>;
                shared.minimums[first_row + row(i)] = unit * minimum[i];
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) attend_drafts(const __grid_constant__ AttendCall call) {
    extern __shared__ __align__(LINE_BYTES) u8 room[];
    __shared__ u64 barriers[GROUPS][STAGES];
    __shared__ RowShared shared;

    if (call.beside != 0u) admit_later_kernels();
    if (call.beside != 0u && blockIdx.x == call.beside) {
        await_earlier_kernels();
        return;
    }
    const int lane = threadIdx.x & 31;
    const int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x >> 5, 0);
    const u32 kv_head = blockIdx.x % call.kv_heads;
    const Item item = call.items[blockIdx.x / call.kv_heads];
    // A captured launch has room for more items than a step may have.
    if (item.tokens == 0u) return;
    const int group = warp / 4;
    const GroupRing ring = {shared_address(room) + group * (STAGES * STAGE_BYTES), shared_address(barriers[group]),
                            call.pages + item.first_page, (u64)kv_head * HEAD_BYTES, group,
                            ((int)item.tokens + TILE_TOKENS - 1) / TILE_TOKENS};
    const bool loads = threadIdx.x % 128 == 0;
    if (loads) {
        ring.start();
        shared_visible();
    }
    if (threadIdx.x < LEVEL_TABLES) shared.level_tables[threadIdx.x] = level_table(threadIdx.x) ^ LEVELS_RAISED;
    for (int row = threadIdx.x; row < ROWS; row += WARPS * 32) {
        const int query = (int)min((u32)row / call.group, item.queries - 1u);
        shared.limit[row] = min(max(item.seen + query, 0), (int)item.tokens);
        shared.from[row] = MASKED == 0 ? 0 : max(item.from + query, 0);
    }
    __syncthreads();
    // All reads above are of tables that were written before the step was launched. The data below may come from the
    // previous kernel.
    if (call.beside == 0u) {
        await_earlier_kernels();
        admit_later_kernels();
    }
    u64 next_address = 0;
    if (loads) {
        for (int turn = 0; turn < STAGES; turn++) ring.issue(turn, ring.address(turn));
        next_address = ring.address(STAGES);
    }
    if (warp < PREPARING_WARPS) {
        prepare_rows(room + QUERIES_AT, shared.constants, call, item, kv_head, warp * PREPARED_ROWS, lane);
    }
    shared_visible();
    __syncthreads();

    // Rows are in the order of their queries: the first sees the fewest tokens, and the last one begins last.
    const int least = shared.limit[0];
    const int last_start = shared.from[ROWS - 1];
    DraftWarp own(shared, shared_address(room), warp, lane);
#pragma unroll 1
    for (int turn = 0; ring.tile(turn) < ring.tiles; turn++) {
        const int before = ring.tile(turn) * TILE_TOKENS;
        Products products[TOKEN_SIXTY_FOURS];
        ring.wait(turn);
        own.multiply_keys(products, ring.stage(turn));
        own.apply_ranges(products, ring.stage(turn));
        if (before + TILE_TOKENS > least || before < last_start) {
            own.to_logits<true>(call, products, before);
        } else if (CAPPED) {
            own.to_logits<false>(call, products, before);
        }
        own.refer(products, ring.stage(turn));
        // All warps have read the tile before.
        if (loads && turn > 0) {
            ring.issue(turn - 1 + STAGES, next_address);
            next_address = ring.address(turn + STAGES);
        }
        own.weigh(products, ring.stage(turn));
        own.multiply_values(ring.stage(turn));
    }

    // Tiles are no longer read.
    __syncthreads();
    const BlockSums block = {(float*)room, shared.totals, shared.minimums};
    own.put(block);
    __syncthreads();
    if (warp < PREPARING_WARPS) write_rows(call, item, kv_head, warp * PREPARED_ROWS, block, lane);
}
