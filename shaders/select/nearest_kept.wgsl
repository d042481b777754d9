// nearest_kept: for every evicted token the kept token whose key has the largest cosine similarity. Ties go to the
// first.
//
//   nearest = argmax_i key · unit_i,  similarity = key · unit_nearest / ‖key‖
//
// One workgroup owns RESIDENT evicted tokens of a KV head, one per invocation. All kept keys, which normalize_kept
// divided by their norms, stream through in order. No reduction, no atomics.
//
// In bounds: evicted and kept tokens beyond those of the call are zeros and not written; tokens are clamped; buffers
// were checked when they were bound. Loops are bounded by the call.
//
// binds: 2 evicted_tokens, 3 units, 4 nearest, 5 similarities

// import select/calls.wgsl#merge_call
// import select/rows.wgsl#resident_rows

@group(0) @binding(2) var<storage, read> evicted_tokens: array<u32>;
// [kv_head][kept][HEAD_DIM].
@group(0) @binding(3) var<storage, read> units: array<vec4<f32>>;
// [kv_head][evicted]: indices into the kept tokens.
@group(0) @binding(4) var<storage, read_write> nearest: array<u32>;
// [kv_head][evicted].
@group(0) @binding(5) var<storage, read_write> similarities: array<f32>;

@compute @workgroup_size(128)
fn nearest_kept(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) invocation: u32) {
    let kv_head = workgroup.y;
    let tile = workgroup.x * RESIDENT;
    for (var first = 0u; first < RESIDENT; first += STAGED) {
        workgroupBarrier();
        stage_evicted(tile + first, kv_head, invocation);
        workgroupBarrier();
        take_resident(first, invocation);
    }
    var square = 0f;
    // unroll
    for (var c = 0u; c < VECTORS; c++) {
        square += dot(resident[c], resident[c]);
    }
    var best = -3.4028234e38f;
    var best_kept = 0u;
    for (var first = 0u; first < call.kept; first += STAGED) {
        workgroupBarrier();
        stage_units(first, kv_head, invocation);
        workgroupBarrier();
        for (var r = 0u; r < STAGED; r++) {
            let own = product(r);
            if (own > best && first + r < call.kept) {
                best = own;
                best_kept = first + r;
            }
        }
    }
    if (tile + invocation < call.evicted) {
        let at = kv_head * call.evicted + tile + invocation;
        nearest[at] = best_kept;
        var inverse = 0f;
        if (square > 0f) {
            inverse = inverseSqrt(square);
        }
        similarities[at] = best * inverse;
    }
}

fn stage_evicted(first: u32, kv_head: u32, invocation: u32) {
    for (var i = invocation; i < STAGED_VECTORS; i += RESIDENT) {
        var vector = vec4<f32>();
        let row = first + i / VECTORS;
        if (row < call.evicted) {
            let at = row_start(evicted_tokens[kv_head * call.evicted + row], kv_head) + i % VECTORS * 4u;
            vector = vec4<f32>(element(at), element(at + 1u), element(at + 2u), element(at + 3u));
        }
        staged[i] = vector;
    }
}

fn stage_units(first: u32, kv_head: u32, invocation: u32) {
    for (var i = invocation; i < STAGED_VECTORS; i += RESIDENT) {
        var vector = vec4<f32>();
        if (first + i / VECTORS < call.kept) {
            vector = units[(kv_head * call.kept + first) * VECTORS + i];
        }
        staged[i] = vector;
    }
}
