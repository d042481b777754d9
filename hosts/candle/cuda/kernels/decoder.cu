// What a decoder does between its products. A thread takes eight elements that follow each other at a time.
//
// HALVES: elements are f16 in place of f32. Sums and functions are in f32, and each result is rounded once.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Eight {
    float of[8];
};

__device__ __forceinline__ float2 floats_of(u32 halves) {
    float2 x;
    asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;\n}"
        : "=f"(x.x), "=f"(x.y)
        : "r"(halves));
    return x;
}

__device__ __forceinline__ u32 halves_of(float x, float y) {
    u32 halves;
    asm("{\n .reg .b16 low, high;\n cvt.rn.f16.f32 low, %1;\n cvt.rn.f16.f32 high, %2;\n mov.b32 %0, {low, high};\n}"
        : "=r"(halves)
        : "f"(x), "f"(y));
    return halves;
}

// Waits for the kernel before, which may still run when this one begins. The next one may begin already.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Four elements from an address that is a multiple of their size.
__device__ __forceinline__ float4 load_four(u64 base, size_t at) {
#if HALVES
    const uint2 words = reinterpret_cast<const uint2*>(base)[at / 4];
    const float2 a = floats_of(words.x), b = floats_of(words.y);
    return make_float4(a.x, a.y, b.x, b.y);
#else
    return reinterpret_cast<const float4*>(base)[at / 4];
#endif
}

__device__ __forceinline__ void store_four(u64 base, size_t at, float4 x) {
#if HALVES
    reinterpret_cast<uint2*>(base)[at / 4] = make_uint2(halves_of(x.x, x.y), halves_of(x.z, x.w));
#else
    reinterpret_cast<float4*>(base)[at / 4] = x;
#endif
}

__device__ __forceinline__ Eight load(u64 base, size_t at) {
    Eight x;
#if HALVES
    const uint4 words = reinterpret_cast<const uint4*>(base)[at / 8];
    const u32 all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        const float2 two = floats_of(all[pair]);
        x.of[2 * pair] = two.x;
        x.of[2 * pair + 1] = two.y;
    }
#else
    const float4 a = load_four(base, at), b = load_four(base, at + 4);
    x.of[0] = a.x, x.of[1] = a.y, x.of[2] = a.z, x.of[3] = a.w;
    x.of[4] = b.x, x.of[5] = b.y, x.of[6] = b.z, x.of[7] = b.w;
#endif
    return x;
}

__device__ __forceinline__ void store(u64 base, size_t at, const Eight& x) {
#if HALVES
    reinterpret_cast<uint4*>(base)[at / 8] = make_uint4(halves_of(x.of[0], x.of[1]), halves_of(x.of[2], x.of[3]),
                                                        halves_of(x.of[4], x.of[5]), halves_of(x.of[6], x.of[7]));
#else
    store_four(base, at, make_float4(x.of[0], x.of[1], x.of[2], x.of[3]));
    store_four(base, at + 4, make_float4(x.of[4], x.of[5], x.of[6], x.of[7]));
#endif
}

// The element as it is stored.
__device__ __forceinline__ float rounded(float x) {
#if HALVES
    return floats_of(halves_of(x, 0.0f)).x;
#else
    return x;
#endif
}

#ifdef WIDTH
struct NormCall {
    u64 stream;
    u64 added;
    u64 weight;
    u64 sum;
    u64 normed;
    float epsilon;
    u32 padding;
};

// Elements of a thread, by eights.
constexpr int EIGHTS = (WIDTH / 8 + THREADS - 1) / THREADS;

// The sum of two rows and its norm. A block takes a row.
extern "C" __global__ void __launch_bounds__(THREADS) add_and_norm(const NormCall call) {
    __shared__ float sums[THREADS / 32];
    const size_t row = static_cast<size_t>(blockIdx.x) * WIDTH;
    wait_for_inputs();
    Eight x[EIGHTS];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
        const int at = 8 * (threadIdx.x + i * THREADS);
        if (at >= WIDTH) break;
        x[i] = load(call.stream, row + at);
        const Eight added = load(call.added, row + at);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x[i].of[j] = rounded(x[i].of[j] + added.of[j]);
            squares += x[i].of[j] * x[i].of[j];
        }
        store(call.sum, row + at, x[i]);
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, apart);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
    __syncthreads();
    float all = 0.0f;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) all += sums[warp];
    const float by = rsqrtf(all / WIDTH + call.epsilon);
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
        const int at = 8 * (threadIdx.x + i * THREADS);
        if (at >= WIDTH) break;
        const Eight weight = load(call.weight, at);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i].of[j] *= by * weight.of[j];
        store(call.normed, row + at, x[i]);
    }
}
#endif

#ifdef HEAD_DIM
struct HeadsCall {
    u64 joined;
    u64 cosines;
    u64 sines;
    u64 queries;
    u64 keys;
    u64 values;
    u64 rows;
};

// Heads of a row.
constexpr int HEADS = QUERY_HEADS + 2 * KV_HEADS;
constexpr int HALF = HEAD_DIM / 2;

// Queries, keys and values of a row as tensors of their own, the former two rotated. A thread takes four pairs.
extern "C" __global__ void __launch_bounds__(256) split_heads(const HeadsCall call) {
    constexpr u32 UNITS = HEADS * HEAD_DIM / 8;
    const u64 unit = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x;
    const u64 row = unit / UNITS;
    if (row >= call.rows) return;
    const u32 head = static_cast<u32>(unit % UNITS) / (HEAD_DIM / 8), part = unit % (HEAD_DIM / 8);
    const size_t from = row * (HEADS * HEAD_DIM) + head * HEAD_DIM;
    const bool is_query = head < QUERY_HEADS, is_value = head >= QUERY_HEADS + KV_HEADS;
    const u64 base = is_query ? call.queries : is_value ? call.values : call.keys;
    const u32 count = is_query ? QUERY_HEADS : KV_HEADS;
    const u32 first = is_query ? 0 : is_value ? QUERY_HEADS + KV_HEADS : QUERY_HEADS;
    const size_t to = (row * count + head - first) * HEAD_DIM;
    wait_for_inputs();
    if (is_value) {
        store(base, to + 8 * part, load(call.joined, from + 8 * part));
        return;
    }
    const float4 cosine = load_four(call.cosines, row * HALF + 4 * part);
    const float4 sine = load_four(call.sines, row * HALF + 4 * part);
    const float c[4] = {cosine.x, cosine.y, cosine.z, cosine.w}, s[4] = {sine.x, sine.y, sine.z, sine.w};
#if NEIGHBOURS
    Eight x = load(call.joined, from + 8 * part);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float a = x.of[2 * i], b = x.of[2 * i + 1];
        x.of[2 * i] = a * c[i] - b * s[i];
        x.of[2 * i + 1] = a * s[i] + b * c[i];
    }
    store(base, to + 8 * part, x);
#else
    const float4 low = load_four(call.joined, from + 4 * part);
    const float4 high = load_four(call.joined, from + HALF + 4 * part);
    float a[4] = {low.x, low.y, low.z, low.w}, b[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float turned = a[i] * c[i] - b[i] * s[i];
        b[i] = a[i] * s[i] + b[i] * c[i];
        a[i] = turned;
    }
    store_four(base, to + 4 * part, make_float4(a[0], a[1], a[2], a[3]));
    store_four(base, to + HALF + 4 * part, make_float4(b[0], b[1], b[2], b[3]));
#endif
}
#endif

#ifdef INNER
struct GateCall {
    u64 joined;
    u64 gated;
    u64 rows;
};

// activation(gate) · up of rows that hold both.
extern "C" __global__ void __launch_bounds__(256) gate(const GateCall call) {
    constexpr u32 UNITS = INNER / 8;
    const u64 unit = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x;
    const u64 row = unit / UNITS;
    if (row >= call.rows) return;
    const size_t at = 8 * (unit % UNITS);
    wait_for_inputs();
    Eight x = load(call.joined, row * (2 * INNER) + at);
    const Eight up = load(call.joined, row * (2 * INNER) + INNER + at);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float g = x.of[j];
#if GELU
        const float activated = 0.5f * g * (1.0f + tanhf(0.7978845608f * g * (1.0f + 0.044715f * g * g)));
#else
        const float activated = g / (1.0f + __expf(-g));
#endif
        x.of[j] = activated * up.of[j];
    }
    store(call.gated, row * INNER + at, x);
}
#endif
