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
// block writes the output where its sequence has no other items; otherwise states are merged (merge_states.cu).
//
// Launched with programmatic serialisation, blocks read their tables while the kernel before still runs.
//
// Memory: K and V of the item once, in runs of at least 2 KiB; queries, ranges and page addresses before them.
// Cost per 16 tokens and warp: HEAD_DIM/32 integer and HEAD_DIM/16 half MMAs (more with WIDE), one instruction for each
// register of unpacked codes, 2 · LANE_HEADS exponentials.
//
// In bounds: items, pages, slots and queries were checked on the host. A step begins inside its item, and loads never
// leave the tile; tokens beyond the item get the score −∞, and what is stored there is finite.

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rotation.cuh"
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

// One output of the block from the sums of its warps; `decode` takes it from codes to values.
template <typename Decode>
__device__ __forceinline__ ItemState join_warps(const WarpState (&states)[WARPS][CHUNK_HEADS], const float* joined,
                                                int head, int channel, Decode decode) {
    float top = states[0][head].reference;
#pragma unroll
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, states[w][head].reference);
    float weight = 0.0f;
    float minimum = 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const WarpState& state = states[w][head];
        const float factor = exp2_approx(state.reference - top);
        weight += factor * state.weight;
        minimum += factor * state.minimum;
        sum += factor * joined[(w * CHUNK_HEADS + head) * JOIN_ROW + channel];
    }
    return {decode((sum * value_unit(channel / 16) + minimum) / weight), top + log2_approx(weight)};
}

// Outputs of rotated values are rotated back where whole rows of them lie in shared memory.
constexpr bool ROTATED = ROTATION_ORDER<true> != 0;

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) attend(const AttendCall call) {
    extern __shared__ __align__(16) u8 ring_memory[];
    __shared__ QueryShared query_shared;
    __shared__ WarpState warp_states[WARPS][CHUNK_HEADS];
    __shared__ u64 barriers[WARPS][STAGES];

    admit_later_kernels();
    const int lane = threadIdx.x & 31;
    const int warp = threadIdx.x >> 5;
    const int g = lane >> 2;
    const int c = lane & 3;
    const u32 rank = blockIdx.x % call.cluster;
    const u32 chunk = blockIdx.x / call.cluster % call.chunks;
    const u32 kv_head = blockIdx.x / call.cluster / call.chunks % call.kv_heads;
    const Item item = call.items[blockIdx.x / call.cluster / call.chunks / call.kv_heads * call.cluster + rank];
    const u32 first_head = kv_head * call.group + chunk * CHUNK_HEADS;
    const int heads = min(CHUNK_HEADS, (int)(call.group - chunk * CHUNK_HEADS));
    const int steps = ((int)item.tokens + STEP_TOKENS - 1) / STEP_TOKENS;

    // A warp takes whole tiles in turn where the item has plenty, so that what it reads is contiguous; otherwise steps.
    const int tiles = (steps + STEPS_PER_TILE - 1) / STEPS_PER_TILE;
    const bool whole_tiles = tiles % WARPS == 0 || tiles >= 8 * WARPS;
    const auto step_of = [&](int turn) {
        return whole_tiles ? (turn / STEPS_PER_TILE * WARPS + warp) * STEPS_PER_TILE + turn % STEPS_PER_TILE
                           : turn * WARPS + warp;
    };
    const u64* pages = call.pages + item.first_page;
    const u64 head_at = (u64)kv_head * HEAD_BYTES;
    const Ring ring = {shared_address(ring_memory) + warp * (STAGES * STAGE_BYTES), shared_address(barriers[warp]), lane};
    u64 first_pages[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        const int step = step_of(i);
        first_pages[i] = step < steps ? pages[step / STEPS_PER_TILE] : 0;
    }
    ring.start();
    // All above are tables, written before the step was launched; what follows may come from the kernel before.
    await_earlier_kernels();
    QueryLoads query_loads = load_query(call, item, kv_head, first_head, heads, warp, lane);
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        const int step = step_of(i);
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
    u32 use = 0;
    bool first = true;
    // The page of the step that is to be prefetched next is known one step ahead.
    int ahead = step_of(STAGES);
    u64 ahead_page = ahead < steps ? pages[ahead / STEPS_PER_TILE] : 0;
    int turn = 0;
    for (int step = step_of(0); step < steps; step = step_of(++turn)) {
        ring.wait(stage, use);
        const u32 at = ring.stage(stage);
        // Not unrolled: the loop is to stay in the instruction cache.
#pragma unroll 1
        for (int pass = 0; pass < STEP_PASSES; pass++) {
            const int tokens = (int)item.tokens - step * STEP_TOKENS - pass * PASS_TOKENS;
            if (tokens <= 0) break;

            float scores[PASS_SCORES];
            float base[KEY_VARIANTS][LANE_HEADS];
#pragma unroll
            for (int v = 0; v < KEY_VARIANTS; v++) {
#pragma unroll
                for (int h = 0; h < LANE_HEADS; h++) base[v][h] = start[v][h] - (KEY_TOKEN_RANGES ? 0.0f : reference[h]);
            }
            pass_scores(scores, at + pass * PASS_KEY_LOADS * LOAD_BYTES, lane, query, delta, base);
            float value_scale[VALUE_TOKEN_RANGES ? 2 * PASS_BLOCKS : 1];
            float value_min[VALUE_TOKEN_RANGES ? 2 * PASS_BLOCKS : 1];
            float largest_scale = 0.0f;
#pragma unroll
            for (int i = 0; i < 2 * PASS_BLOCKS; i++) {
                if (KEY_TOKEN_RANGES) {
                    const u32 range = load_shared_4(at + STAGE_KEY_RANGES_AT + 4 * (pass * PASS_TOKENS + 8 * i + g));
#pragma unroll
                    for (int h = 0; h < LANE_HEADS; h++) {
                        float& score = scores[i * LANE_HEADS + h];
                        score = half_value(range & 0xffffu) * score +
                                (half_value(range >> 16) * query_sum[h] - reference[h]);
                    }
                }
                if (VALUE_TOKEN_RANGES) {
                    const u32 range = load_shared_4(at + STAGE_VALUE_RANGES_AT + 4 * (pass * PASS_TOKENS + 8 * i + g));
                    value_scale[i] = half_value(range & 0xffffu);
                    value_min[i] = half_value(range >> 16);
                    largest_scale = fmaxf(largest_scale, value_scale[i]);
                }
            }
            if (tokens < PASS_TOKENS) {
#pragma unroll
                for (int i = 0; i < 2 * PASS_BLOCKS; i++) {
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
                for (int i = 1; i < 2 * PASS_BLOCKS; i++) largest[h] = fmaxf(largest[h], scores[i * LANE_HEADS + h]);
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
                    for (int i = 0; i < 2 * PASS_BLOCKS; i++) scores[i * LANE_HEADS + h] -= move;
                }
                first = false;
            }

            u32 weights[PASS_BLOCKS][2];
#pragma unroll
            for (int i = 0; i < 2 * PASS_BLOCKS; i++) {
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
            pass_values(sums, at + STAGE_VALUES_AT + pass * PASS_VALUE_LOADS * LOAD_BYTES, lane, weights);

        }
        ring.release();
        if (ahead < steps) ring.issue(stage, ahead_page + head_at, ahead);
        ring.commit();
        ahead = step_of(turn + 1 + STAGES);
        ahead_page = ahead < steps ? pages[ahead / STEPS_PER_TILE] : 0;
        if (++stage == STAGES) {
            stage = 0;
            use++;
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
        const bool idle = step_of(0) >= steps;
        if (g == 0) warp_states[warp][head] = {idle ? -__int_as_float(0x7f800000) : reference[h], total, total_minimum};
        float* row = joined + (warp * CHUNK_HEADS + head) * JOIN_ROW + g;
#pragma unroll
        for (int n = 0; n < VALUE_BLOCKS; n++) {
            row[16 * n] = sums[n][WIDE ? h : 0];
            row[16 * n + 8] = sums[n][WIDE ? 2 + h : 2];
        }
    }
    __syncthreads();

    ClusterShared& cluster_shared = *(ClusterShared*)(joined + WARPS * CHUNK_HEADS * JOIN_ROW);
    for (int e = threadIdx.x; e < heads * HEAD_DIM; e += WARPS * 32) {
        const ItemState state = join_warps(warp_states, joined, e / HEAD_DIM, e % HEAD_DIM, [&](float out) {
            if (VALUE_BITS == 16 || VALUE_TOKEN_RANGES) return out;
            const u64 slot = (u64)item.range_slot * call.kv_heads + kv_head;
            const float2 range = call.value_ranges[slot * HEAD_DIM + e % HEAD_DIM];
            return range.x * out + range.y;
        });
        if (call.cluster > 1 || ROTATED) {
            cluster_shared.outputs[e] = state.out;
            if (e % HEAD_DIM == 0) cluster_shared.lse[e / HEAD_DIM] = state.lse;
        } else {
            write_state(call, item, first_head, e, state);
        }
    }
    if (ROTATED) {
        __syncthreads();
        for (int head = warp; head < heads; head += WARPS) {
            rotate_output(cluster_shared.outputs + head * HEAD_DIM, lane);
        }
        __syncthreads();
        for (int e = threadIdx.x; call.cluster == 1 && e < heads * HEAD_DIM; e += WARPS * 32) {
            write_state(call, item, first_head, e, {cluster_shared.outputs[e], cluster_shared.lse[e / HEAD_DIM]});
        }
    }
    if (call.cluster > 1) {
        cluster_barrier();
        for (int e = rank * WARPS * 32 + threadIdx.x; e < heads * HEAD_DIM; e += call.cluster * WARPS * 32) {
            write_state(call, item, first_head, e, merge_cluster(cluster_shared, call.cluster, e));
        }
        // No block leaves while others read its memory, and the first speaks for all.
        cluster_barrier();
        if (rank != 0) return;
    }
    if (item.states == 1) return;
    u32* arrivals = call.arrivals + ((u64)item.sequence * call.kv_heads + kv_head) * call.chunks + chunk;
    if (last_to_arrive(arrivals, item.states)) merge_states(call, item, first_head, heads);
}
