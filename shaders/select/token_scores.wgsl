// token_scores: scores the tokens of every KV head by their column sums, so that the best tokens are those that stay.
//
//   sum_t is the largest of a group of heads;  w_t = sum_t, or sum_t / (rows that see t);  p_t = mean or maximum of w over the pooled tokens around t, but for recent ones
//   score_t = +inf of what stays in any case; at most 0 of images where text is raised, in the order of p_t; else p_t
//
// One workgroup owns TILE tokens of a head; an invocation owns every 256th of them. If text is raised, the workgroup
// first searches all tokens of the head for the largest value. Sums are read from the cache once per pooled token, and
// scores are written coalesced. For a NaN sum the kernel keeps the largest distance of such a token from the end. An
// integer maximum is the same in every run.
//
// In bounds: tokens are below `tokens`, neighbours between 0 and the first recent one; rows and boundaries lie behind
// the call in one buffer that was made for them; sums, scores and words were checked when they were bound. Loops are
// bounded by the call.
//
// binds: 0 call, 1 sums, 2 scores, 3 not_numbers
// set by plans: WEIGHING, POOL, TEXT, GROUP

// import common/ordered.wgsl#larger

struct TokenScoresCall {
    tokens: u32,
    // The first of the recent tokens.
    recent_from: u32,
    // Tokens pooled on either side.
    half_width: u32,
    row_count: u32,
    boundary_count: u32,
    // Index of the first sum within its binding.
    first_sum: u32,
    // Positions of the rows, ascending, and then where images begin and end, ascending.
    places: array<u32>,
}

@group(0) @binding(0) var<storage, read> call: TokenScoresCall;
// [kv_head][GROUP][tokens], and [kv_head][tokens]. Scores are the bits of f32.
@group(0) @binding(1) var<storage, read> sums: array<f32>;
@group(0) @binding(2) var<storage, read_write> scores: array<u32>;
// [kv_head].
@group(0) @binding(3) var<storage, read_write> not_numbers: array<atomic<u32>>;

// 0 sum, 1 mean of the rows that see a token.
const WEIGHING: u32 = 0u;
// 0 none, 1 mean, 2 maximum.
const POOL: u32 = 0u;
// 0 like images, 1 raised, 2 stays.
const TEXT: u32 = 0u;
// Sums of a token of a KV head.
const GROUP: u32 = 1u;
const INVOCATIONS: u32 = 256u;
const TILE: u32 = 2048u;
const INFINITE: u32 = 0x7f800000u;
const LEAST: f32 = -3.4028234e38f;

var<workgroup> largest_of: array<f32, INVOCATIONS>;

// The number of ascending places from `start` to `end` that are below `value`.
fn count_below(start: u32, end: u32, value: u32) -> u32 {
    var first = start;
    var count = end - start;
    while (count > 0u) {
        let half = count / 2u;
        if (call.places[first + half] < value) {
            first += half + 1u;
            count -= half + 1u;
        } else {
            count = half;
        }
    }
    return first - start;
}

// The largest sum of a token, or NaN if one is.
fn sum_of(first: u32, token: u32) -> f32 {
    var sum = sums[first + token];
    for (var head = 1u; head < GROUP; head++) {
        sum = larger(sum, sums[first + head * call.tokens + token]);
    }
    return sum;
}

fn weighed(first: u32, token: u32) -> f32 {
    let sum = sum_of(first, token);
    if (WEIGHING == 0u) {
        return sum;
    }
    let seen_by = call.row_count - count_below(0u, call.row_count, token);
    if (seen_by == 0u) {
        return 0f;
    }
    return sum / f32(seen_by);
}

fn pooled(first: u32, token: u32) -> f32 {
    if (POOL == 0u || token >= call.recent_from) {
        return weighed(first, token);
    }
    let start = token - min(token, call.half_width);
    let end = min(token + call.half_width + 1u, call.recent_from);
    var sum = 0f;
    var most = LEAST;
    for (var near = start; near < end; near++) {
        let x = weighed(first, near);
        sum += x;
        most = max(most, x);
    }
    return select(most, sum / f32(2u * call.half_width + 1u), POOL == 1u);
}

// The largest value over all tokens of the head.
fn largest(first: u32, invocation: u32) -> f32 {
    var own = LEAST;
    for (var token = invocation; token < call.tokens; token += INVOCATIONS) {
        own = max(own, pooled(first, token));
    }
    largest_of[invocation] = own;
    workgroupBarrier();
    for (var distance = INVOCATIONS / 2u; distance > 0u; distance /= 2u) {
        if (invocation < distance) {
            largest_of[invocation] = max(largest_of[invocation], largest_of[invocation + distance]);
        }
        workgroupBarrier();
    }
    return largest_of[0];
}

// The bits of the score of an image where text is raised: 0 for the largest score of all, and less in the
// order of the others. Adding the largest to text would round its score. NaN stays NaN.
fn lowered(score: f32, most: f32) -> u32 {
    if (is_nan(score)) {
        return bitcast<u32>(score);
    }
    // Bits ascend with numbers from 0 on, and descend with negative ones.
    return select(0xff7fffffu - u32(max(bitcast<i32>(score), 0)), 0u, score >= most);
}

@compute @workgroup_size(256)
fn token_scores(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) invocation: u32) {
    let head = workgroup.y;
    let first = call.first_sum + head * GROUP * call.tokens;
    var most = 0f;
    if (TEXT == 1u) {
        most = largest(first, invocation);
    }
    let end = min((workgroup.x + 1u) * TILE, call.tokens);
    for (var token = workgroup.x * TILE + invocation; token < end; token += INVOCATIONS) {
        if (is_nan(sum_of(first, token))) {
            atomicMax(&not_numbers[head], call.tokens - token);
        }
        let value = pooled(first, token);
        var score = bitcast<u32>(value);
        var stays = token >= call.recent_from;
        if (TEXT != 0u) {
            let ends = call.row_count + call.boundary_count;
            let text = count_below(call.row_count, ends, token + 1u) % 2u == 0u;
            stays = stays || (TEXT == 2u && text);
            if (TEXT == 1u && !text) {
                score = lowered(value, most);
            }
        }
        scores[head * call.tokens + token] = select(score, INFINITE, stays);
    }
}
