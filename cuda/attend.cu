// attend: one decode step of one segment format, from queries to merged outputs.
//
//   score_t = q · k_t scale log2(e),   out = Σ_t 2^(score_t) v_t / Σ_t 2^(score_t)
//
// A block owns one item (consecutive tokens of a span, and one or a few queries) for one KV head and a chunk of query
// heads. Its warps take the item's steps of STEP_TOKENS tokens in turn. Warps never wait for each other in the loop:
// each has its own ring of STAGES stages in shared memory, filled by asynchronous copies (common/ring.cuh), and its own
// softmax. Drafts have more heads than a warp takes, each query with all of its own: ROW_WARPS warps then share a ring,
// so that tokens are read once for all of them. Packed keys are multiplied as bytes (m16n8k32) with a query of 16 bits
// in two bytes, f16 keys as halves with a query of two halves. Packed values are multiplied as bytes with weights of 16
// bits in two bytes, f16 values as halves (m16n8k16) with weights in f16. Codes go from memory into the MMA without a
// conversion: see common/scores.cuh and common/values.cuh, and common/weights.cuh for the part between them. With LONE_HEAD
// keys of 1 bit stay bits, and runs of tokens take the columns that other heads would (common/key_bits.cuh). After the
// loop the sums of the warps are merged in shared memory. The block writes the output if its query has no other items.
// Otherwise states are merged (merge_states.cu).
//
// Calibrated segments are launched twice. The first launch only finds the extremes of their scores
// (common/calibration.cuh).
//
// With programmatic serialisation, blocks read their tables while the previous kernel still runs. Launches of one step
// overlap: the first waits for all work before the step, and only then admits the next, which therefore has nothing to
// wait for. Every later launch carries one extra block that exits only after the previous launch has finished, so work
// queued after the step waits for all of it.
//
// With STORES the launch also stores the tokens of the step, which decodes one for each query (common/storing.cuh). It
// overlaps with the kernels before it: pages that the step does not write were complete before it, since its tables were
// uploaded after them, so blocks load them at once: short items one stage of each team, others whole rings. Then blocks
// wait, for the queries and the rows to store. The block that has the page of a token stores it before it loads that
// page.
//
// If one launch attends right after its layer was stored, it overlaps with the storing kernels. They admit it once all
// work before them is done. A warp waits for them before it loads a page that they write (FRESH_PAGE), and so does
// every block before it writes.
//
// Memory: K and V of the item are read once, in stretches of at least 2 KiB; queries, ranges and page addresses before
// them. Cost per 32 tokens and warp: HEAD_DIM/16 integer MMAs each for packed keys and values (twice as many with WIDE,
// and for keys with levels and the signs of a sketch), one or two instructions for each register of unpacked codes, and
// 4 · LANE_HEADS exponentials.
//
// In bounds: items, pages, slots and queries were checked on the host. A step begins inside its item, and loads never
// leave the tile; tokens beyond the item get the score −∞, and the data stored there are finite.

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rotation.cuh"
#include "common/attend_call.cuh"
#include "common/calibration.cuh"
#include "common/logits.cuh"
#include "prepare_query.cu"
#include "common/three_bits.cuh"
#include "common/scores.cuh"
#include "common/scores_grouped.cuh"
#include "common/values.cuh"
#include "common/key_bits.cuh"
#include "common/values_grouped.cuh"
#include "common/weights.cuh"
#include "common/ring.cuh"
#include "merge_states.cu"

// Whether blocks store the tokens of the step, each of which one of them attends to.
#ifndef STORES
#define STORES 0
#endif
#if STORES
#include "common/storing.cuh"
// A short item has at most this many turns of its warps. If blocks filled all stages at once, they would delay blocks of
// the kernel before, which still merge their states. Merging is a good part of a short item's time.
constexpr int SHORT_TURNS = 6;
#endif

// A row of the merged sums, padded so that the heads of a warp's lanes lie in different banks. The channels are
// followed by the sums of minimums of groups of channels.
constexpr int JOIN_ROW = HEAD_DIM + 8 + (VALUE_CHANNEL_GROUPS ? (VALUE_ROW_GROUPS + 31) / 32 * 32 : 0);

// Warps, or teams of them, that take different tokens.
constexpr int TEAMS = WARPS / ROW_WARPS;
static_assert(TEAMS * ROW_WARPS == WARPS, "teams are whole");

// The data that the warps of a block exchange after the loop.
struct JoinShared {
    float reference[TEAMS][BLOCK_HEADS];
    // Relative to the largest reference of the block.
    float weight[TEAMS][BLOCK_HEADS];
    float minimum[TEAMS][BLOCK_HEADS];
    // (scale, minimum) of the channels, if values have a range per channel.
    float2 ranges[HEAD_DIM];
};

// The largest reference of a head in the block.
__device__ __forceinline__ float block_reference(const JoinShared& shared, int head) {
    float top = shared.reference[0][head];
#pragma unroll
    for (int t = 1; t < TEAMS; t++) top = fmaxf(top, shared.reference[t][head]);
    return top;
}

// The same by all lanes of a warp, for the head that a lane has in common with seven others, of which it is the g-th.
// Each reads a few references: those of many teams would keep shared memory busy.
__device__ __forceinline__ float block_reference_of_lanes(const JoinShared& shared, int head, int g) {
    float top = shared.reference[g % TEAMS][head];
#pragma unroll
    for (int t = g + 8; t < TEAMS; t += 8) top = fmaxf(top, shared.reference[t][head]);
    return max_of_tokens(top);
}

__device__ __forceinline__ float block_sum(const float (&of_teams)[TEAMS][BLOCK_HEADS], int head) {
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < TEAMS; t++) sum += of_teams[t][head];
    return sum;
}

// The same by all lanes of a warp, for one head.
__device__ __forceinline__ float block_sum_of_lanes(const float (&of_teams)[TEAMS][BLOCK_HEADS], int head) {
    static_assert(TEAMS <= 32, "a lane reads what one team has");
    const int lane = threadIdx.x & 31;
    return warp_sum(lane < TEAMS ? of_teams[lane][head] : 0.0f);
}

__device__ __forceinline__ float block_lse(const JoinShared& shared, int head) {
    return block_reference(shared, head) + log2_approx(block_sum(shared.weight, head));
}

// Output e of the block from the sums of its warps. The lanes of a warp have neighbouring outputs of one head.
__device__ __forceinline__ float block_output(const JoinShared& shared, const float* joined, int e) {
    const int head = e / HEAD_DIM;
    const int channel = e % HEAD_DIM;
    const auto sum_of = [&](int place) {
        float sum = 0.0f;
#pragma unroll
        for (int t = 0; t < TEAMS; t++) sum += joined[(t * BLOCK_HEADS + head) * JOIN_ROW + place];
        return sum;
    };
    float minimum = 0.0f;
    if (VALUE_TOKEN_RANGES) minimum = block_sum_of_lanes(shared.minimum, head);
    if (VALUE_CHANNEL_GROUPS) minimum = sum_of(HEAD_DIM + channel / (VALUE_GROUP_CHANNELS + !VALUE_GROUP_CHANNELS));
    // If tokens are grouped, the sums are of values, not of codes.
    const float unit = VALUE_TOKEN_GROUPS ? 1.0f : value_unit(channel / 16);
    float out = (sum_of(channel) * unit + minimum) / block_sum_of_lanes(shared.weight, head);
    if (VALUE_LEVEL_UNIT != 0) out *= __uint_as_float(VALUE_LEVEL_UNIT);
    if (!VALUE_SPAN_RANGES) return out;
    return shared.ranges[channel].x * out + shared.ranges[channel].y;
}

// The address of a page, once the data that the step stores there are in memory.
__device__ __forceinline__ u64 arrived_page(const AttendCall& call, u64 page) {
    if ((page & FRESH_PAGE) == 0) return page;
    if (call.early != 0u) await_earlier_kernels();
    return page ^ FRESH_PAGE;
}

// Outputs of rotated values are rotated back while whole rows lie in shared memory.
constexpr bool ROTATED = ROTATION_ORDER<true> != 0;
__device__ __forceinline__ float* rotated_output(float* joined, int e) {
    return joined + e / HEAD_DIM * JOIN_ROW + e % HEAD_DIM;
}

#if STORES
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    attend(const __grid_constant__ StoringCall both) {
    const AttendCall& call = both.attend;
    __shared__ StoredRows stored_rows;
#else
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) attend(const AttendCall call) {
#endif
    extern __shared__ __align__(LINE_BYTES) u8 ring_memory[];
    __shared__ QueryShared query_shared;
    __shared__ JoinShared join;
    __shared__ ClusterShared cluster_shared;
    __shared__ u64 barriers[TEAMS][STAGES];
    __shared__ u32 readers[TEAMS][STAGES];

    if (call.beside != 0u || call.early != 0u) admit_later_kernels();
    if (call.beside != 0u && blockIdx.x == call.beside) {
        await_earlier_kernels();
        return;
    }
    const int lane = threadIdx.x & 31;
    const int warp = threadIdx.x >> 5;
    const int team = warp / ROW_WARPS;
    const bool leads = warp % ROW_WARPS == 0;
    const int g = lane >> 2;
    const int c = lane & 3;
    // The first of the lane's heads in the block.
    const int lane_head = LONE_HEAD ? 0 : warp % ROW_WARPS * WARP_HEADS + LANE_HEADS * c;
    const u32 rank = blockIdx.x % call.cluster;
    const u32 chunk = blockIdx.x / call.cluster % call.chunks;
    const u32 kv_head = blockIdx.x / call.cluster / call.chunks % call.kv_heads;
    const Item item = call.items[blockIdx.x / call.cluster / call.chunks / call.kv_heads * call.cluster + rank];
    // A captured launch has room for more items than a step may have.
    if (item.tokens == 0u) return;
    const u32 first_head = kv_head * call.group + chunk * BLOCK_HEADS;
    const int heads = QUERIES == 1 ? min(BLOCK_HEADS, (int)(call.group - chunk * BLOCK_HEADS))
                                   : (int)(item.queries * call.group);
    const int steps = ((int)item.tokens + STEP_TOKENS - 1) / STEP_TOKENS;

    // A team takes whole tiles in turn if the item has plenty, so that its reads are contiguous. Otherwise it takes
    // steps.
    const int tiles = (steps + STEPS_PER_TILE - 1) / STEPS_PER_TILE;
    const bool whole_tiles = tiles % TEAMS == 0 || tiles >= 8 * TEAMS;
    const auto step_of = [&](int turn) {
        return whole_tiles ? (turn / STEPS_PER_TILE * TEAMS + team) * STEPS_PER_TILE + turn % STEPS_PER_TILE
                           : turn * TEAMS + team;
    };
    const u64* pages = call.pages + item.first_page;
    const u64 head_at = (u64)kv_head * HEAD_BYTES;
    const Ring ring = {shared_address(ring_memory) + team * (STAGES * STAGE_BYTES), shared_address(barriers[team]),
                       readers[team], lane};
    u64 first_pages[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        const int step = step_of(i);
        first_pages[i] = step < steps ? pages[step / STEPS_PER_TILE] : 0;
    }
    if (leads) ring.start();
    if (call.cluster > 1) cluster_start();
#if STORES
    const u64 newest = pages[tiles - 1];
    const uint4 entry = entry_at(both.writes, item.row);
    const u64 stored_page = both.writes.shards[entry.w] + (u64)entry.y * call.kv_heads * HEAD_BYTES;
    const bool stores = newest == (stored_page | FRESH_PAGE);
    const auto arrived = [&](u64 page) {
        if ((page & FRESH_PAGE) == 0) return page;
        if (stores) barrier_wait(shared_address(&stored_rows.stored), 0u);
        return page ^ FRESH_PAGE;
    };
#else
    const auto arrived = [&](u64 page) { return arrived_page(call, page); };
#endif
    const auto issue_first = [&](int i) {
        const int step = step_of(i);
        if (leads && step < steps) ring.issue(i, arrived(first_pages[i]) + head_at, step);
        ring.commit();
    };
    // All reads above are of tables that were written before the step was launched. The data below may come from the
    // previous kernel.
#if STORES
    const auto is_fresh = [&](int i) { return (first_pages[i] & FRESH_PAGE) != 0; };
    const bool is_short = steps <= SHORT_TURNS * TEAMS;
    start_storing(stored_rows);
    // The first stage of every team is loaded before any other.
    if (!is_fresh(0)) issue_first(0);
    __syncthreads();
#pragma unroll
    for (int i = 1; i < STAGES; i++) {
        if (!is_fresh(i) && !is_short) issue_first(i);
    }
    await_earlier_kernels();
#else
    if (call.beside == 0u && call.early == 0u) {
        await_earlier_kernels();
        admit_later_kernels();
    }
    // A span is stored in one step, and its ranges with it.
    if constexpr (KEY_SPAN_RANGES || VALUE_SPAN_RANGES) {
        if (call.early != 0u) arrived_page(call, pages[0]);
    }
#endif
    QueryLoads query_loads = load_query(call, item, kv_head, first_head, heads, warp, lane);
    constexpr int threads = WARPS * 32;
    constexpr int thread_ranges = VALUE_SPAN_RANGES ? (HEAD_DIM + threads - 1) / threads : 0;
    float2 ranges[thread_ranges + 1];
    const float2* value_ranges = call.value_ranges + ((u64)item.range_slot * call.kv_heads + kv_head) * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < thread_ranges; i++) {
        const int channel = i * threads + threadIdx.x;
        if (channel < HEAD_DIM) ranges[i] = value_ranges[channel];
    }
#if !STORES
    // The first stage of every team is loaded before any other stage: work begins once it arrives.
    issue_first(0);
#endif
    prepare_query(query_shared, query_loads, call.score_scale, warp, lane);
#pragma unroll
    for (int i = 0; i < thread_ranges; i++) {
        const int channel = i * threads + threadIdx.x;
        if (channel < HEAD_DIM) join.ranges[channel] = ranges[i];
    }
#if STORES
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&stored_rows.prepared));
    if (stores && warp >= WARPS - 2) {
        store_token(both.writes, entry, kv_head, stored_rows, warp - (WARPS - 2), lane);
    }
    barrier_wait(shared_address(&stored_rows.prepared), 0u);
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        if (is_fresh(i) || (i > 0 && is_short)) issue_first(i);
    }
#else
    __syncthreads();
#pragma unroll
    for (int i = 1; i < STAGES; i++) issue_first(i);
#endif

    LaneQuery queries[KEY_QUERIES];
    LoneQuery lone_query;
    if constexpr (LONE_HEAD) lone_query.load(query_shared.queries[0][0], lane);
#pragma unroll
    for (int i = 0; i < KEY_QUERIES; i++) queries[i].load(query_shared.queries[warp % ROW_WARPS][i], lane);
    const SumConstants constants = load_constants(query_shared);
    WarpSums sums;
    sums.clear();
    float smallest[LANE_HEADS];
    float largest[LANE_HEADS];
    ScoreMap maps[LANE_HEADS];
    SeenTokens seen[LANE_HEADS];
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
        smallest[h] = __int_as_float(0x7f800000);
        largest[h] = -smallest[h];
        if (MAPS_SCORES) maps[h] = score_map(call, item.extremes, first_head + min(lane_head + h, heads - 1));
        if (MOVING) seen[h] = seen_tokens(item, block_head(call, first_head, lane_head + h).query);
    }

    int stage = 0;
    u32 use = 0;
    // The page of the next step to prefetch is determined one step ahead.
    int ahead = step_of(STAGES);
    u64 ahead_page = ahead < steps ? pages[ahead / STEPS_PER_TILE] : 0;
    int turn = 0;
    for (int step = step_of(0); step < steps; step = step_of(++turn)) {
        ring.wait(stage, use);
        const u32 at = ring.stage(stage);
        // Not unrolled, so that the loop stays in the instruction cache.
#pragma unroll 1
        for (int pass = 0; pass < STEP_PASSES; pass++) {
            const int tokens = (int)item.tokens - step * STEP_TOKENS - pass * PASS_TOKENS;
            if (tokens <= 0) break;

            float scores[PASS_SCORES];
            const PassLoads keys = {at + pass * PASS_KEY_LOADS * LOAD_BYTES,
                                    at + STAGE_KEY_TOPS_AT + pass * PASS_KEY_TOPS * LOAD_BYTES};
            const u32 key_ranges = at + STAGE_KEY_RANGES_AT;
            if constexpr (LONE_HEAD) {
                pass_scores_of_bits(scores, keys, lane, lone_query);
            } else if constexpr (KEY_TOKEN_RANGES) {
                pass_scores_of_tokens(scores, keys, key_ranges + 4 * pass * PASS_TOKENS, lane, queries, constants);
            } else if constexpr (!KEY_GROUPED) {
                pass_scores<false>(scores, keys, lane, queries[0], constants);
            } else if constexpr (KEY_GROUP_CHANNELS == 1) {
                constexpr int tokens = KEY_GROUP_TOKENS + !KEY_GROUP_TOKENS;
                const u32 ranges = key_ranges + pass * PASS_TOKENS / tokens * (4 * HEAD_DIM);
                pass_scores_of_token_groups(scores, keys, ranges, lane, queries[0]);
            } else {
                const u32 ranges = key_ranges + 4 * pass * PASS_TOKENS;
                pass_scores_of_channel_groups(scores, keys, ranges, lane, queries[0],
                                              shared_address(query_shared.group_sums[warp % ROW_WARPS]));
            }
            if constexpr (FINDS_EXTREMES) {
#pragma unroll
                for (int i = 0; i < PASS_SCORES; i++) {
                    if (8 * (i / LANE_HEADS) + g >= tokens) continue;
                    smallest[i % LANE_HEADS] = fminf(smallest[i % LANE_HEADS], scores[i]);
                    largest[i % LANE_HEADS] = fmaxf(largest[i % LANE_HEADS], scores[i]);
                }
                continue;
            }
            if constexpr (MAPS_SCORES) {
#pragma unroll
                for (int i = 0; i < PASS_SCORES; i++) scores[i] = maps[i % LANE_HEADS](scores[i]);
            }
            if constexpr (CAPPED) {
#pragma unroll
                for (int i = 0; i < PASS_SCORES; i++) scores[i] = capped(call, scores[i]);
            }
            if constexpr (MOVING) {
                const int first = step * STEP_TOKENS + pass * PASS_TOKENS;
                if (MASKED != 0 || first + PASS_TOKENS > item.seen) hide_unseen(scores, seen, first + g);
            } else if constexpr (MASKED != 0) {
                const int first = step * STEP_TOKENS + pass * PASS_TOKENS;
#pragma unroll
                for (int i = 0; i < PASS_SCORES; i++) {
                    if (is_hidden(item, first + score_token(i, lane))) scores[i] = HIDDEN;
                }
            }
            if (tokens < PASS_TOKENS) {
#pragma unroll
                for (int i = 0; i < PASS_SCORES; i++) {
                    if (score_token(i, lane) >= tokens) scores[i] = -__int_as_float(0x7f800000);
                }
            }
            const PassLoads values = {at + STAGE_VALUES_AT + pass * PASS_VALUE_LOADS * LOAD_BYTES,
                                      at + STAGE_VALUE_TOPS_AT + pass * PASS_VALUE_TOPS * LOAD_BYTES};
            if constexpr (VALUE_BITS == 16) {
                attend_halves(sums, scores, values.at, lane);
            } else if constexpr (VALUE_GROUPED) {
                constexpr int tokens = VALUE_GROUP_TOKENS + !VALUE_GROUP_TOKENS;
                const int first = pass * PASS_TOKENS;
                const int ranges = VALUE_TOKEN_GROUPS ? first / tokens * HEAD_DIM : first;
                attend_pairs(sums, scores, values, at + STAGE_VALUE_RANGES_AT + 4 * ranges, lane);
            } else {
                attend_bytes(sums, scores, values, at + STAGE_VALUE_RANGES_AT + 4 * pass * PASS_TOKENS, lane,
                             constants);
            }
        }
        if (ring.release(stage) && ahead < steps) ring.issue(stage, arrived(ahead_page) + head_at, ahead);
        ring.commit();
        ahead = step_of(turn + 1 + STAGES);
        ahead_page = ahead < steps ? pages[ahead / STEPS_PER_TILE] : 0;
        if (++stage == STAGES) {
            stage = 0;
            use++;
        }
    }

    // Work after the step also waits for what the step stores.
    if (!STORES && call.early != 0u) await_earlier_kernels();
    if constexpr (FINDS_EXTREMES) {
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) {
            const float low = -max_of_tokens(-smallest[h]);
            const float high = max_of_tokens(largest[h]);
            // A warp without tokens contributes nothing.
            if (g == 0 && lane_head + h < heads && low <= high) {
                enter_extremes(call, item.extremes, first_head + lane_head + h, low, high);
            }
        }
        return;
    }
    if (g == 0) {
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) join.reference[team][lane_head + h] = sums.reference[h];
    }
    // The rings are free once all warps arrive here.
    __syncthreads();
    float* joined = (float*)ring_memory;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
        const int head = lane_head + h;
        // Without this warp's tokens the factor is 0, and so are the sums.
        const float factor = exp2_approx(sums.reference[h] - block_reference_of_lanes(join, head, g));
        const float weight = (LONE_HEAD ? warp_sum(sums.weight[h]) : sum_of_tokens(sums.weight[h])) * factor;
        const float minimum = VALUE_TOKEN_RANGES ? sum_of_tokens(sums.minimum[h]) * factor : 0.0f;
        if (g == 0) {
            join.weight[team][head] = weight;
            join.minimum[team][head] = minimum;
        }
        float* row = joined + (team * BLOCK_HEADS + head) * JOIN_ROW + g;
#pragma unroll
        for (int n = 0; n < VALUE_BLOCKS; n++) {
            if constexpr (LONE_HEAD) {
                sums.values[n][0] = sum_of_columns(sums.values[n][0]);
                sums.values[n][2] = sum_of_columns(sums.values[n][2]);
            }
            row[16 * n] = sums.values[n][WIDE ? h : 0] * factor;
            row[16 * n + 8] = sums.values[n][WIDE ? 2 + h : 2] * factor;
        }
        if (VALUE_CHANNEL_GROUPS) {
#pragma unroll
            for (int q = 0; q < VALUE_MINIMUM_BLOCKS; q++) {
                const int group = 16 * q + g;
                if (group < VALUE_ROW_GROUPS) row[HEAD_DIM + 16 * q] = sums.minimums[q][WIDE ? h : 0] * factor;
                if (group + 8 < VALUE_ROW_GROUPS) {
                    row[HEAD_DIM + 16 * q + 8] = sums.minimums[q][WIDE ? 2 + h : 2] * factor;
                }
            }
        }
    }
    __syncthreads();

    const int outputs = heads * HEAD_DIM;
    if constexpr (ROTATED) {
        // Where the first team's sums were, each of which one thread has read.
        for (int e = threadIdx.x; e < outputs; e += threads) *rotated_output(joined, e) = block_output(join, joined, e);
        __syncthreads();
        for (int head = warp; head < heads; head += WARPS) rotate_output(joined + head * JOIN_ROW, lane);
        __syncthreads();
    }
    const auto output = [&](int e) { return ROTATED ? *rotated_output(joined, e) : block_output(join, joined, e); };
    if (call.cluster == 1) {
        for (int e = threadIdx.x; e < outputs; e += threads) {
            const bool wanted = SINKS || ((item.states > 1 || call.lse != nullptr) && e % HEAD_DIM == 0);
            const float lse = wanted ? block_lse(join, e / HEAD_DIM) : 0.0f;
            write_state(call, item, first_head, e, {output(e), lse});
        }
    } else {
        cluster_started();
        const u32 share = cluster_share(call.cluster, outputs);
        for (int e = threadIdx.x; e < outputs; e += threads) {
            const u32 place = rank * share + cluster_place(call.cluster, e);
            store_cluster(shared_address(cluster_shared.outputs + place), cluster_owner(call.cluster, e), output(e));
        }
        for (int i = threadIdx.x; i < (int)call.cluster * heads; i += threads) {
            store_cluster(shared_address(&cluster_shared.lse[rank][i % heads]), i / heads, block_lse(join, i % heads));
        }
        cluster_barrier();
        for (int i = threadIdx.x; i < (int)share; i += threads) {
            const int e = (i / CLUSTER_RUN * call.cluster + rank) * CLUSTER_RUN + i % CLUSTER_RUN;
            if (e < outputs) {
                write_state(call, item, first_head, e, merge_cluster(cluster_shared, call.cluster, outputs, e));
            }
        }
    }
    if (item.states == 1) return;
    const int query_heads = QUERIES == 1 ? heads : (int)call.group;
    const auto is_last = [&](u32 query) {
        u32* arrivals = call.arrivals + ((u64)(item.row + query) * call.kv_heads + kv_head) * call.chunks + chunk;
        return last_to_arrive(arrivals, item.states * call.cluster);
    };
    // Queries that move share all their items, and so does their counter.
    bool last = is_last(0);
    for (u32 query = 0; query < (QUERIES == 1 ? 1 : item.queries); query++) {
        if (!MOVING && query > 0) last = is_last(query);
        if (last) merge_states(call, item, query, first_head, query_heads);
    }
}
