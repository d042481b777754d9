// The product of up to 16 rows of activations in f16 with weights that lie in strips: y = x · Wᵀ.
//
// Compiled behind linear.cu. A strip has 16 outputs, a step 128 inputs, which are one group.
//
// Weights are the rows of MMAs of 16 × 8 × 16: lane 4 · r + t of a warp has chunk t of a step for the outputs r and
// r + 8 of a strip, and its 16 pairs of codes are its part of eight MMAs. A masked pair of codes is two f16 numbers
// below the least normal one, f · code · 2^-24. So codes enter the MMAs without arithmetic, pairs of the same f go to
// the same sums, and a step adds scale · (Σ x · code - zero · Σ x) to its outputs, in units of 2^-24.
//
// A cluster takes some strips and all steps. The warps of its blocks form shares of TEAM warps. A share takes every
// ALL_SHARES-th step, and each of its warps some of the strips, whose sums stay in registers from the first step to the
// last one. A warp copies each step of its strips into slots in shared memory while it multiplies the step before. The
// warps of a share copy activations together, a step ahead, and hold those of a step in registers while they go through
// their strips. At the end the sums of all shares are added, each block of a cluster for half of the strips. Sums are
// f32 and run in a fixed order.
//
// Macros beside those of linear.cu: WARPS, CLUSTER (blocks of a cluster, 1 or 2), GRID (clusters), TEAM (warps of a
// share).

#include "shared_memory.cuh"

// A step is four chunks, a strip 16 outputs.
constexpr u32 STEPS = CHUNKS / 4;
constexpr u32 TILES = (ALL_ROWS + 7) / 8;
constexpr u32 STRIPS = (OUTPUTS + 15) / 16;
constexpr u32 SHARES = WARPS / TEAM;
constexpr u32 ALL_SHARES = CLUSTER * SHARES;
constexpr u32 MOST_STRIPS = (STRIPS + GRID - 1) / GRID;
// Strips of a warp, each with a slot. A share has two slots of activations: of this step and of the next one.
constexpr u32 MOST_OWN = (MOST_STRIPS + TEAM - 1) / TEAM;
constexpr u32 LEAST_OWN = STRIPS / GRID / TEAM;
constexpr u32 INPUT_SLOTS = 2;
// Copies of strips that have not ended when a strip has been read, and when the next one has.
constexpr u32 PENDING = MOST_OWN - 1;
constexpr u32 PENDING_NEXT = MOST_OWN > 1 ? MOST_OWN - 2 : 0;

// Copies of 16 bytes of a step, and of a lane.
constexpr u32 PIECES = 16 * BITS;
constexpr u32 COPIES = (PIECES + 31) / 32;
constexpr u32 SCALE_BYTES = SINGLE_SCALES ? 8 : 4;
constexpr u32 CODE_BYTES = 2 * 32 * 4 * BITS;
constexpr u32 SLOT_BYTES = CODE_BYTES + 16 * SCALE_BYTES;
constexpr u32 WEIGHT_BYTES = WARPS * MOST_OWN * SLOT_BYTES;

// Rows of activations of a step: 128 inputs each.
constexpr u32 INPUT_BYTES = ALL_ROWS * 256;

// Words from one row of partial sums to the next: lanes of a warp write to different banks.
constexpr u32 PARTIAL_ROW = 20;
constexpr u32 PARTIAL = ALL_ROWS * PARTIAL_ROW;
// Partial sums lie where weights and activations were.
constexpr u32 STREAM_BYTES = WEIGHT_BYTES + SHARES * INPUT_SLOTS * INPUT_BYTES;
constexpr u32 PARTIAL_BYTES = MOST_STRIPS * SHARES * PARTIAL * 4;
constexpr u32 SUMS_AT = STREAM_BYTES > PARTIAL_BYTES ? STREAM_BYTES : PARTIAL_BYTES;
// Sums of the other block of a cluster, and the barrier that says that they have come.
constexpr u32 STRIP_SUMS = 16 * ALL_ROWS;
constexpr u32 MOST_OWNED = (MOST_STRIPS + 1) / 2;
constexpr u32 CAME_AT = SUMS_AT + MOST_OWNED * STRIP_SUMS * 4;

// The sums are in units of 2^-24, the value of a code of 1 as an f16.
constexpr float UNIT = 1.0f / (1 << 24);

__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, bool is_first) {
    const float c0 = is_first ? 0.0f : d[0], c1 = is_first ? 0.0f : d[1];
    const float c2 = is_first ? 0.0f : d[2], c3 = is_first ? 0.0f : d[3];
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}

__device__ __forceinline__ void copy16_if(bool condition, u32 to, u64 from) {
    asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %0, 0;\n @p cp.async.cg.shared.global [%1], [%2], 16;\n}"
                 :
                 : "r"(static_cast<u32>(condition)), "r"(to), "l"(from)
                 : "memory");
}

__device__ __forceinline__ void copy_scale_if(bool condition, u32 to, u64 from) {
    asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %0, 0;\n @p cp.async.ca.shared.global [%1], [%2], %3;\n}"
                 :
                 : "r"(static_cast<u32>(condition)), "r"(to), "l"(from), "n"(SCALE_BYTES)
                 : "memory");
}

// A number that the compiler keeps in a register instead of computing it again.
__device__ __forceinline__ u32 kept(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ uint4 shared16(u32 at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at));
    return x;
}

__device__ __forceinline__ uint2 shared8(u32 at) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at));
    return x;
}

__device__ __forceinline__ u32 shared4(u32 at) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at));
    return x;
}

// Where a lane copies a step of its warp's strips from. Lanes below 16 copy scales as well.
struct Source {
    u64 codes, scales;
    bool exists;
};

// Places of a lane in a slot: of the pieces that it copies, the scale that it copies, its chunk, and its scale.
struct Places {
    u32 pieces, copied, chunk, scale;
};

// Halves of a chunk of 8 bits change places in every second four of chunks, so that lanes read different banks.
__device__ __forceinline__ u32 piece_at(u32 piece) { return BITS == 8 ? piece ^ (piece / 8 % 2) : piece; }

__device__ __forceinline__ Places places_of(u32 slots, u32 lane) {
    const u32 pieces = kept(slots + 16 * piece_at(lane));
    return {pieces, kept(slots + CODE_BYTES + lane % 16 * SCALE_BYTES),
            BITS == 4 ? pieces : kept(slots + (BITS == 8 ? 16 * piece_at(2 * lane) : lane * (4 * BITS))),
            kept(slots + CODE_BYTES + lane / 4 * SCALE_BYTES)};
}

// Copies a step of strip `k` of the warp.
__device__ __forceinline__ void copy_step(const Source& from, const Places& at, u32 k, u32 slot, u32 lane, bool has) {
    constexpr u64 STRIP_CODES = STEPS * (256ull * BITS), STRIP_SCALES = STEPS * (16ull * SCALE_BYTES);
    has = has && from.exists;
#pragma unroll
    for (u32 i = 0; i < COPIES; i++) {
        copy16_if(has && 32 * i + lane < PIECES, at.pieces + slot + 512 * i, from.codes + (k * STRIP_CODES + 512 * i));
    }
    copy_scale_if(has && lane < 16, at.copied + slot, from.scales + k * STRIP_SCALES);
}

// The chunk of an output, and with `which` 1 of the output eight later.
__device__ __forceinline__ Chunk copied_chunk(const Places& of, u32 slot, u32 which) {
    Chunk c;
    const u32 at = of.chunk + slot + which * (128 * BITS);
    if constexpr (BITS % 4 == 0) {
#pragma unroll
        for (u32 i = 0; i < BITS / 4; i++) {
            const uint4 x = shared16(at ^ 16 * i);
            c.words[4 * i] = x.x, c.words[4 * i + 1] = x.y, c.words[4 * i + 2] = x.z, c.words[4 * i + 3] = x.w;
        }
    } else if constexpr (BITS == 2) {
        const uint2 x = shared8(at);
        c.words[0] = x.x, c.words[1] = x.y;
    } else {
#pragma unroll
        for (u32 i = 0; i < BITS; i++) c.words[i] = shared4(at + 4 * i);
    }
    return c;
}

// Scale and zero of a strip's output.
__device__ __forceinline__ float2 copied_scale(u32 at) {
    if constexpr (SINGLE_SCALES) {
        const uint2 both = shared8(at);
        return {__uint_as_float(both.x), __uint_as_float(both.y)};
    } else {
        return floats_of(shared4(at));
    }
}

// How a pair of codes becomes two f16 numbers: its word is shifted right by `shift`, and its lower code is at bit `at`
// then. The pairs 2j and 2j + 1, which an MMA multiplies, have the same `at`: MMAs take neighbouring registers of
// activations, and other pairs would have to be moved together for every strip.
struct Field {
    int word, shift, at;
};

__device__ __forceinline__ constexpr Field field_of(int pair) {
    constexpr int THREE_SHIFT[15] = {0, 3, 0, 3, 12, 0, 3, 6, 3, 6, 0, 3, 0, 3, 12};
    constexpr int TWO_SHIFT[8] = {0, 2, 0, 2, 8, 10, 8, 10}, FOUR_SHIFT[4] = {0, 4, 4, 8};
    if (BITS == 8) return {pair / 2, pair % 2 * 8, 0};
    if (BITS == 4) return {pair / 4, FOUR_SHIFT[pair % 4], 4 * (pair % 4) - FOUR_SHIFT[pair % 4]};
    if (BITS == 2) return {pair / 8, TWO_SHIFT[pair % 8], 2 * (pair % 8) - TWO_SHIFT[pair % 8]};
    if (pair == 15) return {0, 0, 0};
    return {pair / 5, THREE_SHIFT[pair], 3 * (pair % 5) - THREE_SHIFT[pair]};
}

// Codes at bit 0 and those at the other one have sums of their own, and the latter are multiplied by OTHER_UNIT. At 8
// bits all codes are at bit 0, and two sums let two MMAs run at a time.
constexpr int CLASSES = 2;
constexpr float OTHER_UNIT = BITS == 8 ? 1.0f : BITS == 3 ? 1.0f / 64 : 1.0f / 16;

__device__ __forceinline__ constexpr int class_of(int j) {
    return BITS == 8 ? j % 2 : field_of(2 * j).at == 0 ? 0 : 1;
}

// A pair of codes as two f16 numbers below the least normal one: f · code · 2^-24.
__device__ __forceinline__ u32 small_field(const Chunk& c, int pair) {
    if (BITS == 3 && pair == 15) {
        return ((c.words[0] >> 15) & 0x00010001u) | ((c.words[1] >> 14) & 0x00020002u) |
               ((c.words[BITS - 1] >> 13) & 0x00040004u);
    }
    const Field of = field_of(pair);
    const u32 mask = ((1u << BITS) - 1u) << of.at;
    return c.words[of.word] >> of.shift & (mask | mask << 16);
}

// Activations of a step, as a lane multiplies them.
struct Inputs {
    u32 pairs[TILES][16];
    // Of the two rows that the lane's sums belong to, in the unit of the sums.
    float sums[TILES][2];
};

// Where octet `octet` of a row of activations lies in shared memory: lanes that read octets of `octet_at` in two rows
// meet different banks.
__device__ __forceinline__ u32 input_at(u32 row, u32 octet) {
    const u32 turned = BITS == 8 ? octet / 8 ^ 2 * (row % 2) : 4 * (row % 2);
    return 256 * row + 16 * (octet ^ turned);
}

// A warp of a share copies its part of the activations of a step.
__device__ __forceinline__ void copy_inputs(const LinearCall& call, u32 to, u32 step, u32 member, u32 lane) {
    constexpr u32 PAIRS = (ALL_ROWS + 1) / 2;
#pragma unroll
    for (u32 i = 0; i < (PAIRS + TEAM - 1) / TEAM; i++) {
        const u32 row = 2 * (TEAM * i + member) + lane / 16;
        const u64 from = call.inputs + 64 * (static_cast<u64>(row) * CHUNKS) + 256 * step + 16 * (lane % 16);
        copy16_if(row < ALL_ROWS, to + input_at(row, lane % 16), from);
    }
}

__device__ __forceinline__ Inputs load_step_inputs(u32 from, u32 lane) {
    Inputs x = {};
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++) {
        const u32 row = 8 * tile + lane / 4;
        if (row < ALL_ROWS) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32* const to = x.pairs[tile] + 4 * i;
                const uint4 of = shared16(from + input_at(row, octet_at(lane % 4, i)));
                to[0] = of.x, to[1] = of.y, to[2] = of.z, to[3] = of.w;
            }
        }
        // The unit of the sums, as f16 numbers.
        const u32 ones = 0x00010001u;
        float sums[4];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            mma(sums, ones, ones, ones, ones, x.pairs[tile][2 * j], x.pairs[tile][2 * j + 1], j == 0);
        }
        x.sums[tile][0] = sums[0], x.sums[tile][1] = sums[1];
    }
    return x;
}

// What a warp multiplies in a step.
struct Step {
    Chunk low, high;
    float2 of_low, of_high;
};

__device__ __forceinline__ Step copied_step(const Places& of, u32 slot) {
    return {copied_chunk(of, slot, 0), copied_chunk(of, slot, 1), copied_scale(of.scale + slot),
            copied_scale(of.scale + slot + 8 * SCALE_BYTES)};
}

__device__ __forceinline__ void add_step(const Step& step, const Inputs& x, float (&sums)[TILES][4]) {
    float parts[CLASSES][TILES][4];
    u32 begun = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int p = 2 * j, q = 2 * j + 1;
        const u32 a0 = small_field(step.low, p), a1 = small_field(step.high, p);
        const u32 a2 = small_field(step.low, q), a3 = small_field(step.high, q);
        const bool is_first = (begun >> class_of(j) & 1) == 0;
        begun |= 1u << class_of(j);
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            mma(parts[class_of(j)][tile], a0, a1, a2, a3, x.pairs[tile][p], x.pairs[tile][q], is_first);
        }
    }
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // One row has one column.
            if (ALL_ROWS == 1 && i % 2 == 1) continue;
            const float2 scale = i < 2 ? step.of_low : step.of_high;
            const float sum = parts[0][tile][i] + OTHER_UNIT * parts[1][tile][i];
            sums[tile][i] += scale.x * (sum - scale.y * x.sums[tile][i % 2]);
        }
    }
}

__device__ __forceinline__ void store_partial(float* partial, const float (&sums)[TILES][4], u32 lane) {
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 row = 8 * tile + 2 * (lane % 4) + i % 2;
            if (row < ALL_ROWS) partial[row * PARTIAL_ROW + lane / 4 + 8 * (i / 2)] = sums[tile][i];
        }
    }
}

__device__ __forceinline__ u32 rank_in_cluster() { return blockIdx.x % CLUSTER; }

__device__ __forceinline__ void store_sum(const LinearCall& call, u32 row, u32 strip, u32 output, float sum) {
    if (16 * strip + output < OUTPUTS) store(call.outputs, row, 16 * strip + output, sum / UNIT);
}

// Sends a number to the same place in another block of the cluster, which `barrier` of that block counts.
__device__ __forceinline__ void send(u32 to, u32 block, float x, u32 barrier) {
    asm volatile("{\n.reg .b32 there, counts;\nmapa.shared::cluster.u32 there, %0, %2;\n"
                 "mapa.shared::cluster.u32 counts, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [counts];\n}" ::"r"(to),
                 "r"(barrier), "r"(block), "r"(__float_as_uint(x))
                 : "memory");
}

// The sum of the shares of this block.
__device__ __forceinline__ float sum_of_shares(const float* partial, u32 strip, u32 row, u32 output) {
    const float* const at = partial + strip * (SHARES * PARTIAL) + row * PARTIAL_ROW + output;
    float sum = 0.0f;
#pragma unroll
    for (u32 w = 0; w < SHARES; w++) sum += at[w * PARTIAL];
    return sum;
}

// Adds the sums of all shares over the strips of the cluster. A block sends those of the strips that it does not own.
__device__ __forceinline__ void gather(const LinearCall& call, const float* partial, u32 base, u32 first_strip,
                                       u32 strips) {
    const u32 threads = 32 * WARPS;
    if (CLUSTER == 1) {
        for (u32 i = threadIdx.x; i < strips * STRIP_SUMS; i += threads) {
            const u32 strip = i / STRIP_SUMS, row = i / 16 % ALL_ROWS;
            store_sum(call, row, first_strip + strip, i % 16, sum_of_shares(partial, strip, row, i % 16));
        }
        return;
    }
    // Strips 2i + rank of the cluster are those of a block.
    const u32 rank = rank_in_cluster(), owned = (strips + 1 - rank) / 2, others = strips - owned;
    for (u32 i = threadIdx.x; i < others * STRIP_SUMS; i += threads) {
        const u32 strip = 2 * (i / STRIP_SUMS) + (rank ^ 1);
        const float sum = sum_of_shares(partial, strip, i / 16 % ALL_ROWS, i % 16);
        send(base + SUMS_AT + 4 * i, rank ^ 1, sum, base + CAME_AT);
    }
    if (threadIdx.x == 0) barrier_expect(base + CAME_AT, 4 * owned * STRIP_SUMS);
    constexpr u32 ROUNDS = (MOST_OWNED * STRIP_SUMS + threads - 1) / threads;
    float sums[ROUNDS];
#pragma unroll
    for (u32 n = 0; n < ROUNDS; n++) {
        const u32 i = n * threads + threadIdx.x;
        if (i >= owned * STRIP_SUMS) continue;
        sums[n] = sum_of_shares(partial, 2 * (i / STRIP_SUMS) + rank, i / 16 % ALL_ROWS, i % 16);
    }
    barrier_wait(base + CAME_AT, 0);
#pragma unroll
    for (u32 n = 0; n < ROUNDS; n++) {
        const u32 i = n * threads + threadIdx.x;
        if (i >= owned * STRIP_SUMS) continue;
        // In the order of the blocks.
        const float other = __uint_as_float(shared4(base + SUMS_AT + 4 * i));
        store_sum(call, i / 16 % ALL_ROWS, first_strip + 2 * (i / STRIP_SUMS) + rank, i % 16, sums[n] + other);
    }
}

// The warps of a share wait for each other.
__device__ __forceinline__ void share_sync(u32 share) {
    if constexpr (TEAM == 1) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(1 + share), "n"(32 * TEAM) : "memory");
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) linear_strips(const __grid_constant__ LinearCall call) {
    extern __shared__ __align__(128) unsigned char shared[];
    float* const partial = reinterpret_cast<float*>(shared);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = warp / TEAM, member = warp % TEAM;
    const u32 cluster = blockIdx.x / CLUSTER, first_step = rank_in_cluster() * SHARES + share;
    const u32 first_strip = static_cast<u64>(cluster) * STRIPS / GRID;
    const u32 strips = static_cast<u64>(cluster + 1) * STRIPS / GRID - first_strip;
    const u32 first_own = member * strips / TEAM, own = (member + 1) * strips / TEAM - first_own;
    const u32 base = shared_at(shared);
    if (CLUSTER > 1) {
        if (threadIdx.x == 0) {
            barrier_init(base + CAME_AT, 1);
            barriers_visible();
        }
        __syncwarp();
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
    const Places places = places_of(base + warp * (MOST_OWN * SLOT_BYTES), lane);
    const u32 inputs = base + WEIGHT_BYTES + share * (INPUT_SLOTS * INPUT_BYTES);

    // Strips that only some warps have.
    auto has_strip = [&](u32 k) { return k < LEAST_OWN || k < own; };
    const u64 place = static_cast<u64>(first_strip + first_own) * STEPS + first_step;
    Source next = {call.codes + place * (256 * BITS) + 16 * lane, call.scales + (16 * place + lane % 16) * SCALE_BYTES,
                   first_step < STEPS};
    auto advance = [&](u32 step) {
        next.codes += ALL_SHARES * (256 * BITS), next.scales += ALL_SHARES * (16 * SCALE_BYTES);
        next.exists = step < STEPS;
    };
    // Weights do not depend on the previous kernel, so copies begin before that has finished.
#pragma unroll
    for (u32 k = 0; k < MOST_OWN; k++) {
        copy_step(next, places, k, k * SLOT_BYTES, lane, has_strip(k));
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    advance(first_step + ALL_SHARES);
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    auto copy_inputs_of = [&](u32 slot, u32 step) {
        if (step < STEPS) copy_inputs(call, inputs + slot * INPUT_BYTES, step, member, lane);
    };
#pragma unroll
    for (u32 i = 0; i < INPUT_SLOTS; i++) {
        copy_inputs_of(i, first_step + i * ALL_SHARES);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    float sums[MOST_OWN][TILES][4] = {};
    u32 input_slot = 0;
#pragma unroll 1
    for (u32 step = first_step; step < STEPS; step += ALL_SHARES) {
        // The activations of the first steps came last, those of a step with the first strip of the step before.
        if (step == first_step) asm volatile("cp.async.wait_group 1;" ::: "memory");
        else asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
        share_sync(share);
        // All warps have read the activations of the step before.
        if (step > first_step) copy_inputs_of(input_slot ^ 1, step + ALL_SHARES);
        const Inputs x = load_step_inputs(inputs + input_slot * INPUT_BYTES, lane);
        input_slot ^= 1;
        asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
        __syncwarp();
        Step held = copied_step(places, 0);
#pragma unroll
        for (u32 k = 0; k < MOST_OWN; k++) {
            const Step now = held;
            // The next strip is read before the products of this one, which do not wait for it.
            if (k + 1 < MOST_OWN) asm volatile("cp.async.wait_group %0;" ::"n"(PENDING_NEXT) : "memory");
            __syncwarp();
            if (k + 1 < MOST_OWN) held = copied_step(places, (k + 1) * SLOT_BYTES);
            // All lanes have read the slot of this one.
            copy_step(next, places, k, k * SLOT_BYTES, lane, has_strip(k));
            asm volatile("cp.async.commit_group;" ::: "memory");
            if (has_strip(k)) add_step(now, x, sums[k]);
        }
        advance(step + 2 * ALL_SHARES);
    }
    __syncthreads();
#pragma unroll
    for (u32 k = 0; k < MOST_OWN; k++) {
        if (k < own) store_partial(partial + ((first_own + k) * SHARES + share) * PARTIAL, sums[k], lane);
    }
    __syncthreads();
    // The other block has begun, so its shared memory can be written.
    if (CLUSTER > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    gather(call, partial, base, first_strip, strips);
}
