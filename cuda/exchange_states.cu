// exchange_states: sends this rank's attention states to all others, and merges those of all ranks. The exchange is that
// of common/exchange.cuh, the formula that of common/merge_parts.cuh, over the ranks in their order.
//
// A thread owns pairs of channels, every (threads of the grid)-th. It sends all of its pairs before it waits for the
// first. The thread of a head's first pair sends the log-sum-exp.
//
// In bounds: outputs have `heads · head_dim` elements, log-sum-exps `heads`, and `heads · (head_dim + 1)` words fit a
// slot. Head dimensions and capacities are even, so that pairs are aligned.

#include "common/merge_parts.cuh"
#include "common/elements.cuh"
#include "common/exchange.cuh"

struct StatesCall {
    Exchange exchange;
    const float* outputs;
    const float* lse;
    void* merged;
    // Null if nobody asks for it.
    float* merged_lse;
    // Rows times query heads.
    u32 heads;
    u32 head_dim;
    u32 merged_type;
    u32 unused;
};

// A pair of this rank's channels, and the log-sum-exp of their head.
struct OwnPair {
    float a;
    float b;
    float lse;
};

__device__ __forceinline__ OwnPair own_pair(const StatesCall& call, u32 pair) {
    return {call.outputs[pair], call.outputs[pair + 1], call.lse[pair / call.head_dim]};
}

// A pair of channels of every rank, and their log-sum-exps.
struct RankPairs {
    float a[RANKS];
    float b[RANKS];
    float lse[RANKS];
};

// Looks for the words of all other ranks. The first rank whose words are missing, or RANKS.
__device__ __forceinline__ u32 look(const Exchange& exchange, u32 step, u32 pair, u32 lse, RankPairs& pairs) {
    u32 missing = RANKS;
#pragma unroll
    for (u32 i = 0; i < RANKS; i++) {
        const u32 rank = RANKS - 1 - i;
        if (rank == exchange.rank) continue;
        u64 a, b;
        load_numbers(slot(exchange, exchange.rank, rank, step, pair), a, b);
        const u64 c = load_number(slot(exchange, exchange.rank, rank, step, lse));
        pairs.a[rank] = __uint_as_float((u32)a);
        pairs.b[rank] = __uint_as_float((u32)b);
        pairs.lse[rank] = __uint_as_float((u32)c);
        if ((u32)(a >> 32) != step || (u32)(b >> 32) != step || (u32)(c >> 32) != step) missing = rank;
    }
    return missing;
}

__device__ __forceinline__ void write_merged(const StatesCall& call, u32 pair, const RankPairs& pairs) {
    float largest = pairs.lse[0];
#pragma unroll
    for (u32 rank = 1; rank < RANKS; rank++) largest = larger(largest, pairs.lse[rank]);
    float weights = 0.0f, a = 0.0f, b = 0.0f;
#pragma unroll
    for (u32 rank = 0; rank < RANKS; rank++) {
        const float weight = part_weight(pairs.lse[rank], largest);
        weights += weight;
        a += weighted(weight, pairs.a[rank]);
        b += weighted(weight, pairs.b[rank]);
    }
    store_element(call.merged, call.merged_type, pair, merged_output(a, weights));
    store_element(call.merged, call.merged_type, pair + 1, merged_output(b, weights));
    if (call.merged_lse != nullptr && pair % call.head_dim == 0) {
        call.merged_lse[pair / call.head_dim] = merged_lse(largest, weights);
    }
}

extern "C" __global__ void __launch_bounds__(256) exchange_states(const StatesCall call) {
    await_earlier_kernels();
    admit_later_kernels();
    const Exchange& exchange = call.exchange;
    const u32 outputs = call.heads * call.head_dim;
    const u32 first = (blockIdx.x * blockDim.x + threadIdx.x) * 2;
    const u32 stride = gridDim.x * blockDim.x * 2;
    // Loaded together with the number of the launch, not after it.
    OwnPair own = first < outputs ? own_pair(call, first) : OwnPair{0.0f, 0.0f, 0.0f};
    const u32 step = begin_exchange(exchange);
    if (step == 0u) return;
    for (u32 pair = first; pair < outputs; pair += stride) {
        if (pair != first) own = own_pair(call, pair);
        const u32 head = pair / call.head_dim;
#pragma unroll
        for (u32 rank = 0; rank < RANKS; rank++) {
            if (rank == exchange.rank) continue;
            if (pair % call.head_dim == 0) {
                const u64 lse = numbered(__float_as_uint(own.lse), step);
                store_number(slot(exchange, rank, exchange.rank, step, outputs + head), lse);
            }
            const u64 a = numbered(__float_as_uint(own.a), step);
            const u64 b = numbered(__float_as_uint(own.b), step);
            store_numbers(slot(exchange, rank, exchange.rank, step, pair), a, b);
        }
    }
    Wait wait = {0, 0, false};
    for (u32 pair = first; pair < outputs; pair += stride) {
        const u32 head = pair / call.head_dim;
        if (first + stride < outputs) own = own_pair(call, pair);
        RankPairs pairs;
        u32 missing;
        do {
            missing = look(exchange, step, pair, outputs + head, pairs);
        } while (missing != RANKS && !gives_up(exchange, wait));
        if (missing != RANKS) {
            fail(exchange, missing);
            break;
        }
#pragma unroll
        for (u32 rank = 0; rank < RANKS; rank++) {
            if (rank != exchange.rank) continue;
            pairs.a[rank] = own.a;
            pairs.b[rank] = own.b;
            pairs.lse[rank] = own.lse;
        }
        write_merged(call, pair, pairs);
    }
    end_exchange(exchange, step);
}
