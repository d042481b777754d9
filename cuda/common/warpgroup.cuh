// Products of the four warps of a warpgroup (`wgmma`, compute capability 9.0).
//
// Operands in shared memory are matrices of 8 rows by 8 halves, 128 bytes each, row after row. `matrices` names two
// consecutive ones of one step of 16; those of the next eight rows lie `stride` bytes later. The tensor cores read them
// asynchronously: after shared_visible() by the threads that wrote them, and a barrier.

#pragma once

#include "common/ptx.cuh"

#if WARPGROUPS
// Matrices at an address of shared memory, a multiple of 16.
__device__ __forceinline__ u64 matrices(u32 at, u32 stride) {
    return (u64)(at >> 4 & 0x3fffu) | (u64)(128u >> 4) << 16 | (u64)(stride >> 4) << 32;
}

// Waits for the products.
template <int EIGHTS>
__device__ __forceinline__ void warpgroup_end(float (&d)[EIGHTS][4]) {
    warpgroup_commit();
    warpgroup_wait<0>(d);
}

// Matrices at an address, and those a number of 16 bytes behind them. Only the low word changes, so that the compiler
// counts in registers of the warp.
struct Matrices {
    u32 low;
    u32 high;

    __device__ __forceinline__ Matrices(u32 at, u32 stride) : low(at >> 4 & 0x3fffu | 128u >> 4 << 16), high(stride >> 4) {}

    __device__ __forceinline__ u64 after(u32 sixteens) const {
        u64 descriptor;
        asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low + sixteens), "r"(high));
        return descriptor;
    }
};

// 64 rows by 64 columns: d = a · b, or d += a · b, both in shared memory.
__device__ __forceinline__ void warpgroup_multiply(float (&d)[8][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.u32 adds, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" THIRTY_TWO_NAMES "}, %32, %33, adds, 1, 1, 0, 0;\n"
        "}"
        : SIXTEEN(d, 0), SIXTEEN(d, 4)
        : "l"(a), "l"(b), "r"((u32)adds));
}

// 64 rows by 128 columns: d = a · b, or d += a · b, both in shared memory.
__device__ __forceinline__ void warpgroup_multiply(float (&d)[16][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.u32 adds, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" SIXTY_FOUR_NAMES "}, %64, %65, adds, 1, 1, 0, 0;\n"
        "}"
        : SIXTEEN(d, 0), SIXTEEN(d, 4), SIXTEEN(d, 8), SIXTEEN(d, 12)
        : "l"(a), "l"(b), "r"((u32)adds));
}

// 64 rows by 96 columns with a in registers.
__device__ __forceinline__ void warpgroup_multiply(float (&d)[12][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.eq.u32 adds, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {" THIRTY_TWO_NAMES
        ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, {%48, %49, %50, %51}, %52, "
        "adds, 1, 1, 0;\n"
        "}"
        : SIXTEEN(d, 0), SIXTEEN(d, 4), SIXTEEN(d, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif
