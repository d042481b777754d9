// merge_tokens: merges into every kept row the evicted rows whose nearest kept row it is, c to one.
//
//   averaged (p + Σ e) / (c + 1),  pivotal (p + Σ (e + p) / 2) / (c + 1),  weighted (p + Σ similarity · e) / (c + 1)
//
// One workgroup owns KEPT_TILE kept tokens of a KV head. Its invocations walk over the assignments of all evicted
// tokens, one each at a time, and set a bit for those that merge into its kept tokens. Then all invocations take the
// marked tokens in order, each adding its own channels. Rows are therefore read once and coalesced, every sum is in the
// order of the evicted tokens, and two runs give the same bits.
//
// In bounds: kept tokens beyond those of the call are not written; tokens are clamped; assignments outside the tile,
// whatever they are, are skipped; buffers were checked when they were bound. Loops are bounded by the call.
//
// binds: 2 kept_tokens, 3 evicted_tokens, 4 nearest, 5 similarities, 6 merged
// set by plans: HEAD_DIM, MERGING

// import select/calls.wgsl#merge_call

@group(0) @binding(2) var<storage, read> kept_tokens: array<u32>;
@group(0) @binding(3) var<storage, read> evicted_tokens: array<u32>;
@group(0) @binding(4) var<storage, read> nearest: array<u32>;
@group(0) @binding(5) var<storage, read> similarities: array<f32>;
// [kv_head][kept][HEAD_DIM].
@group(0) @binding(6) var<storage, read_write> merged: array<f32>;

const HEAD_DIM: u32 = 128u;
const INVOCATIONS: u32 = 128u;
const KEPT_TILE: u32 = 2048u / HEAD_DIM;
const TILE_CHANNELS: u32 = KEPT_TILE * HEAD_DIM;
const MARK_WORDS: u32 = INVOCATIONS / 32u;
// 0: averaged, 1: pivotal, 2: weighted.
const MERGING: u32 = 1u;

// An invocation owns every INVOCATIONS-th channel of each kept token.
var<workgroup> sums: array<f32, TILE_CHANNELS>;
var<workgroup> counts: array<u32, KEPT_TILE>;
var<workgroup> marks: array<atomic<u32>, MARK_WORDS>;

@compute @workgroup_size(128)
fn merge_tokens(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) invocation: u32) {
    let kv_head = workgroup.y;
    let first_kept = workgroup.x * KEPT_TILE;
    let own_kept = min(KEPT_TILE, call.kept - first_kept);
    for (var i = 0u; i < KEPT_TILE; i++) {
        for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
            sums[i * HEAD_DIM + channel] = 0f;
        }
    }
    if (invocation < KEPT_TILE) {
        counts[invocation] = 0u;
    }
    let first_assigned = kv_head * call.evicted;
    for (var first = 0u; first < call.evicted; first += INVOCATIONS) {
        workgroupBarrier();
        if (invocation < MARK_WORDS) {
            atomicStore(&marks[invocation], 0u);
        }
        workgroupBarrier();
        let own = first + invocation;
        // An assignment below first_kept wraps around and falls beyond the tile.
        if (own < call.evicted && nearest[first_assigned + own] - first_kept < own_kept) {
            atomicOr(&marks[invocation / 32u], 1u << (invocation % 32u));
        }
        workgroupBarrier();
        for (var word = 0u; word < MARK_WORDS; word++) {
            var left = atomicLoad(&marks[word]);
            while (left != 0u) {
                let member = first_assigned + first + word * 32u + countTrailingZeros(left);
                left &= left - 1u;
                add_member(member, kv_head, first_kept, invocation);
            }
        }
    }
    workgroupBarrier();
    for (var i = 0u; i < own_kept; i++) {
        let row = kv_head * call.kept + first_kept + i;
        let start = row_start(kept_tokens[row], kv_head);
        let count = f32(counts[i]);
        for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
            var x = element(start + channel);
            if (counts[i] > 0u) {
                var sum = x + sums[i * HEAD_DIM + channel];
                if (MERGING == 1u) {
                    sum = x + 0.5f * (count * x + sums[i * HEAD_DIM + channel]);
                }
                x = sum / (count + 1f);
            }
            merged[row * HEAD_DIM + channel] = x;
        }
    }
}

fn add_member(member: u32, kv_head: u32, first_kept: u32, invocation: u32) {
    let into = nearest[member] - first_kept;
    let start = row_start(evicted_tokens[member], kv_head);
    var weight = 1f;
    if (MERGING == 2u) {
        weight = similarities[member];
    }
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        sums[into * HEAD_DIM + channel] += weight * element(start + channel);
    }
    if (invocation == 0u) {
        counts[into] += 1u;
    }
}
