// The product of up to 16 rows of activations in f16 with weights of 2, 3 or 4 bits that lie in strips: y = x · Wᵀ.
//
// Compiled behind linear.cu. A strip has 16 outputs, a step 128 inputs, which are one group.
//
// Weights are the rows of MMAs of 16 × 8 × 16: lane 4 · r + t of a warp has chunk t of a step for the outputs r and
// r + 8 of a strip, and its 16 pairs of codes are its part of eight MMAs. A masked pair of codes is two f16 numbers
// below the least normal one, f · code · 2^-24. So codes enter the MMAs without arithmetic, pairs of the same f go to
// the same sums, and a step adds scale · (Σ x · code - zero · Σ x) to its outputs, in units of 2^-24.
//
// Weights stream through rings in shared memory, one of each warp. Activations stay in registers while a warp goes
// through the strips of its cluster. The blocks of a cluster share the steps, and each adds the sums of both for half
// of the strips. Sums are f32 and run in a fixed order.
//
// Macros beside those of linear.cu: WARPS, CLUSTER (blocks of a cluster, 1 or 2), GRID (clusters), TOGETHER (steps
// whose activations a warp holds), AHEAD (strips of a ring), WINDOW and BUFFERS (strips whose sums are added together;
// 2 if a cluster has more strips than that).

// A step is four chunks, a strip 16 outputs. A cluster takes strips, the warps of its blocks take shares of the steps.
constexpr u32 STEPS = CHUNKS / 4;
constexpr u32 TILES = (ALL_ROWS + 7) / 8;
constexpr u32 STRIPS = (OUTPUTS + 15) / 16;
constexpr u32 ALL_WARPS = CLUSTER * WARPS;
constexpr u32 MOST_STEPS = (STEPS + ALL_WARPS - 1) / ALL_WARPS;
constexpr u32 MOST_STRIPS = (STRIPS + GRID - 1) / GRID;
// A warp keeps the activations of TOGETHER steps in registers and takes all strips with them, then come the next ones.
constexpr u32 PHASES = (MOST_STEPS + TOGETHER - 1) / TOGETHER;

// Copies of 16 bytes of a step, and of a lane.
constexpr u32 PIECES = 16 * BITS;
constexpr u32 COPIES = (PIECES + 31) / 32;
constexpr u32 SCALE_BYTES = SINGLE_SCALES ? 8 : 4;
constexpr u32 CODE_BYTES = 2 * 32 * 4 * BITS;
constexpr u32 SLOT_BYTES = CODE_BYTES + 16 * SCALE_BYTES;

// A warp's ring holds its steps of AHEAD strips.
constexpr u32 SLOTS = AHEAD * TOGETHER;
constexpr u32 RINGS_BYTES = WARPS * SLOTS * SLOT_BYTES;

// Words from one row of partial sums to the next: lanes of a warp write to different banks.
constexpr u32 PARTIAL_ROW = 20;
constexpr u32 PARTIAL = ALL_ROWS * PARTIAL_ROW;

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

__device__ __forceinline__ u64 kept(u64 x) {
    asm volatile("" : "+l"(x));
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

// Where a lane copies the steps of a strip from. Lanes below 16 copy a scale as well.
struct Source {
    u64 codes, scales;
    bool exists;
};

// Places of a lane in a slot: of the pieces that it copies, the scale that it copies, its chunk, and its scale.
struct Places {
    u32 pieces, copied, chunk, scale;
};

__device__ __forceinline__ Places places_of(u32 ring, u32 lane) {
    return {kept(ring + 16 * lane), kept(ring + CODE_BYTES + lane % 16 * SCALE_BYTES), kept(ring + lane * (4 * BITS)),
            kept(ring + CODE_BYTES + lane / 4 * SCALE_BYTES)};
}

__device__ __forceinline__ void copy_step(const Source& from, const Places& at, u32 slot, u32 s, u32 lane, bool has) {
    has = has && from.exists;
#pragma unroll
    for (u32 k = 0; k < COPIES; k++) {
        copy16_if(has && 32 * k + lane < PIECES, at.pieces + slot + 512 * k, from.codes + s * (256 * BITS) + 512 * k);
    }
    copy_scale_if(has && lane < 16, at.copied + slot, from.scales + s * (16 * SCALE_BYTES));
}

// The chunk of an output, and with `which` 1 of the output eight later.
__device__ __forceinline__ Chunk copied_chunk(const Places& of, u32 slot, u32 which) {
    Chunk c;
    const u32 at = of.chunk + slot + which * (128 * BITS);
    if constexpr (BITS == 4) {
        const uint4 x = shared16(at);
        c.words[0] = x.x, c.words[1] = x.y, c.words[2] = x.z, c.words[3] = x.w;
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

// MMA j of a step multiplies two pairs of codes that come with the same factor.
__device__ __forceinline__ constexpr int pair_of(int j, int which) {
    constexpr int TWO[16] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
    constexpr int THREE[16] = {0, 3, 1, 4, 2, 7, 5, 8, 6, 9, 10, 13, 11, 14, 12, 15};
    constexpr int FOUR[16] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
    const int at = 2 * j + which;
    return BITS == 2 ? TWO[at] : BITS == 3 ? THREE[at] : FOUR[at];
}

// The sums that codes of a factor go to.
constexpr int CLASSES = BITS == 2 ? 4 : BITS == 3 ? 3 : 2;

__device__ __forceinline__ constexpr int class_of(int j) {
    if (BITS == 3 && j == 7) return 0;
    return log_factor(pair_of(j, 0)) / BITS;
}

// A pair of codes as two f16 numbers below the least normal one: f · code · 2^-24.
__device__ __forceinline__ u32 small_field(const Chunk& c, int pair) {
    u32 word;
    int at = log_factor(pair);
    if (BITS == 2) {
        word = c.words[pair / 8] >> (pair % 8 < 4 ? 0 : 8);
    } else if (BITS == 4) {
        word = c.words[pair / 4] >> (pair % 4 < 2 ? 0 : 8);
    } else if (pair == 15) {
        return ((c.words[0] >> 15) & 0x00010001u) | ((c.words[1] >> 14) & 0x00020002u) |
               ((c.words[BITS - 1] >> 13) & 0x00040004u);
    } else if (pair == 12) {
        word = c.words[BITS - 1] >> 6, at = 0;
    } else {
        word = c.words[pair / 5] >> (pair % 5 < 3 ? 0 : 9);
    }
    const u32 mask = ((1u << BITS) - 1u) << at;
    return word & (mask | mask << 16);
}

// Activations of a step, as a lane multiplies them.
struct Inputs {
    u32 pairs[TILES][16];
    // Of the two rows that the lane's sums belong to, in the unit of the sums.
    float sums[TILES][2];
};

__device__ __forceinline__ Inputs load_step_inputs(const LinearCall& call, u32 step, u32 lane, bool has) {
    Inputs x = {};
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++) {
        const u32 row = 8 * tile + lane / 4;
        if (has && row < ALL_ROWS) {
            const u64 of_row = call.inputs + 64 * (static_cast<u64>(row) * CHUNKS);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32* const to = x.pairs[tile] + 4 * i;
                asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                             : "l"(of_row + 16 * octet_at(4 * step + lane % 4, i))
                             : "memory");
            }
        }
        const u32 ones = 0x3C003C00u;
        float sums[4];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            mma(sums, ones, ones, ones, ones, x.pairs[tile][2 * j], x.pairs[tile][2 * j + 1], j == 0);
        }
        x.sums[tile][0] = UNIT * sums[0], x.sums[tile][1] = UNIT * sums[1];
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
        const int p = pair_of(j, 0), q = pair_of(j, 1);
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
            const float2 scale = i < 2 ? step.of_low : step.of_high;
            float sum = parts[0][tile][i];
#pragma unroll
            for (int f = 1; f < CLASSES; f++) sum += parts[f][tile][i] * (1.0f / (1 << (BITS * f)));
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

// The block of the cluster that adds the sums of a strip and writes its outputs.
__device__ __forceinline__ u32 owner_of(u32 strip) { return strip % CLUSTER; }

__device__ __forceinline__ u32 rank_in_cluster() { return blockIdx.x % CLUSTER; }

__device__ __forceinline__ void store_sum(const LinearCall& call, u32 row, u32 strip, u32 output, float sum) {
    if (16 * strip + output < OUTPUTS) store(call.outputs, row, 16 * strip + output, sum / UNIT);
}

// Writes a number to the same place in another block of the cluster.
__device__ __forceinline__ void store_at(u32 block, float* to, float x) {
    const u32 local = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("{\n .reg .u32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
                 " st.shared::cluster.f32 [remote], %2;\n}"
                 :
                 : "r"(local), "r"(block), "f"(x)
                 : "memory");
}

// Adds the sums of the warps over a window of strips.
__device__ __forceinline__ void gather(const LinearCall& call, const float* partial, float* block_sums, u32 first_strip,
                                       u32 from, u32 to, u32 phase) {
    for (u32 i = threadIdx.x; i < (to - from) * (16 * ALL_ROWS); i += 32 * WARPS) {
        const u32 output = i % 16, row = i / 16 % ALL_ROWS, strip = i / (16 * ALL_ROWS);
        const float* const at = partial + strip * (WARPS * PARTIAL) + row * PARTIAL_ROW + output;
        float* const block_sum = block_sums + (from - first_strip) * (16 * ALL_ROWS) + i;
        // The thread itself wrote the sum of the phases before.
        float sum = PHASES == 1 || phase == 0 ? 0.0f : *block_sum;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) sum += at[w * PARTIAL];
        if (phase + 1 < PHASES) {
            *block_sum = sum;
        } else if (CLUSTER == 1) {
            store_sum(call, row, from + strip, output, sum);
        } else if (owner_of(from + strip) == rank_in_cluster()) {
            *block_sum = sum;
        } else {
            store_at(owner_of(from + strip), block_sum + MOST_STRIPS * (16 * ALL_ROWS), sum);
        }
    }
}

// Adds the sums of both blocks over the strips that this one owns.
__device__ __forceinline__ void gather_cluster(const LinearCall& call, const float* block_sums, u32 first_strip,
                                               u32 last_strip) {
    for (u32 i = threadIdx.x; i < (last_strip - first_strip) * (16 * ALL_ROWS); i += 32 * WARPS) {
        const u32 strip = first_strip + i / (16 * ALL_ROWS);
        if (owner_of(strip) != rank_in_cluster()) continue;
        const float sum = block_sums[i] + block_sums[MOST_STRIPS * (16 * ALL_ROWS) + i];
        store_sum(call, i / 16 % ALL_ROWS, strip, i % 16, sum);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) linear_strips(const __grid_constant__ LinearCall call) {
    extern __shared__ __align__(128) unsigned char shared[];
    float* const partial = reinterpret_cast<float*>(shared + RINGS_BYTES);
    float* const block_sums = partial + BUFFERS * WINDOW * WARPS * PARTIAL;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 cluster = blockIdx.x / CLUSTER, share = rank_in_cluster() * WARPS + warp;
    const u32 first_step = share * STEPS / ALL_WARPS, steps = (share + 1) * STEPS / ALL_WARPS - first_step;
    const u32 first_strip = static_cast<u64>(cluster) * STRIPS / GRID;
    const u32 last_strip = static_cast<u64>(cluster + 1) * STRIPS / GRID;
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    const u32 ring = static_cast<u32>(__cvta_generic_to_shared(shared)) + warp * (SLOTS * SLOT_BYTES);
    const Places places = places_of(ring, lane);
    auto has_step = [&](u32 phase, u32 s) { return phase * TOGETHER + s < steps; };

    // What is copied next.
    u32 next_strip = first_strip, next_phase = 0;
    auto next_source = [&]() -> Source {
        const u32 step = first_step + next_phase * TOGETHER;
        const u64 codes = call.codes + (static_cast<u64>(next_strip) * STEPS + step) * (256 * BITS) + 16 * lane;
        const u64 group = static_cast<u64>(next_strip) * GROUPS + step / (GROUP_CHUNKS / 4);
        const u64 scales = call.scales + (16 * group + lane % 16) * SCALE_BYTES;
        return {kept(codes), kept(scales), next_phase < PHASES && next_strip < last_strip};
    };
    auto advance = [&]() {
        if (++next_strip >= last_strip) next_strip = first_strip, next_phase++;
    };
    // Weights do not depend on the previous kernel, so copies begin before that has finished.
#pragma unroll 1
    for (u32 i = 0; i < AHEAD; i++) {
        const Source from = next_source();
#pragma unroll
        for (u32 s = 0; s < TOGETHER; s++) {
            const u32 at = (i * TOGETHER + s) * SLOT_BYTES;
            copy_step(from, places, at, s, lane, has_step(next_phase, s));
            asm volatile("cp.async.commit_group;" ::: "memory");
        }
        advance();
    }
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // The other block has begun, so its shared memory can be written.
    if (CLUSTER > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    u32 slot = 0, window = 0;
#pragma unroll 1
    for (u32 phase = 0; phase < PHASES; phase++) {
        Inputs x[TOGETHER];
#pragma unroll
        for (u32 s = 0; s < TOGETHER; s++) {
            // Steps that a phase lacks are multiplied by 0.
            x[s] = load_step_inputs(call, first_step + phase * TOGETHER + s, lane, has_step(phase, s));
        }
        u32 first_of_window = first_strip;
#pragma unroll 1
        for (u32 strip = first_strip; strip < last_strip; strip++) {
            const Source from = next_source();
            float sums[TILES][4] = {};
#pragma unroll
            for (u32 s = 0; s < TOGETHER; s++) {
                const u32 at = slot + s * SLOT_BYTES;
                const bool has = has_step(phase, s);
                asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS - 1) : "memory");
                __syncwarp();
                Step step = copied_step(places, at);
                // All lanes have read the slot.
                __syncwarp();
                copy_step(from, places, at, s, lane, has_step(next_phase, s));
                asm volatile("cp.async.commit_group;" ::: "memory");
                if (STEPS % (ALL_WARPS * TOGETHER) == 0 || has) add_step(step, x[s], sums);
            }
            advance();
            slot = AHEAD == 1 || slot == (AHEAD - 1) * TOGETHER * SLOT_BYTES ? 0 : slot + TOGETHER * SLOT_BYTES;
            float* const of_window = partial + window * (WINDOW * WARPS * PARTIAL);
            store_partial(of_window + ((strip - first_of_window) * WARPS + warp) * PARTIAL, sums, lane);
            if (strip + 1 - first_of_window == WINDOW || strip + 1 == last_strip) {
                __syncthreads();
                gather(call, of_window, block_sums, first_strip, first_of_window, strip + 1, phase);
                first_of_window = strip + 1;
                window = BUFFERS - 1 - window;
                // With one buffer, the next phase waits until this one has been read.
                if (BUFFERS == 1 && PHASES > 1) __syncthreads();
            }
        }
    }
    if (CLUSTER > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        gather_cluster(call, block_sums, first_strip, last_strip);
    }
}
