// Rows that stay in registers while others stream through, multiplied by MMAs: the resident rows are the A operand, the
// passing ones the 8 columns of the B operand.
//
// A warp owns 16 · M_TILES resident rows. Since a sum over channels may take them in any order, lane c of a quad takes
// the channels 32 p + 8 c .. + 8 for the two steps of pair p, of both operands: 16 bytes of a 16-bit row. Rows whose
// channels do not fill the last pair end with zeros.
//
// Passing rows lie in shared memory in groups of eight ("eights"), in the order in which lanes read them:
// [eight][plane][pair][lane], 16 bytes each, so that every load of a warp is 512 contiguous bytes.
//
// Halves hold f16 exactly, and bf16 within the range of normal halves. f32 elements are two halves, x = high + low, in
// two planes, and a product is high · high + high · low + low · high: about 22 bits.
//
// With WARPGROUPS (compute capability 9.0; halves only) the four warps of a warpgroup multiply their rows with AT_ONCE
// eights together, and the tensor cores read the passing rows from shared memory asynchronously, as matrices of 8 rows
// and 8 channels. Each 16 bytes are therefore stored as four words, [eight][pair][word][lane].
//
// Macros: HEAD_DIM, KEY_TYPE (of the resident rows), QUERY_TYPE (of the passing ones), KEYS_ALIGNED and QUERIES_ALIGNED
// (every row begins at a multiple of 16 bytes), WARPGROUPS, WARPS of a block, M_TILES.

#pragma once

#include "common/ptx.cuh"
#include "common/elements.cuh"

constexpr u32 PAIRS = (HEAD_DIM + 31) / 32;
constexpr bool KEYS_SPLIT = KEY_TYPE == ELEMENTS_F32;
constexpr bool QUERIES_SPLIT = QUERY_TYPE == ELEMENTS_F32;
// Rows of an A fragment of which a lane holds a part.
constexpr u32 SLOTS = 2 * M_TILES;
constexpr u32 WARP_ROWS = 16 * M_TILES;
// Number of warps that multiply together, and their rows.
constexpr u32 GROUP_WARPS = WARPGROUPS ? 4 : 1;
constexpr u32 GROUP_ROWS = GROUP_WARPS * WARP_ROWS;
// 16 bytes each, of eight passing rows.
constexpr u32 PLANE_LOADS = 32 * PAIRS;
constexpr u32 EIGHT_LOADS = PLANE_LOADS * (QUERIES_SPLIT ? 2 : 1);
// Eights that a warp multiplies at once, so that its products wait less for each other.
constexpr u32 AT_ONCE = WARPGROUPS ? 7 : 2;

struct Resident {
    u32 high[M_TILES][2 * PAIRS][4];
    u32 low[M_TILES][2 * PAIRS][4];
};

// Eight elements as four pairs of halves, and the rest of f32 elements.
template <u32 TYPE, bool ALIGNED>
__device__ __forceinline__ void load_eight(uint4& high, uint4& low, const void* elements, u64 index) {
    if constexpr (TYPE == ELEMENTS_F16 && ALIGNED) {
        high = *(const uint4*)((const u16*)elements + index);
    } else {
        float x[8];
        if constexpr (TYPE == ELEMENTS_F32 && ALIGNED) {
            const float4* from = (const float4*)((const float*)elements + index);
            const float4 a = from[0], b = from[1];
            x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
        } else if constexpr (TYPE == ELEMENTS_BF16 && ALIGNED) {
            const uint4 words = *(const uint4*)((const u16*)elements + index);
            const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (u32 i = 0; i < 8; i++) x[i] = bfloat_value(pairs[i / 2] >> 16 * (i % 2) & 0xffffu);
        } else {
#pragma unroll
            for (u32 i = 0; i < 8; i++) x[i] = load_element(elements, TYPE, index + i);
        }
        u32 halves[4], rest[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const float a = x[2 * i], b = x[2 * i + 1];
            halves[i] = half_pair(a, b);
            rest[i] = half_pair(a - half_value(halves[i] & 0xffffu), b - half_value(halves[i] >> 16));
        }
        high = make_uint4(halves[0], halves[1], halves[2], halves[3]);
        if constexpr (TYPE == ELEMENTS_F32) low = make_uint4(rest[0], rest[1], rest[2], rest[3]);
    }
}

// Stores eight channels of a row in words of the two steps of pair `p`. Row `row` of a tile of 16 lies in words 0 and 2
// of an A fragment, row + 8, `half` 1, in words 1 and 3.
__device__ __forceinline__ void set_resident(u32 (&steps)[2 * PAIRS][4], u32 p, u32 half, const uint4& words) {
    // Zero, hidden from the compiler. Otherwise the compiler would leave the words in the registers that 16-byte loads
    // write, and collect the four words of a fragment again for every product.
    const u32 zero = blockIdx.z;
    steps[2 * p][half] = words.x ^ zero;
    steps[2 * p][2 + half] = words.y ^ zero;
    steps[2 * p + 1][half] = words.z ^ zero;
    steps[2 * p + 1][2 + half] = words.w ^ zero;
}

__device__ __forceinline__ void load_resident_row(Resident& resident, u32 tile, u32 half, const void* rows, u64 start,
                                                  bool exists, u32 lane) {
#pragma unroll
    for (u32 p = 0; p < PAIRS; p++) {
        const u32 channel = 32 * p + 8 * (lane % 4);
        uint4 high = make_uint4(0, 0, 0, 0);
        uint4 low = high;
        if (exists && channel < HEAD_DIM) load_eight<KEY_TYPE, KEYS_ALIGNED != 0>(high, low, rows, start + channel);
        set_resident(resident.high[tile], p, half, high);
        if constexpr (KEYS_SPLIT) {
            resident.low[tile][2 * p][half] = low.x;
            resident.low[tile][2 * p][2 + half] = low.y;
            resident.low[tile][2 * p + 1][half] = low.z;
            resident.low[tile][2 * p + 1][2 + half] = low.w;
        }
    }
}

// Stages a lane's eight channels of a passing row, which begins at `start`, for pair `p` of an eight; zeros if the row
// does not exist. They may arrive later: copies_commit and copies_wait.
__device__ __forceinline__ void stage_passing(uint4* eight, u32 p, const void* rows, u64 start, bool exists, u32 lane) {
    const u32 channel = 32 * p + 8 * (lane % 4);
    exists = exists && channel < HEAD_DIM;
    if constexpr (QUERY_TYPE == ELEMENTS_F16 && QUERIES_ALIGNED && !WARPGROUPS) {
        const u16* from = (const u16*)rows + (exists ? start + channel : 0);
        copy_16_async_or_zeros(shared_address(eight + 32 * p + lane), from, exists);
    } else if constexpr (QUERY_TYPE == ELEMENTS_F16 && QUERIES_ALIGNED) {
        const u32* from = (const u32*)((const u16*)rows + (exists ? start + channel : 0));
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            copy_4_async_or_zeros(shared_address((u32*)(eight + 32 * p) + 32 * i + lane), from + i, exists);
        }
    } else {
        uint4 high = make_uint4(0, 0, 0, 0);
        uint4 low = high;
        if (exists) load_eight<QUERY_TYPE, QUERIES_ALIGNED != 0>(high, low, rows, start + channel);
        if constexpr (WARPGROUPS) {
            u32* words = (u32*)(eight + 32 * p) + lane;
            words[0] = high.x, words[32] = high.y, words[64] = high.z, words[96] = high.w;
        } else {
            eight[32 * p + lane] = high;
        }
        if constexpr (QUERIES_SPLIT) eight[PLANE_LOADS + 32 * p + lane] = low;
    }
}

// Products of the warp's resident rows with AT_ONCE consecutive eights. In tile m, [m][0] and [1] belong to row lane /
// 4 with columns 2 (lane % 4) and the one after, [2] and [3] to row lane / 4 + 8.
struct Products {
    float of[AT_ONCE][M_TILES][4];

    __device__ __forceinline__ void add(u32 eight, u32 step, const u32 (&rows)[M_TILES][2 * PAIRS][4], u32 b0, u32 b1) {
#pragma unroll
        for (u32 m = 0; m < M_TILES; m++) multiply_f16(of[eight][m], rows[m][step], b0, b1);
    }
};

#if WARPGROUPS
// Adds the products of 64 rows, 16 of each warp, with 56 to tile `m`. A is in registers, B are matrices in shared
// memory. The tensor cores read and write until warpgroup_end.
__device__ __forceinline__ void warpgroup_multiply(float (&d)[7][M_TILES][4], u32 m, const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.u32 adds, %33, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n56k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27}, {%28, %29, %30, %31}, %32, adds, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][m][0]), "+f"(d[0][m][1]), "+f"(d[0][m][2]), "+f"(d[0][m][3]),
          "+f"(d[1][m][0]), "+f"(d[1][m][1]), "+f"(d[1][m][2]), "+f"(d[1][m][3]),
          "+f"(d[2][m][0]), "+f"(d[2][m][1]), "+f"(d[2][m][2]), "+f"(d[2][m][3]),
          "+f"(d[3][m][0]), "+f"(d[3][m][1]), "+f"(d[3][m][2]), "+f"(d[3][m][3]),
          "+f"(d[4][m][0]), "+f"(d[4][m][1]), "+f"(d[4][m][2]), "+f"(d[4][m][3]),
          "+f"(d[5][m][0]), "+f"(d[5][m][1]), "+f"(d[5][m][2]), "+f"(d[5][m][3]),
          "+f"(d[6][m][0]), "+f"(d[6][m][1]), "+f"(d[6][m][2]), "+f"(d[6][m][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)adds));
}

// Waits for the products, and tells the compiler that they have changed.
__device__ __forceinline__ void warpgroup_end(float (&d)[7][M_TILES][4]) {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (u32 i = 0; i < 28 * M_TILES; i++) asm volatile("" : "+f"(d[i / (4 * M_TILES)][i / 4 % M_TILES][i % 4]));
}

// Eights in shared memory are matrices of 8 rows and 8 channels, 128 bytes each. The two of a step are contiguous.
__device__ __forceinline__ void multiply_staged(Products& products, const Resident& resident, const uint4* staged, u32) {
    const u64 strides = (u64)(128 >> 4) << 16 | (u64)(16 * EIGHT_LOADS >> 4) << 32;
    const u64 matrices = strides | (shared_address(staged) >> 4 & 0x3fff);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (u32 step = 0; step < 2 * PAIRS; step++) {
#pragma unroll
        for (u32 m = 0; m < M_TILES; m++) {
            warpgroup_multiply(products.of, m, resident.high[m][step], matrices + 16 * step, step > 0);
        }
    }
    warpgroup_end(products.of);
}
#else
__device__ __forceinline__ void multiply_staged(Products& products, const Resident& resident, const uint4* staged,
                                                u32 lane) {
#pragma unroll
    for (u32 i = 0; i < AT_ONCE * M_TILES * 4; i++) products.of[i / (4 * M_TILES)][i / 4 % M_TILES][i % 4] = 0.0f;
#pragma unroll
    for (u32 p = 0; p < PAIRS; p++) {
        uint4 b[AT_ONCE];
#pragma unroll
        for (u32 e = 0; e < AT_ONCE; e++) b[e] = staged[e * EIGHT_LOADS + 32 * p + lane];
#pragma unroll
        for (u32 e = 0; e < AT_ONCE; e++) products.add(e, 2 * p, resident.high, b[e].x, b[e].y);
#pragma unroll
        for (u32 e = 0; e < AT_ONCE; e++) products.add(e, 2 * p + 1, resident.high, b[e].z, b[e].w);
        if constexpr (KEYS_SPLIT) {
#pragma unroll
            for (u32 e = 0; e < AT_ONCE; e++) products.add(e, 2 * p, resident.low, b[e].x, b[e].y);
#pragma unroll
            for (u32 e = 0; e < AT_ONCE; e++) products.add(e, 2 * p + 1, resident.low, b[e].z, b[e].w);
        }
        if constexpr (QUERIES_SPLIT) {
#pragma unroll
            for (u32 e = 0; e < AT_ONCE; e++) {
                const uint4 rest = staged[e * EIGHT_LOADS + PLANE_LOADS + 32 * p + lane];
                products.add(e, 2 * p, resident.high, rest.x, rest.y);
                products.add(e, 2 * p + 1, resident.high, rest.z, rest.w);
            }
        }
    }
}
#endif
