// Products of the four warps of a warpgroup (`wgmma`, compute capability 9.0).
//
// Operands in shared memory are matrices of 8 rows by 8 halves, 128 bytes each, row after row. `matrices` names two
// consecutive ones of one step of 16; those of the next eight rows lie `stride` bytes later. The tensor cores read them
// asynchronously: after shared_visible() by the threads that wrote them, and a barrier.
//
// Of 64 rows each warp has 16. A lane holds row lane / 4 of them in words 0 and 1 of every four, and row lane / 4 + 8
// in words 2 and 3, columns 2 (lane % 4) and the one after of eight, as in MMAs of one warp.

#pragma once

#include "common/ptx.cuh"

#if WARPGROUPS
// Matrices at an address of shared memory, a multiple of 16.
__device__ __forceinline__ u64 matrices(u32 at, u32 stride) {
    return (u64)(at >> 4 & 0x3fffu) | (u64)(128u >> 4) << 16 | (u64)(stride >> 4) << 32;
}

// Call before products whose operands in registers were written by other instructions.
__device__ __forceinline__ void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of products that were started since the last call.
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until no more than PENDING groups are running. Those of `d` have then ended.
template <int PENDING, int EIGHTS>
__device__ __forceinline__ void warpgroup_wait(float (&d)[EIGHTS][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    // Tells the compiler that the registers have changed.
#pragma unroll
    for (int i = 0; i < 4 * EIGHTS; i++) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
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

#define FOUR(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 1), FOUR(d, i + 2), FOUR(d, i + 3)
#define THIRTY_TWO_NAMES                                                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31"

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

// 64 rows by 64 columns: d += a · b with a in registers.
__device__ __forceinline__ void warpgroup_multiply(float (&d)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.eq.u32 adds, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" THIRTY_TWO_NAMES
        "}, {%32, %33, %34, %35}, %36, adds, 1, 1, 0;\n"
        "}"
        : SIXTEEN(d, 0), SIXTEEN(d, 4)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// 64 rows by 128 columns.
__device__ __forceinline__ void warpgroup_multiply(float (&d)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.eq.u32 adds, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" THIRTY_TWO_NAMES
        ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "
        "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, adds, 1, 1, 0;\n"
        "}"
        : SIXTEEN(d, 0), SIXTEEN(d, 4), SIXTEEN(d, 8), SIXTEEN(d, 12)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#define SIXTY_FOUR_NAMES                                                                                             \
    THIRTY_TWO_NAMES                                                                                                 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "    \
    "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

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

// 64 rows by 256 columns.
__device__ __forceinline__ void warpgroup_multiply(float (&d)[32][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.eq.u32 adds, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" SIXTY_FOUR_NAMES
        ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, "
        "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "
        "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, "
        "%123, %124, %125, %126, %127}, {%128, %129, %130, %131}, %132, adds, 1, 1, 0;\n"
        "}"
        : SIXTEEN(d, 0), SIXTEEN(d, 4), SIXTEEN(d, 8), SIXTEEN(d, 12), SIXTEEN(d, 16), SIXTEEN(d, 20), SIXTEEN(d, 24),
          SIXTEEN(d, 28)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif
