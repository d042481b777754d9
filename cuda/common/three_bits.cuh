// Codes of 3 bits as bytes, assembled from words with their low two bits and words with their top bits.

#pragma once

// The codes of block `block` in one word of each kind: planes of two bits, and of one.
__device__ __forceinline__ u32 three_bit_bytes(u32 low, u32 top, int block) {
    const int plane = block % TOP_PLANES;
    const u32 high = plane < 2 ? top << (2 - plane) : top >> (plane - 2);
    return low >> 2 * (block % 4) & 0x03030303u | high & 0x04040404u;
}

// The codes of a lane's words.
__device__ __forceinline__ void three_bit_block(u32 (&a)[4], const uint4& low, const uint4& top, int block) {
    a[0] = three_bit_bytes(low.x, top.x, block);
    a[1] = three_bit_bytes(low.y, top.y, block);
    a[2] = three_bit_bytes(low.z, top.z, block);
    a[3] = three_bit_bytes(low.w, top.w, block);
}

// Levels of a codebook of 3 bits as signed bytes (common/level_bytes.cuh): nibbles of codes select bytes of a table.
__device__ __forceinline__ u32 three_bit_levels(u32 codes) {
    const u32 selector = permute_bytes(codes | codes >> 4, 0u, 0x4420u);
    return permute_bytes(0xf3d8ba91u, 0x6e45270cu, selector);
}
