// merge_states: merges the states of a query's items into its output. A stage of `attend`.
//
//   out = Σ_i 2^(lse_i − M) out_i / Σ_i 2^(lse_i − M),  M = max_i lse_i
//
// over the states, and a sink where the layer has them: one more state, of output 0.
//
// Blocks of a cluster merge first: each sends the others, through their shared memory, the parts of its outputs that
// they merge. The last block of a query, KV head and chunk to arrive merges the remaining states. It resets the counter
// to zero, so that the next step, or the next replay of a graph, finds it so. A thread owns every (threads)-th output.
// States are read past the L1 cache, which may hold older ones.
//
// In bounds: rows first_state .. first_state + states belong to the query and were sized by the plan.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/attend_call.cuh"

// The state of a query head with its sink, where there are sinks. Every output passes here once.
__device__ __forceinline__ ItemState with_sink(const AttendCall& call, u32 head, ItemState state) {
    if constexpr (!SINKS) return state;
    const float sink = call.sinks[head];
    const float largest = fmaxf(state.lse, sink);
    const float own = exp2_approx(state.lse - largest);
    const float total = own + exp2_approx(sink - largest);
    return {state.out * own / total, largest + log2_approx(total)};
}

// Log-sum-exps below this are of queries that see no token (attend_run.cu gives them −1e30): their output is 0.
constexpr float LEAST_LSE = -1e29f;

// What turns the mean of a row's values into its output: the share that a sink leaves, or 0 if it sees no token. `lse` is
// that of the row without the sink and becomes that of the output.
__device__ __forceinline__ float output_share(const AttendCall& call, u32 head, float& lse) {
    const ItemState state = with_sink(call, head, {1.0f, lse});
    // NaN counts as seen, so that it stays and weighs where parts are merged.
    const bool sees = !(state.lse < LEAST_LSE);
    lse = sees ? state.lse : -__int_as_float(0x7f800000);
    return sees ? state.out : 0.0f;
}

// Channels beyond those of the output are skipped.
__device__ __forceinline__ void write_output(const AttendCall& call, u32 row, u32 head, u32 channel,
                                             ItemState without_sink) {
    if (channel >= TENSOR_CHANNELS) return;
    ItemState state = with_sink(call, head, without_sink);
    if (state.lse < LEAST_LSE) state = {0.0f, -__int_as_float(0x7f800000)};
    const u64 query_head = (u64)row * call.kv_heads * call.group + head;
    if (call.lse != nullptr && channel == 0) call.lse[query_head] = state.lse * 0.69314718f;
    const u64 index = row * call.output_stride + (u64)head * TENSOR_CHANNELS + channel;
    store_element(call.output, call.output_type, index, state.out);
}

// Maximum number of blocks in a cluster.
constexpr u32 MOST_CLUSTER = 8;

// True in all threads of the last block to arrive.
__device__ __forceinline__ bool last_to_arrive(u32* arrivals, u32 expected) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = arrive(arrivals) + 1u == expected;
        if (last) *arrivals = 0u;
    }
    __syncthreads();
    return last;
}

// Outputs go to the blocks of a cluster in turn, CLUSTER_RUN at a time.
constexpr u32 CLUSTER_RUN = 32;

// The data that the blocks of a cluster send to one of them: a part of their outputs, and their log-sum-exps
// [rank][head].
struct ClusterShared {
    float outputs[BLOCK_HEADS * HEAD_DIM + MOST_CLUSTER * CLUSTER_RUN];
    float lse[MOST_CLUSTER][BLOCK_HEADS];
};

// The block that merges output e, and the place of that output among those it merges.
__device__ __forceinline__ u32 cluster_owner(u32 cluster, u32 e) { return e / CLUSTER_RUN % cluster; }
__device__ __forceinline__ u32 cluster_place(u32 cluster, u32 e) {
    return e / CLUSTER_RUN / cluster * CLUSTER_RUN + e % CLUSTER_RUN;
}

// Maximum number of outputs that a block merges, of `outputs` in all.
__device__ __forceinline__ u32 cluster_share(u32 cluster, u32 outputs) {
    return (outputs / CLUSTER_RUN + cluster - 1) / cluster * CLUSTER_RUN;
}

// Merges output e, which belongs to this block.
__device__ __forceinline__ ItemState merge_cluster(const ClusterShared& shared, u32 cluster, u32 outputs, u32 e) {
    const float* received = shared.outputs + cluster_place(cluster, e);
    const u32 share = cluster_share(cluster, outputs);
    float largest = -__int_as_float(0x7f800000);
    for (u32 rank = 0; rank < cluster; rank++) largest = fmaxf(largest, shared.lse[rank][e / HEAD_DIM]);
    float weight = 0.0f;
    float sum = 0.0f;
    for (u32 rank = 0; rank < cluster; rank++) {
        const float w = exp2_approx(shared.lse[rank][e / HEAD_DIM] - largest);
        weight += w;
        sum += w * received[rank * share];
    }
    return {sum / weight, largest + log2_approx(weight)};
}

// States that are loaded at once: all of most queries, since a second round of loads takes a microsecond.
constexpr u32 MERGED_AT_ONCE = 16;

// Writes output e of a block or a cluster: to the query's output if there is nothing to merge, otherwise as a state.
__device__ __forceinline__ void write_state(const AttendCall& call, const Item& item, u32 first_head, int e,
                                            ItemState state) {
    const u32 query_heads = call.kv_heads * call.group;
    const BlockHead of = block_head(call, first_head, e / HEAD_DIM);
    if (item.states == 1) {
        write_output(call, item.row + of.query, of.head, e % HEAD_DIM, state);
        return;
    }
    const u64 row = (u64)(item.state + of.query * item.stride) * query_heads + of.head;
    call.states[row * HEAD_DIM + e % HEAD_DIM] = state.out;
    if (e % HEAD_DIM == 0) call.state_lse[row] = state.lse;
}

// Merges the states of one of the item's queries.
__device__ __forceinline__ void merge_states(const AttendCall& call, const Item& item, u32 query, u32 first_head,
                                             int heads) {
    const u32 query_heads = call.kv_heads * call.group;
    const u64 first_state = item.first_state + query * item.stride;
    for (int e = threadIdx.x; e < heads * HEAD_DIM; e += WARPS * 32) {
        const u32 head = first_head + e / HEAD_DIM;
        const float* lse = call.state_lse + first_state * query_heads + head;
        const float* out = call.states + (first_state * query_heads + head) * HEAD_DIM + e % HEAD_DIM;
        float largest = -__int_as_float(0x7f800000);
        float weight = 0.0f;
        float sum = 0.0f;
        for (u32 first = 0; first < item.states; first += MERGED_AT_ONCE) {
            float lses[MERGED_AT_ONCE];
            float outs[MERGED_AT_ONCE];
            const float before = largest;
#pragma unroll
            for (u32 i = 0; i < MERGED_AT_ONCE; i++) {
                const u64 row = (u64)(first + i) * query_heads;
                const bool there = first + i < item.states;
                lses[i] = there ? __ldcg(lse + row) : -__int_as_float(0x7f800000);
                outs[i] = there ? __ldcg(out + row * HEAD_DIM) : 0.0f;
            }
#pragma unroll
            for (u32 i = 0; i < MERGED_AT_ONCE; i++) largest = fmaxf(largest, lses[i]);
            const float factor = exp2_approx(before - largest);
            weight *= factor;
            sum *= factor;
#pragma unroll
            for (u32 i = 0; i < MERGED_AT_ONCE; i++) {
                const float w = exp2_approx(lses[i] - largest);
                weight += w;
                sum += w * outs[i];
            }
        }
        write_output(call, item.row + query, head, e % HEAD_DIM, {sum / weight, largest + log2_approx(weight)});
    }
}
