// unpack_tiles: packed tiles as tiles of halves, for attend_run_pipelined.cu, whose blocks read each of them several
// times. What halves are is in common/halves.cuh.
//
// A block owns the tile of a page for one of the heads of a section: x = page · heads + head. The copy engine fetches
// it into shared memory, and each warp unpacks 16 of its tokens of keys and every second block of 32 of its tokens of
// values.
//
//   halves  [page][head of the section]: a tile of f16 (common/tile.cuh) of keys, and one of values. Channels of packed
//           keys are in the order of `channel_place`.
//
// Memory: the packed tile once; halves are written in lines of 128 bytes, a matrix each, which mostly stay in the L2
// cache. Cost: about 2 instructions for an element.
//
// In bounds: pages were checked on the host, which has room for all of them.

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/attend_call.cuh"
#include "common/tile_halves.cuh"

// A tile in memory.
struct TileHalves {
    static constexpr int UNROLLED = 1;
    static constexpr bool KEEPS_BITS = false;

    u8* keys;

    // Word r of a block is a lane's part of a matrix: rows 8 (r % 2) and columns 8 (r / 2).
    __device__ __forceinline__ void put_keys(int m, int f, const u32 (&words)[4], int lane) const {
#pragma unroll
        for (int r = 0; r < 4; r++) put(keys, (2 * m + r % 2) * (HEAD_DIM / 8) + 2 * f + r / 2, words[r], lane);
    }

    __device__ __forceinline__ void put_values(int m, int n, const u32 (&words)[4], int lane) const {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            put(keys + TILE_HALVES_BYTES, m * (HEAD_DIM / 4) + 4 * n + r % 2 * 2 + r / 2, words[r], lane);
        }
    }

    static __device__ __forceinline__ void put(u8* tile, int matrix, u32 word, int lane) {
        ((u32*)(tile + matrix * MATRIX_BYTES))[lane] = word;
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) unpack_tiles(const __grid_constant__ AttendCall call) {
    extern __shared__ __align__(LINE_BYTES) u8 room[];
    __shared__ u64 arrival;
    const int lane = threadIdx.x & 31;
    const int warp = threadIdx.x >> 5;
    const u32 stage = shared_address(room);
    const u32 barrier = shared_address(&arrival);
    if (threadIdx.x == 0) {
        barrier_init(barrier);
        shared_visible();
    }
    __syncthreads();
    // The kernel before may store what is unpacked, or read the halves of the section before.
    await_earlier_kernels();
    admit_later_kernels();
    if (threadIdx.x == 0) {
        const u32 kv_head = call.first_head + blockIdx.x % call.section_heads;
        const u8* const from = (const u8*)(call.pages[blockIdx.x / call.section_heads] + (u64)kv_head * HEAD_BYTES);
        barrier_expect(barrier, HEAD_BYTES);
        copy_bulk(stage, from, HEAD_BYTES, barrier);
    }
    barrier_wait(barrier, 0);
    constexpr int blocks = TILE_TOKENS / BLOCK_TOKENS;
    constexpr int runs = TILE_TOKENS / 32;
    static_assert(WARPS == blocks, "a warp for each block of 16 tokens");
    const TileHalves halves = {call.halves + (u64)blockIdx.x * (2 * TILE_HALVES_BYTES)};
    unpack_keys(halves, stage, stage + KEY_RANGES_AT, warp, KeyBlocks(), lane);
    unpack_values(halves, stage + VALUES_AT, stage + VALUE_RANGES_AT, warp % runs, warp / runs, WARPS / runs, lane);
}
