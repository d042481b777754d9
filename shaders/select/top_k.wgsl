// top_k: the indices of the k largest scores of every KV head, ascending. Ties go to the lower indices.
//
// One workgroup owns a head. Scores are mapped to integers of the same order (−0 equals +0, NaN lies below −∞). Four
// passes over the scores find the k-th largest integer byte by byte. Each pass builds a histogram of the next byte of
// the scores that agree with the bytes found so far. Integer atomics give the same histogram in every order. Then each
// invocation owns a contiguous range of scores and counts those above the k-th and those equal to it. A scan over the
// invocations gives the place of its range in the result. Of the scores equal to the k-th, the first ones still needed
// are taken.
//
// Six reads of every score, the first four coalesced; exact for any k and n.
//
// In bounds: workgroups beyond the heads are not launched; scores and result were checked against n and k when they
// were bound. Loops are bounded by n.
//
// binds: 0 call, 1 scores, 2 chosen

struct TopKCall {
    n: u32,
    k: u32,
    // Index of the first score within its binding.
    first_score: u32,
}

@group(0) @binding(0) var<storage, read> call: TopKCall;
@group(0) @binding(1) var<storage, read> scores: array<u32>;
// [kv_head][k].
@group(0) @binding(2) var<storage, read_write> chosen: array<u32>;

const INVOCATIONS: u32 = 256u;
// Values of a byte, one for each invocation.
const BINS: u32 = 256u;

var<workgroup> histogram: array<atomic<u32>, BINS>;
var<workgroup> sums: array<vec2<u32>, INVOCATIONS>;
// The byte of the k-th score, and the number of scores with a larger byte.
var<workgroup> found: vec2<u32>;

// A number that has the order of the scores.
fn rank_of(index: u32) -> u32 {
    let bits = scores[index];
    let magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return 0u;
    }
    if (magnitude == 0u) {
        return 0x80000000u;
    }
    return select(bits | 0x80000000u, ~bits, bits >= 0x80000000u);
}

// Sums over the invocations up to and including this one.
fn scan(value: vec2<u32>, invocation: u32) -> vec2<u32> {
    sums[invocation] = value;
    workgroupBarrier();
    for (var distance = 1u; distance < INVOCATIONS; distance *= 2u) {
        var before = vec2<u32>();
        if (invocation >= distance) {
            before = sums[invocation - distance];
        }
        workgroupBarrier();
        sums[invocation] += before;
        workgroupBarrier();
    }
    return sums[invocation];
}

@compute @workgroup_size(256)
fn top_k(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) invocation: u32) {
    let head = workgroup.x;
    let first = call.first_score + head * call.n;
    // The known bytes of the k-th rank, and how many scores that agree with them are wanted.
    var known = 0u;
    var mask = 0u;
    var wanted = call.k;
    for (var turn = 0u; turn < 4u; turn++) {
        let shift = 24u - 8u * turn;
        atomicStore(&histogram[invocation], 0u);
        workgroupBarrier();
        for (var i = invocation; i < call.n; i += INVOCATIONS) {
            let rank = rank_of(first + i);
            if ((rank & mask) == known) {
                atomicAdd(&histogram[(rank >> shift) & 255u], 1u);
            }
        }
        workgroupBarrier();
        // From the largest byte down.
        let byte = BINS - 1u - invocation;
        let count = atomicLoad(&histogram[byte]);
        let up_to = scan(vec2<u32>(count, 0u), invocation).x;
        if (up_to >= wanted && up_to - count < wanted) {
            found = vec2<u32>(byte, up_to - count);
        }
        workgroupBarrier();
        known |= found.x << shift;
        mask |= 255u << shift;
        wanted -= found.y;
        workgroupBarrier();
    }

    let run = (call.n + INVOCATIONS - 1u) / INVOCATIONS;
    let start = min(invocation * run, call.n);
    let end = min(start + run, call.n);
    // Counts of scores above the k-th, and equal to it.
    var own = vec2<u32>();
    for (var i = start; i < end; i++) {
        let rank = rank_of(first + i);
        own += vec2<u32>(u32(rank > known), u32(rank == known));
    }
    var before = scan(own, invocation) - own;
    for (var i = start; i < end; i++) {
        let rank = rank_of(first + i);
        if (rank > known || (rank == known && before.y < wanted)) {
            chosen[head * call.k + before.x + min(before.y, wanted)] = i;
        }
        before += vec2<u32>(u32(rank > known), u32(rank == known));
    }
}
