// The exchange of words between ranks that can write to each other's memory, without a fence.
//
// Every word travels with the number of the exchange, in one store of 64 bits. Whoever finds that number in his own
// memory has the word: nobody waits for another write, and nothing orders words among themselves. A rank has slots for
// the words of two exchanges, of even and of odd number. It writes those of exchange n + 2 only after its exchange n + 1
// is complete, and with it exchange n of everyone who sent it a word in n + 1. In n + 1 every rank waits for all others.
//
// Numbers are read from device memory, so that a graph can be replayed. Every block counts its own launches, all
// launches have the same grid, and so all blocks of all ranks agree. 0 is no number: new memory holds it.
//
// A wait ends after `deadline` nanoseconds, or soon after a rank said that it left. Then the exchange has failed for
// good: `failed` stops later launches at once, and `report` tells the host which rank was missing.
//
// RANKS is set by the host.
//
// In bounds: slots hold [2][RANKS][capacity] words on every rank, and the host checked the words of a launch against
// `capacity`. `steps` has a number for every block.

#pragma once

#include "common/ptx.cuh"

constexpr u32 MOST_RANKS = 16;

struct Exchange {
    // The slots of every rank, as this device addresses them.
    u64* slots[MOST_RANKS];
    // Of this rank, on its device: a number for every block, what failed, who left.
    u32* steps;
    volatile u32* failed;
    const u32* left;
    // Of this rank, on the host.
    u32* report;
    u64 deadline;
    // The most words that a rank sends to another in one exchange.
    u32 capacity;
    u32 rank;
};

__device__ __forceinline__ u64 numbered(u32 word, u32 step) { return (u64)step << 32 | word; }

__device__ __forceinline__ void store_number(u64* to, u64 word) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

// Two words, each of which arrives whole.
__device__ __forceinline__ void store_numbers(u64* to, u64 a, u64 b) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}

__device__ __forceinline__ u64 load_number(const u64* from) {
    u64 word;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}

__device__ __forceinline__ void load_numbers(const u64* from, u64& a, u64& b) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
}

__device__ __forceinline__ u32 load_flag(const u32* from) {
    u32 flag;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(flag) : "l"(from) : "memory");
    return flag;
}

__device__ __forceinline__ void store_flag(u32* to, u32 flag) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(flag) : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    return now;
}

// Where rank `to` expects word `word` of rank `from`.
__device__ __forceinline__ u64* slot(const Exchange& exchange, u32 to, u32 from, u32 step, u32 word) {
    return exchange.slots[to] + ((u64)(step & 1u) * RANKS + from) * exchange.capacity + word;
}

// One thread's wait for words.
struct Wait {
    u64 begin;
    u32 polls;
    bool saw_leaver;
};

constexpr u32 POLLS_BETWEEN_LOOKS = 64;

// Whether to give up. Called after every fruitless look at the slots; the clock and the flags are read now and then.
__device__ __forceinline__ bool gives_up(const Exchange& exchange, Wait& wait) {
    if (++wait.polls % POLLS_BETWEEN_LOOKS != 0) return false;
    if (wait.begin == 0) wait.begin = nanoseconds();
    if (*exchange.failed != 0u || nanoseconds() - wait.begin > exchange.deadline) return true;
    // What a rank sent before it left is there by now: one more round of looks finds it.
    if (wait.saw_leaver) return true;
    wait.saw_leaver = load_flag(exchange.left) != 0u;
    return false;
}

// Notes that words of rank `missing` did not come.
__device__ __forceinline__ void fail(const Exchange& exchange, u32 missing) {
    *exchange.failed = 1u;
    store_flag(exchange.report, missing + 1u);
}

// The number of this launch, 0 once the exchange has failed.
__device__ __forceinline__ u32 begin_exchange(const Exchange& exchange) {
    const u32 failed = *exchange.failed;
    const u32 step = exchange.steps[blockIdx.x];
    return failed != 0u ? 0u : step;
}

// The number of the block's next launch. Parity goes on where numbers begin again.
__device__ __forceinline__ void end_exchange(const Exchange& exchange, u32 step) {
    __syncthreads();
    if (threadIdx.x == 0) exchange.steps[blockIdx.x] = step == 0xffffffffu ? 2u : step + 1u;
}
