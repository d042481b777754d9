// Scores of keys of 1 bit for a query head alone (LONE_HEAD). Keys stay the bits that they are.
//
// A word of a load has 16 channels of one token in its low half and of the token 16 later in its high half. A nibble of it
// is a channel of each of four blocks. MMAs of bits count where both operands are 1. Their columns are the bits of the
// query: eight of its low byte, then eight of its high byte, each in the half of the tokens that a product is of. So 16
// tokens take two MMAs and no unpacking. The counts are at most 128, and as halves multiples of 2^-24. An MMA of halves
// multiplies them by the values of the query's bits and adds them up, in the column of its 16 tokens: then every lane has
// 4 tokens of its own.

constexpr float COUNT_UNIT = 16777216.0f;
static_assert(!LONE_HEAD || (KEY_BITS == 1 && KEY_SPAN_RANGES && VALUE_SPAN_RANGES && !WIDE && HEAD_DIM == 128 &&
                             PASS_TOKENS == 128 && QUERIES == 1 && ROW_WARPS == 1 && !FINDS_EXTREMES && !MAPS_SCORES),
              "a head alone has the bits of whole tiles");

// The token of the pass that score i of a lane is of.
__device__ __forceinline__ int score_token(int i, int lane) {
    const int g = lane >> 2;
    return LONE_HEAD ? 32 * (lane & 3) + i % 2 * 16 + i / 2 * 8 + g : 8 * (i / LANE_HEADS) + g;
}

struct LoneQuery {
    // Bits of the query's low byte and of its high byte, for either register of an MMA, in low halves.
    u32 bits[2][2];
    // The values of the lane's two bits of either byte.
    u32 values[2];
    float delta;
    float base;

    __device__ __forceinline__ void load(const QueryRows& shared, int lane) {
        const int g = lane >> 2;
        const int c = lane & 3;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32* words = (const u32*)shared.rows[half == 0 ? 1 : 0];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                u32 nibbles = 0u;
#pragma unroll
                for (int f = 0; f < 4; f++) nibbles |= (words[8 * f + 4 * r + c] >> g & 0x01010101u) << f;
                // From bytes to nibbles.
                bits[half][r] = permute_bytes(nibbles | nibbles >> 4, 0u, 0x4420u);
            }
            // Two's complement: the last bit of the high byte is negative. Low bytes are signed, too.
            const float even = power_of_two(2 * c + 8 * half);
            values[half] = half_pair(even, c == 3 ? -2.0f * even : 2.0f * even);
        }
        // Codes are stored inverted. The base has the sum for codes that are all 1.
        delta = -COUNT_UNIT * shared.heads[0].delta;
        base = shared.heads[0].base[0];
    }
};

__device__ __forceinline__ void count_bits(int (&d)[4], const uint4& a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(0));
}

__device__ __forceinline__ void pass_scores_of_bits(float (&scores)[PASS_SCORES], const PassLoads& keys, int lane,
                                                    const LoneQuery& query) {
    const int g = lane >> 2;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int load = 0; load < PASS_TOKENS / 32; load++) {
        const uint4 words = load_shared_16(keys.at + load * LOAD_BYTES + lane * 16);
#pragma unroll
        for (int later = 0; later < 2; later++) {
            u32 counts[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int d[4];
                count_bits(d, words, query.bits[half][0] << (16 * later), query.bits[half][1] << (16 * later));
                counts[2 * half] = permute_bytes(d[0], d[1], 0x5410u);
                counts[2 * half + 1] = permute_bytes(d[2], d[3], 0x5410u);
            }
            const bool own = g == 2 * load + later;
            multiply_f16(sums, counts, own ? query.values[0] : 0u, own ? query.values[1] : 0u);
        }
    }
#pragma unroll
    for (int i = 0; i < PASS_TOKENS / 32; i++) scores[i] = __fmaf_rn(sums[i], query.delta, query.base);
}
