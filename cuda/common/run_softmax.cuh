// What softmax over many rows takes from the products of a lane, which are [8 tokens][row, tokens 2 c and 2 c + 1]: four
// lanes have the same rows.

#pragma once

#include "common/ptx.cuh"

// The score of a masked token: below all others, and finite, so that differences exist.
constexpr float NO_SCORE = -1e30f;

// Weights are halves up to 2^15. If one would be larger, references move so that it is at most 2^6 (as in
// common/weights.cuh).
constexpr float MOST_WEIGHT = 15.0f;
constexpr float START_WEIGHT = 6.0f;

// Turns the products of a row into scores: score = products · delta + base. Where tokens have ranges that are applied to
// products, the base is what a minimum of 1 adds to a product.
struct RowConstants {
    float delta;
    float base;
};

// The least delta. That of a row of zeros may be zero, and so may that of scores which calibration makes equal. The
// products of hidden tokens are minus infinity, and would become NaN. With this one such scores stay equal.
constexpr float LEAST_DELTA = 1e-30f;

__device__ __forceinline__ float row_delta(float unit, float scale) { return fmaxf(unit * scale, LEAST_DELTA); }

// The largest over the four lanes that hold the same rows, and the sum.
__device__ __forceinline__ float max_of_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

__device__ __forceinline__ float sum_of_quad(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// The largest of a lane's row `h`.
template <int EIGHTS>
__device__ __forceinline__ float largest_of_row(const float (&products)[EIGHTS][4], int h) {
    float largest = fmaxf(products[0][2 * h], products[0][2 * h + 1]);
#pragma unroll
    for (int j = 1; j < EIGHTS; j++) largest = fmaxf(largest, fmaxf(products[j][2 * h], products[j][2 * h + 1]));
    return largest;
}
