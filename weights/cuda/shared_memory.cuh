// Copies to shared memory, words of it, and clusters of blocks, on compute capability 9.0.
//
// Operands of products are blocks of 64 halves a row in shared memory, 128 bytes, whose 16-byte parts are swapped: part
// p of row r lies at part p ^ (r % 8). Blocks begin at multiples of 1024 bytes.

#pragma once

#include "device/warpgroup.cuh"

__device__ __forceinline__ u32 shared_at(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Makes barriers visible to the blocks of the cluster and to the copy engine.
__device__ __forceinline__ void barriers_visible() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Copies the box of a tensor that begins at column `x` of row `y` to shared memory.
__device__ __forceinline__ void copy_box(u32 to, const void* map, u32 x, u32 y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

// Copies a multiple of 16 bytes to shared memory.
__device__ __forceinline__ void copy_bytes(u32 to, u64 from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Copies a few words to shared memory. Its end is waited for by `arrive_after_copies`.
template <u32 BYTES>
__device__ __forceinline__ void copy_async(u32 to, u64 from) {
    if constexpr (BYTES % 16 == 0) {
#pragma unroll
        for (u32 i = 0; i < BYTES; i += 16) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory");
        }
    } else if constexpr (BYTES == 8) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
    } else {
#pragma unroll
        for (u32 i = 0; i < BYTES; i += 4) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + i), "l"(from + i) : "memory");
        }
    }
}

// Arrives once this thread's `copy_async` have ended.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ float4 load_shared(u32 from) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}

__device__ __forceinline__ u32 load_word(u32 from) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

__device__ __forceinline__ void store_word(u32 to, u32 x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

// Writes to the same place in another block of the cluster.
__device__ __forceinline__ void store_shared_at(u32 to, u32 block, const float (&x)[4]) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5};\n}" ::"r"(to),
        "r"(block), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
        : "memory");
}

// Waits for all threads of the cluster. Earlier writes are visible afterwards.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Names blocks of operands for products: eight rows take 1024 bytes.
__device__ __forceinline__ u64 operand(u32 at) {
    return static_cast<u64>(at >> 4 & 0x3fffu) | 1ull << 16 | static_cast<u64>(1024u >> 4) << 32 | 1ull << 62;
}
