// Instructions of compute capability 9.0: barriers in shared memory, copies of boxes of a tensor, clusters, and
// products of the four warps of a warpgroup.
//
// Operands of products are blocks of 64 halves a row in shared memory, 128 bytes, whose 16-byte parts are swapped: part
// p of row r lies at part p ^ (r % 8). Blocks begin at multiples of 1024 bytes.

#pragma once

__device__ __forceinline__ u32 shared_at(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes barriers visible to the blocks of the cluster and to the copy engine.
__device__ __forceinline__ void barriers_visible() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the same barrier of another block of the cluster.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(block)
        : "memory");
}

// Arrives, and names the bytes after which the phase ends.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase of this parity.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Copies the box of a tensor that begins at column `x` of row `y` to shared memory.
__device__ __forceinline__ void copy_box(u32 to, const void* map, u32 x, u32 y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

// The same to the blocks of the cluster whose bits are set. Each counts the bytes on its own barrier.
__device__ __forceinline__ void copy_box_to(u32 to, const void* map, u32 x, u32 y, u32 barrier, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
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

// Makes this thread's writes to shared memory visible to the copy engine.
__device__ __forceinline__ void operands_visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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

template <u32 COUNT>
__device__ __forceinline__ void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <u32 COUNT>
__device__ __forceinline__ void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Names blocks of operands for products: eight rows take 1024 bytes.
__device__ __forceinline__ u64 operand(u32 at) {
    return static_cast<u64>(at >> 4 & 0x3fffu) | 1ull << 16 | static_cast<u64>(1024u >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until no more than PENDING groups of products are running.
template <u32 PENDING>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Tells the compiler that products have changed the sums.
template <u32 EIGHTS>
__device__ __forceinline__ void changed(float (&d)[EIGHTS][4]) {
#pragma unroll
    for (u32 i = 0; i < 4 * EIGHTS; i++) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}

#define SUM4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define SUM16(d, i) SUM4(d, i), SUM4(d, i + 1), SUM4(d, i + 2), SUM4(d, i + 3)
#define SUM32(d, i) SUM16(d, i), SUM16(d, i + 4)
#define NAMES_0 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_32 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
    "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_64 \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
    "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_96 \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
    "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// 64 rows of a, which registers hold, by the rows of b, 16 inputs: d = a · bᵀ, or d += a · bᵀ. Lane 4 · r + t of warp w
// has the halves 2t, 2t + 1 of row 16w + r, of row 16w + r + 8, and then the halves 2t + 8, 2t + 9 of both.
__device__ __forceinline__ void multiply_held(float (&d)[8][4], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile("{\n.reg .pred adds;\nsetp.ne.u32 adds, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" NAMES_0 "}, {%32, %33, %34, %35}, %36, adds, "
                 "1, 1, 0;\n}"
                 : SUM32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)));
}

__device__ __forceinline__ void multiply_held(float (&d)[16][4], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile("{\n.reg .pred adds;\nsetp.ne.u32 adds, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" NAMES_0 ", " NAMES_32
                 "}, {%64, %65, %66, %67}, %68, adds, 1, 1, 0;\n}"
                 : SUM32(d, 0), SUM32(d, 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)));
}

__device__ __forceinline__ void multiply_held(float (&d)[32][4], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile("{\n.reg .pred adds;\nsetp.ne.u32 adds, %133, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" NAMES_0 ", " NAMES_32 ", " NAMES_64
                 ", " NAMES_96 "}, {%128, %129, %130, %131}, %132, adds, 1, 1, 0;\n}"
                 : SUM32(d, 0), SUM32(d, 8), SUM32(d, 16), SUM32(d, 24)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)));
}
