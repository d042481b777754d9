// attend by multiply-adds: one decode step of a segment format with sketched keys.
//
//   score_t = (q · level_t + R q · sign_t) log2(e)/√d,   out = Σ_t 2^(score_t) v_t / Σ_t 2^(score_t)
//
// with levels and signs times the norms they are relative to. A block owns one item for one KV head and a chunk of query
// heads. It takes a tile at a time: levels, and then signs, become floats in shared memory, a thread scores one token for all heads; a warp turns the scores of a head into weights relative to a
// running maximum; values become floats in the same place, and a thread adds up one channel (two of 256) for all heads.
//
// Memory: K of the item twice (the second time from caches), V once, coalesced. Cost per element: about 10 operations to make it a float, two accesses of
// shared memory and one multiply-add per head. Not tuned: this path serves formats, it does not win races.
//
// In bounds: as in attend.cu; tokens of the last tile beyond the item get the weight 0, and what is stored there is finite.

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rotation.cuh"
#include "common/attend_call.cuh"
#include "common/calibration.cuh"
#include "common/code_range.cuh"
#include "merge_states.cu"

constexpr int THREADS = WARPS * 32;
// A token's elements, padded so that those of a channel lie in different banks.
constexpr int ELEMENTS_ROW = HEAD_DIM + 1;
constexpr int THREAD_CHANNELS = (HEAD_DIM + THREADS - 1) / THREADS;
static_assert(THREADS == TILE_TOKENS, "a thread scores a token");

struct RunningHead {
    float maximum;
    float weight;
    // What sums are multiplied with to be relative to the newest maximum.
    float keep;
};

// What the fields of a tile stand for, as floats.
template <bool VALUE, typename ValueOf>
__device__ __forceinline__ void load_elements(float* elements, const u8* part, const float2* span_ranges,
                                              ValueOf value_of_field) {
    for (u32 unit = threadIdx.x; unit < UNITS<VALUE>; unit += THREADS) {
        Unit<VALUE> packed;
        packed.load((const u32*)(part + TILE_AT<VALUE>), unit);
#pragma unroll
        for (u32 i = 0; i < FIELDS<VALUE>; i++) {
            const Field field = field_of<VALUE>(unit, i);
            const float2 range = element_range<VALUE>(part, span_ranges, field.token, field.channel);
            elements[field.token * ELEMENTS_ROW + field.channel] = value_of_field(packed.get(i, field.shift), range);
        }
    }
}

// Adds the products of this thread's token with the queries.
__device__ __forceinline__ void add_scores(float (&scores)[CHUNK_HEADS], const float (*queries)[HEAD_DIM],
                                           const float* elements) {
#pragma unroll 8
    for (int channel = 0; channel < HEAD_DIM; channel++) {
        const float key = elements[threadIdx.x * ELEMENTS_ROW + channel];
#pragma unroll
        for (int h = 0; h < CHUNK_HEADS; h++) scores[h] += queries[h][channel] * key;
    }
}

__device__ __forceinline__ float warp_max(float x) {
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// Query of a head, rotated like the keys and scaled, and once more for their sketches; zero beyond the last head.
__device__ __forceinline__ void load_query(float* query, float* sketch_query, const AttendCall& call, const Item& item, u32 head, bool there,
                                           int lane) {
    float row[LANE_CHANNELS];
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const u64 at = ((u64)item.sequence * call.kv_heads * call.group + head) * TENSOR_CHANNELS + lane + 32 * i;
        row[i] = 0.0f;
        if (there && lane + 32 * i < TENSOR_CHANNELS) row[i] = call.queries_f16 ? half_value(((const u16*)call.queries)[at]) : ((const float*)call.queries)[at];
    }
    rotate<false>(row, lane);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) query[lane + 32 * i] = row[i] * call.score_scale;
    rotate_for_sketch<false>(row, lane);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        if (SKETCHED<false>) sketch_query[lane + 32 * i] = row[i] * call.score_scale;
    }
}

// Turns a head's scores of a tile into weights.
__device__ __forceinline__ void weigh(float (&scores)[TILE_TOKENS], RunningHead& head, int lane) {
    float largest = scores[lane];
#pragma unroll
    for (int i = 1; i < TILE_TOKENS / 32; i++) largest = fmaxf(largest, scores[lane + 32 * i]);
    const float maximum = fmaxf(head.maximum, warp_max(largest));
    const float keep = exp2_approx(head.maximum - maximum);
    float weight = 0.0f;
#pragma unroll
    for (int i = 0; i < TILE_TOKENS / 32; i++) {
        const float p = exp2_approx(scores[lane + 32 * i] - maximum);
        scores[lane + 32 * i] = p;
        weight += p;
    }
    weight = warp_sum(weight);
    __syncwarp();
    if (lane == 0) head = {maximum, head.weight * keep + weight, keep};
}

extern "C" __global__ void __launch_bounds__(THREADS) attend(const AttendCall call) {
    extern __shared__ float elements[];
    __shared__ float queries[CHUNK_HEADS][HEAD_DIM];
    __shared__ float sketch_queries[SKETCHED<false> ? CHUNK_HEADS : 1][HEAD_DIM];
    __shared__ float weights[CHUNK_HEADS][TILE_TOKENS];
    __shared__ RunningHead running[CHUNK_HEADS];

    const int thread = threadIdx.x;
    const int lane = thread & 31;
    const int warp = thread >> 5;
    const u32 chunk = blockIdx.x % call.chunks;
    const u32 kv_head = blockIdx.x / call.chunks % call.kv_heads;
    const Item item = call.items[blockIdx.x / call.chunks / call.kv_heads];
    const u32 first_head = kv_head * call.group + chunk * CHUNK_HEADS;
    const int heads = min(CHUNK_HEADS, (int)(call.group - chunk * CHUNK_HEADS));
    const u64 slot = ((u64)item.range_slot * call.kv_heads + kv_head) * HEAD_DIM;

    for (int h = warp; h < CHUNK_HEADS; h += WARPS) {
        load_query(queries[h], sketch_queries[SKETCHED<false> ? h : 0], call, item, first_head + h, h < heads, lane);
        if (lane == 0) running[h] = {-__int_as_float(0x7f800000), 0.0f, 0.0f};
    }
    float smallest[CHUNK_HEADS];
    float largest[CHUNK_HEADS];
    ScoreMap maps[CHUNK_HEADS];
#pragma unroll
    for (int h = 0; h < CHUNK_HEADS; h++) {
        smallest[h] = __int_as_float(0x7f800000);
        largest[h] = -smallest[h];
        if (MAPS_SCORES) maps[h] = score_map(call, item, first_head + min(h, heads - 1));
    }
    float sums[THREAD_CHANNELS][CHUNK_HEADS];
#pragma unroll
    for (int k = 0; k < THREAD_CHANNELS; k++) {
#pragma unroll
        for (int h = 0; h < CHUNK_HEADS; h++) sums[k][h] = 0.0f;
    }

    for (u32 first = 0; first < item.tokens; first += TILE_TOKENS) {
        const u8* part = (const u8*)call.pages[item.first_page + first / TILE_TOKENS] + (u64)kv_head * HEAD_BYTES;
        const auto values_of = [](u32 field, float2 range) { return field_value<true>(field, range); };
        const auto keys_of = [](u32 field, float2 range) { return field_value<false>(field, range); };
        float scores[CHUNK_HEADS];
#pragma unroll
        for (int h = 0; h < CHUNK_HEADS; h++) scores[h] = 0.0f;
        load_elements<false>(elements, part, call.key_ranges + slot, keys_of);
        __syncthreads();
        add_scores(scores, queries, elements);
        if constexpr (SKETCHED<false>) {
            const auto signs_of = [](u32 field, float2 range) {
                return sketched_sign<false>(field ^ FLIPPED<false>, range.y);
            };
            __syncthreads();
            load_elements<false>(elements, part, call.key_ranges + slot, signs_of);
            __syncthreads();
            add_scores(scores, sketch_queries, elements);
        }
        const bool there = first + thread < item.tokens;
        if constexpr (FINDS_EXTREMES) {
#pragma unroll
            for (int h = 0; h < CHUNK_HEADS; h++) {
                if (!there) continue;
                smallest[h] = fminf(smallest[h], scores[h]);
                largest[h] = fmaxf(largest[h], scores[h]);
            }
            __syncthreads();
            continue;
        }
#pragma unroll
        for (int h = 0; h < CHUNK_HEADS; h++) {
            const float score = MAPS_SCORES ? maps[h](scores[h]) : scores[h];
            weights[h][thread] = there ? score : -__int_as_float(0x7f800000);
        }
        __syncthreads();

        load_elements<true>(elements, part, call.value_ranges + slot, values_of);
        for (int h = warp; h < CHUNK_HEADS; h += WARPS) weigh(weights[h], running[h], lane);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < THREAD_CHANNELS; k++) {
            const int channel = min(thread + k * THREADS, HEAD_DIM - 1);
#pragma unroll
            for (int h = 0; h < CHUNK_HEADS; h++) sums[k][h] *= running[h].keep;
#pragma unroll 8
            for (int token = 0; token < TILE_TOKENS; token++) {
                const float value = elements[token * ELEMENTS_ROW + channel];
#pragma unroll
                for (int h = 0; h < CHUNK_HEADS; h++) sums[k][h] += weights[h][token] * value;
            }
        }
        __syncthreads();
    }

    if constexpr (FINDS_EXTREMES) {
#pragma unroll
        for (int h = 0; h < CHUNK_HEADS; h++) {
            const float low = -warp_max(-smallest[h]);
            const float high = warp_max(largest[h]);
            // A warp without tokens has nothing to say.
            if (lane == 0 && h < heads && low <= high) enter_extremes(call, item, first_head + h, low, high);
        }
        return;
    }

    // Outputs as rows, so that a warp can rotate one back.
#pragma unroll
    for (int k = 0; k < THREAD_CHANNELS; k++) {
        const int channel = thread + k * THREADS;
#pragma unroll
        for (int h = 0; h < CHUNK_HEADS; h++) {
            if (channel < HEAD_DIM) elements[h * HEAD_DIM + channel] = sums[k][h] / running[h].weight;
        }
    }
    __syncthreads();
    for (int h = warp; h < heads; h += WARPS) rotate_output(elements + h * HEAD_DIM, lane);
    __syncthreads();
    for (int e = thread; e < heads * HEAD_DIM; e += THREADS) {
        const RunningHead& head = running[e / HEAD_DIM];
        write_state(call, item, first_head, e, {elements[e], head.maximum + log2_approx(head.weight)});
    }
    if (item.states == 1) return;
    u32* arrivals = call.arrivals + ((u64)item.sequence * call.kv_heads + kv_head) * call.chunks + chunk;
    if (last_to_arrive(arrivals, item.states)) merge_states(call, item, first_head, heads);
}
