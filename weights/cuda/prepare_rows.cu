// Activations as the products of many rows read them: in the order in which the codes lie, and in f16.
//
// A row is multiplied by a power of two so that its largest number lies between 2^14 and 2^15, and its outputs are
// multiplied by the inverse. So bf16 loses nothing but numbers below 2^-39 of the largest, and f32 is the sum of two
// numbers in f16 to the same precision. Padded places are 0.
//
// Macros: INPUTS, PLACES (of a part of a row), PARTS (1 or 2 summands), INPUT (0 f32, 2 bf16), ORDERED (1 if `order`
// names the input of each place), ORDER_PLACES (of `order`).

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct PrepareCall {
    u64 order;
    u64 inputs;
    u64 prepared;
    u64 units;
};

constexpr u32 THREADS = 256;

__device__ __forceinline__ float element(u64 inputs, size_t at) {
    if constexpr (INPUT == 0) return __ldg(reinterpret_cast<const float*>(inputs) + at);
    return __uint_as_float(static_cast<u32>(__ldg(reinterpret_cast<const u16*>(inputs) + at)) << 16);
}

__device__ __forceinline__ u16 half_of(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ float value_of(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS) prepare_rows(const __grid_constant__ PrepareCall call) {
    __shared__ u32 of_warps[THREADS / 32];
    const size_t row = blockIdx.x;
    u32 largest = 0;
    for (u32 input = threadIdx.x; input < INPUTS; input += THREADS) {
        largest = max(largest, __float_as_uint(element(call.inputs, row * INPUTS + input)) & 0x7f800000u);
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    for (u32 warp = 0; warp < THREADS / 32; warp++) largest = max(largest, of_warps[warp]);
    // The exponent, from 2^-100 to 2^126, so that the factor and its inverse are normal numbers.
    const u32 exponent = min(max(largest, 27u << 23), 253u << 23) >> 23;
    const float factor = __uint_as_float((268u - exponent) << 23);
    if (threadIdx.x == 0) reinterpret_cast<float*>(call.units)[row] = __uint_as_float((exponent - 14u) << 23);
    u16* const to = reinterpret_cast<u16*>(call.prepared) + row * (PARTS * PLACES);
    for (u32 place = threadIdx.x; place < PLACES; place += THREADS) {
        u32 input = place;
        if (ORDERED) input = place < ORDER_PLACES ? __ldg(reinterpret_cast<const u32*>(call.order) + place) : INPUTS;
        const float x = input < INPUTS ? factor * element(call.inputs, row * INPUTS + input) : 0.0f;
        const u16 nearest = half_of(x);
        to[place] = nearest;
        if (PARTS == 2) {
            const float rest = x - value_of(nearest);
            // Beyond the largest f16 there is no rest.
            to[PLACES + place] = half_of(rest == rest ? rest : 0.0f);
        }
    }
}
