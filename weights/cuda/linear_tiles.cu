// The product of many rows of f16 activations with packed weights, by the products of warpgroups: y = x · Wᵀ.
//
// A block multiplies tiles of ROW_TILE rows by OUTPUT_TILE outputs. One warpgroup copies activations and dequantises
// weights into rings in shared memory, steps of 128 inputs at a time, each weight rounded once to f16. The two others
// multiply and keep the sums in registers: with 128 rows each has 64 of them, with 64 rows each has half of the
// outputs.
//
// Blocks of a cluster share activations, or the steps:
// - SHARE 2: two blocks have the same rows and neighbouring outputs. Each copies half of the activations to both.
// - SPLIT n: n blocks have the same tile and a part of the steps each. They exchange sums through shared memory, and
//   each adds and writes a part of the outputs.
//
// f32 activations come as PARTS = 2 numbers in f16, and the sums of both parts are the product. With UNITS 1 rows are
// divided by a power of two each, with which the outputs are multiplied.
//
// Macros beside those of codes.cuh: ROW_TILE (64 or 128), OUTPUT_TILE (128 or 256), SHARE, SPLIT, PARTS, UNITS, OUTPUT
// (0 f32, 1 f16, 2 bf16), WIDE (1 if rows of outputs begin at multiples of 16 bytes).
//
// Sums are f32 and run in a fixed order.

#include "codes.cuh"
#include "warpgroup.cuh"

struct TilesCall {
    // The activations as the copy engine reads them.
    alignas(64) u64 map[16];
    u64 codes;
    u64 scales;
    u64 units;
    u64 outputs;
    u32 rows;
};

constexpr u32 STEPS = (CHUNKS + 3) / 4;
constexpr u32 ALL_STEPS = STEPS * PARTS;
constexpr u32 OUTPUT_TILES = (OUTPUTS + OUTPUT_TILE - 1) / OUTPUT_TILE;
// Tiles of outputs that a cluster has at once.
constexpr u32 CLUSTER_COLUMNS = (OUTPUT_TILES + SHARE - 1) / SHARE;
// Row tiles whose blocks run at the same time, so that both operands stay in the L2 cache.
constexpr u32 BAND = 8;

// Blocks of 64 inputs, two a step.
constexpr u32 X_BLOCK = ROW_TILE * 128;
constexpr u32 W_BLOCK = OUTPUT_TILE * 128;
constexpr u32 X_SLOTS = 3;
constexpr u32 W_SLOTS = 2;
constexpr u32 X_AT = W_SLOTS * 2 * W_BLOCK;
constexpr u32 BARRIERS_AT = X_AT + X_SLOTS * 2 * X_BLOCK;

constexpr u32 PRODUCERS = 128;
constexpr u32 CONSUMERS = 256;
constexpr u32 CONSUMER_WARPS = CONSUMERS / 32;

// Eights of outputs of a warpgroup; those that lanes exchange before they store.
constexpr u32 EIGHTS = ROW_TILE == 128 ? OUTPUT_TILE / 8 : OUTPUT_TILE / 16;
constexpr u32 FOURS = EIGHTS / 4;

// Chunks of a step that a producer dequantises.
constexpr u32 OWN = OUTPUT_TILE / 32;

__device__ __forceinline__ u32 x_full(u32 base, u32 slot) { return base + BARRIERS_AT + 8 * slot; }
__device__ __forceinline__ u32 x_empty(u32 base, u32 slot) { return base + BARRIERS_AT + 8 * (X_SLOTS + slot); }
__device__ __forceinline__ u32 w_full(u32 base, u32 slot) { return base + BARRIERS_AT + 8 * (2 * X_SLOTS + slot); }
__device__ __forceinline__ u32 w_empty(u32 base, u32 slot) {
    return base + BARRIERS_AT + 8 * (2 * X_SLOTS + W_SLOTS + slot);
}

// A place in a ring, and the parity of the round.
template <u32 SLOTS>
struct Place {
    u32 slot = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

// The steps of all tiles of a block, one after the other.
struct Walk {
    u32 tile, step, tiles, first_step, last_step;

    __device__ __forceinline__ explicit Walk(u32 rows) {
        const u32 rank = SPLIT > 1 ? cluster_rank() : 0;
        tile = blockIdx.x / (SHARE * SPLIT);
        tiles = (rows + ROW_TILE - 1) / ROW_TILE * CLUSTER_COLUMNS;
        first_step = rank * ALL_STEPS / SPLIT;
        last_step = (rank + 1) * ALL_STEPS / SPLIT;
        step = first_step;
    }

    __device__ __forceinline__ bool exists() const { return tile < tiles; }

    __device__ __forceinline__ void advance() {
        if (++step == last_step) step = first_step, tile += gridDim.x / (SHARE * SPLIT);
    }

    // First row and first output of the tile.
    __device__ __forceinline__ uint2 first() const {
        constexpr u32 OF_BAND = BAND * CLUSTER_COLUMNS;
        const u32 band = tile / OF_BAND, at = tile % OF_BAND;
        const u32 rows = min(tiles / CLUSTER_COLUMNS - band * BAND, BAND);
        const u32 column = at / rows * SHARE + (SHARE > 1 ? cluster_rank() : 0);
        return {(band * BAND + at % rows) * ROW_TILE, column * OUTPUT_TILE};
    }
};

struct HeldChunk {
    Chunk codes;
    float2 single;
    u32 half;
};

__device__ __forceinline__ HeldChunk load_held(const TilesCall& call, size_t output, u32 chunk) {
    HeldChunk held;
    chunk = min(chunk, CHUNKS - 1u);
    held.codes = load_chunk(call.codes, chunk_at(output, chunk));
    const size_t group = scale_at(output, chunk / GROUP_CHUNKS);
    if constexpr (SINGLE_SCALES) {
        held.single = __ldg(reinterpret_cast<const float2*>(call.scales) + group);
    } else {
        held.half = __ldg(reinterpret_cast<const u32*>(call.scales) + group);
    }
    return held;
}

// Copies the activations of a step, once the slot is empty.
__device__ __forceinline__ void copy_inputs(const TilesCall& call, u32 base, const Walk& walk,
                                            const Place<X_SLOTS>& at) {
    barrier_wait(x_empty(base, at.slot), at.parity ^ 1);
    const u32 full = x_full(base, at.slot), to = base + X_AT + at.slot * (2 * X_BLOCK), row = walk.first().x;
    barrier_expect(full, 2 * X_BLOCK);
#pragma unroll
    for (u32 block = 0; block < 2; block++) {
        const u32 input = 128 * walk.step + 64 * block;
        if constexpr (SHARE > 1) {
            const u32 part = cluster_rank() * (ROW_TILE / SHARE);
            copy_box_to(to + block * X_BLOCK + part * 128, call.map, input, row + part, full, (1 << SHARE) - 1);
        } else {
            copy_box(to + block * X_BLOCK, call.map, input, row, full);
        }
    }
}

// Dequantises a chunk into a slot. `n` is its output in the tile.
__device__ __forceinline__ void put_chunk(u32 slot, const HeldChunk& held, u32 n, u32 t, bool exists) {
    const float2 scale = SINGLE_SCALES ? held.single : floats_of(held.half);
#pragma unroll
    for (int octet = 0; octet < 4; octet++) {
        uint4 weights = rounded_octet(held.codes, octet, scale);
        if (CHUNKS % 4 != 0 && !exists) weights = {};
        const u32 at = octet_at(t, octet);
        store_shared(slot + at / 8 * W_BLOCK + n * 128 + ((at % 8 ^ n % 8) << 4), weights);
    }
}

__device__ __forceinline__ void produce(const TilesCall& call, u32 base) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    // Eight neighbouring lanes have two outputs four apart, so that they write to different banks.
    const u32 n = 8 * warp + (lane / 8 | lane / 4 % 2 * 4);
    Walk walk(call.rows), ahead = walk, inputs = walk;
    HeldChunk held[OWN];
    auto load = [&](u32 own) {
        const u32 output = min(ahead.first().y + n + 32 * own, OUTPUTS - 1u);
        return load_held(call, output, 4 * (ahead.step % STEPS) + t);
    };
#pragma unroll
    for (u32 own = 0; own < OWN; own++) held[own] = load(own);
    ahead.advance();
    Place<X_SLOTS> x;
    Place<W_SLOTS> w;
    if (threadIdx.x == 0) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        copy_inputs(call, base, inputs, x);
        inputs.advance(), x.advance();
    }
    __syncwarp();
#pragma unroll 1
    for (; walk.exists(); walk.advance(), w.advance()) {
        if (threadIdx.x == 0 && inputs.exists()) {
            copy_inputs(call, base, inputs, x);
            inputs.advance(), x.advance();
        }
        __syncwarp();
        barrier_wait(w_empty(base, w.slot), w.parity ^ 1);
        // Reads the last step again when there is no next one.
        if (!ahead.exists()) ahead = walk;
        const u32 slot = base + w.slot * (2 * W_BLOCK);
        const bool exists = 4 * (walk.step % STEPS) + t < CHUNKS;
#pragma unroll
        for (u32 own = 0; own < OWN; own++) {
            put_chunk(slot, held[own], n + 32 * own, t, exists);
            held[own] = load(own);
        }
        ahead.advance();
        operands_visible();
        __syncwarp();
        if (lane == 0) barrier_arrive(w_full(base, w.slot));
    }
}

// A slot has been read by this warp.
__device__ __forceinline__ void release(u32 base, u32 x_slot, u32 w_slot) {
    if (threadIdx.x % 32 != 0) return;
    barrier_arrive(w_empty(base, w_slot));
    if constexpr (SHARE > 1) {
#pragma unroll
        for (u32 block = 0; block < SHARE; block++) barrier_arrive_at(x_empty(base, x_slot), block);
    } else {
        barrier_arrive(x_empty(base, x_slot));
    }
}

// The block of the cluster that adds and writes four eights of outputs, and the first that it has.
__device__ __forceinline__ constexpr u32 owner_of(u32 four) { return four * SPLIT / FOURS; }
__device__ __forceinline__ constexpr u32 first_of(u32 owner) { return (owner * FOURS + SPLIT - 1) / SPLIT; }
constexpr u32 MOST_OWNED = (FOURS + SPLIT - 1) / SPLIT * 4;

// Sends sums to their owners, and adds those of others.
__device__ __forceinline__ void exchange(float (&sums)[EIGHTS][4], u32 base, u32 thread) {
    const u32 rank = cluster_rank();
    auto place = [&](u32 eight, u32 owner, u32 from) {
        const u32 sender = from < owner ? from : from - 1;
        return base + ((sender * MOST_OWNED + eight - 4 * first_of(owner)) * CONSUMERS + thread) * 16;
    };
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++) {
        const u32 owner = owner_of(i / 4);
        if (owner != rank) store_shared_at(place(i, owner, rank), owner, sums[i]);
    }
    cluster_sync();
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++) {
        if (owner_of(i / 4) != rank) continue;
#pragma unroll
        for (u32 k = 1; k < SPLIT; k++) {
            // The others in the order of their ranks.
            const float4 other = load_shared(place(i, rank, k - 1 < rank ? k - 1 : k));
            sums[i][0] += other.x, sums[i][1] += other.y, sums[i][2] += other.z, sums[i][3] += other.w;
        }
    }
}

// The word of each of four lanes to the lane whose number it has: a transposition.
__device__ __forceinline__ uint4 transposed(uint4 x, u32 lane) {
    constexpr u32 ALL = 0xffffffffu;
    const bool odd = lane % 2, high = lane / 2 % 2;
    const u32 a = __shfl_xor_sync(ALL, odd ? x.x : x.y, 1), b = __shfl_xor_sync(ALL, odd ? x.z : x.w, 1);
    if (odd) x.x = a, x.z = b;
    else x.y = a, x.w = b;
    const u32 c = __shfl_xor_sync(ALL, high ? x.x : x.z, 2), d = __shfl_xor_sync(ALL, high ? x.y : x.w, 2);
    if (high) x.x = c, x.y = d;
    else x.z = c, x.w = d;
    return x;
}

__device__ __forceinline__ u32 output_pair(float x, float y) {
    if constexpr (OUTPUT == 1) return halves_of(x, y);
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

// Stores two neighbouring outputs of a row.
__device__ __forceinline__ void store_pair(u64 outputs, size_t row, u32 output, float x, float y) {
    const size_t at = row * OUTPUTS + output;
    if constexpr (OUTPUT == 0) {
        float* const to = reinterpret_cast<float*>(outputs) + at;
        if (WIDE) {
            if (output < OUTPUTS) *reinterpret_cast<float2*>(to) = {x, y};
        } else {
            if (output < OUTPUTS) to[0] = x;
            if (output + 1 < OUTPUTS) to[1] = y;
        }
    } else {
        unsigned short* const to = reinterpret_cast<unsigned short*>(outputs) + at;
        const u32 pair = output_pair(x, y);
        if (output < OUTPUTS) to[0] = static_cast<unsigned short>(pair);
        if (output + 1 < OUTPUTS) to[1] = static_cast<unsigned short>(pair >> 16);
    }
}

// Writes the sums of a warpgroup: of the rows `row` and `row + 8`, from output `first` on.
__device__ __forceinline__ void store_sums(const TilesCall& call, const float (&sums)[EIGHTS][4], u32 row, u32 first,
                                           u32 lane, u32 rank) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 of = row + 8 * half;
        const bool exists = of < call.rows;
        const float unit = UNITS && exists ? __ldg(reinterpret_cast<const float*>(call.units) + of) : 1.0f;
#pragma unroll
        for (u32 four = 0; four < FOURS; four++) {
            if (SPLIT > 1 && owner_of(four) != rank) continue;
            float x[4], y[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                x[i] = unit * sums[4 * four + i][2 * half], y[i] = unit * sums[4 * four + i][2 * half + 1];
            }
            if constexpr (WIDE && OUTPUT != 0) {
                const uint4 eight = transposed({output_pair(x[0], y[0]), output_pair(x[1], y[1]),
                                                output_pair(x[2], y[2]), output_pair(x[3], y[3])}, lane);
                const u32 output = first + 32 * four + 8 * (lane % 4);
                unsigned short* const row_of =
                    reinterpret_cast<unsigned short*>(call.outputs) + static_cast<size_t>(of) * OUTPUTS;
                if (exists && output < OUTPUTS) *reinterpret_cast<uint4*>(row_of + output) = eight;
            } else {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    if (exists) store_pair(call.outputs, of, first + 32 * four + 8 * i + 2 * (lane % 4), x[i], y[i]);
                }
            }
        }
    }
}

__device__ __forceinline__ void consume(const TilesCall& call, u32 base) {
    const u32 thread = threadIdx.x - PRODUCERS, group = thread / 128, lane = thread % 32, warp = thread % 128 / 32;
    const u32 x_part = ROW_TILE == 128 ? group * (64 * 128) : 0;
    const u32 w_part = ROW_TILE == 128 ? 0 : group * (OUTPUT_TILE / 2 * 128);
    const u32 rank = SPLIT > 1 ? cluster_rank() : 0;
    Walk walk(call.rows);
    Place<X_SLOTS> x;
    Place<W_SLOTS> w;
#pragma unroll 1
    while (walk.exists()) {
        const uint2 first = walk.first();
        float sums[EIGHTS][4];
        u32 last_x = 0, last_w = 0;
#pragma unroll 1
        for (u32 step = walk.first_step; step < walk.last_step; step++, x.advance(), w.advance()) {
            barrier_wait(x_full(base, x.slot), x.parity);
            barrier_wait(w_full(base, w.slot), w.parity);
            const u64 a = operand(base + X_AT + x.slot * (2 * X_BLOCK) + x_part);
            const u64 b = operand(base + w.slot * (2 * W_BLOCK) + w_part);
            products_begin();
#pragma unroll
            for (u32 k = 0; k < 8; k++) {
                const u32 inside = k % 4 * 2;
                multiply(sums, a + (k / 4 * (X_BLOCK / 16) + inside), b + (k / 4 * (W_BLOCK / 16) + inside),
                         k > 0 || step > walk.first_step);
            }
            products_commit();
            if (step > walk.first_step) {
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                release(base, last_x, last_w);
            }
            last_x = x.slot, last_w = w.slot;
        }
        products_wait<0>(sums);
        release(base, last_x, last_w);
        walk.step = walk.last_step - 1;
        walk.advance();
        if constexpr (SPLIT > 1) {
            cluster_sync();
            exchange(sums, base, thread);
        }
        asm volatile("griddepcontrol.wait;" ::: "memory");
        const u32 row = first.x + (ROW_TILE == 128 ? 64 * group : 0) + 16 * warp + lane / 4;
        store_sums(call, sums, row, first.y + (ROW_TILE == 128 ? 0 : group * (OUTPUT_TILE / 2)), lane, rank);
    }
}

extern "C" __global__ void __launch_bounds__(PRODUCERS + CONSUMERS, 1)
    linear_tiles(const __grid_constant__ TilesCall call) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = shared_at(shared);
    if (threadIdx.x == 0) {
        for (u32 slot = 0; slot < X_SLOTS; slot++) {
            barrier_init(x_full(base, slot), 1);
            barrier_init(x_empty(base, slot), CONSUMER_WARPS * SHARE);
        }
        for (u32 slot = 0; slot < W_SLOTS; slot++) {
            barrier_init(w_full(base, slot), PRODUCERS / 32);
            barrier_init(w_empty(base, slot), CONSUMER_WARPS);
        }
        barriers_visible();
        operands_visible();
    }
    if (SHARE * SPLIT > 1) cluster_sync();
    else __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (threadIdx.x < PRODUCERS) {
        shrink_registers<120>();
        produce(call, base);
        // As often as the others.
        if (SPLIT > 1) cluster_sync(), cluster_sync();
    } else {
        grow_registers<192>();
        consume(call, base);
    }
    // No block ends while others write to it.
    if (SHARE > 1) cluster_sync();
}
