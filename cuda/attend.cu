// attend: one decode step of one segment format, from queries to merged outputs.
//
//   score_t = q · k_t log2(e)/√d,   out = Σ_t 2^(score_t) v_t / Σ_t 2^(score_t)
//
// A block owns one item (a run of tokens of a span) for one KV head and a chunk of query heads, and its warps take the
// item's steps of STEP_TOKENS tokens in turn. Warps never wait for each other in the loop: each has its own ring of
// STAGES stages in shared memory, filled by asynchronous copies (common/ring.cuh), and its own softmax. Keys are
// multiplied as bytes (m16n8k32) with a query of 16 bits in two bytes, f16 keys as halves with a query of two halves;
// values are multiplied as halves (m16n8k16) with weights in f16. Codes go from memory into the MMA without a
// conversion; see common/scores.cuh and common/values.cuh.
//
// Weights are 2^(score − reference): the reference is set by the first step and moves, by whole powers of two and hence
// exactly, only when a weight would leave the range of f16. After the loop the warps are joined in shared memory. The
// block writes the output where its sequence has no other items; otherwise a state, and the last block merges.
//
// Memory: K and V of the item once, in runs of at least 2 KiB; queries, ranges and page addresses before them.
// Cost per 16 tokens and warp: HEAD_DIM/32 integer and HEAD_DIM/16 half MMAs (more with WIDE), one instruction for each
// register of unpacked codes, 2 · LANE_HEADS exponentials.
//
// In bounds: items, pages, slots and queries were checked on the host. A step begins inside its item, and loads never
// leave the tile; tokens beyond the item get the score −∞, and what is stored there is finite.

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/attend_call.cuh"
#include "prepare_query.cu"
#include "common/scores.cuh"
#include "common/values.cuh"
#include "common/ring.cuh"
#include "merge_states.cu"

// A row of the joined sums, padded so that the heads of a warp's lanes lie in different banks.
constexpr int JOIN_ROW = HEAD_DIM + 8;

constexpr float MIDDLE_VALUE = VALUE_BITS == 16 ? 0.0f : ((1 << (VALUE_BITS % 16)) - 1) * 0.5f;

struct WarpState {
    float reference;
    float weight;
    float minimum;
};

// The largest over the 8 lanes that hold the same heads.
__device__ __forceinline__ float max_of_tokens(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 4));
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 8));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 16));
}

__device__ __forceinline__ float sum_of_tokens(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 4);
    x += __shfl_xor_sync(ALL_LANES, x, 8);
    return x + __shfl_xor_sync(ALL_LANES, x, 16);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) attend(const AttendCall call) {
    extern __shared__ __align__(16) u8 ring_memory[];
    __shared__ QueryShared query_shared;
    __shared__ WarpState warp_states[WARPS][CHUNK_HEADS];
    __shared__ u64 barriers[WARPS][STAGES];

    const int lane = threadIdx.x & 31;
    const int warp = threadIdx.x >> 5;
    const int g = lane >> 2;
    const int c = lane & 3;
    const u32 chunk = blockIdx.x % call.chunks;
    const u32 kv_head = blockIdx.x / call.chunks % call.kv_heads;
    const Item item = call.items[blockIdx.x / call.chunks / call.kv_heads];
    const u32 first_head = kv_head * call.group + chunk * CHUNK_HEADS;
    const int heads = min(CHUNK_HEADS, (int)(call.group - chunk * CHUNK_HEADS));
    const int steps = ((int)item.tokens + STEP_TOKENS - 1) / STEP_TOKENS;

    const u64* pages = call.pages + item.first_page;
    const u64 head_at = (u64)kv_head * HEAD_BYTES;
    const Ring ring = {shared_address(ring_memory) + warp * (STAGES * STAGE_BYTES), shared_address(barriers[warp]), lane};
    u64 first_pages[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        const int step = warp + i * WARPS;
        first_pages[i] = step < steps ? pages[step / STEPS_PER_TILE] : 0;
    }
    const QueryLoads query_loads = load_query(call, item, kv_head, first_head, heads, warp, lane);
    ring.start();
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        const int step = warp + i * WARPS;
        if (step < steps) ring.issue(i, first_pages[i] + head_at, step);
        ring.commit();
    }
    prepare_query(query_shared, query_loads, call.score_scale, warp, lane);
    __syncthreads();

    u32 query[2 * QUERY_REGISTERS];
    load_query_fragments(query, query_shared, lane);
    float delta[LANE_HEADS];
    float start[KEY_VARIANTS][LANE_HEADS];
    float query_sum[LANE_HEADS];
    float reference[LANE_HEADS];
    float weight[LANE_HEADS];
    float minimum[LANE_HEADS];
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
        const HeadConstants& constants = query_shared.heads[LANE_HEADS * c + h];
        delta[h] = constants.delta;
        query_sum[h] = constants.query_sum;
#pragma unroll
        for (int v = 0; v < KEY_VARIANTS; v++) start[v][h] = constants.base[v];
        reference[h] = 0.0f;
        weight[h] = 0.0f;
        minimum[h] = 0.0f;
    }
    float sums[VALUE_BLOCKS][4];
#pragma unroll
    for (int n = 0; n < VALUE_BLOCKS; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[n][i] = 0.0f;
    }

    int stage = 0;
    u32 turn = 0;
    bool first = true;
    // The page of the step that is to be prefetched next is known one step ahead.
    int ahead = warp + STAGES * WARPS;
    u64 ahead_page = ahead < steps ? pages[ahead / STEPS_PER_TILE] : 0;
    for (int step = warp; step < steps; step += WARPS) {
        ring.wait(stage, turn);
        const u32 at = ring.stage(stage);

        float scores[STEP_SCORES];
        float base[KEY_VARIANTS][LANE_HEADS];
#pragma unroll
        for (int v = 0; v < KEY_VARIANTS; v++) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) base[v][h] = start[v][h] - (KEY_TOKEN_RANGES ? 0.0f : reference[h]);
        }
        step_scores(scores, at, lane, query, delta, base);
        float value_scale[VALUE_TOKEN_RANGES ? 2 * STEP_BLOCKS : 1];
        float value_min[VALUE_TOKEN_RANGES ? 2 * STEP_BLOCKS : 1];
        float largest_scale = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * STEP_BLOCKS; i++) {
            if (KEY_TOKEN_RANGES) {
                const u32 range = load_shared_4(at + STAGE_KEY_RANGES_AT + 4 * (8 * i + g));
#pragma unroll
                for (int h = 0; h < LANE_HEADS; h++) {
                    float& score = scores[i * LANE_HEADS + h];
                    score = half_value(range & 0xffffu) * score +
                            (half_value(range >> 16) * query_sum[h] - reference[h]);
                }
            }
            if (VALUE_TOKEN_RANGES) {
                const u32 range = load_shared_4(at + STAGE_VALUE_RANGES_AT + 4 * (8 * i + g));
                value_scale[i] = half_value(range & 0xffffu);
                value_min[i] = half_value(range >> 16);
                largest_scale = fmaxf(largest_scale, value_scale[i]);
            }
        }
        const int tokens = (int)item.tokens - step * STEP_TOKENS;
        if (tokens < STEP_TOKENS) {
#pragma unroll
            for (int i = 0; i < 2 * STEP_BLOCKS; i++) {
#pragma unroll
                for (int h = 0; h < LANE_HEADS; h++) {
                    if (8 * i + g >= tokens) scores[i * LANE_HEADS + h] = -__int_as_float(0x7f800000);
                }
            }
        }

        // What goes into the MMA is at most 2^(score + scale_bits).
        float largest[LANE_HEADS];
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) {
            largest[h] = scores[h];
#pragma unroll
            for (int i = 1; i < 2 * STEP_BLOCKS; i++) largest[h] = fmaxf(largest[h], scores[i * LANE_HEADS + h]);
        }
        // Scales of values are 0 or at least 2^-14.
        if (VALUE_TOKEN_RANGES) {
            const float scale_bits = log2_approx(fmaxf(max_of_tokens(largest_scale), 6.1035156e-5f));
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) largest[h] += scale_bits;
        }
        const float most = WIDE ? fmaxf(largest[0], largest[LANE_HEADS - 1]) : largest[0];
        if (first || __any_sync(ALL_LANES, most > MOST)) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) {
                float move = ceilf(max_of_tokens(largest[h]) - START);
                if (!first) move = fmaxf(move, 0.0f);
                reference[h] += move;
                const float factor = exp2_approx(-move);
                // Before the first step there is nothing to scale, and the factor may be infinite.
                if (!first) {
                    weight[h] *= factor;
                    minimum[h] *= factor;
#pragma unroll
                    for (int n = 0; n < VALUE_BLOCKS; n++) {
                        sums[n][WIDE ? h : 0] *= factor;
                        sums[n][WIDE ? 2 + h : 2] *= factor;
                    }
                }
#pragma unroll
                for (int i = 0; i < 2 * STEP_BLOCKS; i++) scores[i * LANE_HEADS + h] -= move;
            }
            first = false;
        }

        u32 weights[STEP_BLOCKS][2];
#pragma unroll
        for (int i = 0; i < 2 * STEP_BLOCKS; i++) {
            float p[2] = {0.0f, 0.0f};
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) {
                p[h] = exp2_approx(scores[i * LANE_HEADS + h]);
                if (VALUE_TOKEN_RANGES) {
                    weight[h] += p[h];
                    minimum[h] += p[h] * value_min[i];
                    p[h] *= value_scale[i];
                }
            }
            const u32 pair = half_pair(p[0], p[1]);
            // What rounding takes from the weights must not shift what all codes have in common: the sum of the weights
            // is that of the rounded ones, and where scales differ the middle code makes up for it.
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) {
                const float rounded = half_value(h == 0 ? pair & 0xffffu : pair >> 16);
                if (VALUE_TOKEN_RANGES) {
                    minimum[h] += MIDDLE_VALUE * (p[h] - rounded);
                } else {
                    weight[h] += rounded;
                }
            }
            weights[i / 2][i % 2] = transpose_8x8(pair);
        }
        step_values(sums, at, lane, weights);

        ring.release();
        if (ahead < steps) ring.issue(stage, ahead_page + head_at, ahead);
        ring.commit();
        ahead += WARPS;
        ahead_page = ahead < steps ? pages[ahead / STEPS_PER_TILE] : 0;
        if (++stage == STAGES) {
            stage = 0;
            turn++;
        }
    }

    // The rings are free once all warps are here.
    __syncthreads();
    float* joined = (float*)ring_memory;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
        const float total = sum_of_tokens(weight[h]);
        const float total_minimum = VALUE_TOKEN_RANGES ? sum_of_tokens(minimum[h]) : 0.0f;
        const int head = LANE_HEADS * c + h;
        const bool idle = warp >= steps;
        if (g == 0) warp_states[warp][head] = {idle ? -__int_as_float(0x7f800000) : reference[h], total, total_minimum};
        float* row = joined + (warp * CHUNK_HEADS + head) * JOIN_ROW + g;
#pragma unroll
        for (int n = 0; n < VALUE_BLOCKS; n++) {
            row[16 * n] = sums[n][WIDE ? h : 0];
            row[16 * n + 8] = sums[n][WIDE ? 2 + h : 2];
        }
    }
    __syncthreads();

    const u32 query_heads = call.kv_heads * call.group;
    const bool alone = item.states == 1;
    for (int e = threadIdx.x; e < heads * HEAD_DIM; e += WARPS * 32) {
        const int head = e / HEAD_DIM;
        const int channel = e % HEAD_DIM;
        float top = warp_states[0][head].reference;
#pragma unroll
        for (int w = 1; w < WARPS; w++) top = fmaxf(top, warp_states[w][head].reference);
        float total = 0.0f;
        float low = 0.0f;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const WarpState& state = warp_states[w][head];
            const float factor = exp2_approx(state.reference - top);
            total += factor * state.weight;
            low += factor * state.minimum;
            sum += factor * joined[(w * CHUNK_HEADS + head) * JOIN_ROW + channel];
        }
        sum *= value_unit(channel / 16);
        float out = (sum + low) / total;
        if (VALUE_BITS != 16 && !VALUE_TOKEN_RANGES) {
            const float2 range =
                call.value_ranges[((u64)item.range_slot * call.kv_heads + kv_head) * HEAD_DIM + channel];
            out = range.x * out + range.y;
        }
        if (alone) {
            write_output(call, ((u64)item.sequence * query_heads + first_head + head) * HEAD_DIM + channel, out);
        } else {
            const u64 row = (u64)item.state * query_heads + first_head + head;
            call.states[row * HEAD_DIM + channel] = out;
            if (channel == 0) call.state_lse[row] = top + log2_approx(total);
        }
    }
    if (alone) return;
    u32* arrivals = call.arrivals + ((u64)item.sequence * call.kv_heads + kv_head) * call.chunks + chunk;
    if (last_to_arrive(arrivals, item.states)) merge_states(call, item, first_head, heads);
}
