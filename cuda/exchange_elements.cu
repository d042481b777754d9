// exchange_elements: sends elements to all other ranks and gathers those of all, takes those of one, or reduces them, in
// the order of the ranks. The exchange is that of common/exchange.cuh.
//
// A thread owns elements, every (threads of the grid)-th, and sends all of them before it waits for the first. A word
// holds one element of any type. All ranks send and wait, also where only the elements of one are asked for: slots are
// written again only when everybody has read them.
//
// In bounds: both arrays were checked to hold the elements, and the elements fit a slot.

#include "common/merge_parts.cuh"
#include "common/elements.cuh"
#include "common/exchange.cuh"

constexpr u32 GATHER = 0;
constexpr u32 TAKE = 1;
constexpr u32 SUM = 2;
constexpr u32 LARGEST = 3;

struct ElementsCall {
    Exchange exchange;
    const void* from;
    void* to;
    // Elements between those of two ranks, where they are gathered.
    u64 stride;
    u32 elements;
    u32 element_type;
    u32 operation;
    // The rank whose elements are taken.
    u32 root;
};

__device__ __forceinline__ u32 load_bits(const ElementsCall& call, u32 e) {
    return call.element_type == ELEMENTS_F32 ? ((const u32*)call.from)[e] : ((const u16*)call.from)[e];
}

__device__ __forceinline__ void store_bits(const ElementsCall& call, u64 e, u32 bits) {
    if (call.element_type == ELEMENTS_F32) {
        ((u32*)call.to)[e] = bits;
    } else {
        ((u16*)call.to)[e] = (u16)bits;
    }
}

// Waits for element e of another rank. False if it does not come.
__device__ __forceinline__ bool receive(const Exchange& exchange, u32 rank, u32 step, u32 e, Wait& wait, u32& bits) {
    u64 word;
    do {
        word = load_number(slot(exchange, exchange.rank, rank, step, e));
    } while ((u32)(word >> 32) != step && !gives_up(exchange, wait));
    bits = (u32)word;
    return (u32)(word >> 32) == step;
}

extern "C" __global__ void __launch_bounds__(256) exchange_elements(const ElementsCall call) {
    await_earlier_kernels();
    admit_later_kernels();
    const Exchange& exchange = call.exchange;
    const u32 step = begin_exchange(exchange);
    if (step == 0u) return;
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 stride = gridDim.x * blockDim.x;
    for (u32 e = first; e < call.elements; e += stride) {
        const u64 word = numbered(load_bits(call, e), step);
        for (u32 rank = 0; rank < RANKS; rank++) {
            if (rank != exchange.rank) store_number(slot(exchange, rank, exchange.rank, step, e), word);
        }
    }
    Wait wait = {0, 0, false};
    bool arrived = true;
    for (u32 e = first; e < call.elements && arrived; e += stride) {
        // Read before it is written: a reduction replaces what it reads.
        const u32 own = load_bits(call, e);
        float joined = 0.0f;
        for (u32 rank = 0; rank < RANKS; rank++) {
            u32 bits = own;
            if (rank != exchange.rank && !receive(exchange, rank, step, e, wait, bits)) {
                fail(exchange, rank);
                arrived = false;
                break;
            }
            const float x = __uint_as_float(bits);
            if (call.operation == GATHER) store_bits(call, rank * call.stride + e, bits);
            if (call.operation == TAKE && rank == call.root) store_bits(call, e, bits);
            if (call.operation == SUM) joined = rank == 0 ? x : joined + x;
            if (call.operation == LARGEST) joined = rank == 0 ? x : larger(joined, x);
        }
        if (arrived && call.operation >= SUM) store_bits(call, e, __float_as_uint(joined));
    }
    end_exchange(exchange, step);
}
