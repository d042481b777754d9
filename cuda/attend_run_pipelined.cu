// attend_run_pipelined: attend_run for many rows on compute capability 9.0, over f16 pages, or over the halves that
// unpack_tiles.cu made of packed ones.
//
//   score_rt = q_r · k_t scale log2(e)  for from_r <= t < seen_r,   out_r = Σ_t 2^(score_rt) v_t / Σ_t 2^(score_rt)
//
// Blocks stay on their multiprocessor and take one work after the other: ROWS rows of an item, for one KV head. One warp
// lets the copy engine fetch keys and values, which lie in the page as the tensor cores read them. Three warps next to it
// copy the queries of the next work. The other warpgroups have 64 rows each. They take the tokens in passes, the newest
// first, since only those are hidden from some rows. While the products of a pass with its keys become weights, the
// products of the pass before with its values run. Warpgroups start their products in turn, so that some multiply while
// others compute weights.
//
//   stages     [STAGES] passes of keys, [STAGES] of values, then [QUERY_STAGES] the queries of every warpgroup
//   barriers   full: one arrival and its bytes; of queries: one arrival of every thread that copies them
//              empty: one arrival of every warpgroup
//
// Scales of a span, and units of levels, are part of the query for keys and of the output for values.
//
// Calibrated scores take two launches (common/calibration.cuh). The first multiplies with the keys alone.
//
// Works are numbered head by head, so that the pages of few heads are in the L2 cache, and the longest come first. A
// block takes the next number from a counter in memory. The last block sets it to zero again. Which block takes a work
// does not change its result.
//
// States are those of attend_run.cu, and so is merging (merge_run.cu).
//
// Memory: K and V of an item once for ROWS rows, mostly from the L2 cache. Cost per pass and warpgroup: 2 HEAD_DIM ·
// 64 · RUN_TOKENS multiply-adds, and RUN_TOKENS / 2 exponentials a thread.
//
// In bounds: items, pages and queries were checked on the host. Rows beyond those of the item read its last query and
// write nothing. Tokens beyond the item are masked, and the data stored there are finite.

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/attend_call.cuh"
#include "common/logits.cuh"
#include "common/warpgroup.cuh"
#include "common/run_rows.cuh"
#include "common/run_softmax.cuh"
#include "common/run_works.cuh"
#include "merge_states.cu"

// Registers of the threads that multiply, and of those that copy.
constexpr int GROUP_REGISTERS = GROUPS == 2 ? 232 : 160;
constexpr int COPYING_REGISTERS = GROUPS == 2 ? 40 : 32;

// Numbers of barriers: of the warps of a warpgroup, and those where warpgroups take turns.
constexpr int FIRST_GROUP_BARRIER = 1;
constexpr int FIRST_TURN_BARRIER = FIRST_GROUP_BARRIER + GROUPS;
// The warpgroup whose turn it is, and the one before it, which says so.
constexpr int TURN_THREADS = 256;

// The products of a lane: [8 tokens][row, tokens 2 c and 2 c + 1]. Those of 16 tokens, as halves, are an A fragment.
using PassProducts = float[2 * PASS_STEPS][4];
using PassWeights = u32[PASS_STEPS][4];

// Starts the products of queries with the keys of a pass, and of weights with values.
__device__ __forceinline__ void multiply_keys(PassProducts& products, u32 queries, u32 keys) {
    const Matrices rows(queries, 256), tokens(keys, HEAD_DIM * 16);
    warpgroup_begin();
#pragma unroll
    for (int f = 0; f < CHANNEL_STEPS; f++) {
        warpgroup_multiply(products, rows.after(f * (GROUP_ROWS * 2)), tokens.after(f * 16), f > 0);
    }
    warpgroup_commit();
}

__device__ __forceinline__ void multiply_values(RowValues& sums, const PassWeights& weights, u32 values) {
    const Matrices tokens(values, 256);
    warpgroup_begin();
#pragma unroll
    for (int m = 0; m < PASS_STEPS; m++) warpgroup_multiply(sums, weights[m], tokens.after(m * (HEAD_DIM * 2)));
    warpgroup_commit();
}

// The product of a hidden token.
__device__ __forceinline__ float no_product() { return -__int_as_float(0x7f800000); }

// The output of a row that sees tokens, but has no weights. Queries in f16 are multiplied as they are. All scores of an
// infinite one may be minus infinity.
__device__ __forceinline__ float no_number() { return __int_as_float(0x7fc00000); }

// A lane's rows g and g + 8, and what it knows of their softmax. Without a cap scores lack the base of their row, which
// is in their log-sum-exp at the end.
struct RunSoftmax {
    float reference[2];
    // The lane's part.
    float weight[2];
    RowConstants of[2];
    int start[2];
    int limit[2];
    // The factors of earlier sums, if references moved in the last pass.
    float moved[2];

    // From products to weights of the tokens from `before` on. True if references moved.
    template <bool SOME_HIDDEN>
    __device__ __forceinline__ bool weigh(const AttendCall& call, PassProducts& products, PassWeights& weights, int before,
                                          int lane) {
        bool far = false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            to_logits<SOME_HIDDEN>(call, products, h, before + 2 * (lane & 3));
            far = far || largest_of_row(products, h) * scale(h) - reference[h] > MOST_WEIGHT;
        }
        const bool moves = __any_sync(ALL_LANES, far);
        if (moves) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float top = max_of_quad(largest_of_row(products, h)) * scale(h);
                const float next = fmaxf(reference[h], ceilf(top - START_WEIGHT));
                moved[h] = exp2_approx(reference[h] - next);
                weight[h] *= moved[h];
                reference[h] = next;
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sums[2] = {0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < 2 * PASS_STEPS; j++) {
                const float low = exp2_approx(__fmaf_rn(products[j][2 * h], scale(h), -reference[h]));
                const float high = exp2_approx(__fmaf_rn(products[j][2 * h + 1], scale(h), -reference[h]));
                weights[j / 2][j % 2 * 2 + h] = half_pair(low, high);
                sums[j % 2] += low + high;
            }
            weight[h] += sums[0] + sums[1];
        }
        return moves;
    }

    // Capped products are scores already.
    __device__ __forceinline__ float scale(int h) const { return CAPPED ? 1.0f : of[h].delta; }

    // Caps the products of row `h`, and hides tokens; `first` is the lane's first token.
    template <bool SOME_HIDDEN>
    __device__ __forceinline__ void to_logits(const AttendCall& call, PassProducts& products, int h, int first) const {
        const int from = start[h] - first;
        const int end = limit[h] - first;
#pragma unroll
        for (int j = 0; j < 4 * PASS_STEPS; j++) {
            float& product = products[j / 2][2 * h + j % 2];
            if constexpr (CAPPED) {
                product = capped(call, KEY_SPAN_RANGES ? __fmaf_rn(product, of[h].delta, of[h].base) : product * of[h].delta);
            }
            const int token = 8 * (j / 2) + j % 2;
            if (SOME_HIDDEN) {
                product = (MASKED == 0 || from <= token) && token < end ? product : no_product();
            }
        }
    }

    // Maps the scores of row `h` by the extremes over its span, unless it sees nothing of that.
    __device__ __forceinline__ void calibrate(const AttendCall& call, u32 place, u32 head, int h) {
        if (limit[h] <= start[h]) return;
        const ScoreMap map = score_map(call, place, head);
        of[h].base = map(of[h].base);
        of[h].delta = row_delta(of[h].delta, map.slope);
    }
};

// The smallest and the largest product of a lane's rows.
struct RunExtremes {
    float smallest[2] = {-no_product(), -no_product()};
    float largest[2] = {no_product(), no_product()};

    // `limits` count the tokens from the lane's first one on.
    __device__ __forceinline__ void take(const PassProducts& products, const int (&limits)[2]) {
#pragma unroll
        for (int i = 0; i < 8 * PASS_STEPS; i++) {
            const int h = i % 4 / 2;
            if (8 * (i / 4) + i % 2 >= limits[h]) continue;
            smallest[h] = fminf(smallest[h], products[i / 4][i % 4]);
            largest[h] = fmaxf(largest[h], products[i / 4][i % 4]);
        }
    }

    // Those of the four lanes that have row `h`.
    __device__ __forceinline__ float2 of_row(int h) const { return {-max_of_quad(-smallest[h]), max_of_quad(largest[h])}; }
};

// The four warps that have the same 64 rows.
struct WarpGroup {
    int number;
    // Of the block.
    int warp;
    int lane;
    // Of one of its threads.
    bool leads;
    // In shared memory.
    u32 room;
    // In shared memory: the rows of the block.
    const PlacedRow* places;
    // Queries of the first and the last row of the warpgroup.
    u32 first_query;
    u32 last_query;

    __device__ __forceinline__ WarpGroup(u32 group, const PlacedRow* places, u32 room, int warp, int lane)
        : number(warp / 4),
          warp(warp),
          lane(lane),
          leads(threadIdx.x % 128 == 0),
          room(room),
          places(places),
          first_query(warp / 4 * GROUP_ROWS / group),
          last_query((warp / 4 * GROUP_ROWS + GROUP_ROWS - 1) / group) {}

    // The lane's rows when queries are loaded, and those of its products.
    __device__ __forceinline__ PlacedRow loaded(int h) const { return places[warp * WARP_ROWS + lane % 8 + 8 * h]; }
    __device__ __forceinline__ PlacedRow placed(int h) const { return places[warp * WARP_ROWS + lane / 4 + 8 * h]; }

    __device__ __forceinline__ void sync() const { group_sync(FIRST_GROUP_BARRIER + number, 128); }

    // Between these, the warpgroup starts its products.
    __device__ __forceinline__ void await_turn() const { group_sync(FIRST_TURN_BARRIER + number, TURN_THREADS); }
    __device__ __forceinline__ void end_turn() const {
        group_arrive(FIRST_TURN_BARRIER + (number + 1) % GROUPS, TURN_THREADS);
    }

    // Its queries in shared memory.
    __device__ __forceinline__ u32 queries(u32 round) const {
        return room + QUERIES_AT + round % QUERY_STAGES * QUERY_STAGE_BYTES + number * GROUP_QUERY_BYTES;
    }

    // A work from queries to states or outputs. `count` counts the passes of the block.
    __device__ __forceinline__ void attend(const AttendCall& call, const Pipeline& pipeline, const Work& work, u32 round,
                                           const RowConstants* constants, const RowSigns& signs, u32& count) const {
        const u32 queries = this->queries(round);
        RunSoftmax rows;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            rows.reference[h] = NO_SCORE;
            rows.weight[h] = 0.0f;
            rows.of[h] = constants[warp * WARP_ROWS + 8 * h + lane / 4];
            rows.limit[h] = work.limit(placed(h).query());
            rows.start[h] = work.start(placed(h).query());
            if (MAPS_SCORES) rows.calibrate(call, extremes_place(work, h), query_head(call, work, h), h);
        }
        const int least = work.limit(first_query);
        const int last_start = work.start(last_query);
        PassProducts products;
        PassWeights weights;
        RowValues sums;
#pragma unroll
        for (int i = 0; i < 8 * CHANNEL_STEPS; i++) sums[i / 4][i % 4] = 0.0f;
        const auto weigh = [&](int pass, PassWeights& weights) {
            const int before = pass * RUN_TOKENS;
            const bool whole = before + RUN_TOKENS <= least && (MASKED == 0 || before >= last_start);
            return whole ? rows.weigh<false>(call, products, weights, before, lane)
                         : rows.weigh<true>(call, products, weights, before, lane);
        };
        // The same in all lanes, so that addresses are counted in registers of the warp.
        u32 stage = __shfl_sync(ALL_LANES, count % STAGES, 0);
        barrier_wait(pipeline.keys_full + 8 * stage, count / STAGES & 1);
        await_turn();
        multiply_keys(products, queries, room + stage * PASS_BYTES);
        end_turn();
        warpgroup_wait<0>(products);
        if (leads) barrier_arrive(pipeline.keys_empty + 8 * stage);
        weigh(work.end_pass - 1, weights);
        count++;
#pragma unroll 1
        for (int pass = work.end_pass - 2; pass >= work.first_pass; pass--, count++) {
            stage = __shfl_sync(ALL_LANES, count % STAGES, 0);
            const u32 earlier = stage == 0u ? STAGES - 1u : stage - 1u;
            barrier_wait(pipeline.keys_full + 8 * stage, count / STAGES & 1);
            await_turn();
            multiply_keys(products, queries, room + stage * PASS_BYTES);
            barrier_wait(pipeline.values_full + 8 * earlier, (count - 1) / STAGES & 1);
            multiply_values(sums, weights, room + PASS_VALUES_AT + earlier * PASS_BYTES);
            end_turn();
            warpgroup_wait<1>(products);
            if (leads) barrier_arrive(pipeline.keys_empty + 8 * stage);
            PassWeights next;
            const bool moves = weigh(pass, next);
            warpgroup_wait<0>(sums);
            if (leads) barrier_arrive(pipeline.values_empty + 8 * earlier);
            if (moves) {
#pragma unroll
                for (int i = 0; i < 8 * CHANNEL_STEPS; i++) sums[i / 4][i % 4] *= rows.moved[i % 4 / 2];
            }
            // Not before the products above have ended, which read `weights`: the compiler would make them wait for each
            // other if it merged the two.
#pragma unroll
            for (int i = 0; i < 4 * PASS_STEPS; i++) {
                asm volatile("mov.b32 %0, %1;" : "=r"(weights[i / 4][i % 4]) : "r"(next[i / 4][i % 4]) : "memory");
            }
        }
        if (leads) barrier_arrive(pipeline.work_empty + 8 * (round % 2));
        stage = (count - 1) % STAGES;
        barrier_wait(pipeline.values_full + 8 * stage, (count - 1) / STAGES & 1);
        multiply_values(sums, weights, room + PASS_VALUES_AT + stage * PASS_BYTES);
        warpgroup_wait<0>(sums);
        if (leads) barrier_arrive(pipeline.values_empty + 8 * stage);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (MAPS_SCORES) {
                rows.reference[h] += rows.of[h].base;
            } else if (KEY_SPAN_RANGES && !CAPPED) {
                rows.reference[h] += constants[warp * WARP_ROWS + 8 * h + lane / 4].base;
            }
        }
        write(call, work, rows, sums, signs);
    }

    // The extremes of the scores of a work.
    __device__ __forceinline__ void find_extremes(const AttendCall& call, const Pipeline& pipeline, const Work& work,
                                                  u32 round, const RowConstants* constants, u32& count) const {
        const u32 queries = this->queries(round);
        RunExtremes extremes;
        const int limits[2] = {work.limit(placed(0).query()), work.limit(placed(1).query())};
#pragma unroll 1
        for (int pass = work.end_pass - 1; pass >= work.first_pass; pass--, count++) {
            const u32 stage = __shfl_sync(ALL_LANES, count % STAGES, 0);
            PassProducts products;
            barrier_wait(pipeline.keys_full + 8 * stage, count / STAGES & 1);
            await_turn();
            multiply_keys(products, queries, room + stage * PASS_BYTES);
            end_turn();
            warpgroup_wait<0>(products);
            if (leads) barrier_arrive(pipeline.keys_empty + 8 * stage);
            const int before = pass * RUN_TOKENS + 2 * (lane & 3);
            extremes.take(products, {limits[0] - before, limits[1] - before});
        }
        if (leads) barrier_arrive(pipeline.work_empty + 8 * (round % 2));
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 of_row = extremes.of_row(h);
            const RowConstants to_score = constants[warp * WARP_ROWS + 8 * h + lane / 4];
            if (exists(call, work, h) && (lane & 3) == 0 && of_row.x <= of_row.y) {
                enter_extremes(call, extremes_place(work, h), query_head(call, work, h),
                               __fmaf_rn(of_row.x, to_score.delta, to_score.base),
                               __fmaf_rn(of_row.y, to_score.delta, to_score.base));
            }
        }
    }

    // Of the lane's row `h`: whether the item has it, its query head, and the place of the extremes of its query.
    __device__ __forceinline__ bool exists(const AttendCall& call, const Work& work, int h) const {
        return placed(h).query() < (u32)ROWS / call.group && work.first + placed(h).query() < work.item.queries;
    }
    __device__ __forceinline__ u32 query_head(const AttendCall& call, const Work& work, int h) const {
        return work.kv_head * call.group + placed(h).head();
    }
    __device__ __forceinline__ u32 extremes_place(const Work& work, int h) const {
        return work.item.extremes + min(work.first + placed(h).query(), work.item.queries - 1u);
    }

    // Writes the rows of the warp: states, or the outputs themselves.
    __device__ __forceinline__ void write(const AttendCall& call, const Work& work, const RunSoftmax& rows,
                                          RowValues& sums, const RowSigns& signs) const {
        const Item& item = work.item;
        const u64 query_heads = call.kv_heads * call.group;
        const bool merged = item.states > 1u;
        const u32 type = merged ? ELEMENTS_F32 : call.output_type;
        const u64 bytes = type == ELEMENTS_F32 ? 4u : 2u;
        const bool aligned = merged || (((u64)call.output | call.output_stride * bytes) & 7u) == 0u;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 query = work.first + placed(h).query();
            const u32 head = query_head(call, work, h);
            const bool exists = this->exists(call, work, h);
            const float weight = sum_of_quad(rows.weight[h]);
            ItemState state = {1.0f / weight, rows.reference[h] + log2_approx(weight)};
            if (weight == 0.0f) state = rows.limit[h] > rows.start[h] ? ItemState{no_number(), no_number()} : ItemState{0.0f, NO_SCORE};
            if constexpr (VALUE_BITS != 16) {
                const u64 of_head = ((u64)item.range_slot * call.kv_heads + work.kv_head) * HEAD_DIM;
                to_values(sums, h, state.out, call.value_ranges + of_head, signs, lane);
                state.out = 1.0f;
            }
            RowTarget target = {nullptr, type, merged ? HEAD_DIM : TENSOR_CHANNELS, exists, aligned};
            if (merged) {
                const u64 at = (u64)(item.state + query * item.stride) * query_heads + head;
                if (exists && (lane & 3) == 0) call.state_lse[at] = state.lse;
                target.to = call.states + at * HEAD_DIM;
            } else {
                const u64 row = item.row + query;
                state.out *= output_share(call, head, state.lse);
                if (exists && (lane & 3) == 0 && call.lse != nullptr) {
                    call.lse[row * query_heads + head] = state.lse * 0.69314718f;
                }
                target.to = (u8*)call.output + (row * call.output_stride + (u64)head * TENSOR_CHANNELS) * bytes;
            }
            target.write(sums, h, state.out, lane);
        }
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32 + 128, 1)
    attend_run_pipelined(const __grid_constant__ AttendCall call) {
    extern __shared__ __align__(LINE_BYTES) u8 room[];
    __shared__ u64 barriers[Pipeline::BARRIERS];
    __shared__ TakenWork taken[TakenWork::PLACES];
    __shared__ RowConstants constants[ROWS];
    __shared__ PlacedRow places[ROWS];
    __shared__ RowSigns signs;

    if (call.beside != 0u) admit_later_kernels();
    if (call.beside != 0u && blockIdx.x == call.beside) {
        await_earlier_kernels();
        return;
    }
    const int lane = threadIdx.x & 31;
    const int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x >> 5, 0);
    const Pipeline pipeline(shared_address(barriers));
    if (threadIdx.x == 0) pipeline.start();
    if (threadIdx.x < ROWS) places[threadIdx.x] = PlacedRow(threadIdx.x, call.group);
    if (warp == 1) signs.fill(lane);
    __syncthreads();
    if (call.beside == 0u) {
        await_earlier_kernels();
        admit_later_kernels();
    }
    if (warp >= WARPS) {
        shrink_registers<COPYING_REGISTERS>();
        const u32 blocks = call.beside != 0u ? call.beside : gridDim.x;
        if (warp == WARPS && lane == 0) copy_works(call, pipeline, shared_address(room), taken, blocks);
        if (warp > WARPS) copy_queries(call, pipeline, shared_address(room), taken, places, warp - WARPS - 1, lane);
        return;
    }
    grow_registers<GROUP_REGISTERS>();
    const WarpGroup group(call.group, places, shared_address(room), warp, lane);
    u32 passes = 0;
    // The first turn is that of the first warpgroup.
    if (group.number == GROUPS - 1) group.end_turn();
#pragma unroll 1
    for (u32 round = 0;; round++) {
        barrier_wait(pipeline.queries_full + 8 * (round % 2), round / 2 & 1);
        const TakenWork& of = taken[round % TakenWork::PLACES];
        const u32 number = __shfl_sync(ALL_LANES, of.number, 0);
        if (number == TakenWork::NONE) break;
        const Work work(call, number, of.item);
        if (work.end_pass == 0) {
            group.sync();
            if (group.leads) barrier_arrive(pipeline.work_empty + 8 * (round % 2));
            continue;
        }
        const PlacedRow rows[2] = {group.loaded(0), group.loaded(1)};
        u8* const room_of = room + QUERIES_AT + round % QUERY_STAGES * QUERY_STAGE_BYTES;
        const WarpQueries queries = {call, room_of, constants, signs, warp, lane};
        if (call.query_type == ELEMENTS_F32) {
            queries.move<u32>(work.item, work.kv_head, work.first, rows, false);
        } else {
            queries.move<u16>(work.item, work.kv_head, work.first, rows, copies_queries(call));
        }
        shared_visible();
        group.sync();
        if constexpr (FINDS_EXTREMES) {
            group.find_extremes(call, pipeline, work, round, constants, passes);
        } else {
            group.attend(call, pipeline, work, round, constants, signs, passes);
        }
    }
    // The last turn that was announced.
    if (group.number == 0) group.await_turn();
}
