// uncentre_keys: adds the centre of their sequence back to keys in dense f32 rows [kv_head][token][channel], in place.
//
// One thread owns one element; neighbours own neighbouring channels.
//
// In bounds: threads beyond the last element return; the rows were made for the tokens of the call, and the slot was
// checked on the host.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"

extern "C" __global__ void uncentre_keys(const RowsCall call) {
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 of_head = (u64)call.tokens * TENSOR_CHANNELS;
    if (index >= of_head * call.kv_heads) return;
    const u32 kv_head = (u32)(index / of_head);
    float* x = (float*)call.rows + index;
    *x = __fadd_rn(*x, call.centre[kv_head * TENSOR_CHANNELS + (u32)(index % TENSOR_CHANNELS)]);
}
