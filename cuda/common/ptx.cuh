// Instructions that have no name in CUDA C++, and the integer types of the kernels. Nothing here needs a header of the
// toolkit, so NVRTC can compile the kernels where only its library is installed.

#pragma once

#include "device/warpgroup.cuh"

typedef unsigned char u8;
typedef unsigned short u16;

constexpr u32 ALL_LANES = 0xffffffffu;

// The nearest half, ties to even, as 16 bits. Infinite if the number is too large.
__device__ __forceinline__ u32 half_bits(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ float half_value(u32 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
    return x;
}

// The nearest bfloat, ties to even, as 16 bits.
__device__ __forceinline__ u32 bfloat_bits(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// A bfloat is the high half of a float.
__device__ __forceinline__ float bfloat_value(u32 bits) { return __uint_as_float(bits << 16); }

// Two halves in one word, `low` in the low half.
__device__ __forceinline__ u32 half_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Pairs of halves: a · b, a · b + c and a · b − c rounded once, the larger.
__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

__device__ __forceinline__ u32 multiply_add_pair(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

__device__ __forceinline__ u32 multiply_subtract_pair(u32 a, u32 b, u32 c) {
    u32 out;
    asm("{\n.reg .b32 negative;\nneg.f16x2 negative, %3;\nfma.rn.f16x2 %0, %1, %2, negative;\n}"
        : "=r"(out)
        : "r"(a), "r"(b), "r"(c));
    return out;
}

__device__ __forceinline__ u32 max_pair(u32 a, u32 b) {
    u32 out;
    asm("max.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Byte i of the result is byte s & 7 of (high : low), where s is nibble i of `selector`. If s & 8 is set, the result is
// that byte's sign.
__device__ __forceinline__ u32 permute_bytes(u32 low, u32 high, u32 selector) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
    return out;
}

// The fragment of an 8×8 matrix of halves, transposed.
__device__ __forceinline__ u32 transpose_8x8(u32 fragment) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(fragment));
    return out;
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

// Copies 16 bytes to shared memory without waiting; see copies_commit and copies_wait.
__device__ __forceinline__ void copy_16_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Prefetches the line of an address into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// Copies 16 bytes, or writes 16 zeros without reading.
__device__ __forceinline__ void copy_16_async_or_zeros(u32 to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

// Copies 4 bytes to shared memory without waiting, or writes zeros there without reading.
__device__ __forceinline__ void copy_4_async_or_zeros(u32 to, const void* from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(exists ? 4 : 0) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Arrives at a barrier of shared memory when this thread's copies have ended.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until no more than PENDING of this thread's groups of copies are in flight.
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Waits until `threads` threads have arrived at a barrier of the block that is known by its number, this one included;
// or arrives without waiting.
__device__ __forceinline__ void group_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void group_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Whether one of the threads says so, which meet at a barrier of the block.
__device__ __forceinline__ bool group_any(int number, int threads, bool one) {
    u32 any;
    asm volatile(
        "{\n"
        ".reg .pred one, any;\n"
        "setp.ne.u32 one, %3, 0;\n"
        "bar.red.or.pred any, %1, %2, one;\n"
        "selp.u32 %0, 1, 0, any;\n"
        "}"
        : "=r"(any)
        : "r"(number), "r"(threads), "r"((u32)one)
        : "memory");
    return any != 0u;
}

// Copies bytes, a multiple of 16, to shared memory through the copy engine, counted on a barrier. They are evicted from
// the L2 cache first, since a step reads them once.
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    u64 once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(once)
        : "memory");
}

// The same for bytes that other blocks read, too.
__device__ __forceinline__ void copy_bulk_shared(u32 to, const void* from, u32 bytes, u32 barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
#endif
}

// What this thread wrote to global memory is there for the copy engine, if a barrier of the block comes before a copy.
__device__ __forceinline__ void global_visible_to_copies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.acq_rel.gpu;\nfence.proxy.async.global;" ::: "memory");
#endif
}

// Lets the next kernel of the stream begin, if it was launched with programmatic serialisation.
__device__ __forceinline__ void admit_later_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until all kernels before this one are complete and what they wrote is visible.
__device__ __forceinline__ void await_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Adds one to a counter, for all blocks of the device. The addition comes after everything that this block wrote before
// its last barrier, and before everything that it reads after the next one.
__device__ __forceinline__ u32 arrive(u32* counter) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Signals that this thread runs; see cluster_started.
__device__ __forceinline__ void cluster_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Waits until all threads of the cluster have signalled that they run. Only then may their shared memory be written.
__device__ __forceinline__ void cluster_started() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Waits for all blocks of the cluster. Earlier writes are visible afterwards.
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes the float at this block's address `at` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ void store_cluster(u32 at, u32 rank, float x) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .u32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.f32 [there], %2;\n"
        "}" ::"r"(at),
        "r"(rank), "f"(x)
        : "memory");
#endif
}

// Stores four 8×8 matrices of halves, given as fragments: row k of matrix j goes to the address of lane 8 j + k.
__device__ __forceinline__ void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
#endif
}

// The same of transposed matrices: column k of fragment j goes to the address of lane 8 j + k.
__device__ __forceinline__ void store_matrices_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
#endif
}

// Loads four 8×8 matrices of halves as fragments: row k of matrix j is at the address of lane 8 j + k.
__device__ __forceinline__ uint4 load_matrices(u32 from) {
    uint4 words;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(from)
                 : "memory");
    return words;
}

__device__ __forceinline__ uint4 load_shared_16(u32 from) {
    uint4 words;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(from)
                 : "memory");
    return words;
}

__device__ __forceinline__ uint2 load_shared_8(u32 from) {
    uint2 words;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(from) : "memory");
    return words;
}

__device__ __forceinline__ u32 load_shared_4(u32 from) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

// c += a · b of 16×16 by 16×8 halves, in single precision.
__device__ __forceinline__ void multiply_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = a · b + c of 16×32 by 32×8 bytes. Those of `a` are signed or unsigned, those of `b` are signed.
template <bool SIGNED>
__device__ __forceinline__ void multiply_bytes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const int* c) {
    if constexpr (SIGNED) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
    } else {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
    }
}

// d = a · b + c of bytes. Those of `a` are signed or unsigned, those of `b` are unsigned.
template <bool SIGNED>
__device__ __forceinline__ void multiply_unsigned_bytes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                        const int* c) {
    if constexpr (SIGNED) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
    } else {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
    }
}
