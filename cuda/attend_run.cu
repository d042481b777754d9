// attend_run: many queries of a run over one span, from queries to states or outputs. On compute capability 9.0 many
// rows over f16 pages have a kernel of their own (attend_run_pipelined.cu).
//
//   score_rt = q_r · k_t scale log2(e)  for from_r <= t < seen_r,   out_r = Σ_t 2^(score_rt) v_t / Σ_t 2^(score_rt)
//
// A row r is a query and a query head. The rows of a block are queries of one run with all query heads of one KV head.
// A block owns one item (consecutive tokens of a span, and up to ROWS rows) for one KV head, and a warp owns 16 of the
// rows. Tiles pass through a ring of the block (common/tile_ring.cuh), are unpacked to halves in shared memory once for
// all warps (common/unit_halves.cuh), and are multiplied as halves: rows of queries with keys, then weights with
// values. The weights are halves in the registers of the products. Halves are values for tile ranges, levels times
// norms for codebooks, and codes for span ranges. Scales of a span, and units of levels, are part of the query for
// keys, and of the output for values. While one unit of a tile is multiplied, the next one is unpacked.
//
// With WARPGROUPS (compute capability 9.0) four warps together multiply 64 rows with 64 tokens, and the tensor cores
// read halves and queries from shared memory asynchronously (common/warpgroup.cuh). If a block has 128 rows and enough
// room, TOKEN_PARTS = 2 warpgroups have the same rows, and each takes half the tokens of a tile. Their sums are merged
// at the end. Otherwise each warp multiplies separately (m16n8k16). It reads every tile, and f16 tiles without
// unpacking. If a block has few rows, such as those of drafts, TOKEN_PARTS = 2 or 4 warps have the same ones, and share
// the tokens of a tile.
//
// Causal rows see the first `seen` tokens of the item, and each query sees one more than the previous one. With
// a window (MASKED) each query also begins one token later than the previous one. A separate
// launch merges the states (merge_run.cu): with this many rows, merging would take as long as a whole block for the
// last block to arrive.
//
// Memory: K and V of the item are read once for ROWS rows. Cost per 64 tokens and warp: HEAD_DIM products of 16 × 8 ×
// 16, 32 exponentials, and 2 · HEAD_DIM / 16 loads of 2 KiB from shared memory for 64 rows, or for 16 rows if warps
// multiply separately. Unpacking takes about 4 instructions for two elements, shared by the warps.
//
// In bounds: items, pages, slots and queries were checked on the host. Rows beyond those of the item read the last row
// and write nothing; tokens beyond the item are masked, and the data stored there are finite.

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rotation.cuh"
#include "common/reduce.cuh"
#include "common/attend_call.cuh"
#include "common/logits.cuh"
#include "common/unit_halves.cuh"
#include "common/run_outputs.cuh"
#include "common/run_queries.cuh"
#include "common/run_softmax.cuh"
#include "common/warpgroup.cuh"
#include "common/tile_ring.cuh"
#include "merge_states.cu"

static_assert(ROWS / GROUP_ROWS * GROUP_QUERY_ROOM <= QUERY_ROOM, "queries lie where tiles do later");

// Blocks of 16 tokens whose scores a warp holds at once, and their tokens.
constexpr int PASS_STEPS = WARPGROUPS ? 4 : 2;
constexpr int RUN_TOKENS = PASS_STEPS * BLOCK_TOKENS;

// The sums of a warp so far. A lane holds rows g and g + 8: references, its part of the weights, and the products, [8
// channels][row, channels 2 c and 2 c + 1].
struct RunSums {
    float reference[2];
    float weight[2];
    float values[2 * CHANNEL_STEPS][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            reference[h] = NO_SCORE;
            weight[h] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < 8 * CHANNEL_STEPS; n++) values[n / 4][n % 4] = 0.0f;
    }

    // Moves to a new reference, which is at least as large as the previous one.
    __device__ __forceinline__ void refer(int h, float to) {
        const float factor = exp2_approx(reference[h] - to);
        reference[h] = to;
        weight[h] *= factor;
#pragma unroll
        for (int n = 0; n < 2 * CHANNEL_STEPS; n++) {
            values[n][2 * h] *= factor;
            values[n][2 * h + 1] *= factor;
        }
    }

    // Stores them, whose rows begin at `first_row`.
    __device__ __forceinline__ void put(const BlockSums& block, int first_row, int lane) const {
        const int c = lane & 3;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first_row + 8 * h + (lane >> 2);
            const float total = sum_of_quad(weight[h]);
            if (c == 0) block.totals[row] = {total, reference[h]};
#pragma unroll
            for (int n = 0; n < 2 * CHANNEL_STEPS; n++) {
                block.rows[row * OUTPUT_ROW + 8 * n + 2 * c] = values[n][2 * h];
                block.rows[row * OUTPUT_ROW + 8 * n + 2 * c + 1] = values[n][2 * h + 1];
            }
        }
    }
};

// The products of a lane: [8 tokens][row, tokens 2 c and 2 c + 1].
using PassProducts = float[2 * PASS_STEPS][4];

#if WARPGROUPS
// The queries of a warpgroup, as matrices in shared memory.
struct RunQueries {
    u32 at;

    __device__ __forceinline__ RunQueries(u8* queries, int first_row, int)
        : at(shared_address(queries) + first_row / GROUP_ROWS * GROUP_QUERY_ROOM) {}
};

// Multiplies RUN_TOKENS keys, stored at `keys`, with the rows.
__device__ __forceinline__ void multiply_keys(PassProducts& products, const RunQueries& queries, u32 keys, int) {
    const u64 rows = matrices(queries.at, 256);
    const u64 tokens = matrices(keys, 256);
    warpgroup_begin();
#pragma unroll
    for (int f = 0; f < CHANNEL_STEPS; f++) {
        warpgroup_multiply(products, rows + f * (GROUP_ROWS * 2), tokens + f * (UNIT_TOKENS * 2), f > 0);
    }
    warpgroup_end(products);
}

// Adds weights times values, which are stored at `values`.
__device__ __forceinline__ void multiply_values(RunSums& sums, const u32 (&weights)[PASS_STEPS][4], u32 values, int) {
    const u64 tokens = matrices(values, 256);
    warpgroup_begin();
#pragma unroll
    for (int m = 0; m < PASS_STEPS; m++) warpgroup_multiply(sums.values, weights[m], tokens + m * (HEAD_DIM * 2));
    warpgroup_end(sums.values);
}
#else
// A warp's queries, as A fragments.
struct RunQueries {
    u32 fragments[CHANNEL_STEPS][4];

    __device__ __forceinline__ RunQueries(u8* queries, int first_row, int lane) {
        const u32 from = shared_address(queries) + first_row / GROUP_ROWS * GROUP_QUERY_ROOM + lane * 16;
        __syncwarp();
#pragma unroll
        for (int f = 0; f < CHANNEL_STEPS; f++) {
            const uint4 words = load_shared_16(from + f * LOAD_BYTES);
            fragments[f][0] = words.x;
            fragments[f][1] = words.y;
            fragments[f][2] = words.z;
            fragments[f][3] = words.w;
        }
    }
};

// Multiplies RUN_TOKENS keys, stored at `keys`, with the rows.
__device__ __forceinline__ void multiply_keys(PassProducts& products, const RunQueries& queries, u32 keys, int lane) {
#pragma unroll
    for (int i = 0; i < 8 * PASS_STEPS; i++) products[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int f = 0; f < CHANNEL_STEPS; f++) {
#pragma unroll
        for (int m = 0; m < PASS_STEPS; m++) {
            const FragmentPair key = load_fragments<false>(keys + m * (CHANNEL_STEPS * LOAD_BYTES), f, lane);
            multiply_f16(products[2 * m], queries.fragments[f], key.first[0], key.first[1]);
            multiply_f16(products[2 * m + 1], queries.fragments[f], key.second[0], key.second[1]);
        }
    }
}

// Adds weights times values, which are stored at `values`.
__device__ __forceinline__ void multiply_values(RunSums& sums, const u32 (&weights)[PASS_STEPS][4], u32 values, int lane) {
#pragma unroll
    for (int m = 0; m < PASS_STEPS; m++) {
#pragma unroll
        for (int n = 0; n < CHANNEL_STEPS; n++) {
            const FragmentPair value = load_fragments<true>(values + m * (CHANNEL_STEPS * LOAD_BYTES), n, lane);
            multiply_f16(sums.values[2 * n], weights[m], value.first[0], value.first[1]);
            multiply_f16(sums.values[2 * n + 1], weights[m], value.second[0], value.second[1]);
        }
    }
}
#endif

// The first token of the item that a row sees.
__device__ __forceinline__ int row_start(const AttendCall& call, const Item& item, int row) {
    if constexpr (MASKED == 0) return 0;
    return max(item.from + (int)min((u32)row / call.group, item.queries - 1u), 0);
}

// RUN_TOKENS tokens of a unit of halves: keys at `keys`, values at `values`. If some rows do not see all of them,
// `limits` are the numbers of the item's tokens up to the last that they see, and `before` is the number of its tokens
// before these.
template <bool SOME_HIDDEN>
__device__ __forceinline__ void attend_pass(const AttendCall& call, const Item& item, RunSums& sums,
                                            const RunQueries& queries, const RowConstants* constants, const int* limits,
                                            int first_row, int before, u32 keys, u32 values, int lane) {
    PassProducts products;
    multiply_keys(products, queries, keys, lane);
    const int g = lane >> 2;
    const int c = lane & 3;
    RowConstants of[2];
    bool far = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        of[h] = constants[8 * h + g];
        if constexpr (CAPPED) {
            // The products become scores.
#pragma unroll
            for (int j = 0; j < 4 * PASS_STEPS; j++) {
                float& product = products[j / 2][2 * h + j % 2];
                product = capped(call, __fmaf_rn(product, of[h].delta, of[h].base));
            }
            of[h] = {1.0f, 0.0f};
        }
        if (SOME_HIDDEN) {
            const int from = row_start(call, item, first_row + 8 * h + g) - before;
            const int limit = limits[8 * h + g] - before;
#pragma unroll
            for (int j = 0; j < 4 * PASS_STEPS; j++) {
                float& product = products[j / 2][2 * h + j % 2];
                const int token = 8 * (j / 2) + 2 * c + j % 2;
                product = from <= token && token < limit ? product : -__int_as_float(0x7f800000);
            }
        }
        const float top = __fmaf_rn(largest_of_row(products, h), of[h].delta, of[h].base);
        far = far || top - sums.reference[h] > MOST_WEIGHT;
    }
    if (__any_sync(ALL_LANES, far)) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float top = __fmaf_rn(max_of_quad(largest_of_row(products, h)), of[h].delta, of[h].base);
            sums.refer(h, fmaxf(sums.reference[h], ceilf(top - START_WEIGHT)));
        }
    }
    // The products of 16 tokens form an A fragment.
    u32 weights[PASS_STEPS][4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float shift = of[h].base - sums.reference[h];
#pragma unroll
        for (int j = 0; j < 2 * PASS_STEPS; j++) {
            const float low = exp2_approx(__fmaf_rn(products[j][2 * h], of[h].delta, shift));
            const float high = exp2_approx(__fmaf_rn(products[j][2 * h + 1], of[h].delta, shift));
            const u32 pair = half_pair(low, high);
            weights[j / 2][j % 2 * 2 + h] = pair;
            // The rounding of the weights must not shift the common part of all values.
            sums.weight[h] += half_value(pair & 0xffffu) + half_value(pair >> 16);
        }
    }
    multiply_values(sums, weights, values, lane);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) attend_run(const AttendCall call) {
    extern __shared__ __align__(LINE_BYTES) u8 room[];
    __shared__ u64 barriers[STAGES];
    __shared__ RowConstants row_constants[ROWS];
    // Number of tokens of the item that a row sees.
    __shared__ int row_limits[ROWS];
    __shared__ float2 totals[ROWS * TOKEN_PARTS];

    if (call.beside != 0u) admit_later_kernels();
    if (call.beside != 0u && blockIdx.x == call.beside) {
        await_earlier_kernels();
        return;
    }
    const int lane = threadIdx.x & 31;
    const int warp = threadIdx.x >> 5;
    const u32 kv_head = blockIdx.x % call.kv_heads;
    const Item item = call.items[blockIdx.x / call.kv_heads];
    // A captured launch has room for more items than a step may have.
    if (item.tokens == 0u) return;
    const TileRing ring = {shared_address(room) + RING_AT, shared_address(barriers), call.pages + item.first_page,
                           (u64)kv_head * HEAD_BYTES, ((int)item.tokens + TILE_TOKENS - 1) / TILE_TOKENS};
    ring.start();
    __syncthreads();
    // All reads above are of tables that were written before the step was launched. The data below may come from the
    // previous kernel.
    if (call.beside == 0u) {
        await_earlier_kernels();
        admit_later_kernels();
    }
    // All stages except the last lie next to the queries.
    for (int tile = 0; tile < STAGES - RING_HOLDS_QUERIES; tile++) ring.issue(tile);

    for (int row = threadIdx.x; row < ROWS; row += WARPS * 32) {
        const int seen = item.seen + (int)min((u32)row / call.group, item.queries - 1u);
        row_limits[row] = min(max(seen, 0), (int)item.tokens);
    }
    prepare_rows(room + QUERIES_AT, row_constants, call, item, kv_head, warp * PREPARED_ROWS, lane);
    if (WARPGROUPS) shared_visible();
    // Below, a warp reads the queries of rows that others prepared.
    if (!WARPGROUPS && TOKEN_PARTS > 1) __syncthreads();
    // The warp's rows. Other warps have the same rows, for another part of the tokens of a unit.
    const int first_row = warp * WARP_ROWS % ROWS;
    const int part = warp * WARP_ROWS / ROWS;
    const RunQueries queries(room + QUERIES_AT, first_row, lane);
    __syncthreads();
    if (RING_HOLDS_QUERIES) {
        shared_visible();
        ring.issue(STAGES - 1);
    }
    const int units = ((int)item.tokens + UNIT_TOKENS - 1) / UNIT_TOKENS;
    const auto unpack = [&](int unit) {
        const int tile = unit / TILE_UNITS;
        ring.wait(tile);
        unpack_unit(shared_address(room) + unit % 2 * HALVES_BYTES, ring.stage(tile), unit % TILE_UNITS, warp, lane);
    };
    // Loads the next tile into the place of this unit's tile, once its last unit was read.
    const auto issue_after = [&](int unit) {
        if (unit % TILE_UNITS == TILE_UNITS - 1) ring.issue(unit / TILE_UNITS + STAGES);
    };
    if constexpr (UNPACKS) {
        unpack(0);
        __syncthreads();
        issue_after(0);
    }

    // Rows are in the order of their queries: the first of the group sees the fewest tokens.
    const int first_of_group = first_row / GROUP_ROWS * GROUP_ROWS;
    const int least = row_limits[first_of_group];
    const bool idle = first_of_group >= (int)(item.queries * call.group);
    const int most = idle ? 0 : row_limits[first_of_group + GROUP_ROWS - 1];
    // Where the group begins to see, and from where on all its rows do.
    const int first_seen = row_start(call, item, first_of_group);
    const int last_seen = row_start(call, item, first_of_group + GROUP_ROWS - 1);
    RunSums sums;
    sums.clear();
#pragma unroll 1
    for (int unit = 0; unit < units; unit++) {
        if constexpr (!UNPACKS) ring.wait(unit);
        const u32 keys = UNPACKS ? shared_address(room) + unit % 2 * HALVES_BYTES : ring.stage(unit);
        const u32 values = keys + (UNPACKS ? HALVES_BYTES / 2 : VALUES_AT);
        // Every other warp of a scheduler unpacks first, so that some are always multiplying.
#pragma unroll 1
        for (int turn = 0; turn <= (int)UNPACKS; turn++) {
            if (UNPACKS && (warp / 4 + turn) % 2 == 0) {
                if (unit + 1 < units) unpack(unit + 1);
                continue;
            }
#pragma unroll 1
            for (int pass = part; pass < UNIT_TOKENS / RUN_TOKENS; pass += TOKEN_PARTS) {
                const int before = unit * UNIT_TOKENS + pass * RUN_TOKENS;
                if (before >= most) break;
                if (MASKED && before + RUN_TOKENS <= first_seen) continue;
                const u32 values_from = values + pass * (PASS_STEPS * CHANNEL_STEPS * LOAD_BYTES);
                const u32 keys_from = keys + pass * (PASS_STEPS * (WARPGROUPS ? 1 : CHANNEL_STEPS) * LOAD_BYTES);
                const RowConstants* constants = row_constants + first_row;
                const int* limits = row_limits + first_row;
                if (before + RUN_TOKENS <= least && (!MASKED || before >= last_seen)) {
                    attend_pass<false>(call, item, sums, queries, constants, limits, first_row, before, keys_from,
                                       values_from, lane);
                } else {
                    attend_pass<true>(call, item, sums, queries, constants, limits, first_row, before, keys_from,
                                       values_from, lane);
                }
            }
        }
        __syncthreads();
        issue_after(UNPACKS ? unit + 1 : unit);
    }

    // Tiles are no longer read.
    const BlockSums block = {(float*)room, totals};
    sums.put(block, part * ROWS + first_row, lane);
    __syncthreads();
    write_rows(call, item, kv_head, warp * PREPARED_ROWS, block, lane);
}
