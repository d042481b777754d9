// attend_run: many queries of a run over one span, from queries to states or outputs.
//
//   score_rt = q_r · k_t log2(e)/√d  for t < seen_r,   out_r = Σ_t 2^(score_rt) v_t / Σ_t 2^(score_rt)
//
// A row r is a query and a query head; those of a block are queries of one run with all query heads of one KV head. A block
// owns one item (a run of tokens of a span, and up to ROWS rows) for one KV head, and a warp owns 16 of the rows: it reads
// every tile, and warps share nothing else. Tiles come through a ring of the block (common/tile_ring.cuh),
// and are multiplied as halves (m16n8k16): rows of queries with keys, then weights, which are halves where the products
// left them, with values. Packed tiles become halves in shared memory first, once for all warps (common/tile_halves.cuh):
// values where ranges lie beside the tile, levels times norms of codebooks, and codes where ranges hold for the span. Scales
// of a span, and units of levels, are part of the query for keys, and of the output for values. While one tile is
// multiplied, the next one is unpacked.
//
// Causal rows see the first `seen` tokens of the item, and each query one more than the one before it. States are merged
// by a launch of its own (merge_run.cu): with so many rows it would be the whole work of a block that comes last.
//
// Memory: K and V of the item once for ROWS rows. Cost per 16 tokens and warp: HEAD_DIM / 4 MMAs, 8 exponentials, and
// HEAD_DIM / 8 loads of 512 bytes from shared memory; unpacking takes about 4 instructions for two elements, shared by the
// warps.
//
// In bounds: items, pages, slots and queries were checked on the host. Rows beyond those of the item read the last row and
// write nothing; tokens beyond the item are masked, and what is stored there is finite.

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rotation.cuh"
#include "common/reduce.cuh"
#include "common/attend_call.cuh"
#include "common/tile_halves.cuh"
#include "common/warpgroup.cuh"
#include "common/tile_ring.cuh"
#include "merge_states.cu"

// Rows of a warp, and of a block.
constexpr int WARP_ROWS = 16;
constexpr int ROWS = WARPS * WARP_ROWS;

// A warp's queries as A fragments in shared memory, [16 channels][lane], 16 bytes each.
constexpr u32 WARP_QUERY_BYTES = CHANNEL_STEPS * LOAD_BYTES;
static_assert(WARPS * WARP_QUERY_BYTES <= QUERY_ROOM, "queries lie where tiles do later");

// Rows that a warp prepares at once, so that their loads and sums wait together.
constexpr int ROWS_AT_ONCE = 8;

// Warps that multiply together, and their rows.
constexpr int GROUP_WARPS = WARPGROUPS ? 4 : 1;
constexpr int GROUP_ROWS = GROUP_WARPS * WARP_ROWS;

// Blocks of 16 tokens whose scores a warp holds at once, and their tokens.
constexpr int PASS_STEPS = WARPGROUPS ? 4 : 2;
constexpr int RUN_TOKENS = PASS_STEPS * BLOCK_TOKENS;

// A warp's outputs, padded so that the rows of a fragment lie in different banks.
constexpr int OUTPUT_ROW = HEAD_DIM + 8;

// The score that stands for none: below all others, and finite, so that differences exist.
constexpr float NO_SCORE = -1e30f;

// What turns the products of a row into scores: score = products · delta + base.
struct RowConstants {
    float delta;
    float base;
};

// The query of a row of the block, and its head.
struct BlockRow {
    u32 query;
    u32 head;
};

__device__ __forceinline__ BlockRow block_row(const AttendCall& call, u32 kv_head, u32 row) {
    return {row / call.group, kv_head * call.group + row % call.group};
}

// Puts the channels of a row, lane + 32 · i in `row`, where its fragments are read: as halves of at most 2^15, which 16-bit
// queries fill exactly, since the factor is a power of two. Yields that factor's inverse.
__device__ __forceinline__ float put_query(u8* fragments, int row, const float (&channels)[LANE_CHANNELS], int lane) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) largest = fmaxf(largest, fabsf(channels[i]));
    largest = warp_max(largest);
    // Bits of a power of two; the range leaves room for its inverse.
    const u32 exponent = min(max(__float_as_uint(largest) >> 23, 40u), 240u) - 14u;
    const float factor = __uint_as_float((254u - exponent) << 23);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const int channel = lane + 32 * i;
        const ChannelPlace place = channel_place(channel % 16);
#if WARPGROUPS
        const int matrix = channel / 16 * (GROUP_ROWS / 4) + row / 8 * 2 + place.second;
        const int word = matrix * 32 + row % 8 * 4 + place.column;
#else
        const int word = (channel / 16 * 32 + row % 8 * 4 + place.column) * 4 + row / 8 + 2 * place.second;
#endif
        ((u16*)fragments)[2 * word + place.high] = (u16)half_bits(channels[i] * factor);
    }
    return __uint_as_float(exponent << 23);
}

// Prepares the rows of a warp, one after the other.
__device__ __forceinline__ void prepare_rows(u8* room, RowConstants* constants, const AttendCall& call, const Item& item,
                                             u32 kv_head, int first_row, int lane) {
    float2 ranges[LANE_CHANNELS];
    if (KEY_SPAN_RANGES) {
        const float2* from = call.key_ranges + ((u64)item.range_slot * call.kv_heads + kv_head) * HEAD_DIM + lane;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) ranges[i] = from[32 * i];
    }
    const u32 last = item.queries * call.group - 1u;
#pragma unroll 1
    for (int first = 0; first < WARP_ROWS; first += ROWS_AT_ONCE) {
        float rows[ROWS_AT_ONCE][LANE_CHANNELS];
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; r++) {
            const BlockRow of = block_row(call, kv_head, min((u32)(first_row + first + r), last));
            const u64 at = (item.row + of.query) * call.query_stride + (u64)of.head * TENSOR_CHANNELS + lane;
#pragma unroll
            for (int i = 0; i < LANE_CHANNELS; i++) {
                const bool there = lane + 32 * i < TENSOR_CHANNELS;
                rows[r][i] = there ? load_element(call.queries, call.query_type, at + 32 * i) : 0.0f;
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; r++) {
            float(&row)[LANE_CHANNELS] = rows[r];
            rotate<false>(row, lane);
            float base = 0.0f;
            if (KEY_SPAN_RANGES) {
#pragma unroll
                for (int i = 0; i < LANE_CHANNELS; i++) {
                    base = __fmaf_rn(row[i], __fmaf_rn(KEY_CENTRE, ranges[i].x, ranges[i].y), base);
                    row[i] *= ranges[i].x;
                }
                base = warp_sum(base) * call.score_scale;
            }
            const float factor = put_query(room, first + r, row, lane);
            if (lane == 0) constants[first + r] = {factor * call.score_scale * halves_unit(KEY_LEVEL_UNIT), base};
        }
    }
}

// The largest over the four lanes that hold the same rows, and the sum.
__device__ __forceinline__ float max_of_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

__device__ __forceinline__ float sum_of_quad(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// What a warp has summed so far. A lane holds rows g and g + 8: references, its part of the weights, and the products,
// [8 channels][row, channels 2 c and 2 c + 1].
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

    // Takes a new reference, at least as large as the one before.
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
};

// Weights are halves of at most 2^15; where one would be larger, references move so that it is at most 2^6 (as in
// common/weights.cuh).
constexpr float MOST_WEIGHT = 15.0f;
constexpr float START_WEIGHT = 6.0f;

// The products of a lane: [8 tokens][row, tokens 2 c and 2 c + 1].
using PassProducts = float[2 * PASS_STEPS][4];

// The largest of row `h`.
__device__ __forceinline__ float largest_of_row(const PassProducts& products, int h) {
    float largest = fmaxf(products[0][2 * h], products[0][2 * h + 1]);
#pragma unroll
    for (int j = 1; j < 2 * PASS_STEPS; j++) {
        largest = fmaxf(largest, fmaxf(products[j][2 * h], products[j][2 * h + 1]));
    }
    return largest;
}

#if WARPGROUPS
// The queries of a warpgroup, as matrices in shared memory.
struct RunQueries {
    u32 at;

    __device__ __forceinline__ RunQueries(u8* queries, int warp, int)
        : at(shared_address(queries) + warp / GROUP_WARPS * (GROUP_ROWS * HEAD_DIM * 2)) {}
};

// The products of RUN_TOKENS keys, which lie at `keys`, with the rows.
__device__ __forceinline__ void multiply_keys(PassProducts& products, const RunQueries& queries, u32 keys, int) {
    static_assert(RUN_TOKENS == UNIT_TOKENS, "a step of channels follows the one before");
    const u64 rows = matrices(queries.at, 256);
    const u64 tokens = matrices(keys, 256);
    warpgroup_begin();
#pragma unroll
    for (int f = 0; f < CHANNEL_STEPS; f++) {
        warpgroup_multiply(products, rows + f * (GROUP_ROWS * 2), tokens + f * (UNIT_TOKENS * 2), f > 0);
    }
    warpgroup_end(products);
}

// Adds weights times values, which lie at `values`.
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

    __device__ __forceinline__ RunQueries(u8* queries, int warp, int lane) {
        const u32 from = shared_address(queries) + warp * WARP_QUERY_BYTES + lane * 16;
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

// The products of RUN_TOKENS keys, which lie at `keys`, with the rows.
__device__ __forceinline__ void multiply_keys(PassProducts& products, const RunQueries& queries, u32 keys, int lane) {
#pragma unroll
    for (int i = 0; i < 8 * PASS_STEPS; i++) products[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int f = 0; f < CHANNEL_STEPS; f++) {
#pragma unroll
        for (int m = 0; m < PASS_STEPS; m++) {
            const FragmentPair key = load_fragments(keys + (m * CHANNEL_STEPS + f) * LOAD_BYTES + lane * 16);
            multiply_f16(products[2 * m], queries.fragments[f], key.first[0], key.first[1]);
            multiply_f16(products[2 * m + 1], queries.fragments[f], key.second[0], key.second[1]);
        }
    }
}

// Adds weights times values, which lie at `values`.
__device__ __forceinline__ void multiply_values(RunSums& sums, const u32 (&weights)[PASS_STEPS][4], u32 values, int lane) {
#pragma unroll
    for (int m = 0; m < PASS_STEPS; m++) {
#pragma unroll
        for (int n = 0; n < CHANNEL_STEPS; n++) {
            const FragmentPair value = load_fragments(values + (m * CHANNEL_STEPS + n) * LOAD_BYTES + lane * 16);
            multiply_f16(sums.values[2 * n], weights[m], value.first[0], value.first[1]);
            multiply_f16(sums.values[2 * n + 1], weights[m], value.second[0], value.second[1]);
        }
    }
}
#endif

// RUN_TOKENS tokens of a unit of halves: keys at `keys`, values at `values`. Where some rows see fewer, `limits` are what
// they see of the item, and `before` are its tokens before these.
template <bool MASKED>
__device__ __forceinline__ void attend_pass(RunSums& sums, const RunQueries& queries, const RowConstants* constants,
                                            const int* limits, int before, u32 keys, u32 values, int lane) {
    PassProducts products;
    multiply_keys(products, queries, keys, lane);
    const int g = lane >> 2;
    const int c = lane & 3;
    RowConstants of[2];
    bool far = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        of[h] = constants[8 * h + g];
        if (MASKED) {
            const int limit = limits[8 * h + g] - before;
#pragma unroll
            for (int j = 0; j < 4 * PASS_STEPS; j++) {
                float& product = products[j / 2][2 * h + j % 2];
                product = 8 * (j / 2) + 2 * c + j % 2 < limit ? product : -__int_as_float(0x7f800000);
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
    // What the products left of 16 tokens is an A fragment.
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
            // What rounding takes from the weights must not shift what all values have in common.
            sums.weight[h] += half_value(pair & 0xffffu) + half_value(pair >> 16);
        }
    }
    multiply_values(sums, weights, values, lane);
}

// Writes the rows of a warp, whose sums lie in `rows` by then: states, or the outputs themselves.
__device__ __forceinline__ void write_rows(const AttendCall& call, const Item& item, u32 kv_head, int first_row,
                                           const float* rows, const float2* totals, int lane) {
    float2 ranges[LANE_CHANNELS];
    if (VALUE_SPAN_RANGES) {
        const float2* from = call.value_ranges + ((u64)item.range_slot * call.kv_heads + kv_head) * HEAD_DIM + lane;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) ranges[i] = from[32 * i];
    }
    const int count = min(WARP_ROWS, (int)(item.queries * call.group) - first_row);
#pragma unroll 4
    for (int r = 0; r < count; r++) {
        // (weight, log-sum-exp); a row that sees nothing of the item has neither.
        const float2 total = totals[r];
        float row[LANE_CHANNELS];
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            float x = total.x == 0.0f ? 0.0f : rows[r * OUTPUT_ROW + lane + 32 * i] / total.x * halves_unit(VALUE_LEVEL_UNIT);
            if (VALUE_SPAN_RANGES) x = __fmaf_rn(ranges[i].x, x + VALUE_CENTRE, ranges[i].y);
            row[i] = x;
        }
        rotate_back<true>(row, lane);
        const BlockRow of = block_row(call, kv_head, first_row + r);
        const u32 query_heads = call.kv_heads * call.group;
        const u64 state = (u64)(item.state + of.query * item.stride) * query_heads + of.head;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            if (item.states == 1) {
                write_output(call, item.row + of.query, of.head, lane + 32 * i, {row[i], total.y});
            } else {
                call.states[state * HEAD_DIM + lane + 32 * i] = row[i];
            }
        }
        if (item.states > 1 && lane == 0) call.state_lse[state] = total.y;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) attend_run(const AttendCall call) {
    extern __shared__ __align__(LINE_BYTES) u8 room[];
    __shared__ u64 barriers[STAGES];
    __shared__ RowConstants row_constants[ROWS];
    // Tokens of the item that a row sees.
    __shared__ int row_limits[ROWS];
    __shared__ float2 totals[ROWS];

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
    const int tiles = ((int)item.tokens + TILE_TOKENS - 1) / TILE_TOKENS;
    const TileRing ring = {shared_address(room) + RING_AT, shared_address(barriers), call.pages + item.first_page,
                           (u64)kv_head * HEAD_BYTES, tiles};
    ring.start();
    __syncthreads();
    // All above are tables, written before the step was launched; what follows may come from the kernel before.
    if (call.beside == 0u) {
        await_earlier_kernels();
        admit_later_kernels();
    }
    // The stages but the last lie beside the queries.
    for (int tile = 0; tile < STAGES - RING_HOLDS_QUERIES; tile++) ring.issue(tile);

    const int first_row = warp * WARP_ROWS;
    for (int row = threadIdx.x; row < ROWS; row += WARPS * 32) {
        const int seen = item.seen + (int)min((u32)row / call.group, item.queries - 1u);
        row_limits[row] = min(max(seen, 0), (int)item.tokens);
    }
    // Those of the other warps of a group lie between a warp's own.
    const int group_row = first_row % GROUP_ROWS;
    u8* const own_queries = room + QUERIES_AT + (first_row - group_row) * (HEAD_DIM * 2) + group_row * (WARPGROUPS ? 32 : 0);
    prepare_rows(own_queries, row_constants + first_row, call, item, kv_head, first_row, lane);
    if (WARPGROUPS) shared_visible();
    const RunQueries queries(room + QUERIES_AT, warp, lane);
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
    // Asks for the tile that may lie where the one of this unit was, once its last unit was read.
    const auto issue_after = [&](int unit) {
        if (unit % TILE_UNITS == TILE_UNITS - 1) ring.issue(unit / TILE_UNITS + STAGES);
    };
    if constexpr (UNPACKS) {
        unpack(0);
        __syncthreads();
        issue_after(0);
    }

    // Rows are in the order of their queries: the first of the group sees the least.
    const int first_of_group = first_row - group_row;
    const int least = row_limits[first_of_group];
    const bool idle = first_of_group >= (int)(item.queries * call.group);
    const int most = idle ? 0 : row_limits[first_of_group + GROUP_ROWS - 1];
    RunSums sums;
    sums.clear();
#pragma unroll 1
    for (int unit = 0; unit < units; unit++) {
        if constexpr (!UNPACKS) ring.wait(unit);
        const u32 keys = UNPACKS ? shared_address(room) + unit % 2 * HALVES_BYTES : ring.stage(unit);
        const u32 values = keys + (UNPACKS ? HALVES_BYTES / 2 : VALUES_AT);
        // Every other warp of a scheduler unpacks first, so that some always multiply.
#pragma unroll 1
        for (int turn = 0; turn <= (int)UNPACKS; turn++) {
            if (UNPACKS && (warp / 4 + turn) % 2 == 0) {
                if (unit + 1 < units) unpack(unit + 1);
                continue;
            }
#pragma unroll 1
            for (int pass = 0; pass < UNIT_TOKENS / RUN_TOKENS; pass++) {
                const int before = unit * UNIT_TOKENS + pass * RUN_TOKENS;
                if (before >= most) break;
                const u32 at = pass * (PASS_STEPS * CHANNEL_STEPS * LOAD_BYTES);
                const RowConstants* constants = row_constants + first_row;
                const int* limits = row_limits + first_row;
                if (before + RUN_TOKENS <= least) {
                    attend_pass<false>(sums, queries, constants, limits, before, keys + at, values + at, lane);
                } else {
                    attend_pass<true>(sums, queries, constants, limits, before, keys + at, values + at, lane);
                }
            }
        }
        __syncthreads();
        issue_after(UNPACKS ? unit + 1 : unit);
    }

    // Tiles are not read any more.
    const int g = lane >> 2;
    const int c = lane & 3;
    float* rows = (float*)room + warp * (WARP_ROWS * OUTPUT_ROW);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = 8 * h + g;
        const float weight = sum_of_quad(sums.weight[h]);
        const float lse = weight == 0.0f ? NO_SCORE : sums.reference[h] + log2_approx(weight);
        if (c == 0) totals[first_row + row] = {weight, lse};
#pragma unroll
        for (int n = 0; n < 2 * CHANNEL_STEPS; n++) {
            rows[row * OUTPUT_ROW + 8 * n + 2 * c] = sums.values[n][2 * h];
            rows[row * OUTPUT_ROW + 8 * n + 2 * c + 1] = sums.values[n][2 * h + 1];
        }
    }
    __syncwarp();
    write_rows(call, item, kv_head, first_row, rows, totals + first_row, lane);
}
