// Barriers in shared memory, and products of the four warps of a warpgroup (`wgmma`, compute capability 9.0).
//
// Of 64 rows each warp has 16. A lane holds row lane / 4 of them in words 0 and 1 of every four, and row lane / 4 + 8
// in words 2 and 3, columns 2 (lane % 4) and the one after of eight, as in MMAs of one warp.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

// A barrier whose phases end after as many arrivals.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals = 1u) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Sets the number of bytes after whose arrival this phase of the barrier ends.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// Waits for the end of the barrier's phase of this parity.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// Makes this thread's writes to shared memory visible to the copy engine and the tensor cores: barriers that bulk
// copies use, rows that a warpgroup multiplies. Cards before compute capability 9.0 have neither.
__device__ __forceinline__ void shared_visible() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Gives registers of the calling warpgroup back, or takes some that others gave back, so that its threads have COUNT.
template <int COUNT>
__device__ __forceinline__ void shrink_registers() {
#if WARPGROUPS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

template <int COUNT>
__device__ __forceinline__ void grow_registers() {
#if WARPGROUPS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

#if WARPGROUPS
// Call before products whose operands in registers were written by other instructions.
__device__ __forceinline__ void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of products that were started since the last call.
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until no more than PENDING groups are running.
template <int PENDING>
__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The same. The products of `d` have then ended.
template <int PENDING, int EIGHTS>
__device__ __forceinline__ void warpgroup_wait(float (&d)[EIGHTS][4]) {
    warpgroup_wait<PENDING>();
    // Tells the compiler that the registers have changed.
#pragma unroll
    for (int i = 0; i < 4 * EIGHTS; i++) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}

// Sums of a product as operands, and their names.
#define FOUR(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 1), FOUR(d, i + 2), FOUR(d, i + 3)
#define THIRTY_TWO(d, i) SIXTEEN(d, i), SIXTEEN(d, i + 4)
#define THIRTY_TWO_NAMES \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SIXTY_FOUR_NAMES \
    THIRTY_TWO_NAMES ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
    "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HUNDRED_TWENTY_EIGHT_NAMES \
    SIXTY_FOUR_NAMES ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
    "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, " \
    "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, " \
    "%119, %120, %121, %122, %123, %124, %125, %126, %127"

// 64 rows by 16 columns: d += a · b, or d = a · b, with a in registers and b in shared memory.
__device__ __forceinline__ void warpgroup_multiply(float (&d)[2][4], const u32 (&a)[4], u64 b, bool adds = true) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.u32 adds, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, %12, adds, 1, 1, 0;\n"
        "}"
        : FOUR(d, 0), FOUR(d, 1)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)));
}

// 64 rows by 32 columns.
__device__ __forceinline__ void warpgroup_multiply(float (&d)[4][4], const u32 (&a)[4], u64 b, bool adds = true) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.u32 adds, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15}, {%16, %17, %18, %19}, %20, adds, 1, 1, 0;\n"
        "}"
        : SIXTEEN(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)));
}

// 64 rows by 64 columns.
__device__ __forceinline__ void warpgroup_multiply(float (&d)[8][4], const u32 (&a)[4], u64 b, bool adds = true) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.u32 adds, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" THIRTY_TWO_NAMES "}, "
        "{%32, %33, %34, %35}, %36, adds, 1, 1, 0;\n"
        "}"
        : THIRTY_TWO(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)));
}

// 64 rows by 128 columns.
__device__ __forceinline__ void warpgroup_multiply(float (&d)[16][4], const u32 (&a)[4], u64 b, bool adds = true) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.u32 adds, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" SIXTY_FOUR_NAMES "}, "
        "{%64, %65, %66, %67}, %68, adds, 1, 1, 0;\n"
        "}"
        : THIRTY_TWO(d, 0), THIRTY_TWO(d, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)));
}

// 64 rows by 256 columns.
__device__ __forceinline__ void warpgroup_multiply(float (&d)[32][4], const u32 (&a)[4], u64 b, bool adds = true) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.u32 adds, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" HUNDRED_TWENTY_EIGHT_NAMES "}, "
        "{%128, %129, %130, %131}, %132, adds, 1, 1, 0;\n"
        "}"
        : THIRTY_TWO(d, 0), THIRTY_TWO(d, 8), THIRTY_TWO(d, 16), THIRTY_TWO(d, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)));
}
#endif
