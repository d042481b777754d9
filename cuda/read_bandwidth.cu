// read_bandwidth: reads memory once and sums its words, to measure how fast the device reads.
//
// A block of 256 threads reads blocks of READ_LOADS · 256 groups of 16 bytes, all blocks of the grid in turn;
// neighbours read neighbouring groups. The host knows the sum modulo 2^32 and compares it, so that no compiler can
// leave a load out.
//
// In bounds: the memory is `blocks` whole blocks.

#pragma once

#include "common/ptx.cuh"

constexpr u32 READ_LOADS = 16;

extern "C" __global__ void __launch_bounds__(256) read_bandwidth(const uint4* words, u32 blocks, u32* sum) {
    u32 total = 0u;
    for (u32 block = blockIdx.x; block < blocks; block += gridDim.x) {
        const uint4* from = words + (u64)block * (READ_LOADS * 256) + threadIdx.x;
        uint4 loads[READ_LOADS];
#pragma unroll
        for (u32 i = 0; i < READ_LOADS; i++) loads[i] = __ldcs(from + i * 256);
#pragma unroll
        for (u32 i = 0; i < READ_LOADS; i++) total += loads[i].x + loads[i].y + loads[i].z + loads[i].w;
    }
    total = __reduce_add_sync(ALL_LANES, total);
    if (threadIdx.x % 32 == 0) atomicAdd(sum, total);
}
