// The product of many rows of f16 activations with packed weights, by the products of warpgroups: y = x · Wᵀ.
//
// A block multiplies tiles of 128 outputs by ROW_TILE rows. Its last warpgroup copies activations, codes and scales
// into a ring in shared memory, steps of 128 inputs at a time. The two others dequantise codes in registers, each
// weight rounded once to f16, and multiply: weights are the rows of products, and activations their columns. So a
// weight is dequantised once a tile, and none is written to shared memory.
//
// A product of 16 inputs wants inputs 2t, 2t + 1, 2t + 8 and 2t + 9 in lane t of four. A chunk has octets of
// neighbouring inputs, so lane t takes pair t of the octets of all four lanes.
//
// SPLIT blocks have the same tile and a share of the steps each, and add their sums: see tile_sums.cuh.
//
// f32 activations come as PARTS = 2 numbers in f16, and the sums of both parts are the product. With UNITS 1 rows are
// divided by a power of two each, with which the outputs are multiplied.
//
// Macros beside those of codes.cuh: ROW_TILE (64, 128 or 256), SLOTS, SPLIT, PARTS, UNITS, OUTPUT (0 f32, 1 f16,
// 2 bf16), WIDE (1 if rows of outputs begin at multiples of 16 bytes).
//
// Sums are f32 and run in a fixed order.

#include "tile.cuh"
#include "tile_sums.cuh"

__device__ __forceinline__ u32 full(u32 base, u32 slot) { return base + BARRIERS_AT + 8 * slot; }
__device__ __forceinline__ u32 empty(u32 base, u32 slot) { return base + BARRIERS_AT + 8 * (SLOTS + slot); }

// A place in the ring, and the parity of the round.
struct Place {
    u32 slot = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

// The tiles of a block, one after the other.
struct Walk {
    u32 tile, tiles, first_step, last_step;
    // First row and first output of the tile, and strips that exist.
    u32 row, output, strips;

    __device__ __forceinline__ explicit Walk(u32 rows) {
        const u32 rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0;
        tile = blockIdx.x / SPLIT;
        tiles = (rows + ROW_TILE - 1) / ROW_TILE * COLUMNS;
        first_step = rank * ALL_STEPS / SPLIT;
        last_step = (rank + 1) * ALL_STEPS / SPLIT;
        find();
    }

    __device__ __forceinline__ bool exists() const { return tile < tiles; }

    __device__ __forceinline__ void advance() {
        tile += gridDim.x / SPLIT;
        if (exists()) find();
    }

    // Blocks that run at the same time read the same activations.
    __device__ __forceinline__ void find() {
        row = tile / COLUMNS * ROW_TILE, output = tile % COLUMNS * OUTPUT_TILE;
        strips = min((OUTPUTS - output + 15) / 16, TILE_STRIPS);
    }
};

__device__ __forceinline__ void copy_inputs(const TilesCall& call, u32 to, u32 barrier, u32 step, u32 row) {
#pragma unroll
    for (u32 block = 0; block < 2; block++) {
        copy_box(to + block * X_BLOCK, call.map, 128 * step + 64 * block, row, barrier);
    }
}

// Copies the codes and scales of a step by the copy engine: lane i has strip i of the tile.
__device__ __forceinline__ void copy_strips(const TilesCall& call, const Walk& walk, u32 step, u32 slot, u32 barrier) {
    const u32 lane = threadIdx.x % 32;
    if (lane >= walk.strips) return;
    const u64 place = static_cast<u64>(walk.output / 16 + lane) * STEPS + step % STEPS;
    copy_bytes(slot + CODES_AT + lane * STRIP_CODES, call.codes + place * STRIP_CODES, STRIP_CODES, barrier);
    copy_bytes(slot + SCALES_AT + lane * STRIP_SCALES, call.scales + place * STRIP_SCALES, STRIP_SCALES, barrier);
}

// Copies those of layers that do not lie in strips: thread i has chunk i % 4 of every 32nd output.
__device__ __forceinline__ void copy_chunks(const TilesCall& call, const Walk& walk, u32 step, u32 slot, u32 barrier) {
    const u32 thread = threadIdx.x % PRODUCERS, chunk = min(4 * (step % STEPS) + thread % 4, CHUNKS - 1u);
#pragma unroll 2
    for (u32 n = thread / 4; n < OUTPUT_TILE; n += PRODUCERS / 4) {
        const size_t output = min(walk.output + n, OUTPUTS - 1u);
        const u32 place = 4 * n + thread % 4;
        copy_async<CHUNK_BYTES>(slot + CODES_AT + place * CHUNK_BYTES,
                                call.codes + (output * CHUNKS + chunk) * CHUNK_BYTES);
        copy_async<SCALE_BYTES>(slot + SCALES_AT + place * SCALE_BYTES,
                                call.scales + (output * GROUPS + chunk / GROUP_CHUNKS) * SCALE_BYTES);
    }
    arrive_after_copies(barrier);
}

__device__ __forceinline__ void produce(const TilesCall& call, u32 base) {
    const u32 thread = threadIdx.x - CONSUMERS;
    // One warp is enough for the copy engine.
    if (IN_STRIPS && thread >= 32) return;
    Place at;
    bool has_waited = false;
#pragma unroll 1
    for (Walk walk(call.rows); walk.exists(); walk.advance()) {
#pragma unroll 1
        for (u32 step = walk.first_step; step < walk.last_step; step++, at.advance()) {
            const u32 slot = base + at.slot * SLOT, barrier = full(base, at.slot);
            if (!IN_STRIPS || thread == 0) barrier_wait(empty(base, at.slot), at.parity ^ 1);
            if (thread == 0) {
                const u32 strips = IN_STRIPS ? walk.strips : 0;
                barrier_expect(barrier, 2 * X_BLOCK + strips * (STRIP_CODES + STRIP_SCALES));
            }
            __syncwarp();
            if constexpr (IN_STRIPS) copy_strips(call, walk, step, slot, barrier);
            else copy_chunks(call, walk, step, slot, barrier);
            if (thread != 0) continue;
            // Weights do not depend on the previous kernel, but activations do.
            if (!has_waited) asm volatile("griddepcontrol.wait;" ::: "memory");
            has_waited = true;
            copy_inputs(call, slot, barrier, step, walk.row);
        }
    }
    // No thread ends before its copies.
    if (!IN_STRIPS) asm volatile("cp.async.wait_all;" ::: "memory");
}

// What a lane has of a strip in a step: chunk t of the outputs r and r + 8, and their scales.
struct Held {
    Chunk codes[2];
    float2 scales[2];
};

__device__ __forceinline__ float2 shared_scale(u32 at) {
    if constexpr (SINGLE_SCALES) return {__uint_as_float(load_word(at)), __uint_as_float(load_word(at + 4))};
    return floats_of(load_word(at));
}

__device__ __forceinline__ Held load_held(u32 slot, u32 strip, u32 lane) {
    Held held;
#pragma unroll
    for (u32 which = 0; which < 2; which++) {
        const u32 place = 64 * strip + 32 * which + lane;
        const u32 from = slot + CODES_AT + place * CHUNK_BYTES;
        if constexpr (BITS % 4 == 0) {
#pragma unroll
            for (int i = 0; i < BITS / 4; i++) {
                const float4 x = load_shared(from + 16 * i);
                held.codes[which].words[4 * i] = __float_as_uint(x.x);
                held.codes[which].words[4 * i + 1] = __float_as_uint(x.y);
                held.codes[which].words[4 * i + 2] = __float_as_uint(x.z);
                held.codes[which].words[4 * i + 3] = __float_as_uint(x.w);
            }
        } else {
#pragma unroll
            for (int i = 0; i < BITS; i++) held.codes[which].words[i] = load_word(from + 4 * i);
        }
        const u32 scale = IN_STRIPS ? 16 * strip + 8 * which + lane / 4 : place;
        held.scales[which] = shared_scale(slot + SCALES_AT + scale * SCALE_BYTES);
    }
    return held;
}

// `transposed` for words of four pairs of 4-bit codes: nibbles change places, then bytes.
__device__ __forceinline__ u32 transposed_pairs(u32 word, u32 lane) {
    constexpr u32 ALL = 0xffffffffu;
    const bool odd = lane % 2, high = lane / 2 % 2;
    const u32 mask = odd ? 0xf0f0f0f0u : 0x0f0f0f0fu;
    const u32 a = __shfl_xor_sync(ALL, word, 1);
    const u32 turned = __funnelshift_l(a, a, odd ? 28 : 4);
    const u32 both = (word & mask) | (turned & ~mask);
    const u32 b = __shfl_xor_sync(ALL, both, 2);
    return __byte_perm(both, b, high ? 0x3715 : 0x6240);
}

// Of the octets `octet` of the chunks of four lanes: pair t of each, for lane t, each weight rounded to f16.
__device__ __forceinline__ uint4 weights_of_lanes(const Chunk& codes, int octet, float2 scale, bool exists, u32 lane) {
    if constexpr (BITS == 4 && EVERY_FOURTH) {
        Chunk of_lanes;
        of_lanes.words[octet] = transposed_pairs(codes.words[octet], lane);
        return rounded_octet(of_lanes, octet, scale);
    }
    uint4 weights = rounded_octet(codes, octet, scale);
    if (CHUNKS % 4 != 0 && !exists) weights = {};
    return transposed(weights, lane);
}

// A slot has been read by this warp.
__device__ __forceinline__ void release(u32 base, u32 slot) {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(base, slot));
}

// The weights of a warpgroup that are multiplied together: of each 16 inputs.
struct Weights {
    u32 of[2 * TOGETHER][4];

    // From the octets `part`, or 2 · `part` and the next one.
    __device__ __forceinline__ void make(const Held& held, int part, bool exists, u32 lane) {
#pragma unroll
        for (u32 which = 0; which < 2; which++) {
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
                const uint4 x =
                    weights_of_lanes(held.codes[which], TOGETHER * part + i, held.scales[which], exists, lane);
                const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (u32 p = 0; p < 4; p++) {
                    if (EVERY_FOURTH) of[p / 2][p % 2 * 2 + which] = pairs[p];
                    else of[p][2 * i + which] = pairs[p];
                }
            }
        }
    }

    // The first of the 16 inputs `k`, of the step.
    static __device__ __forceinline__ constexpr u32 input(u32 part, u32 k) {
        return EVERY_FOURTH ? 32 * part + 16 * k : 32 * k + 16 * part;
    }
};

// Parts of a step, each with its own registers, and how many may be multiplied while the next one is made. With few
// rows their products are short.
constexpr u32 STEP_PARTS = 4 / TOGETHER;
constexpr u32 PENDING = ROW_TILE == 64 ? STEP_PARTS - 1 : 1;

__device__ __forceinline__ void consume(const TilesCall& call, u32 base) {
    const u32 thread = threadIdx.x, lane = thread % 32, strip = thread / 32;
    Place at;
    Weights weights[STEP_PARTS];
#pragma unroll 1
    for (Walk walk(call.rows); walk.exists(); walk.advance()) {
        float sums[EIGHTS][4];
        u32 last = 0;
#pragma unroll 1
        for (u32 step = walk.first_step; step < walk.last_step; step++, at.advance()) {
            const u32 slot = base + at.slot * SLOT;
            barrier_wait(full(base, at.slot), at.parity);
            const Held held = load_held(slot, strip, lane);
            const bool exists = 4 * (step % STEPS) + lane % 4 < CHUNKS;
            const u64 x = operand(slot);
#pragma unroll
            for (u32 part = 0; part < STEP_PARTS; part++) {
                weights[part].make(held, part, exists, lane);
                warpgroup_begin();
#pragma unroll
                for (u32 k = 0; k < 2 * TOGETHER; k++) {
                    const u32 input = Weights::input(part, k);
                    warpgroup_multiply(sums, weights[part].of[k], x + (input / 64 * (X_BLOCK / 16) + input % 64 / 8),
                                  part + k > 0 || step > walk.first_step);
                }
                warpgroup_commit();
                warpgroup_wait<PENDING>();
                // The products of the last step have ended.
                if (part + 1 == PENDING && step > walk.first_step) release(base, last);
            }
            last = at.slot;
        }
        warpgroup_wait<0>(sums);
        release(base, last);
        asm volatile("griddepcontrol.wait;" ::: "memory");
        u32 has = 1;
        if (EXCHANGES) has = exchange(sums, base, thread);
        else if (SPLIT > 1) has = gather(call, sums, walk.tile, base, thread);
        store_strip(call, sums, walk.row, walk.output + 16 * strip, has, lane);
        // Blocks that share steps have one tile each.
        if (SPLIT > 1) return;
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1)
    linear_tiles(const __grid_constant__ TilesCall call) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = shared_at(shared);
    if (threadIdx.x == 0) {
        for (u32 slot = 0; slot < SLOTS; slot++) {
            barrier_init(full(base, slot), IN_STRIPS ? 1 : 1 + PRODUCERS);
            barrier_init(empty(base, slot), CONSUMER_WARPS);
        }
        barriers_visible();
        shared_visible();
    }
    if (EXCHANGES) cluster_sync();
    else __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (threadIdx.x < CONSUMERS) {
        grow_registers<232>();
        consume(call, base);
    } else {
        shrink_registers<40>();
        produce(call, base);
        // As often as the others.
        if (EXCHANGES) cluster_sync(), cluster_sync();
    }
}
