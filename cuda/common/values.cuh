// Weighted values of one pass of a warp: rows are 16 channels, columns the heads, the sum runs over tokens.

// The A fragment of one block of values: four codes of a plane in every word, masked in place, as bytes code · 2^shift.
// If the plane of a block of channels changes between runs of tokens, codes are shifted down instead. Codes of 3 bits
// are assembled as bytes (common/three_bits.cuh).
__device__ __forceinline__ void value_bytes(u32 (&a)[4], const uint4& load, int plane) {
    const u32 words[4] = {load.x, load.y, load.z, load.w};
    constexpr u32 mask = ((1u << (VALUE_BITS % 16)) - 1u) * 0x01010101u;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (VALUE_BITS == 8) {
            a[r] = words[r];
        } else if (VALUE_PLANE_FIXED) {
            a[r] = words[r] & (mask << (VALUE_BITS * plane));
        } else {
            a[r] = (words[r] >> (VALUE_BITS * plane)) & mask;
        }
    }
}

// Whether integer sums of a pass are read as subnormal floats, which are 2^-149 times the integers (see `add_bytes`).
// Of these 149 powers of two, factors compensate for 48, with which they stay finite (they are at most 2^FAR, and 8
// more for high bytes), and outputs for the others.
constexpr bool VALUE_SUBNORMALS = VALUE_BITS != 16 && !VALUE_GROUPED && !VALUE_LEVELS;
constexpr int LOWERED = VALUE_SUBNORMALS ? 149 - 48 : 0;
constexpr float RAISED = 281474976710656.0f;

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

// Compensates for the place of the codes of a block of 16 channels, and for their being subnormals as halves or in
// sums.
__device__ __forceinline__ float value_unit(int block) {
    if (VALUE_BITS == 16) return 1.0f;
    const int shift = VALUE_PLANE_FIXED && !VALUE_LEVELS && VALUE_BITS != 3 ? VALUE_BITS * (block % VALUE_PLANES) : 0;
    return power_of_two((VALUE_GROUPED ? 24 : LOWERED) - shift);
}

// f16 values: `weights` are the B fragments, pairs of halves, of the pass's blocks of 16 tokens.
__device__ __forceinline__ void pass_halves(float (&sums)[VALUE_BLOCKS][4], u32 values, int lane,
                                            const u32 (&weights)[PASS_BLOCKS][2]) {
#pragma unroll
    for (int m = 0; m < PASS_BLOCKS; m++) {
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; block++) {
            const uint4 load = load_value_halves(values + m * (VALUE_BLOCKS * LOAD_BYTES), block, lane);
            const u32 a[4] = {load.x, load.y, load.z, load.w};
            multiply_f16(sums[block], a, weights[m][0], weights[m][1]);
        }
    }
}

// Packed values: runs of 32 tokens, whose weights are integers of 16 bits in two unsigned bytes. High and low bytes are
// neighbouring columns, or columns of two products with WIDE. The sums of a pass stay below 2^23. Read as a float, such
// an integer n is the subnormal n · 2^-149, which a multiply-add takes like any number. This needs no conversion, and
// no start value to subtract. Sums of bytes of levels, which are signed, start at SUM_START instead.
constexpr int PASS_RUNS = PASS_TOKENS >= 32 ? PASS_TOKENS / 32 : 1;
constexpr int WEIGHT_PARTS = WIDE ? 2 : 1;
static_assert(VALUE_BITS == 16 || PASS_TOKENS <= 128, "sums of a pass must stay below 2^23");

// Σ + factor · (256 · high + low) of one register of products: of heads in columns, or of a head's two columns.
__device__ __forceinline__ float add_bytes(float sum, const int (&products)[WEIGHT_PARTS][4], int i, float factor) {
    const float high = __int_as_float(WIDE ? products[0][i] : products[0][2 * i % 4]);
    const float low = __int_as_float(WIDE ? products[WEIGHT_PARTS - 1][i] : products[0][(2 * i + 1) % 4]);
    if (VALUE_SUBNORMALS) {
        return __fmaf_rn(high, factor * (256.0f * RAISED), __fmaf_rn(low, factor * RAISED, sum));
    }
    // Exact up to the addition of the low part. The start value that it contains is subtracted here.
    const float joined = __fadd_rn(__fmaf_rn(high, 256.0f, -257.0f * SUM_START_FLOAT), low);
    return __fmaf_rn(joined, factor, sum);
}

// The B fragments of weights given as integers in the order of scores: byte e of word r belongs to token
// 2 c + 8 r + (e >> 1) of half e & 1 of the run.
__device__ __forceinline__ void weight_fragments_of_heads(u32 (&weights)[WEIGHT_PARTS][PASS_RUNS][2],
                                                          const u32 (&integers)[PASS_SCORES]) {
#pragma unroll
    for (int run = 0; run < PASS_RUNS; run++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int first = (4 * run + r) * LANE_HEADS;
            const int second = (4 * run + 2 + r) * LANE_HEADS;
            if (WIDE) {
                // Low bytes of both halves, then high ones.
                const u32 even = permute_bytes(integers[first % PASS_SCORES], integers[second % PASS_SCORES], 0x5140u);
                const u32 odd =
                    permute_bytes(integers[(first + 1) % PASS_SCORES], integers[(second + 1) % PASS_SCORES], 0x5140u);
                weights[0][run][r] = transpose_8x8(permute_bytes(even, odd, 0x7632u));
                weights[WEIGHT_PARTS - 1][run][r] = transpose_8x8(permute_bytes(even, odd, 0x5410u));
            } else {
                weights[0][run][r] = transpose_8x8(
                    permute_bytes(integers[first % PASS_SCORES], integers[second % PASS_SCORES], 0x4051u));
            }
        }
    }
}

// The same, where a head alone has columns of its own for each run: those of run c are columns 2 c and 2 c + 1, and lanes
// 4 g + c have its weights.
__device__ __forceinline__ void weight_fragments(u32 (&weights)[WEIGHT_PARTS][PASS_RUNS][2],
                                                 const u32 (&integers)[PASS_SCORES]) {
    if constexpr (LONE_HEAD) {
        const int own = (threadIdx.x & 31) >> 3;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u32 all = transpose_8x8(permute_bytes(integers[2 * r], integers[2 * r + 1], 0x4051u));
#pragma unroll
            for (int run = 0; run < PASS_RUNS; run++) weights[0][run][r] = own == run ? all : 0u;
        }
    } else {
        weight_fragments_of_heads(weights, integers);
    }
}

// Loads of top bits that a group of blocks of channels needs: one for each run, or all if planes change between runs.
constexpr int VALUE_GROUP_TOPS = VALUE_BITS != 3 ? 1 : VALUE_PLANE_FIXED ? PASS_RUNS : PASS_VALUE_TOPS;

__device__ __forceinline__ void load_value_tops(uint4 (&tops)[VALUE_GROUP_TOPS], const PassLoads& values, int first_block,
                                                int lane) {
    if (VALUE_BITS != 3) return;
#pragma unroll
    for (int i = 0; i < VALUE_GROUP_TOPS; i++) {
        const int load = VALUE_PLANE_FIXED ? (i * VALUE_BLOCKS + first_block) / TOP_PLANES : i;
        tops[i] = load_shared_16(values.tops + load * LOAD_BYTES + lane * 16);
    }
}

// The codes of 3 bits of a block of channels in a run, as bytes.
__device__ __forceinline__ void three_bit_values(u32 (&a)[4], const uint4& load, const uint4 (&tops)[VALUE_GROUP_TOPS],
                                                 int run, int block) {
    const int place = run * VALUE_BLOCKS + block;
    three_bit_block(a, load, tops[VALUE_PLANE_FIXED ? run : place / TOP_PLANES], place);
}

// Adds factor[h] · Σ w · code to the sums. `weights` are the B fragments of the runs.
__device__ __forceinline__ void pass_bytes(float (&sums)[VALUE_BLOCKS][4], const PassLoads& values, int lane,
                                           const u32 (&weights)[WEIGHT_PARTS][PASS_RUNS][2],
                                           const float (&factor)[LANE_HEADS], const SumConstants& constants) {
    const auto multiply = [&](int (&products)[WEIGHT_PARTS][4], const u32 (&a)[4], int run) {
#pragma unroll
        for (int part = 0; part < WEIGHT_PARTS; part++) {
            const u32(&b)[2] = weights[part][run];
            constexpr int zeros[4] = {0, 0, 0, 0};
            const int* start = VALUE_SUBNORMALS ? zeros : constants.level_start;
            multiply_unsigned_bytes<VALUE_LEVELS>(products[part], a, b[0], b[1], run == 0 ? start : products[part]);
        }
    };
    int products[WEIGHT_PARTS][4];
    // Blocks of channels that share their loads in every run, or all blocks if planes change between runs.
    constexpr int groups = VALUE_PLANE_FIXED ? VALUE_BLOCKS / VALUE_PLANES : 1;
    constexpr int group_blocks = VALUE_BLOCKS / groups;
    constexpr int group_loads = PASS_VALUE_LOADS / groups;
#pragma unroll
    for (int group = 0; group < groups; group++) {
        uint4 loads[group_loads];
#pragma unroll
        for (int i = 0; i < group_loads; i++) {
            loads[i] = load_shared_16(values.at + (i * groups + group) * LOAD_BYTES + lane * 16);
        }
        uint4 tops[VALUE_GROUP_TOPS];
        load_value_tops(tops, values, group * group_blocks, lane);
        u32 levels[VALUE_LEVELS ? group_loads : 1][4][VALUE_PLANES];
        if constexpr (VALUE_LEVELS && VALUE_BITS != 3) {
#pragma unroll
            for (int i = 0; i < group_loads; i++) {
                level_bytes<VALUE_BITS, false, true>(levels[i][0], loads[i].x, constants.level_tables);
                level_bytes<VALUE_BITS, false, true>(levels[i][1], loads[i].y, constants.level_tables);
                level_bytes<VALUE_BITS, false, true>(levels[i][2], loads[i].z, constants.level_tables);
                level_bytes<VALUE_BITS, false, true>(levels[i][3], loads[i].w, constants.level_tables);
            }
        }
#pragma unroll
        for (int n = 0; n < group_blocks; n++) {
            const int block = group * group_blocks + n;
#pragma unroll
            for (int run = 0; run < PASS_RUNS; run++) {
                const int index = run * group_blocks + n;
                u32 a[4];
                if constexpr (VALUE_BITS == 3) {
                    three_bit_values(a, loads[index / VALUE_PLANES], tops, run, block);
#pragma unroll
                    for (int r = 0; r < 4; r++) a[r] = VALUE_LEVELS ? three_bit_levels(a[r]) : a[r];
                } else if constexpr (VALUE_LEVELS) {
#pragma unroll
                    for (int r = 0; r < 4; r++) a[r] = levels[index / VALUE_PLANES][r][index % VALUE_PLANES];
                } else {
                    value_bytes(a, loads[index / VALUE_PLANES], index % VALUE_PLANES);
                }
                multiply(products, a, run);
            }
#pragma unroll
            for (int i = 0; i < 2 * LANE_HEADS; i++) {
                float& sum = sums[block][WIDE ? i : 2 * i];
                sum = add_bytes(sum, products, i, factor[i % LANE_HEADS]);
            }
        }
    }
}
